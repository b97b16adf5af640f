"""Files that have no object's name yet: written here, then linked or renamed to their key.

Owns the root's hidden folder of temporary files, their writing and syncing, and clearing away
those whose writer died. Knows no key. Invariant: a living writer holds a lock on its file, so
clearing never takes a file that is still wanted, whichever container or node wrote it.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import file_locks
from .base import RESERVED_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FOLDER_FLAGS", "TempFile", "clear_stale", "written_file"]

# Every step down from the root is opened so: a symbolic link is refused, not followed.
FOLDER_FLAGS = file_locks.open_flags("O_RDONLY", "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC")

# One write call moves at most 2 GiB - 4 KiB on Linux; smaller pieces keep signals served.
_WRITE_BYTES = 1 << 28
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True, kw_only=True, slots=True)
class TempFile:
    """A synced file without a key.

    Attributes:
        folder_fd: Open folder that holds it.
        name: Its name there.
    """

    folder_fd: int
    name: str


@contextmanager
def written_file(root_fd: int, view: memoryview) -> Iterator[TempFile]:
    """Write and fsync the bytes to a temporary file under the root; remove its name at the end.

    Raises:
        OSError: As the file system says; nothing is left behind.
    """
    with suppress(FileExistsError):
        os.mkdir(RESERVED_FOLDER, dir_fd=root_fd)
    folder_fd = os.open(RESERVED_FOLDER, FOLDER_FLAGS, dir_fd=root_fd)
    try:
        name, fd = _locked_file(folder_fd)
        try:
            _write_all(fd, view)
            os.fsync(fd)
            yield TempFile(folder_fd=folder_fd, name=name)
        finally:
            # Gone already when it was renamed to its key.
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder_fd)
            # fsync has said what there was to say: a complaint now, its name given, would deny what is there.
            with suppress(OSError):
                os.close(fd)
    finally:
        os.close(folder_fd)


def clear_stale(root_fd: int) -> int:
    """Remove temporary files whose writers are dead; returns how many.

    Safe beside living writers in any process. Files that cannot be judged (no lock support, no
    permission) are left: they are never listed and only cost space.
    """
    try:
        folder_fd = os.open(RESERVED_FOLDER, FOLDER_FLAGS, dir_fd=root_fd)
    except OSError:
        return 0
    cleared = 0
    try:
        for name in os.listdir(folder_fd):  # noqa: PTH208 - pathlib cannot read an open folder
            with suppress(OSError):
                fd = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
                try:
                    file_locks.take(fd)
                    os.unlink(name, dir_fd=folder_fd)
                    cleared += 1
                finally:
                    os.close(fd)
    finally:
        os.close(folder_fd)
    return cleared


def _locked_file(folder_fd: int) -> tuple[str, int]:
    while True:
        # The process id is for the human who finds the file; the random part makes it unique.
        name = f"{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o666, dir_fd=folder_fd)
        try:
            file_locks.take(fd)
        except BlockingIOError:
            os.close(fd)  # a clearer took it between open and lock, and is removing it
            continue
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(fd)
                raise
        if os.fstat(fd).st_nlink > 0:
            return name, fd
        os.close(fd)  # a clearer removed it before the lock


def _write_all(fd: int, view: memoryview) -> None:
    # The seam for direct I/O: it needs only an open file, the bytes, and that they are in the
    # file afterwards; the caller syncs and names it.
    done = 0
    while done < len(view):
        done += os.write(fd, view[done : done + _WRITE_BYTES])
