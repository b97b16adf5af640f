"""A seed becomes a schedule: a scenario of several faults. Pure.

Owns: how many faults there are, and what each one knows of the one before. Does not own: the table (`deeds`) and the moments.
Invariant: the same seed, size, store and table give the same scenario, on every machine and with every version of Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptd.chaos.scenario import Expectation, Fault, Scenario
from ckptd.chaos.soak.chance import Chance
from ckptd.chaos.soak.deed import Deed
from ckptd.chaos.soak.deeds import DEEDS
from ckptd.chaos.soak.moments import SLOW, Ground

_DEEDS_OF_A_SCHEDULE = (2, 5)
_DELAYS_S = ("0.01", "0.05", "0.1")
_ENDS = ("kill", "lose", "segfault", "terminate", "raise", "hang", "reboot")
"""Deeds after which somebody is started again."""


def draw(seed: int, *, nnodes: int, nproc: int, store: str, deeds: Sequence[Deed] = DEEDS) -> Scenario:
    """Return the schedule of a seed; its name is `seed-N-STORE`.

    Args:
        seed: From 0.
        nnodes: Number of nodes.
        nproc: Ranks on each.
        store: "local" or "s3".
        deeds: The table.

    Raises:
        ValueError: No deed of the table can be done here.
    """
    ground = Ground(nnodes=nnodes, nproc=nproc, store=store)
    if not any(deed.fits(ground) for deed in deeds):
        raise ValueError(f"no deed of the table can be done to a job of {nnodes} nodes on a store of kind {store}")
    chance = Chance(f"soak/{seed}/{nnodes}/{nproc}/{store}")
    faults: list[Fault] = []
    for _ in range(chance.between(*_DEEDS_OF_A_SCHEDULE)):
        possible = [deed for deed in deeds if deed.fits(ground)]
        if not possible:
            break
        deed = chance.weighted(possible, [one.weight for one in possible])
        faults += deed.make(chance, ground)
        drawn, pulse = (*ground.drawn, deed.name), ground.pulse or deed.pulse
        ground = _after(faults[-1], replace(ground, index=len(faults), drawn=drawn, pulse=pulse))
    return Scenario(
        name=f"seed-{seed}-{store}",
        title=f"{len(faults)} faults drawn by the seed {seed}",
        proves="Every promise, whatever happens one after the other.",
        min_nodes=nnodes,
        min_ranks=nnodes * nproc,
        agent_failpoints=_delays(chance),
        faults=tuple(faults),
        expect=Expectation(may_miss=True),
    )


def _after(fault: Fault, ground: Ground) -> Ground:
    """Return what the next fault may count on."""
    kind, which = fault.target.kind, fault.target.which
    if fault.do not in _ENDS:
        return replace(ground, is_starting=False, restarted=())
    if fault.do == "hang":
        # It takes a while until the job is given up, and starts again then.
        return replace(ground, is_starting=True, restarted=())
    if kind == "all":
        return replace(ground, is_starting=True, restarted=tuple(range(ground.nnodes)))
    if kind == "coordinator":
        # Rank 0 lives on node 0, and has its own agent lead.
        return replace(ground, is_starting=False, restarted=(0,))
    nodes = (int(which or 0),) if kind in ("agent", "node") else ()
    return replace(ground, is_starting=kind in ("rank", "node"), restarted=nodes)


def _delays(chance: Chance) -> str:
    """Return delays of all agents: the slower a step of the protocol, the more happens beside it."""
    count = (0, 0, 1, 1, 2)[chance.below(5)]
    delays = {chance.one_of(SLOW): chance.one_of(_DELAYS_S) for _ in range(count)}
    return ";".join(f"{name}=delay:{seconds}" for name, seconds in delays.items())
