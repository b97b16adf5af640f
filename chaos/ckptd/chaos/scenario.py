"""Scenarios as values: what is hurt, when, and what must be seen afterwards.

Owns: the words. Does not own: their spelling in TOML (`scenario_reader`), which rank "any" is (`schedule`), nor how a
fault is done (`nemesis`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptd.chaos.local_faults import LocalFault
from ckptd.chaos.network.words import NetworkFault

DEEDS = ("kill", "stop", "continue", "lose")
TARGETS = ("rank", "agent", "node", "coordinator", "all")
TIERS = ("memory", "mixed", "store")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Whom a fault hurts.

    Attributes:
        kind: One of TARGETS; "coordinator" is the node that plays it.
        which: A number, "any" (the seed chooses) or "last"; None for coordinator and all.
    """

    kind: str
    which: int | str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """When a fault strikes; exactly one of step, event, failpoint and after_ms is set.

    Attributes:
        step: When the script has printed this step.
        event: When an event of this kind stands in an event log, of the target where the event names rank or node.
        failpoint: When the target's agent passes this failpoint.
        after_ms: So many milliseconds after the fault before it was done (the first: after the first launch).
        nth: The how many-th such event, or pass of the failpoint.
        then: "step": not at the event itself, but at the next step that the script prints.
        before: Kind of event that must not have come before for the same step: else the fault came too late to prove
            anything, and the verdict is unknown.
        restarting: It may strike before the job runs again after the fault before it: in the midst of a recovery. So may all
            with after_ms. Such a fault waits for a target that does not live yet.
    """

    step: int | None = None
    event: str | None = None
    failpoint: str | None = None
    nth: int = 1
    then: str | None = None
    before: str | None = None
    after_ms: int | None = None
    restarting: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreFault:
    """What the store does from the fault's moment on; see `storage_backends.fault_script.Fault`.

    Attributes:
        kind: A FaultKind.
        op: An Op: calls of that method only; None: of all.
        prefix: Keys in the job's root that start so.
        times: How many calls; None: all.
        for_s: How long, seconds; None: to the end.
        delay_s: For "delay", seconds; for "hang", after how many the connection ends (0: when the caller gives up).
        bytes_per_s: For "drip".
        per_s: For "limit".
    """

    kind: str
    op: str | None = None
    prefix: str = ""
    times: int | None = 1
    for_s: int | None = None
    delay_s: int = 0
    bytes_per_s: int = 0
    per_s: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that is done to the job. Faults strike in order, each after the one before it.

    Attributes:
        do: One of DEEDS, "store", "network", or one of `local_faults.LOCAL_DEEDS`.
        target: To whom; of kind "store" or "network" when one of these does something, or the store's disk.
        at: When.
        store: What the store does; None for other deeds.
        network: What the network does; None for other deeds.
        local: What a process, disk or clock does, where the deed says more than its name; else None.
    """

    do: str
    target: Target
    at: Moment
    store: StoreFault | None = None
    network: NetworkFault | None = None
    local: LocalFault | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What must be seen besides equal bits.

    Attributes:
        restored_from: Tiers the launch after the first fault may restore from; empty: anything. "mixed" is both: a
            replica that a rank of another node wrote comes from the store.
        restored_step: "fault": the first launch after the first fault goes on from the step that was in flight, or a newer one.
        committed: "fault": the step that was in flight at the first fault is listed in the end, saved by that run.
            "after": a step that was begun when the last fault was over is.
        relaunches: Fewest and most launches after the first one; None: as many as faults that end a launch.
        fenced: A process that was stopped and woken reports that it is fenced.
        lost_steps_max: Most steps that may be trained again after each fault; None: any number.
        recovery_s_max: Longest time from each fault to the next trained step, seconds; None: any.
        may_miss: Faults whose moment never came are counted, and prove nothing; one of them must have struck.
    """

    restored_from: tuple[str, ...] = ()
    restored_step: str | None = None
    committed: str | None = None
    relaunches: tuple[int, int] | None = None
    fenced: bool = False
    lost_steps_max: int | None = None
    recovery_s_max: int | None = None
    may_miss: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A scenario file.

    Attributes:
        name: Name of the file without ".toml".
        title: One line: what happens.
        proves: One line: the promise that is at stake.
        min_nodes: Fewest nodes it makes sense with.
        min_ranks: Fewest ranks.
        agent_failpoints: Failpoints of every agent all the time, e.g. to slow uploads down.
        faults: In the order they strike.
        expect: What must be seen.
        source: The file it was read from; empty: one of the package's, or none.
    """

    name: str
    title: str
    proves: str = ""
    min_nodes: int = 1
    min_ranks: int = 1
    agent_failpoints: str = ""
    faults: tuple[Fault, ...] = ()
    expect: Expectation = field(default_factory=Expectation)
    source: str = ""
