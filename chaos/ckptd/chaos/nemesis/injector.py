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
from ckptd.chaos.nemesis.network import cut
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

    def restart_failpoints(self, node: int) -> str:
        """Return the failpoints that an agent of a node is given when it is started again now."""
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
        faults: In the order they strike; only the first one, and those that strike a job which starts again, may wait for
            a failpoint.
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
        # What the pending fault waited for, while its target does not live.
        self._came: Event | None = None
        self._failpoint_log: Tail | None = None
        # When the fault before was done; what starts counts from the first look.
        self._since: float | None = None

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

    def restart_failpoints(self, node: int) -> str:
        """Return the failpoints that an agent of a node is given when it is started again now."""
        fault = self.pending
        # The first agents of all have theirs already.
        if fault is None or not fault.at.restarting or self._next == 0:
            return ""
        return self.first_failpoints().get(node, "")

    def arm(self) -> None:
        """The job runs (again): the next fault may strike."""
        self._is_armed = True

    def look(self, new: Iterable[Event]) -> Harm | None:
        """Strike if the moment has come with these events (or with a failpoint, or by time); return what was done."""
        if self._since is None:
            self._since = time.monotonic()
        fault = self.pending
        if fault is None:
            return None
        is_early = fault.at.restarting or fault.at.after_ms is not None
        if not (self._is_armed or is_early):
            return None
        cause = self._came or self._cause(fault, new)
        if cause is None:
            return None
        # The target may be about to start: then it is hit as soon as it lives. What was stopped and is gone does not come back.
        harm = self._strike(fault, cause, may_wait=is_early and fault.do != "continue")
        self._came = cause if self.pending is fault else None
        return harm

    def _cause(self, fault: PlannedFault, new: Iterable[Event]) -> Event | None:
        if fault.at.failpoint:
            return self._failpoint(fault)
        if fault.at.after_ms is None:
            return self._moment(fault, new)
        is_over = time.monotonic() >= (self._since or 0.0) + fault.at.after_ms / 1000
        return Event(t=time.time(), source="harness", kind="time") if is_over else None

    def strike_now(self) -> Harm | None:
        """Strike the pending fault although its moment has not come: the job has ended meanwhile."""
        fault = self.pending
        return None if fault is None else self._strike(fault, Event(t=time.time(), source="harness", kind="end"))

    def coordinator_index(self) -> int:
        """Return the number of the node that plays the coordinator: who claimed last."""
        claimed = self._history.last("claimed", source="agent")
        return 0 if claimed is None else int(claimed.source.split()[1].partition(".")[0])

    def _strike(self, fault: PlannedFault, cause: Event, *, may_wait: bool = False) -> Harm | None:
        fate = Struck(fault=fault, t=time.time(), step=cause.step)
        harm = None
        try:
            if fault.at.failpoint and fault.do == "kill":
                # It has killed itself.
                harm = Harm(pids=(int(cause.fields["pid"]),))
                fate = replace(fate, t=cause.t)
            else:
                coordinator = self._cluster.nodes[self.coordinator_index()]
                if fault.network is not None:
                    harm = cut(fault.network, fault.index, self._cluster, coordinator=coordinator)
                else:
                    harm = strike(fault, self._cluster, coordinator=coordinator)
            fate = replace(fate, fired=True, pids=harm.pids, note="")
        except NemesisError as error:
            if may_wait:
                self.struck[self._next] = Struck(fault=fault, note=f"its moment came, but {error}")
                return None
            fate = replace(fate, note=str(error))
        self.struck[self._next] = fate
        fields = {"do": fault.do, "target": fault.target, "step": cause.step, "fired": fate.fired, "note": fate.note}
        self._history.add(Event(t=fate.t, source="harness", kind="fault", fields=fields))
        self._next += 1
        self._since = time.monotonic()
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
        # Of a node that was not replaced the log also tells of earlier faults.
        before = {pid for fate in self.struck for pid in fate.pids}
        for line in self._failpoint_log.lines():
            pid, name, verb, _hit = line.split()
            if name == fault.at.failpoint and verb == fault.do and int(pid) not in before:
                fields = {"pid": int(pid), "failpoint": name}
                return Event(t=time.time(), source="harness", kind="failpoint", fields=fields)
        return None
