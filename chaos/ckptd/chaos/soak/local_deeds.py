"""What random schedules do to a node's own things: its processes beyond killing, its disks, its clock. Pure.

Owns: how these deeds are drawn, and their bounds. Does not own: how often (`deeds`). Bounds are such that the job must get over
them: a disk has room again, and a process is let go, before any deadline of the job; a clock that is wrong costs nothing at all.
"""

from __future__ import annotations

from ckptd.chaos.local_faults import ClockFault, DiskFault, SlowFault
from ckptd.chaos.scenario import Fault, Target
from ckptd.chaos.soak.chance import Chance
from ckptd.chaos.soak.deed import any_node, any_rank
from ckptd.chaos.soak.moments import Ground, moment

_SHIFTS_S = (-3600, 3600)
_STORE_DISKS = (("full", 0), ("full", 8), ("read_only", 0), ("quota", 0), ("fsync", 0), ("close", 0))
_SHM_DISKS = (("full", 0), ("full", 64), ("quota", 0))
"""What the disk does, and KiB that are left of a full one."""


def segfault_rank(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """A rank gets SIGSEGV."""
    return (Fault(do="segfault", target=any_rank(chance, ground), at=moment(chance, ground, "rank")),)


def segfault_agent(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """An agent gets SIGSEGV."""
    return (Fault(do="segfault", target=any_node(chance, ground, "agent"), at=moment(chance, ground, "agent")),)


def raise_in_rank(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """An exception comes up in a rank; its Python closes what it can on the way out."""
    return (Fault(do="raise", target=any_rank(chance, ground), at=moment(chance, ground, "rank")),)


def terminate(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """SIGTERM: to an agent, as when it is updated, or to a rank, as when a machine is taken back."""
    if chance.percent(70):
        return (Fault(do="terminate", target=any_node(chance, ground, "agent"), at=moment(chance, ground, "agent")),)
    return (Fault(do="terminate", target=any_rank(chance, ground), at=moment(chance, ground, "rank")),)


def hang_rank(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """A rank stops for good; the job is given up."""
    return (Fault(do="hang", target=any_rank(chance, ground), at=moment(chance, ground, "rank")),)


def slow(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """A rank or an agent runs a part of the time."""
    kind = "rank" if chance.percent(50) else "agent"
    target = any_rank(chance, ground) if kind == "rank" else any_node(chance, ground, kind)
    local = SlowFault(percent=10 * chance.between(1, 5), for_s=chance.between(1, 3))
    return (Fault(do="slow", target=target, at=moment(chance, ground, kind), local=local),)


def reboot(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """A node, or all of them, come back with their disks and names, their shared memory wiped."""
    if chance.percent(75):
        return (Fault(do="reboot", target=any_node(chance, ground), at=moment(chance, ground, "node")),)
    return (Fault(do="reboot", target=Target(kind="all"), at=moment(chance, ground, "all")),)


def store_disk(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """The disk of a local store takes nothing for a while: a save that cannot be written is lost, and said so."""
    kind, left_kib = chance.one_of(_STORE_DISKS)
    local = DiskFault(disk="store", kind=kind, left_kib=left_kib, for_s=1)
    return (Fault(do="disk", target=Target(kind="store"), at=moment(chance, ground, "store"), local=local),)


def shared_memory(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """A node's shared memory takes nothing more for a while."""
    kind, left_kib = chance.one_of(_SHM_DISKS)
    local = DiskFault(disk="shm", kind=kind, left_kib=left_kib, for_s=chance.between(1, 2))
    return (Fault(do="disk", target=any_node(chance, ground), at=moment(chance, ground, "node"), local=local),)


def clock(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """Somebody's clock is an hour off, for some time or to the end."""
    kind = chance.weighted(("node", "rank", "agent"), (3, 1, 1))
    target = any_rank(chance, ground) if kind == "rank" else any_node(chance, ground, kind)
    for_s = chance.between(1, 8) if chance.percent(60) else None
    local = ClockFault(shift_s=chance.one_of(_SHIFTS_S), for_s=for_s)
    return (Fault(do="clock", target=target, at=moment(chance, ground, kind), local=local),)
