"""The table of what random schedules do. Pure; a row per deed.

Owns: which deeds there are, how often each is drawn, and what it comes to as faults of a scenario. Does not own: when they
strike (`moments`), nor the makers of `local_deeds`, `network_deeds` and `store_deeds`. A new deed joins by a maker and a row;
seeds then stand for other schedules.
"""

from __future__ import annotations

from ckptd.chaos.scenario import Fault, Moment, Target
from ckptd.chaos.soak import local_deeds, network_deeds, store_deeds
from ckptd.chaos.soak.chance import Chance
from ckptd.chaos.soak.deed import Deed, any_node, any_rank
from ckptd.chaos.soak.moments import Ground, failpoint, moment


def _kill_rank(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    return (Fault(do="kill", target=any_rank(chance, ground), at=moment(chance, ground, "rank")),)


def _kill_agent(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    return (Fault(do="kill", target=any_node(chance, ground, "agent"), at=moment(chance, ground, "agent")),)


def _kill_coordinator(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    return (Fault(do="kill", target=Target(kind="coordinator"), at=moment(chance, ground, "coordinator")),)


def _kill_at_failpoint(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    return (_at_failpoint(chance, ground, "kill"),)


def _at_failpoint(chance: Chance, ground: Ground, do: str) -> Fault:
    """An agent hits itself at a failpoint, where it can be given one; else it is hit from outside."""
    target = any_node(chance, ground, "agent")
    at = failpoint(chance, ground, int(target.which or 0))
    return Fault(do=do, target=target, at=at or moment(chance, ground, "agent"))


def _kill_node(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    return (Fault(do="kill", target=any_node(chance, ground), at=moment(chance, ground, "node")),)


def _lose_node(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    return (Fault(do="lose", target=any_node(chance, ground), at=moment(chance, ground, "node")),)


def _kill_all(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    return (Fault(do="kill", target=Target(kind="all"), at=moment(chance, ground, "all")),)


def _lose_all(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    return (Fault(do="lose", target=Target(kind="all"), at=moment(chance, ground, "all")),)


def _paused(chance: Chance, stop: Fault, most_ms: int) -> tuple[Fault, ...]:
    """A fault that stops something, and the one that has it go on."""
    return stop, Fault(do="continue", target=stop.target, at=Moment(after_ms=chance.between(50, most_ms)))


def _pause_rank(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    stop = Fault(do="stop", target=any_rank(chance, ground), at=moment(chance, ground, "rank"))
    return _paused(chance, stop, 2500)


def _pause_agent(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    return _paused(chance, _at_failpoint(chance, ground, "stop"), 2500)


def _freeze_node(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """A node hangs and is replaced; it wakes while the job starts elsewhere, or when it has moved on."""
    stop = Fault(do="stop", target=any_node(chance, ground), at=moment(chance, ground, "node"))
    if chance.percent(40):
        return _paused(chance, stop, 3000)
    return stop, Fault(do="continue", target=stop.target, at=Moment(event="decided", nth=chance.between(1, 2)))


DEEDS: tuple[Deed, ...] = (
    Deed(name="kill rank", weight=16, make=_kill_rank),
    Deed(name="kill agent", weight=8, make=_kill_agent),
    Deed(name="kill coordinator", weight=8, make=_kill_coordinator),
    Deed(name="kill at failpoint", weight=16, make=_kill_at_failpoint),
    Deed(name="kill node", weight=8, make=_kill_node),
    Deed(name="lose node", weight=10, make=_lose_node),
    Deed(name="kill all", weight=8, make=_kill_all),
    Deed(name="lose all", weight=6, make=_lose_all),
    Deed(name="pause rank", weight=5, make=_pause_rank, pulse="stops"),
    Deed(name="pause agent", weight=8, make=_pause_agent, pulse="stops"),
    Deed(name="freeze node", weight=7, make=_freeze_node, pulse="stops"),
    Deed(name="segfault rank", weight=3, make=local_deeds.segfault_rank),
    Deed(name="segfault agent", weight=2, make=local_deeds.segfault_agent),
    Deed(name="raise in rank", weight=5, make=local_deeds.raise_in_rank),
    Deed(name="terminate", weight=6, make=local_deeds.terminate),
    Deed(name="hang rank", weight=3, make=local_deeds.hang_rank, pulse="stops"),
    Deed(name="slow", weight=5, make=local_deeds.slow, pulse="paces"),
    Deed(name="reboot", weight=8, make=local_deeds.reboot),
    Deed(name="store's disk", weight=10, make=local_deeds.store_disk, only_local=True),
    Deed(name="shared memory", weight=5, make=local_deeds.shared_memory),
    Deed(name="clock", weight=6, make=local_deeds.clock),
    Deed(name="network", weight=14, make=network_deeds.disturb, min_nodes=2),
    Deed(name="network to store", weight=8, make=network_deeds.disturb_store, only_s3=True),
    Deed(name="cut off", weight=7, make=network_deeds.cut_off, min_nodes=2),
    Deed(name="store", weight=46, make=store_deeds.fail, only_s3=True),
    Deed(name="stale list", weight=12, make=store_deeds.stale_list, only_s3=True, once=True),
    Deed(name="store hangs", weight=6, make=store_deeds.hang, only_s3=True, once=True),
)
"""All weights in one place."""
