"""Strikes the scheduled faults at their moments.

Owns: which fault is next, and whether its moment has come. Does not own: how it is done (`process`) and what follows
(`conductor`). Faults strike one after the other; the next one is armed when the job runs again after the last one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ckptd.chaos.cluster.cluster import Cluster
from ckptd.chaos.history import Event, History
from ckptd.chaos.nemesis.harm import Harm, NemesisError
from ckptd.chaos.nemesis.process import strike
from ckptd.chaos.schedule import PlannedFault
from ckptd.chaos.watch import Tail


@dataclass(frozen=True, kw_only=True, slots=True)
class Struck:
    """A fault's fate.

    Attributes:
        fault: What was planned.
        fired: Whether it was really done.
        t: When, seconds since the epoch.
        step: Step of the event it waited for; None where a failpoint says none.
        pids: Processes that were hit.
        note: Why it was not done, if it was not.
    """

    fault: PlannedFault
    fired: bool = False
    t: float = 0.0
    step: int | None = None
    pids: tuple[int, ...] = ()
    note: str = "its moment never came"


class Injecting(Protocol):
    """What the conductor asks of whoever strikes."""

    struck: list[Struck]
    """The fate of each fault."""

    @property
    def pending(self) -> PlannedFault | None:
        """The fault that has not struck yet, None when all have."""
        ...

    def first_failpoints(self) -> dict[int, str]:
        """Return the failpoints that the first agents are started with, by node."""
        ...

    def arm(self) -> None:
        """The job runs (again): the next fault may strike."""
        ...

    def look(self, new: Iterable[Event]) -> Harm | None:
        """Strike if the moment has come; return what was done."""
        ...

    def strike_now(self) -> Harm | None:
        """Strike the pending fault although its moment has not come."""
        ...


class Injector:
    """Walks through a schedule. For one thread.

    Args:
        faults: In the order they strike; only the first one may wait for a failpoint.
        cluster: Whom they hurt.
        history: What happened so far.
    """

    def __init__(self, faults: Sequence[PlannedFault], cluster: Cluster, history: History) -> None:
        self.struck = [Struck(fault=fault) for fault in faults]
        self._cluster = cluster
        self._history = history
        self._next = 0
        self._hits = 0
        self._awaits: Event | None = None
        self._is_armed = True
        self._failpoint_log: Tail | None = None

    @property
    def pending(self) -> PlannedFault | None:
        """The fault that has not struck yet, None when all have."""
        return self.struck[self._next].fault if self._next < len(self.struck) else None

    def first_failpoints(self) -> dict[int, str]:
        """Return the failpoints that the first agents are started with, by node."""
        fault = self.pending
        if fault is None or fault.at.failpoint is None:
            return {}
        # Rank 0 lives on node 0, and its agent is asked to lead.
        return {fault.which or 0: f"{fault.at.failpoint}={fault.do}@{fault.at.nth}"}

    def arm(self) -> None:
        """The job runs (again): the next fault may strike."""
        self._is_armed = True

    def look(self, new: Iterable[Event]) -> Harm | None:
        """Strike if the moment has come with these events (or with a failpoint); return what was done."""
        fault = self.pending
        if fault is None or not self._is_armed:
            return None
        cause = self._failpoint(fault) if fault.at.failpoint else self._moment(fault, new)
        if cause is None:
            return None
        return self._strike(fault, cause)

    def strike_now(self) -> Harm | None:
        """Strike the pending fault although its moment has not come: the job has ended meanwhile."""
        fault = self.pending
        return None if fault is None else self._strike(fault, Event(t=time.time(), source="harness", kind="end"))

    def coordinator_index(self) -> int:
        """Return the number of the node that plays the coordinator: who claimed last."""
        claimed = self._history.last("claimed", source="agent")
        return 0 if claimed is None else int(claimed.source.split()[1].partition(".")[0])

    def _strike(self, fault: PlannedFault, cause: Event) -> Harm | None:
        fate = Struck(fault=fault, t=time.time(), step=cause.step)
        harm = None
        try:
            if fault.at.failpoint and fault.do == "kill":
                # It has killed itself.
                harm = Harm(pids=(int(cause.fields["pid"]),))
                fate = replace(fate, t=cause.t)
            else:
                harm = strike(fault, self._cluster, coordinator=self._cluster.nodes[self.coordinator_index()])
            fate = replace(fate, fired=True, pids=harm.pids, note="")
        except NemesisError as error:
            fate = replace(fate, note=str(error))
        self.struck[self._next] = fate
        fields = {"do": fault.do, "target": fault.target, "step": cause.step, "fired": fate.fired, "note": fate.note}
        self._history.add(Event(t=fate.t, source="harness", kind="fault", fields=fields))
        self._next += 1
        self._hits, self._awaits, self._is_armed, self._failpoint_log = 0, None, harm is None, None
        return harm

    def _moment(self, fault: PlannedFault, new: Iterable[Event]) -> Event | None:
        for event in new:
            if self._awaits is not None:
                if event.kind == "step" and event.source.startswith("script"):
                    return event
            elif fault.at.step is not None:
                if event.kind == "step" and event.step == fault.at.step:
                    return event
            elif self._matches(fault, event):
                self._hits += 1
                if self._hits == fault.at.nth:
                    if fault.at.then is None:
                        return event
                    self._awaits = event
        return None

    def _matches(self, fault: PlannedFault, event: Event) -> bool:
        if event.kind != fault.at.event or event.source.partition(" ")[0] in ("harness", "client"):
            return False
        if fault.kind == "rank" and event.rank is not None:
            return event.rank == fault.which
        if fault.kind in ("agent", "node") and "node" in event.fields:
            # Without a node it is an event of the whole job.
            return bool(event.fields["node"] == self._cluster.nodes[fault.which or 0].identity())
        return True

    def _failpoint(self, fault: PlannedFault) -> Event | None:
        node = self._cluster.nodes[fault.which or 0]
        if self._failpoint_log is None:
            self._failpoint_log = Tail(node.place.failpoints)
        for line in self._failpoint_log.lines():
            pid, name, verb, _hit = line.split()
            if name == fault.at.failpoint and verb == fault.do:
                fields = {"pid": int(pid), "failpoint": name}
                return Event(t=time.time(), source="harness", kind="failpoint", fields=fields)
        return None
