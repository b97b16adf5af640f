"""Locks on open files that end with their process, where the system has them.

Owns: the one import of `fcntl`, which Windows lacks, so that everything can be imported there. Invariant: where there are no such
locks, taking one is an error and never a success.
"""

from __future__ import annotations

import errno
import os

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["give", "open_flags", "take"]


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


def open_flags(*names: str) -> int:
    """Return these flags of `os.open` together; those that the system lacks are left out, so that a module can be imported."""
    flags = 0
    for name in names:
        flags |= int(getattr(os, name, 0))
    return flags
