"""What the kernel's error numbers mean for a store.

Owns the one table from errno to the conditions of ``errors``. Invariant: no OSError leaves the
local driver.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .errors import InvalidKey, NoSpace, PermissionDenied, StorageError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["translated"]

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM}
# The path has a file where the key has a folder, or the other way round.
_COLLISION = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY}
_PASSING = {errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EBUSY}
_TOO_MANY_FILES = {errno.EMFILE, errno.ENFILE}
_NO_HARD_LINKS = {errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}


@contextmanager
def translated(key: str | None, url: str, root: Path, *, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError.

    Args:
        key: The object concerned.
        url: The store, for the message.
        root: Asked for its free space when the disk is full.
        needed_bytes: What the block wanted to write.
    """
    try:
        yield
    except OSError as error:
        raise _condition(error, key, url, root, needed_bytes) from error


def _condition(error: OSError, key: str | None, url: str, root: Path, needed_bytes: int | None) -> StorageError:
    number = error.errno
    text = error.strerror or str(error)
    if number in _FULL:
        free = _free_bytes(root)
        return NoSpace(
            f"{text}: {free} bytes free" + ("" if needed_bytes is None else f", {needed_bytes} needed"),
            free_bytes=free,
            needed_bytes=needed_bytes,
            key=key,
            url=url,
        )
    if number == errno.EROFS:
        return PermissionDenied(text, key=key, url=url, hint="the file system is mounted read-only")
    if number == errno.ELOOP:
        return PermissionDenied(
            "a symbolic link is in the way", key=key, url=url, hint="links inside the root are refused"
        )
    if number in _FORBIDDEN:
        return PermissionDenied(text, key=key, url=url, hint="check owner and modes of the root folder")
    if number in _COLLISION:
        return InvalidKey(
            f"{text}: the key collides with a file or folder",
            key=key,
            url=url,
            hint="no key may be a folder of another",
        )
    if number == errno.ENAMETOOLONG:
        return InvalidKey(text, key=key, url=url, hint="shorten the root's path")
    if number in _PASSING:
        return Unavailable(text, key=key, url=url)
    if number in _TOO_MANY_FILES:
        return Unavailable(text, key=key, url=url, hint="raise the limit of open files (ulimit -n)")
    if number in _NO_HARD_LINKS:
        return StorageError(text, key=key, url=url, hint="the root must be one file system that has hard links")
    return StorageError(text, key=key, url=url)


def _free_bytes(root: Path) -> int | None:
    try:
        status = os.statvfs(root)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
