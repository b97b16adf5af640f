"""Turns a scenario, a cluster's size and a seed into faults with a name, a victim and a moment. Pure.

Owns: what "any" and "last" mean. Invariant: the same scenario, size and seed give the same schedule, on any machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ckptd.chaos.local_faults import LocalFault
from ckptd.chaos.network.words import NetworkFault
from ckptd.chaos.scenario import Fault, Moment, Scenario, StoreFault


class ScheduleError(ValueError):
    """The scenario does not fit the cluster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFault:
    """A fault with its victim chosen.

    Attributes:
        index: Position in the schedule, from 0.
        do: Word of the scenario: kill, stop, continue, lose, store, network, or one of `local_faults.LOCAL_DEEDS`.
        kind: Kind of the target: rank, agent, node, coordinator, all, store, network.
        which: Number of the rank, agent or node; None for the others.
        at: When.
        store: What the store does; None for other deeds.
        network: What the network does; None for other deeds.
        local: What a process, disk or clock does; None for other deeds.
    """

    index: int
    do: str
    kind: str
    which: int | None
    at: Moment
    store: StoreFault | None = None
    network: NetworkFault | None = None
    local: LocalFault | None = None

    @property
    def target(self) -> str:
        """The target in words, e.g. "rank 3"."""
        if self.network is not None:
            return str(self.network)
        if self.store is not None:
            return " ".join(part for part in ("store:", self.store.kind, self.store.op, self.store.prefix) if part)
        target = self.kind if self.which is None else f"{self.kind} {self.which}"
        return target if self.local is None else self.local.words(target)

    @property
    def moment(self) -> str:
        """The moment in words."""
        nth = f" (no. {self.at.nth})" if self.at.nth > 1 else ""
        if self.at.after_ms is not None:
            return f"{self.at.after_ms} ms later"
        if self.at.step is not None:
            return f"step {self.at.step}"
        if self.at.failpoint is not None:
            return f"failpoint {self.at.failpoint}{nth}" + (" while starting again" if self.at.restarting else "")
        text = f"event {self.at.event}{nth}"
        if self.at.restarting:
            text += " while starting again"
        if self.at.then:
            text += f", then the next {self.at.then}"
        return text + (f", before {self.at.before}" if self.at.before else "")

    def node(self, nproc: int) -> int | None:
        """Number of the node the target is or lives on; None for coordinator and all."""
        return self.which // nproc if self.kind == "rank" and self.which is not None else self.which


def schedule(scenario: Scenario, *, nnodes: int, nproc: int, seed: int) -> tuple[PlannedFault, ...]:
    """Return the faults in the order they strike.

    Raises:
        ScheduleError: The cluster is too small, or a target does not exist in it.
    """
    if nnodes < scenario.min_nodes or nnodes * nproc < scenario.min_ranks:
        raise ScheduleError(
            f"scenario {scenario.name} needs at least {scenario.min_nodes} nodes and {scenario.min_ranks} ranks, "
            f"not {nnodes} nodes with {nproc} ranks each; raise --nnodes or --nproc"
        )
    for fault in scenario.faults:
        if fault.network is not None and (why := fault.network.misfit(nnodes)):
            raise ScheduleError(f"scenario {scenario.name}: {why}")
    # Text, not hash(): that one differs from process to process.
    chance = random.Random(f"{scenario.name}/{nnodes}/{nproc}/{seed}")
    return tuple(
        PlannedFault(
            index=index,
            do=fault.do,
            kind=fault.target.kind,
            which=_which(fault, nnodes, nproc, chance),
            at=fault.at,
            store=fault.store,
            network=fault.network,
            local=fault.local,
        )
        for index, fault in enumerate(scenario.faults)
    )


def _which(fault: Fault, nnodes: int, nproc: int, chance: random.Random) -> int | None:
    which = fault.target.which
    if which is None:
        return None
    most = nnodes * nproc if fault.target.kind == "rank" else nnodes
    if which == "any":
        return chance.randrange(most)
    if which == "last":
        return most - 1
    if int(which) >= most:
        raise ScheduleError(f"there is no {fault.target.kind} {which}; they are 0..{most - 1}")
    return int(which)
