"""Sits in every Python process of a run whose faults strike from within: wrong clocks, disks that refuse, exceptions.

Python imports a module of this name at its start; whatever else is called so is run as well. Owns: `time.time`, `time.time_ns`,
`time.clock_gettime(CLOCK_REALTIME)` and `datetime.now/utcnow/today` shifted by what two small files say; errors of `os.write`,
`os.posix_fallocate`, `os.fsync` and `os.close` below a folder that a third one names; an exception in the main thread when
a signal comes. Does not own: when (`cluster.planted` writes those files, and `nemesis.local` sends that signal). What is not
Python sees the true clock and a sound disk. Uses nothing but the standard library, and does nothing where nothing was asked for.

Everything that was done is appended to a log, a line each: pid, what, and about what.
"""

from __future__ import annotations

import datetime as dt
import errno
import fcntl
import math
import mmap
import os
import signal
import struct
import sys
import threading
import time
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any, NoReturn

FOLDER = "CKPTD_CHAOS_PLANT"
"""Variable: the folder of this process's node."""
PARTS = "CKPTD_CHAOS_PLANT_PARTS"
"""Variable: what is wanted, of "clock", "disk" and "raise", with commas."""
RAISE_SIGNAL = signal.SIGRTMIN + 11
"""Raises in the main thread of a rank. Above those that thread libraries and profilers take."""
LOG = "struck.log"
_CLOCK = struct.Struct("d")
_ERRORS = {"ENOSPC": errno.ENOSPC, "EDQUOT": errno.EDQUOT}

_real_time, _real_time_ns, _real_clock_gettime = time.time, time.time_ns, time.clock_gettime
_RealDatetime = dt.datetime
_real_write, _real_close = os.write, os.close


class InjectedError(RuntimeError):
    """What a rank raises when it is told to."""


def role() -> str:
    """Return who this process is on its node: a rank's number, "agent", or "other"."""
    return os.environ.get("RANK") or ("agent" if "CKPTD_EVENT_LOG" in os.environ else "other")


class _Planted:
    """One process's share."""

    def __init__(self) -> None:
        self._folder = ""
        self._clocks: list[mmap.mmap] = []
        self._told = 0.0
        self._deaf = threading.local()

    def listen(self, folder: str) -> None:
        """Begin to look into a folder; again in a fork that has become somebody else."""
        self._folder = folder
        self._clocks = [clock for name in ("clock", f"clock.{role()}") if (clock := self._mapped(name)) is not None]

    def _mapped(self, name: str) -> mmap.mmap | None:
        try:
            fd = os.open(os.path.join(self._folder, name), os.O_RDONLY | os.O_CLOEXEC)  # noqa: PTH118 - early and lean
        except OSError:
            return None
        try:
            return mmap.mmap(fd, _CLOCK.size, prot=mmap.PROT_READ)
        finally:
            _real_close(fd)

    def say(self, what: str, about: object) -> None:
        """Append a line to the log; never raises."""
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(os.path.join(self._folder, LOG), flags, 0o600)  # noqa: PTH118 - as above
            _real_write(fd, f"{os.getpid()} {what} {about}\n".encode())
            _real_close(fd)

    def shift(self) -> float:
        """Return by how much this process's clock is ahead, seconds."""
        shift = math.fsum(_CLOCK.unpack_from(clock)[0] for clock in self._clocks)
        if shift != self._told:
            self._told = shift
            self.say("clock", shift)
        return shift

    def refuse(self, call: str, fd: int) -> None:
        """Raise what the disk of `fd` says to a call; return where it says nothing."""
        if getattr(self._deaf, "inside", False):
            return
        self._deaf.inside = True
        try:
            with open(os.path.join(self._folder, "disk"), encoding="utf-8") as file:  # noqa: PTH118, PTH123 - as above
                lines = file.read().splitlines()
            path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - as above
        except OSError:
            return
        finally:
            self._deaf.inside = False
        for line in lines:
            refused, name, prefix = line.split(" ", 2)
            if refused == call and (path + "/").startswith(prefix):
                self.say(call, path)
                raise OSError(_ERRORS[name], os.strerror(_ERRORS[name]))


_planted = _Planted()


def _is_for_a_core() -> bool:
    """Whether gRPC asks: it makes deadlines that its core compares with the true clock, which no node's own clock does."""
    frame = sys._getframe(2)  # noqa: SLF001 - the caller's caller, cheaply
    return str(frame.f_globals.get("__name__")).startswith("grpc")


def _shift_clocks(planted: _Planted) -> None:
    def shifted_time() -> float:
        return _real_time() if _is_for_a_core() else _real_time() + planted.shift()

    def shifted_time_ns() -> int:
        return _real_time_ns() + int(planted.shift() * 1e9)

    def shifted_clock_gettime(clock: int) -> float:
        return _real_clock_gettime(clock) + (planted.shift() if clock == time.CLOCK_REALTIME else 0.0)

    time.time, time.time_ns, time.clock_gettime = shifted_time, shifted_time_ns, shifted_clock_gettime

    class _Kind(type):
        # Every datetime is one, wherever it was made.
        def __instancecheck__(cls, thing: object) -> bool:
            return isinstance(thing, _RealDatetime)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, _RealDatetime)

    class Shifted(_RealDatetime, metaclass=_Kind):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Any:
            return super().now(tz) + dt.timedelta(seconds=planted.shift())

        @classmethod
        def utcnow(cls) -> Any:
            return cls.now(dt.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return cls.now()

    Shifted.__name__ = Shifted.__qualname__ = "datetime"
    Shifted.__module__ = "datetime"
    dt.datetime = Shifted  # type: ignore[misc]


def _refuse_calls(planted: _Planted) -> None:
    real_fallocate, real_fsync = os.posix_fallocate, os.fsync

    def write(fd: int, data: Any, /) -> int:
        planted.refuse("write", fd)
        return _real_write(fd, data)

    def fallocate(fd: int, offset: int, length: int, /) -> None:
        planted.refuse("write", fd)
        real_fallocate(fd, offset, length)

    def fsync(fd: Any) -> None:
        planted.refuse("fsync", fd if isinstance(fd, int) else fd.fileno())
        real_fsync(fd)

    def close(fd: int) -> None:
        is_written = False
        try:
            # Only who has written can hear of it.
            with suppress(OSError):
                is_written = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            if is_written:
                planted.refuse("close", fd)
        finally:
            # As the kernel has it: whatever close says, it has closed.
            _real_close(fd)

    os.write, os.posix_fallocate, os.fsync, os.close = write, fallocate, fsync, close


def _raise_when_told(planted: _Planted) -> None:
    def raise_it(*_: object) -> NoReturn:
        planted.say("raise", role())
        raise InjectedError("this rank was told to raise")

    signal.signal(RAISE_SIGNAL, raise_it)


def install() -> None:
    """Change this process, if its environment says so."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    _planted.listen(folder)
    parts = os.environ.get(PARTS, "").split(",")
    if "clock" in parts and time.time is _real_time:
        _shift_clocks(_planted)
    if "disk" in parts and os.write is _real_write:
        _refuse_calls(_planted)
    if "raise" in parts and role().isdigit():
        _raise_when_told(_planted)


def _run_the_next() -> None:
    """Run the sitecustomize that this one hides."""
    here = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120 - as above
    found = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.realpath(path) != here])
    if found is not None and found.loader is not None:
        found.loader.exec_module(module_from_spec(found))


install()
if __name__ == "sitecustomize":
    _run_the_next()
