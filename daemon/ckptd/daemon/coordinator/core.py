"""The coordinator of one timeline: `apply(event, now) -> effects`.

Pure: no I/O, no clock, no threads. Two lanes run protocol procedures: *history* (claim, resolve, start record, restore,
decisions: strictly one after the other) and *admission* (begins), so that saves are answered while a decision waits for a slow
store. Everything else is noting what nodes say.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

from ckptd.daemon.comparisons import parse_policy
from ckptd.daemon.coordinator import beginning, restoring, saving, starting
from ckptd.daemon.coordinator.comparing import Schedule
from ckptd.daemon.coordinator.effects import (
    Close,
    Do,
    Done,
    Effect,
    Event,
    LayoutReceived,
    NodeLost,
    NodeSaid,
    Procedure,
    ProcedureStopped,
    Superseded,
    Tick,
    Wait,
)
from ckptd.daemon.coordinator.state import Node, Phase, Rank, State
from ckptd.daemon.errors import make_error
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import LeadRequest
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, Held, NodeMessage
from ckptd.protos.error_pb2 import Error

HISTORY = "history"
ADMISSION = "admission"


class Coordinator:
    """One process's claim on one timeline. See the module docstring; drive it from one thread."""

    def __init__(
        self,
        lead: LeadRequest,
        *,
        incarnation: str,
        endpoint: str,
        certificate_sha256: str,
        nonce: Callable[[], str],
        stamp: Callable[[], str],
        now: float,
        versions: dict[str, str] | None = None,
        node_grace_s: float = 30.0,
    ) -> None:
        self.state = State(
            lead=lead,
            incarnation=incarnation,
            endpoint=endpoint,
            certificate_sha256=certificate_sha256,
            nonce=nonce,
            stamp=stamp,
            started_at=now,
            versions=versions or {},
            schedule=Schedule(every=parse_policy(lead.options.verify_replicas)),
            node_grace_s=node_grace_s,
            now=now,
        )
        self._lanes: dict[str, Procedure | None] = {HISTORY: None, ADMISSION: None}
        self._waits: dict[str, Wait] = {}
        self._closed = False

    def apply(self, event: Event, now: float) -> list[Effect]:
        """Take one event, return what is to be done. `now` is monotonic seconds and never goes back."""
        state = self.state
        state.now = max(state.now, now)
        if isinstance(event, NodeSaid):
            self._on_node(event.node, event.message)
        elif isinstance(event, NodeLost):
            node = state.nodes.get(event.node)
            if node is not None and node.incarnation == event.incarnation and node.connected:
                node.connected, node.lost_at = False, state.now
                state.log("node_lost", node=event.node)
        elif isinstance(event, LayoutReceived):
            state.layouts[event.digest] = event.rows
        elif isinstance(event, Done):
            self._resume(event.lane, event.result, event.error)
        elif isinstance(event, Superseded):
            self._supersede()
        else:
            assert isinstance(event, Tick)
        self._time()
        self._advance()
        effects, state.effects = state.effects, []
        return effects

    def _supersede(self) -> None:
        """A newer run has its claim: what the look at the claims would find, sooner."""
        state = self.state
        state.superseded = True
        if state.phase is not Phase.ENDED:
            state.phase = Phase.ENDED
            state.fenced = make_error(
                error_pb2.REASON_FENCED,
                f"timeline {state.timeline or '(none yet)'} was taken over by a newer run on the same agent",
                hint="this process belongs to an older run of the job; it must end and not be restarted",
            )
            state.log("fenced", by="a newer run on this agent")
            state.broadcast(CoordinatorMessage(fenced=state.fenced))

    # ------------------------------------------------------------ procedures

    def _resume(self, lane: str, result: object, error: BaseException | None) -> None:
        procedure = self._lanes[lane]
        if procedure is None:
            return
        try:
            operation = procedure.throw(error) if error is not None else procedure.send(result)
        except (StopIteration, ProcedureStopped):
            self._lanes[lane] = None
            return
        except Exception as bug:
            self._lanes[lane] = None
            if self.state.phase is not Phase.ENDED:
                text = f"coordinator: {type(bug).__name__}: {bug}"
                starting.refuse(self.state, make_error(error_pb2.REASON_INTERNAL, text))
            self.state.log("internal_error", error="".join(traceback.format_exception(bug)))
            return
        if isinstance(operation, Wait):
            self._waits[lane] = operation
        else:
            self.state.effects.append(Do(lane=lane, operation=operation))

    def _start(self, lane: str, procedure: Procedure) -> None:
        self._lanes[lane] = procedure
        self._resume(lane, None, None)

    def _advance(self) -> None:
        """Run what can run until nothing moves any more."""
        moved = True
        while moved:
            moved = False
            for lane in self._lanes:
                wait = self._waits.get(lane)
                if wait is not None:
                    held = wait.until()
                    if held or (wait.deadline is not None and self.state.now >= wait.deadline):
                        del self._waits[lane]
                        self._resume(lane, held, None)
                        moved = True
                elif self._lanes[lane] is None:
                    procedure = self._next(lane)
                    if procedure is not None:
                        self._start(lane, procedure)
                        moved = True

    def _next(self, lane: str) -> Procedure | None:
        state = self.state
        if lane == ADMISSION:
            waiting = state.phase in (Phase.GATHERING, Phase.STARTING)
            return beginning.admit(state) if not waiting and beginning.begin_is_due(state) else None
        if state.phase is Phase.GATHERING:
            if state.lead.timeline and not state.has_looked:
                return starting.look_for_newer_run(state)
            complete = not state.missing(state.ranks) and all(rank.attached for rank in state.ranks.values())
            return starting.start(state) if complete else None
        if restoring.restore_is_due(state):
            return restoring.restore(state)
        if state.phase is Phase.RESOLVED and state.start_wanted and not state.lead.options.read_only:
            return starting.write_start_record(state, origin=state.listed.newest(), rollback=False)
        run = saving.decision_is_due(state)
        return saving.decide(state, run) if run is not None else None

    # ------------------------------------------------------------ nodes

    def _on_node(self, name: str, message: NodeMessage) -> None:
        state = self.state
        kind = message.WhichOneof("kind")
        if kind == "hello":
            self._on_hello(name, message.hello)
        elif kind == "attached":
            self._on_attached(name, message.attached)
        elif kind == "gone":
            self._on_gone(name, message.gone)
        elif kind == "begin":
            state.asks(message.begin.rank)
            beginning.on_begin(state, message.begin)
            restoring.on_done(state, message.begin.rank)
        elif kind == "staged":
            saving.on_staged(state, message.staged)
            self._note_held(name, message.staged.timeline, message.staged.step, rank=message.staged.rank)
        elif kind == "sealed":
            saving.on_sealed(state, message.sealed, name)
            self._note_held(name, message.sealed.timeline, message.sealed.step, sealed=message.sealed)
        elif kind == "failed":
            saving.on_failed(state, message.failed)
            self._note_held(name, message.failed.timeline, message.failed.step, failed=message.failed.error)
        elif kind == "restore":
            restoring.on_restore(state, message.restore)
        elif kind == "restore_wanted":
            restoring.on_wanted(state, message.restore_wanted)
        elif kind == "restore_ready":
            restoring.on_ready(state, message.restore_ready)
        elif kind == "restore_failed":
            restoring.on_failed(state, message.restore_failed)
        elif kind == "restore_done":
            restoring.on_done(state, message.restore_done.rank, message.restore_done.attempt)
            state.log("restored", rank=message.restore_done.rank, error=message.restore_done.error.message or None)

    def _on_hello(self, name: str, hello: NodeMessage.NodeHello) -> None:
        state = self.state
        before = state.nodes.get(name)
        held = {(one.timeline, one.step): one for one in hello.held}
        state.nodes[name] = Node(incarnation=hello.incarnation, hostname=hello.hostname, connected=True, held=held)
        state.send(name, CoordinatorMessage(welcome=CoordinatorMessage.Welcome(incarnation=state.incarnation)))
        if before is not None and before.incarnation != hello.incarnation:
            self._restarted(name, held)
        if state.phase is Phase.ENDED:
            if state.fenced is not None:
                state.send(name, CoordinatorMessage(fenced=state.fenced))
            elif state.refusal is not None:
                state.send(name, CoordinatorMessage(refused=state.refusal))
        elif state.phase is Phase.RUNNING:
            starting.announce(state, name)
        for (timeline, step), one in held.items():
            if timeline == str(state.timeline):
                self._retell(name, step, one)

    def _retell(self, name: str, step: int, held: Held) -> None:
        """Say again what the node may have missed while it was away."""
        state = self.state
        run = state.steps.get(step)
        if not self._tell_outcome(name, step) and run is not None:
            for rank in held.ranks:
                saving.on_staged(state, NodeMessage.Staged(rank=rank, step=step, timeline=str(state.timeline)))
            if held.HasField("index"):
                run.sealed[name] = held.index
            elif held.HasField("failed") and run.failed is None:
                run.failed = held.failed

    def _tell_outcome(self, name: str, step: int) -> bool:
        """Tell a node how a step of this timeline ended; return whether it is decided."""
        state = self.state
        if step not in state.decided:
            return False
        outcome = CoordinatorMessage.Outcome(timeline=str(state.timeline), step=step)
        if (why := state.decided[step]) is not None:
            outcome.aborted.CopyFrom(why)
        state.send(name, CoordinatorMessage(outcome=outcome))
        return True

    def _restarted(self, name: str, held: dict[tuple[str, int], Held]) -> None:
        """The node's agent is a new process: what its ranks had not staged is torn."""
        state = self.state
        mine = [number for number, rank in state.ranks.items() if rank.node == name]
        restoring.on_node_restarted(state, mine)
        for run in state.steps.values():
            kept = held.get((str(state.timeline), run.step))
            torn = [rank for rank in mine if kept is None or rank not in kept.ranks]
            if torn and run.failed is None and name not in run.sealed:
                run.failed = make_error(
                    error_pb2.REASON_NODE_LOST,
                    f"step {run.step}: the agent of ranks {torn} was lost before they were staged",
                    step=run.step,
                    ranks=torn,
                    node=name,
                    phase="stage",
                )
                state.torn[run.step] = run.failed

    def _on_attached(self, name: str, said: NodeMessage.RankAttached) -> None:
        state = self.state
        if said.world != state.world or said.mesh != state.lead.mesh or said.rank >= state.world:
            error = make_error(
                error_pb2.REASON_RANKS_DISAGREE,
                f"rank {said.rank} comes with world {said.world} and mesh {list(said.mesh.axes)} {list(said.mesh.sizes)}, "
                f"rank 0 with world {state.world} and mesh {list(state.lead.mesh.axes)} {list(state.lead.mesh.sizes)}",
                rank=said.rank,
                phase="register",
            )
            starting.refuse(state, error)
            return
        theirs, ours = (one.verify_replicas or "always" for one in (said.options, state.lead.options))
        if theirs != ours:
            error = make_error(
                error_pb2.REASON_RANKS_DISAGREE,
                f"rank {said.rank} comes with verify_replicas {theirs!r}, rank 0 with {ours!r}",
                hint="give every rank the same value, as argument or in CKPTD_VERIFY_REPLICAS on every node",
                rank=said.rank,
                ranks=sorted({0, said.rank}),
                phase="register",
            )
            starting.refuse(state, error)
            return
        restored = (said.restored.timeline, said.restored.step) if said.HasField("restored") else None
        state.ranks[said.rank] = Rank(node=name, coordinate=tuple(said.coordinate), restored=restored)
        state.log("attached", rank=said.rank, node=name)
        for ref in said.in_flight:
            if ref.timeline == str(state.timeline):
                self._tell_outcome(name, ref.step)

    def _on_gone(self, name: str, said: NodeMessage.RankGone) -> None:
        state = self.state
        rank = state.ranks.get(said.rank)
        if rank is None or rank.node != name or not rank.attached:
            return
        rank.attached, rank.clean = False, said.clean
        state.begins.pop(said.rank, None)
        state.restores.pop(said.rank, None)
        state.log("rank_gone", rank=said.rank, clean=said.clean)
        why = make_error(
            error_pb2.REASON_RANK_FAILED,
            f"rank {said.rank} ended" if said.clean else f"rank {said.rank} died: {said.why.message}",
            rank=said.rank,
            phase="stage",
        )
        saving.fail_unstaged(state, [said.rank], why)

    def _note_held(
        self,
        name: str,
        timeline: str,
        step: int,
        *,
        rank: int | None = None,
        sealed: NodeMessage.Sealed | None = None,
        failed: Error | None = None,
    ) -> None:
        node = self.state.nodes.get(name)
        if node is None:
            return
        held = node.held.setdefault((timeline, step), Held(timeline=timeline, step=step))
        if rank is not None and rank not in held.ranks:
            held.ranks.append(rank)
        if sealed is not None:
            held.index.CopyFrom(sealed.index)
        if failed is not None:
            held.failed.CopyFrom(failed)

    # ------------------------------------------------------------ time

    def _time(self) -> None:
        state = self.state
        if state.phase is Phase.GATHERING and state.now >= state.started_at + state.lead.options.attach_timeout_s:
            missing = state.missing(number for number, rank in state.ranks.items() if rank.attached)
            if missing:
                error = make_error(
                    error_pb2.REASON_RANKS_MISSING,
                    f"ranks {missing} of {state.world} did not attach within {state.lead.options.attach_timeout_s:g} s",
                    ranks=missing,
                    phase="register",
                )
                starting.refuse(state, error)
        for name, node in state.nodes.items():
            if node.connected or state.now < node.lost_at + state.node_grace_s:
                continue
            lost = [number for number, rank in state.ranks.items() if rank.node == name and rank.attached]
            self._fail_unsealed(name)
            for number in lost:
                state.ranks[number].attached = False
            if lost:
                why = make_error(
                    error_pb2.REASON_NODE_LOST,
                    f"node {name} ({node.hostname}) with ranks {lost} is lost",
                    node=name,
                    ranks=lost,
                    phase="stage",
                )
                saving.fail_unstaged(state, lost, why)
        self._close_when_over()

    def _fail_unsealed(self, name: str) -> None:
        """A node that does not come back cannot finish its uploads."""
        for run in self.state.steps.values():
            if run.failed is None and name not in run.sealed:
                run.failed = make_error(
                    error_pb2.REASON_NODE_LOST,
                    f"step {run.step}: node {name} ({self.state.nodes[name].hostname}) was lost before its upload was done",
                    step=run.step,
                    node=name,
                    phase="upload",
                )

    def _close_when_over(self) -> None:
        state = self.state
        if not self._closed and self._is_over():
            self._closed = True
            ended = "refused" if state.refusal else "all ranks have ended"
            state.effects.append(Close(why="fenced" if state.fenced else ended))

    def _is_over(self) -> bool:
        state = self.state
        # One that ended before a rank had come has to tell those that will.
        is_known = bool(state.ranks) or state.now >= state.started_at + state.lead.options.attach_timeout_s
        if state.superseded or (state.phase is Phase.ENDED and state.live_ranks() == 0 and is_known):
            return True
        idle = not state.steps and self._lanes[HISTORY] is None
        return bool(state.ranks) and state.live_ranks() == 0 and idle
