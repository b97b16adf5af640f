"""Locks on open files that end with their process, where the system has them.

Owns: the one import of `fcntl`, which Windows lacks, so that everything can be imported there. Two kinds, which do not see
each other: `take` says whose a file is, `share` that somebody reads it. Invariant: where there are no such locks, taking one is
an error and never a success.
"""

from __future__ import annotations

import errno
import os
import struct
from contextlib import suppress

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["give", "is_shared", "open_flags", "share", "take", "unshare"]

_FLOCK = struct.Struct("hhqqi0q")
"""struct flock of 64-bit Linux: kind, whence, start, length (0: to the end), pid (0 for locks of open files)."""


def take(fd: int) -> None:
    """Lock an open file for this process alone, or fail at once.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the file system or the system has no such locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "this system has no flock; ckptd's agents and local roots need Linux or macOS")
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def give(fd: int) -> None:
    """Unlock it; closing the file does the same."""
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_UN)


def share(fd: int) -> bool:
    """Say that an open file is read, until `unshare` or its closing; any number of readers may. Linux.

    The lock is the open file's, not the process's: it holds between two that open the file in one process.

    Returns:
        Whether `is_shared` tells of it: not where the system or the file system has no such locks.
    """
    return _lock(fd, "F_RDLCK")


def unshare(fd: int) -> None:
    """Take `share` back, also for a process that was forked meanwhile."""
    _lock(fd, "F_UNLCK")


def is_shared(fd: int) -> bool:
    """Say whether anybody else who opened this file reads it."""
    if not hasattr(fcntl, "F_OFD_GETLK"):
        return False
    with suppress(OSError):
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted))[0]
        return kind != fcntl.F_UNLCK
    return False


def _lock(fd: int, kind: str) -> bool:
    if not hasattr(fcntl, "F_OFD_SETLK"):
        return False
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(getattr(fcntl, kind), os.SEEK_SET, 0, 0, 0))
        return True
    return False


def open_flags(*names: str) -> int:
    """Return these flags of `os.open` together; those that the system lacks are left out, so that a module can be imported."""
    flags = 0
    for name in names:
        flags |= int(getattr(os, name, 0))
    return flags
