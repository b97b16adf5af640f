"""Leads one run from start to end: starts the job, lets the injector hurt it, starts it again, until it is done.

Owns: the loop, restarts of agents and of the job, deadlines. Does not own: judgement (`checkers`). What an operator's
supervisor and scheduler would do is done here, and nothing else: an agent that died is started again, a job that died
is ended everywhere and started again, a lost or unreachable node is replaced by a fresh one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Self

from ckptd.chaos.cluster.cluster import Cluster, Launch
from ckptd.chaos.cluster.node import Node
from ckptd.chaos.cluster.process import ProcessError
from ckptd.chaos.history import Event, History
from ckptd.chaos.nemesis.harm import Harm
from ckptd.chaos.nemesis.injector import Injecting, Injector, Struck
from ckptd.chaos.nemesis.lifting import Lifting
from ckptd.chaos.out_of_reach import end_cut_off_ranks
from ckptd.chaos.schedule import PlannedFault
from ckptd.chaos.watch import TICK, Watcher

_MOST_AGENT_STARTS = 20
_LEAST_PROGRESS = timedelta(seconds=150)
_SILENT_S = 1.0
"""A woken agent without ranks that has said nothing for so long has nothing more to do, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of one run.

    Attributes:
        run: From the first launch to the end.
        progress: Longest silence: no step printed, no event, no launch.
        relaunches: Most launches after the first one.
        woken: Longest wait for a woken zombie to say that it is fenced, once the job is done.
        hung: A job with a hung rank is given up when no step has been printed for so long.
        way_out: What is said where the first two are reached: how to raise them.
    """

    run: timedelta = timedelta(seconds=600)
    progress: timedelta = _LEAST_PROGRESS
    relaunches: int = 4
    woken: timedelta = timedelta(seconds=60)
    hung: timedelta = timedelta(seconds=10)
    way_out: str = ""

    @classmethod
    def of_timeout(cls, run: timedelta, *, relaunches: int) -> Self:
        """Return the bounds of a script of one's own by its `--timeout`: half of it may be silent, and 150 s always."""
        way_out = (
            "where the script needs that long, a longer --timeout (timeout= of the fixture) gives it more: so long for a run, "
            "and half of it without a save, a restore or a printed step (150 s at least)"
        )
        return cls(run=run, progress=max(_LEAST_PROGRESS, run / 2), relaunches=relaunches, way_out=way_out)


@dataclass(frozen=True, kw_only=True, slots=True)
class Performance:
    """How a run went.

    Attributes:
        history: All that was seen.
        finished: The script ended with 0 on all nodes.
        launches: How often it was started.
        struck: Each scheduled fault's fate.
        why: Why it did not finish; empty if it did.
        agent_ends: Exit code of each agent that was asked to end; None where it had to be killed.
        leaks: Processes and folders that were left.
        shared: Files left in the nodes' shared memory before it was removed, in bytes, by node and file.
        left_files: What agents that had ended in order left and should not have: sockets, strange files, by node.
    """

    history: History
    finished: bool
    launches: int
    struck: tuple[Struck, ...]
    why: str
    agent_ends: Mapping[str, int | None]
    leaks: tuple[str, ...]
    shared: Mapping[str, Mapping[str, int]]
    left_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Conductor:
    """One run. Use once; for one thread.

    Args:
        cluster: Not yet started; `perform` closes it.
        script: Script and arguments, placeholders filled.
        environment: Variables of the ranks.
        faults: What strikes, in order.
        limits: Deadlines.
        observe: Is told each event as it is seen, ours included.
        hears_clients: Their event logs speak for a script that does not print where it goes on from.
        saves_are_steps: They tell the steps too: for a script that prints none.
    """

    def __init__(
        self,
        cluster: Cluster,
        script: Sequence[str],
        *,
        environment: Mapping[str, str],
        faults: Sequence[PlannedFault] = (),
        limits: Limits,
        observe: Callable[[Event], None] = lambda _event: None,
        hears_clients: bool = False,
        saves_are_steps: bool = False,
    ) -> None:
        self._cluster, self._script, self._environment = cluster, list(script), environment
        self._limits, self._observe = limits, observe
        self._hears_clients, self._saves_are_steps = hears_clients, saves_are_steps
        self._history = History()
        self._watcher = Watcher(self._history, cluster.true_time)
        self._injector = self._make_injector(faults)
        self._seen = 0
        self._harmed: set[int] = set()
        self._agent_starts = 0
        self._launch_was_harmed = False
        self._launch_is_given_up = False
        self._script_source = ""
        # When a launch with a hung rank printed its last step; None where no rank hangs.
        self._hung_since: float | None = None
        self._lifting = Lifting(self._say)
        # (source, kind) of the event that says: the job runs again.
        self._arm_at: tuple[str, str] | None = None

    def perform(self) -> Performance:
        """Run until the script has ended well, or cannot any more; nothing is left running.

        Raises:
            ProcessError: An agent or a launcher could not be started at all.
        """
        try:
            self._cluster.start(once=self._injector.first_failpoints())
            launch, why = self._play()
            launch.end()
            self._settle()
            end_cut_off_ranks(self._cluster, self._history, self._notice, within=self._limits.woken)
            shared = {node.place.name: node.shared_bytes() for node in self._cluster.nodes}
            ends = self._cluster.end_agents()
            left = {
                n.place.name: files
                for n in self._cluster.nodes
                if (files := n.left_files()) and ends.get(n.source) == 0
            }
            self._notice()
        finally:
            self._cluster.close()
        return Performance(
            history=self._history,
            finished=not why,
            launches=launch.number,
            struck=tuple(self._injector.struck),
            why=why,
            agent_ends=ends,
            leaks=tuple(self._cluster.leaks()),
            shared=shared,
            left_files=left,
        )

    def _make_injector(self, faults: Sequence[PlannedFault]) -> Injecting:
        return Injector(faults, self._cluster, self._history)

    def _play(self) -> tuple[Launch, str]:
        """Start the job and lead it to its end; see `_conduct`."""
        return self._conduct(self._launch())

    def _conduct(self, launch: Launch) -> tuple[Launch, str]:
        """Lead to the end; return the last launch and why the job did not finish ("" if it did)."""
        end = time.monotonic() + self._limits.run.total_seconds()
        quiet_since = time.monotonic()
        while True:
            new = self._notice()
            if new:
                quiet_since = time.monotonic()
            self._suffer(self._injector.look(new))
            self._lifting.lift()
            self._give_up_hung(launch, new)
            self._supervise(launch)
            if launch.succeeded():
                return launch, ""
            if launch.failed() or self._launch_is_given_up:
                # A fault may have struck since we looked: what it did must not be taken for a death by itself.
                self._suffer(self._injector.look(self._notice()))
                self._end(launch)
                if not self._launch_was_harmed:
                    return launch, f"launch {launch.number} died by itself: {launch.complaint()}"
                if launch.number > self._limits.relaunches:
                    return launch, f"the job died {launch.number} times: {launch.complaint()}"
                launch = self._launch()
                quiet_since = time.monotonic()
            now = time.monotonic()
            if now > end:
                return launch, self._late("the run", self._limits.run)
            if now > quiet_since + self._limits.progress.total_seconds():
                return launch, self._late("the next sign of progress", self._limits.progress)
            time.sleep(TICK.total_seconds())

    def _notice(self) -> list[Event]:
        """Take in what is new, tell the observer, and return it, our own events included."""
        self._watcher.poll()
        new = self._history.since(self._seen)
        self._seen += len(new)
        for event in new:
            if (event.source, event.kind) == self._arm_at:
                self._injector.arm()
                self._arm_at = None
            self._observe(event)
        return new

    def _say(self, kind: str, **fields: object) -> None:
        self._history.add(Event(t=time.time(), source="harness", kind=kind, fields=fields))

    def _launch(self) -> Launch:
        self._cluster.await_agents()
        for node in self._cluster.nodes:
            self._watcher.follow_events(node.place.events, node.source)
        launch = self._cluster.launch(self._script, self._environment)
        self._script_source = f"script {launch.number}"
        for node in launch.nodes:
            script, clients = self._script_source, self._cluster.client_events(node, launch.number)
            self._watcher.follow_output(launch.outputs[node.index], script)
            if self._hears_clients:
                self._watcher.follow_clients(clients, f"client {node.index}", script, tells_steps=self._saves_are_steps)
            else:
                self._watcher.follow_events(clients, f"client {node.index}")
        if launch.number > 1:
            self._arm_at = (self._script_source, "step")
        self._launch_was_harmed, self._launch_is_given_up = self._lifting.blocks_start(), False
        self._hung_since = None
        self._say("launched", launch=launch.number)
        return launch

    def restart_failpoints(self, node: int) -> str:
        """Return the failpoints that an agent of a node is given when it is started again now."""
        return self._injector.restart_failpoints(node)

    def _end(self, launch: Launch) -> None:
        """End a launch that failed, everywhere; start dead agents again."""
        codes = launch.codes()
        launch.end()
        self._notice()
        self._say(
            "exited",
            launch=launch.number,
            codes={str(index): code for index, code in codes.items()},
            by_fault=self._launch_was_harmed,
            text="" if self._launch_was_harmed else launch.complaint(),
        )
        self._supervise(launch)

    def _suffer(self, harm: Harm | None) -> None:
        """Follow up what a fault did."""
        if harm is None:
            return
        self._harmed |= set(harm.pids)
        # Nobody dies of what the store does.
        self._launch_was_harmed |= bool(harm.pids) or harm.ends_launch or harm.may_end_launch
        self._launch_was_harmed |= harm.blocks_start and not self._history.of("step", source=self._script_source)
        self._launch_is_given_up |= harm.is_silent
        if harm.is_hung:
            self._hung_since = time.monotonic()
        self._lifting.note(harm)
        for node in harm.replace:
            fresh = self._cluster.replace(node)
            cut_off = {"cut_off": True} if node.is_cut_off else {}
            self._say("node_replaced", node=node.place.name, by=fresh.place.name, **cut_off)
        for node in harm.rebooted:
            self._say("node_rebooted", node=node.place.name)
        # The next fault waits for a job that runs again, or for the agent's return.
        if harm.ends_launch:
            self._arm_at = None
        elif not harm.is_alive and self._agent_died(harm):
            self._arm_at = ("harness", "agent_started")
        else:
            self._injector.arm()

    def _give_up_hung(self, launch: Launch, new: Sequence[Event]) -> None:
        """End a job that does not go on, as a scheduler with a watchdog does."""
        if self._hung_since is None or self._launch_is_given_up:
            return
        if any(event.kind == "step" for event in new):
            self._hung_since = time.monotonic()
        elif time.monotonic() > self._hung_since + self._limits.hung.total_seconds():
            self._launch_is_given_up = True
            self._say("given_up", launch=launch.number, seconds=self._limits.hung.total_seconds())

    def _agent_died(self, harm: Harm) -> bool:
        return any(node.agent is not None and node.agent.pid in harm.pids for node in self._cluster.nodes)

    def _supervise(self, launch: Launch) -> None:
        """Start agents again that died, as an operator's supervisor does."""
        for node in self._cluster.nodes:
            if node.agent is None or (code := node.agent.poll()) is None:
                continue
            if self._agent_starts >= _MOST_AGENT_STARTS:
                raise ProcessError(f"{node.source} died {self._agent_starts} times; see {node.place.agent_log}")
            self._agent_starts += 1
            self._say(
                "agent_died",
                agent=node.place.name,
                code=code,
                by_fault=node.agent.pid in self._harmed or _killed_itself(node),
                launch=launch.number,
            )
            self._cluster.start_agent(node)
            self._say("agent_started", agent=node.place.name)

    def _settle(self) -> None:
        """The job is done: take faults back, wake what is paused, and wait until a zombie has seen that it is fenced."""
        self._lifting.lift(everything=True)
        self._notice()
        fault = self._injector.pending
        if fault is not None and (
            fault.do == "continue" or (fault.network is not None and fault.network.kind == "heal")
        ):
            self._suffer(self._injector.strike_now())
        zombies = {
            node.source
            for node in self._cluster.gone
            if not node.is_lost
            and not node.is_paused
            # One that is cut off hears nothing from its coordinator; if it plays that itself, it hears from the store.
            and (not node.is_cut_off or self._history.of("claimed", source=node.source))
        }
        if not zombies:
            return
        end = time.monotonic() + self._limits.woken.total_seconds()
        while time.monotonic() < end:
            self._notice()
            fenced = {event.source for event in self._history.of("fenced", source="agent")}
            gone = [n for n in self._cluster.gone if n.source in zombies and n.agent and n.agent.poll() is not None]
            if zombies <= fenced | {node.source for node in gone} | self._have_done_all(zombies):
                return
            time.sleep(TICK.total_seconds())

    def _have_done_all(self, zombies: set[str]) -> set[str]:
        """Return the zombies that never led, whose ranks have ended, and that have been silent since: nobody would fence them."""
        led = {event.source for event in self._history.of("claimed", source="agent")}
        silent_since = time.time() - _SILENT_S
        return {
            node.source
            for node in self._cluster.gone
            if node.source in zombies - led
            and (node.ranks is None or node.ranks.poll() is not None)
            and all(event.source != node.source for event in self._history if event.t > silent_since)
        }

    def _late(self, what: str, limit: timedelta) -> str:
        self._say("deadline", what=what, seconds=limit.total_seconds())
        last = self._history.last("step", "restored", "decided", "staged", "launched")
        seen = f"{last.kind} {dict(last.fields)} from {last.source}" if last is not None else "nothing"
        way_out = f"; {self._limits.way_out}" if self._limits.way_out else ""
        return f"{what} did not come within {limit.total_seconds():.0f} s; last seen: {seen}{way_out}"


def _killed_itself(node: Node) -> bool:
    """Whether the agent's present process died at a failpoint."""
    if node.agent is None or not node.place.failpoints.exists():
        return False
    lines = node.place.failpoints.read_text(encoding="utf-8").splitlines()
    return any(line.startswith(f"{node.agent.pid} ") and line.split()[2] in ("kill", "exit") for line in lines)
