"""Strikes one fault at one boundary, in one process: the injector of the matrix.

Owns: which process is armed with which failpoint, and what is done when it gets there. Does not own: how a node is
lost or a process found (`nemesis.process`). A process kills itself at the boundary; where more than it is to be hit, it stops
itself there, so that nothing of it goes on, and the rest is done from outside. Invariant: a fault counts as fired only when
the failpoint's line is there and the harm was done.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ckptd.chaos.cluster.cluster import Cluster
from ckptd.chaos.history import Event, History
from ckptd.chaos.matrix.launcher import rank_log
from ckptd.chaos.matrix.plays import Accident
from ckptd.chaos.nemesis.injector import Struck
from ckptd.chaos.nemesis.process import Harm
from ckptd.chaos.scenario import Moment
from ckptd.chaos.schedule import PlannedFault
from ckptd.protos.boundaries import BOUNDARIES

PAUSE_S = 1.0
"""How long a paused process stands still; a second is longer than anything the protocol does in a job of this size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One process of a run.

    Attributes:
        kind: "agent", "rank" or "verb".
        number: Of the node, of the rank, or of the verb in its play, from 0.
        start: How many-th agent there, which launch, how many-th try of the verb; from 1.
    """

    kind: str
    number: int
    start: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}, start {self.start}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """What a cell does.

    Attributes:
        boundary: Name of the failpoint.
        nth: Which pass of it by that process.
        place: Which process.
        action: "kill", "pause" (stopped and continued), "lose" (its node), "freeze" (its node, woken later), "kill all".
    """

    boundary: str
    nth: int
    place: Place
    action: str

    @property
    def failpoint(self) -> str:
        """As in CKPTD_FAILPOINTS."""
        return f"{self.boundary}={'kill' if self.action == 'kill' else 'stop'}@{self.nth}"


def survey_failpoints() -> str:
    """Return what has every pass of every boundary logged."""
    return ";".join(f"{name}=pass" for name in BOUNDARIES)


class BoundaryInjector:
    """Arms and strikes; see `injector.Injecting`. For one thread.

    Args:
        strike: What is done; None: nothing but the play's own accident, and every pass is logged.
        accident: Of the play.
        cluster: Where.
        history: Gets a `fault` event.
        nproc: Ranks on each node.
    """

    def __init__(
        self, strike: Strike | None, accident: Accident | None, cluster: Cluster, history: History, *, nproc: int
    ) -> None:
        self._strike, self._accident, self._nproc = strike, accident, nproc
        self._cluster, self._history = cluster, history
        self._accident_happened = False
        self._continue_at: float | None = None
        self._hit: Struck | None = None
        self.struck: list[Struck] = []
        if strike is not None:
            fault = PlannedFault(
                index=0,
                do={"pause": "stop", "freeze": "stop", "kill all": "kill"}.get(strike.action, strike.action),
                kind={"lose": "node", "freeze": "node", "kill all": "all"}.get(strike.action, strike.place.kind),
                which=None if strike.action == "kill all" else strike.place.number,
                at=Moment(failpoint=strike.boundary, nth=strike.nth),
            )
            self.struck = [Struck(fault=fault)]
            if strike.action == "freeze":
                wake = Moment(event="decided")
                self.struck.append(Struck(fault=replace(fault, index=1, do="continue", at=wake)))

    # ------------------------------------------------------------ arming

    def failpoints(self, place: Place) -> str:
        """Return the failpoints a process is started with."""
        parts = [] if self._strike is not None else [survey_failpoints()]
        if self._accident is not None and place == Place(kind="agent", number=0, start=1):
            parts.append(self._accident.failpoint)
        if self._strike is not None and place == self._strike.place:
            parts.append(self._strike.failpoint)
        return ";".join(parts)

    def first_failpoints(self) -> dict[int, str]:
        """Nothing: the cluster asks for each process."""
        return {}

    def restart_failpoints(self, node: int) -> str:
        """Nothing: the cluster asks for each process."""
        del node
        return ""

    def arm(self) -> None:
        """Nothing: the process is armed from its start."""

    # ------------------------------------------------------------ striking

    @property
    def pending(self) -> PlannedFault | None:
        """The fault that has not struck yet; None when all have."""
        return next((fate.fault for fate in self.struck if not fate.fired), None)

    @property
    def is_pausing(self) -> bool:
        """Whether a process stands still and is to be continued."""
        return self._continue_at is not None

    def look(self, new: Iterable[Event]) -> Harm | None:
        """Strike if the moment has come; return what was done."""
        if self._accident is not None and not self._accident_happened:
            harm = self._look_for_accident(self._accident)
            if harm is not None:
                return harm
        if self._continue_at is not None and time.time() >= self._continue_at:
            return self._go_on()
        if self._strike is None:
            return None
        if self._hit is None:
            line = self._line()
            return None if line is None else self._do(self._strike, *line)
        if self._strike.action == "freeze" and not self.struck[1].fired and _moved_on(new, self._hit.t):
            return self._wake()
        return None

    def strike_now(self) -> Harm | None:
        """Wake what is frozen; a boundary that was not passed cannot be struck from outside."""
        return self._wake() if self._hit is not None and len(self.struck) > 1 and not self.struck[1].fired else None

    def verb_was_hit(self, pid: int) -> bool:
        """Whether the verb's process `pid` is the one that stands, or fell, at the boundary."""
        line = self._line() if self._hit is None else None
        if line is not None and line[0] == pid and self._strike is not None:
            self._do(self._strike, *line)
        return self._hit is not None and pid in self._hit.pids

    def _line(self) -> tuple[int, float] | None:
        """Return (pid, time) when the armed process has got there."""
        assert self._strike is not None
        place = self._strike.place
        for path in self.logs(place):
            if not path.exists():
                continue
            for text in path.read_text(encoding="utf-8").splitlines():
                pid, name, _verb, _hit = text.split()
                mine = place.kind != "agent" or self._cluster.agent_pids.get((place.number, place.start)) == int(pid)
                if name == self._strike.boundary and mine and not self._is_accident(int(pid), name):
                    return int(pid), path.stat().st_mtime
        return None

    def _is_accident(self, pid: int, name: str) -> bool:
        first = self._cluster.agent_pids.get((0, 1)) == pid
        return self._accident is not None and first and self._accident.failpoint.partition("=")[0] == name

    def logs(self, place: Place) -> list[Path]:
        """Return the files in which passes of a process are logged."""
        if place.kind == "rank":
            return [rank_log(self._cluster.folder / "launches" / str(place.start), place.number)]
        if place.kind == "verb":
            return [self._cluster.folder / f"verb.{place.number}.{place.start}.log"]
        nodes = [*self._cluster.nodes, *self._cluster.gone]
        return [node.place.failpoints for node in nodes if node.index == place.number]

    def _do(self, strike: Strike, pid: int, t: float) -> Harm:
        node_index = strike.place.number // self._nproc if strike.place.kind == "rank" else strike.place.number
        pids: tuple[int, ...] = (pid,)
        harm = Harm(pids=pids, ends_launch=strike.place.kind == "rank" and strike.action == "kill")
        if strike.action == "pause":
            self._continue_at = time.time() + PAUSE_S
        elif strike.action in ("lose", "kill all"):
            nodes = self._cluster.nodes if strike.action == "kill all" else [self._cluster.nodes[node_index]]
            pids = (*pids, *(one for node in nodes for one in node.signal_all(signal.SIGKILL)))
            for node in nodes:
                if strike.action == "lose":
                    node.lose()
                else:
                    node.kill()
            harm = Harm(pids=pids, replace=tuple(nodes) if strike.action == "lose" else (), ends_launch=True)
        elif strike.action == "freeze":
            node = self._cluster.nodes[node_index]
            node.is_paused = True
            pids = (*pids, *node.signal_all(signal.SIGSTOP))
            harm = Harm(pids=pids, replace=(node,), ends_launch=True, is_silent=True)
        self._hit = replace(self.struck[0], fired=strike.action != "pause", t=t, pids=pids, note="")
        self.struck[0] = self._hit
        self._say(strike.action, str(strike.place))
        return harm

    def _go_on(self) -> Harm | None:
        self._continue_at = None
        assert self._hit is not None
        for pid in self._hit.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.struck[0] = self._hit = replace(self._hit, fired=True)
        return None

    def _wake(self) -> Harm:
        zombies = [node for node in self._cluster.gone if node.is_paused]
        pids = [pid for node in zombies for pid in node.signal_all(signal.SIGCONT)]
        for node in zombies:
            node.is_paused = False
        self.struck[1] = replace(self.struck[1], fired=bool(pids), t=time.time(), pids=tuple(pids), note="")
        self._say("continue", "what was frozen")
        return Harm(pids=tuple(pids))

    def _look_for_accident(self, accident: Accident) -> Harm | None:
        pid = self._cluster.agent_pids.get((0, 1))
        name = accident.failpoint.partition("=")[0]
        log = next((node.place.failpoints for node in self._cluster.nodes if node.index == 0), None)
        if (
            pid is None
            or log is None
            or not log.exists()
            or f"{pid} {name} kill " not in log.read_text(encoding="utf-8")
        ):
            return None
        self._accident_happened = True
        pids = [pid]
        if accident.takes_all:
            pids += [one for node in self._cluster.nodes for one in node.signal_all(signal.SIGKILL)]
            for node in self._cluster.nodes:
                node.kill()
        self._say("accident", "all" if accident.takes_all else "agent 0")
        return Harm(pids=tuple(pids), ends_launch=accident.takes_all)

    def _say(self, do: str, target: str) -> None:
        fields = {"do": do, "target": target, "fired": True, "note": ""}
        self._history.add(Event(t=time.time(), source="harness", kind="fault", fields=fields))


def _moved_on(new: Iterable[Event], since: float) -> bool:
    return any(event.kind == "decided" and event.t > since for event in new)
