"""Faults of a node's own things as words: its processes, its disks, its clock.

Owns: the deeds beyond kill, stop, continue, lose and store, what each may be done to, and their numbers. Does not own:
their spelling in TOML (`local_reader`) nor how they are done (`nemesis.local`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

DEEDS_OF = {
    "segfault": ("rank", "agent", "coordinator"),
    "terminate": ("rank", "agent", "coordinator"),
    "raise": ("rank",),
    "hang": ("rank",),
    "slow": ("rank", "agent", "coordinator"),
    "reboot": ("node", "coordinator", "all"),
    "disk": ("node", "coordinator", "all"),
    "clock": ("rank", "agent", "node", "coordinator", "all"),
}
"""Each deed, and the kinds of targets it can be done to."""
LOCAL_DEEDS = tuple(DEEDS_OF)
DISK_FAULTS_OF = {
    "store": ("full", "read_only", "quota", "fsync", "close"),
    "shm": ("full", "quota"),
    "data": ("full", "read_only"),
    "run": ("full",),
}
"""Each disk, and what it can do: shared memory is open for writing all the time, and never synced."""
MOUNTED = ("full", "read_only")
"""What needs a file system of its own; the other faults are answers that are planted into system calls."""
SIZE_MIB = 1024
"""Size of a file system of its own where a scenario says none; memory is taken as it fills."""
NOBODY_ENDS = ("slow", "disk", "clock")
"""Deeds after which every process lives on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowFault:
    """A process that lags: it is stopped and woken again and again.

    Attributes:
        percent: Share of the time that it runs.
        for_s: How long, seconds.
    """

    percent: int
    for_s: int

    def words(self, target: str) -> str:
        """Say it in words."""
        return f"{target}, which runs {self.percent} % of the time"


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskFault:
    """A disk that takes nothing more.

    Attributes:
        disk: "store": the root of a local store; of a node "shm" (shared memory), "data" (its disk), "run" (run folder).
        kind: "full", "read_only"; "quota" (EDQUOT at write), "fsync" and "close" (ENOSPC there).
        left_kib: Of a full one, what is left, KiB.
        size_mib: Of one with a file system of its own, its size, MiB.
        for_s: How long, seconds; None: until the job is done.
    """

    disk: str
    kind: str
    left_kib: int = 0
    size_mib: int = SIZE_MIB
    for_s: int | None = None

    @property
    def is_mounted(self) -> bool:
        """Whether it needs a file system of its own."""
        return self.kind in MOUNTED

    def words(self, target: str) -> str:
        """Say it in words."""
        how = {"quota": "over quota", "fsync": "full at fsync", "close": "full at close"}.get(self.kind, self.kind)
        return f"{self.disk}{'' if self.disk == 'store' else f' of {target}'}: {how.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockFault:
    """A clock that is wrong.

    Attributes:
        shift_s: It is ahead by so much, seconds; behind where it is negative.
        for_s: How long, seconds; None: until the job is done.
    """

    shift_s: int
    for_s: int | None = None

    def words(self, target: str) -> str:
        """Say it in words."""
        return f"{target}, {abs(self.shift_s)} s {'ahead' if self.shift_s > 0 else 'behind'}"


LocalFault: TypeAlias = SlowFault | DiskFault | ClockFault
