"""Disks of a run that can be full or read-only: file systems in memory, in a mount namespace of the harness's own.

Owns: that namespace, mounting, shrinking, and the end of it all. Does not own: when (`nemesis.local`). Needs Linux and
CAP_SYS_ADMIN; `missing` says why not. Invariant: nobody outside ever sees a mount, and the last process of the run takes
them with it, also when everything is killed: a namespace lives as long as somebody lives in it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Self

from ckptd.chaos.local_faults import DiskFault
from ckptd.chaos.schedule import PlannedFault
from ckptd.chaos.watch import wait_until

_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 1, 32, 1 << 14, 1 << 18
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)
# Writers come and go within milliseconds.
_REMOUNT_WITHIN = timedelta(seconds=5)
_depth = 0


class DiskError(OSError):
    """The kernel would not do what was asked of a file system."""


def mounted_faults(faults: Sequence[PlannedFault]) -> tuple[DiskFault, ...]:
    """Return the faults that need a file system of their own."""
    return tuple(fault.local for fault in faults if isinstance(fault.local, DiskFault) and fault.local.is_mounted)


def missing() -> str:
    """Say why there can be no such disks here; "" when there can."""
    try:
        done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unshare (util-linux) cannot be run: {error}"
    return done.stderr.strip() or f"unshare ended with {done.returncode}" if done.returncode else ""


@contextmanager
def private_mounts() -> Iterator[None]:
    """Give the calling thread, and whatever it starts, mounts of their own for the block. May be nested.

    Raises:
        DiskError: Not allowed.
    """
    global _depth  # noqa: PLW0603 - a property of the one thread that leads runs
    if _depth:
        yield
        return
    here, before = os.open(".", os.O_RDONLY), os.open("/proc/thread-self/ns/mnt", os.O_RDONLY)
    try:
        _call("unshare", _libc.unshare(_CLONE_NEWNS))
        _depth += 1
        try:
            _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
            yield
        finally:
            _depth -= 1
            # Threads that were begun within share our working folder; who shares it may not leave.
            _call("unshare", _libc.unshare(_CLONE_FS))
            _call("setns", _libc.setns(before, _CLONE_NEWNS))
            os.fchdir(here)
    finally:
        os.close(before)
        os.close(here)


def _call(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise DiskError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    told = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    result = _libc.mount(told[0], told[1], told[2], ctypes.c_ulong(flags), told[3])
    _call(f"mount {target}", result)


class Disks:
    """The file systems of one run. A context manager within `private_mounts`; for one thread.

    Args:
        faults: What they are for; decides which folders get one, and how large.
    """

    def __init__(self, faults: Sequence[DiskFault]) -> None:
        self._sizes: dict[str, int] = {}
        for fault in faults:
            self._sizes[fault.disk] = max(self._sizes.get(fault.disk, 0), fault.size_mib << 20)
        self._mounted: dict[Path, int] = {}

    def put_under(self, folders: Mapping[str, Path]) -> None:
        """Mount what is wanted over these folders, by disk; they are there and empty.

        Raises:
            DiskError: As the kernel says.
        """
        for disk, folder in folders.items():
            if disk in self._sizes:
                _mount("ckptd-chaos", str(folder), "tmpfs", 0, f"size={self._sizes[disk]},mode=0700")
                self._mounted[folder] = self._sizes[disk]

    def fill(self, folder: Path, left: int) -> None:
        """Leave `left` bytes free: the file system shrinks to what is used, and takes no memory for it.

        Raises:
            DiskError: As the kernel says.
        """

        def shrink() -> bool:
            disk = os.statvfs(folder)
            used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            # A size of 0 would mean no bound.
            size = max(used + left, disk.f_frsize)
            # Refused where somebody wrote between the look and the call.
            with suppress(DiskError):
                _mount(None, str(folder), None, _MS_REMOUNT, f"size={size}")
                return True
            return False

        if not wait_until(shrink, within=_REMOUNT_WITHIN):
            raise DiskError(0, f"{folder} cannot be shrunk")

    def free(self, folder: Path) -> None:
        """Give a file system its size back, and let it be written to."""
        _mount(None, str(folder), None, _MS_REMOUNT, f"size={self._mounted[folder]}")

    def forbid(self, folder: Path) -> None:
        """Make it read-only.

        Raises:
            DiskError: A file on it is open for writing all the time.
        """

        def remount() -> bool:
            with suppress(DiskError):
                _mount(None, str(folder), None, _MS_REMOUNT | _MS_RDONLY)
                return True
            return False

        if not wait_until(remount, within=_REMOUNT_WITHIN):
            raise DiskError(0, f"{folder} is open for writing, it cannot be made read-only")

    def close(self) -> None:
        """Put what the file systems hold into the folders themselves, and unmount them; idempotent."""
        for folder in reversed(list(self._mounted)):
            del self._mounted[folder]
            kept = folder.with_name(f"{folder.name}.kept")
            with suppress(OSError, shutil.Error):
                shutil.copytree(folder, kept, symlinks=True, ignore=_no_sockets)
            with suppress(DiskError):
                _call(f"umount {folder}", _libc.umount2(os.fsencode(folder), _MNT_DETACH))
            with suppress(OSError):
                folder.rmdir()
                kept.rename(folder)

    def unmount(self, below: Path) -> None:
        """Unmount what lies below a folder that is about to be removed."""
        for folder in [one for one in self._mounted if one.is_relative_to(below)]:
            del self._mounted[folder]
            with suppress(DiskError):
                _call(f"umount {folder}", _libc.umount2(os.fsencode(folder), _MNT_DETACH))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _no_sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder, name).is_socket() or Path(folder, name).is_fifo()]
