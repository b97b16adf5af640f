"""Files in shared memory: made whole, locked by their owner, mapped, touched.

Owns: the life of one file and its mapping. Does not own: what stands in it. Used for slots and arenas.

Invariants: the file's pages are reserved when it is made, so that a full /dev/shm is an error here and never
SIGBUS in the trainer; a living owner holds its flock, so that another agent can tell a dead one's files;
only this user can open it.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from ckptd.protos.error_pb2 import REASON_NOT_ALLOWED
from ckptd.storage_backends import file_locks

from .errors import DaemonError, NoSpaceError

PAGE_BYTES = 4096
_MADV_POPULATE_WRITE = 23
_MADV_REMOVE = getattr(mmap, "MADV_REMOVE", -1)
"""-1 where there is none (macOS): the system refuses it, and the memory goes with the last mapping."""
# madvise keeps Python's lock: at the 0.35 GB/s of a first touch this slice holds up other threads for under 1 ms.
_TOUCH_BYTES = 256 << 10


def page_rounded(nbytes: int) -> int:
    """Return the next multiple of the page size."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def prepare_folder(folder: Path) -> None:
    """Make a folder that only this user can enter.

    Raises:
        DaemonError: NOT_ALLOWED, another user owns it or it is a link: somebody may have planted it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise DaemonError.of(
            f"{folder} is not a folder of user {os.geteuid()}",
            reason=REASON_NOT_ALLOWED,
            hint="set CKPTD_RUN_DIR, CKPTD_DATA_DIR and CKPTD_SHM_DIR to folders of your own, or have this one removed",
            object=str(folder),
        )
    if found.st_mode & 0o077:
        folder.chmod(0o700)


class SharedFile:
    """One mapped file. For one thread at a time, but for `touch`, which may run beside the others.

    Attributes:
        path: For the trainer to open.
        view: The whole file, writable.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.view = memoryview(self._map)

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return len(self._map)

    @classmethod
    def create(cls, path: Path, nbytes: int) -> SharedFile:
        """Make a new file of `nbytes` zeros, all its memory reserved, mode 0600.

        Raises:
            NoSpaceError: Free and needed bytes; nothing is left behind.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            file_locks.take(fd)
            _reserve(fd, nbytes)
            return cls(path, fd)
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            if is_full(error):
                raise no_space(path.parent, nbytes, error) from error
            raise

    @classmethod
    def open(cls, path: Path) -> SharedFile | None:
        """Take over a file whose owner is dead; None when it is gone or its owner lives."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            file_locks.take(fd)
            if os.fstat(fd).st_size:
                return cls(path, fd)
            # Its owner died between making and reserving it.
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def touch(self, stop: threading.Event | None = None, *, begin: int = 0, end: int | None = None) -> None:
        """Bring pages into memory without changing a byte, until done or `stop` is set; `begin` is rounded down."""
        end = self.nbytes if end is None else end
        for at in range(begin // PAGE_BYTES * PAGE_BYTES, end, _TOUCH_BYTES):
            if stop is not None and stop.is_set():
                return
            length = min(_TOUCH_BYTES, end - at)
            try:
                self._map.madvise(_MADV_POPULATE_WRITE, at, length)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    return
                # Linux before 5.14. Reading is enough, for the pages are reserved; writing back what was read could
                # undo what somebody else wrote meanwhile.
                np.frombuffer(self._map, dtype=np.uint8, count=length, offset=at)[::PAGE_BYTES].max()

    def is_read(self) -> bool:
        """Say whether a rank that mapped the file said that it copies from it; see `file_locks.share`."""
        return self._fd >= 0 and file_locks.is_shared(self._fd)

    def close(self) -> None:
        """Give up lock and mapping, and leave the file; idempotent. Views handed out keep the mapping alive."""
        if self._fd < 0:
            return
        file_locks.give(self._fd)
        os.close(self._fd)
        self._fd = -1
        with suppress(BufferError):
            self.view.release()
            self._map.close()

    def remove(self, *, punch: bool = True) -> None:
        """Delete the file; idempotent.

        Args:
            punch: Give its memory back at once, even where a trainer keeps it mapped until its next Begin. Not where
                the trainer may still write: with /dev/shm full, a page that it writes anew would be its death. Nor where
                anybody may still copy from it: he would find zeros. Who says so (`is_read`) is looked for here, after
                the name is gone.
        """
        if self._fd < 0:
            return
        self.path.unlink(missing_ok=True)
        if punch and not self.is_read():
            with suppress(OSError, ValueError):
                self._map.madvise(_MADV_REMOVE)
        self.close()


def _reserve(fd: int, nbytes: int) -> None:
    """Make the file so long, with memory or disk for all of it."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
        return
    zeros = bytes(min(nbytes, _TOUCH_BYTES))  # macOS has no such call: what was written is reserved
    for at in range(0, nbytes, len(zeros) or 1):
        piece = zeros[: nbytes - at]
        while piece:
            piece = piece[os.write(fd, piece) :]


def is_full(error: OSError) -> bool:
    """Whether an error says that there is no room for a file."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG}


def no_space(folder: Path, needed: int, why: OSError) -> NoSpaceError:
    """Return the error that says how much is free and how much is needed."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    # What is free on the disk is nothing to whom a quota forbids it.
    over = f" ({why.strerror})" if free >= needed else ""
    return NoSpaceError.of(
        f"no space in {folder}: {needed} bytes needed, {free} free{over}",
        hint="enlarge the tmpfs (docker: --shm-size), use fewer slots, or set CKPTD_SHM_DIR to another one",
        object=str(folder),
    )
