"""Objects as files in a folder of this machine or of a shared file system.

Owns the way from key to path and the order of system calls that makes a put atomic and durable:
temporary file, fsync, link (CREATE) or rename (OVERWRITE) to its name, fsync of every folder up
to the root. Invariant: a name appears only on a file whose bytes are on the disk already, and a
put returns only when the name is there too. Nothing but regular files below the root is ever
opened; symbolic links inside it are refused, so nothing leads out.
"""

from __future__ import annotations

import os
import stat
import threading
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from . import file_locks
from .base import (
    RESERVED_FOLDER,
    Buffer,
    Capabilities,
    ObjectInfo,
    ObjectStore,
    PutMode,
    checked_key,
    checked_prefix,
    flat,
)
from .errors import AlreadyExists, InvalidUrl, NotDurable, NotFound, StorageError, Truncated, Unavailable
from .local_errors import translated
from .local_temp import FOLDER_FLAGS, TempFile, clear_stale, written_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["LocalStore"]

_FILE_FLAGS = file_locks.open_flags("O_RDONLY", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK")  # a FIFO must not hang us
_READ_BYTES = 1 << 28
# How often a put makes its folders anew when deletes keep removing the emptied ones under it.
_FOLDER_ATTEMPTS = 100


class LocalStore(ObjectStore):
    """A store in a folder, which the first put makes.

    Args:
        root: Absolute path. It may itself be, or lie under, a symbolic link.

    Raises:
        InvalidUrl: The path is relative, or something else than a folder is there.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root)
        if not self._root.is_absolute():
            raise InvalidUrl(f"{str(root)!r} is a relative path", hint=f"say {Path.cwd() / self._root}")
        self.url = f"file://{self._root}"
        if self._root.exists() and not self._root.is_dir():
            raise InvalidUrl("the root is no folder", url=self.url, hint="name a folder, or a new path")
        self.capabilities = Capabilities(put_if_absent=True, remote=False, max_put_bytes=None, concurrency=4)
        self._root_is_durable = False
        self._root_lock = threading.Lock()

    def put(self, key: str, data: Buffer, *, mode: PutMode = PutMode.CREATE) -> None:
        """Write one object (see the contract).

        What is there when AlreadyExists is raised has been made durable as well: its writer may
        have died between giving the name and syncing the folder.
        """
        *folders, name = checked_key(key).split("/")
        view = flat(data)
        with translated(key, self.url, self._root, needed_bytes=len(view)):
            self._make_root()
            with self._root_folder() as root_fd:
                if mode is PutMode.CREATE and self._is_there(root_fd, folders, name):
                    raise AlreadyExists("an object of that name is there", key=key, url=self.url)
                with written_file(root_fd, view) as temp:
                    self._give_name(root_fd, temp, key, mode)

    def get(self, key: str) -> bytes:
        """Read a whole object."""
        with translated(key, self.url, self._root), self._opened(key) as (fd, size):
            data = bytearray(size)
            self._read(fd, memoryview(data), 0, key)
            return bytes(data)

    def get_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        """Fill the buffer from the file, without a copy between."""
        view = flat(buffer)
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        with translated(key, self.url, self._root), self._opened(key) as (fd, size):
            if offset + len(view) > size:
                raise Truncated(
                    f"the object has {size} bytes, {offset + len(view)} were asked for",
                    key=key,
                    url=self.url,
                )
            self._read(fd, view, offset, key)

    def head(self, key: str) -> ObjectInfo:
        """Say how large the file is."""
        with translated(key, self.url, self._root), self._opened(key) as (_, size):
            return ObjectInfo(key=key, size=size)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List regular files whose path starts with the prefix; folders that vanish are skipped."""
        *folders, _ = checked_prefix(prefix).split("/")
        found: list[ObjectInfo] = []
        with translated(prefix or None, self.url, self._root):
            try:
                with self._root_folder() as root_fd, _folder_chain(root_fd, folders, create=False) as chain:
                    base = "".join(f"{folder}/" for folder in folders)
                    _collect(chain[-1], base, prefix, found)
            except (FileNotFoundError, NotADirectoryError):
                pass  # no such folder, so no such keys
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Unlink the file and the folders it leaves empty."""
        *folders, name = checked_key(key).split("/")
        with (
            translated(key, self.url, self._root),
            suppress(FileNotFoundError, NotADirectoryError),
            self._root_folder() as root_fd,
            _folder_chain(root_fd, folders, create=False) as chain,
        ):
            try:
                if stat.S_ISDIR(os.stat(name, dir_fd=chain[-1], follow_symlinks=False).st_mode):
                    return  # a folder is no object
                os.unlink(name, dir_fd=chain[-1])
            finally:
                for parent_fd, folder in zip(reversed(chain[:-1]), reversed(folders), strict=True):
                    try:
                        os.rmdir(folder, dir_fd=parent_fd)
                    except OSError:
                        break  # not empty, or another delete was faster

    def close(self) -> None:
        """Do nothing: every call opens and closes what it needs."""

    @contextmanager
    def _root_folder(self) -> Iterator[int]:
        # The root itself may be a link: whoever configured it said so.
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def _make_root(self) -> None:
        with self._root_lock:
            if self._root_is_durable and self._root.is_dir():
                return
            made = [self._root]
            while not made[-1].parent.is_dir():
                made.append(made[-1].parent)
            self._root.mkdir(parents=True, exist_ok=True)
            for folder in reversed(made):
                _sync_path(folder.parent)
            with self._root_folder() as root_fd:
                clear_stale(root_fd)
            self._root_is_durable = True

    def _is_there(self, root_fd: int, folders: Sequence[str], name: str) -> bool:
        try:
            with _folder_chain(root_fd, folders, create=False) as chain:
                os.stat(name, dir_fd=chain[-1], follow_symlinks=False)
                _sync(chain)
                return True
        except FileNotFoundError:
            return False

    def _give_name(self, root_fd: int, temp: TempFile, key: str, mode: PutMode) -> None:
        *folders, name = key.split("/")
        for _ in range(_FOLDER_ATTEMPTS):
            # FileNotFoundError: a delete removed the emptied folder after it was opened here.
            with suppress(FileNotFoundError), _folder_chain(root_fd, folders, create=True) as chain:
                if mode is PutMode.OVERWRITE:
                    os.rename(temp.name, name, src_dir_fd=temp.folder_fd, dst_dir_fd=chain[-1])
                else:
                    try:
                        os.link(
                            temp.name,
                            name,
                            src_dir_fd=temp.folder_fd,
                            dst_dir_fd=chain[-1],
                            follow_symlinks=False,
                        )
                    except FileExistsError:
                        _sync(chain)
                        raise AlreadyExists("an object of that name is there", key=key, url=self.url) from None
                self._make_durable(chain, key, mode)
                return
        raise Unavailable("the object's folder kept vanishing", key=key, url=self.url)

    def _make_durable(self, chain: Sequence[int], key: str, mode: PutMode) -> None:
        """Sync the folders of a name that was just given.

        Raises:
            NotDurable: A folder cannot be synced after a CREATE.
            OSError: The same for OVERWRITE, which may be repeated anyway.
        """
        try:
            _sync(chain)
        except OSError as error:
            if mode is PutMode.OVERWRITE:
                raise
            text = f"the object has its name, but its folder cannot be synced: {error.strerror}"
            raise NotDurable(text, key=key, url=self.url) from error

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        *folders, name = checked_key(key).split("/")
        missing = NotFound("no such object", key=key, url=self.url)
        with ExitStack() as stack:
            try:
                root_fd = stack.enter_context(self._root_folder())
                chain = stack.enter_context(_folder_chain(root_fd, folders, create=False))
                fd = os.open(name, _FILE_FLAGS, dir_fd=chain[-1])
            except (FileNotFoundError, NotADirectoryError):
                raise missing from None
            stack.callback(os.close, fd)
            status = os.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                raise missing
            if not stat.S_ISREG(status.st_mode):
                raise StorageError("not a regular file", key=key, url=self.url, hint="remove it from the root")
            yield fd, status.st_size

    def _read(self, fd: int, view: memoryview, offset: int, key: str) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done : done + _READ_BYTES]], offset + done)
            if count == 0:
                raise Truncated(f"the file ended after {offset + done} bytes while it was read", key=key, url=self.url)
            done += count


@contextmanager
def _folder_chain(root_fd: int, folders: Sequence[str], *, create: bool) -> Iterator[list[int]]:
    """Open root and folders, outermost first; a symbolic link among them is an error."""
    with ExitStack() as stack:
        chain = [root_fd]
        for folder in folders:
            try:
                fd = os.open(folder, FOLDER_FLAGS, dir_fd=chain[-1])
            except FileNotFoundError:
                if not create:
                    raise
                with suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=chain[-1])
                fd = os.open(folder, FOLDER_FLAGS, dir_fd=chain[-1])
            stack.callback(os.close, fd)
            chain.append(fd)
        yield chain


def _sync(chain: Sequence[int]) -> None:
    # Always the whole chain: another thread or process may have made a folder above and not yet
    # synced it, and a folder that did not change costs 0.04 ms (ext4).
    for fd in reversed(chain):
        os.fsync(fd)


def _sync_path(folder: Path) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return  # a folder that we may pass but not read is somebody else's, and was there before
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _collect(folder_fd: int, base: str, prefix: str, found: list[ObjectInfo]) -> None:
    """Append the regular files under the folder whose key, ``base`` and path, has the prefix."""
    with os.scandir(folder_fd) as entries:
        for entry in entries:
            key = base + entry.name
            if key == RESERVED_FOLDER:
                continue
            try:
                if entry.is_file(follow_symlinks=False):
                    if key.startswith(prefix):
                        found.append(ObjectInfo(key=key, size=entry.stat(follow_symlinks=False).st_size))
                elif entry.is_dir(follow_symlinks=False) and (key + "/").startswith(prefix[: len(key) + 1]):
                    fd = os.open(entry.name, FOLDER_FLAGS, dir_fd=folder_fd)
                    try:
                        _collect(fd, key + "/", prefix, found)
                    finally:
                        os.close(fd)
            except FileNotFoundError:
                continue  # deleted since the folder was read
