"""A node's part in saving: from a rank's Begin to the outcome it is told.

Owns: the answers to Begin of this node's ranks, and what an outcome or a new timeline means for the node's snapshots. Does not
own: layouts and plans on their way (`plan_exchange`), slots and uploads (`held`), the session (`run_link`). On the agent's event
loop. Invariant: a rank gets a slot only for a step that is go on all ranks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.daemon.errors import DaemonError, make_error
from ckptd.daemon.held import HeldJob
from ckptd.daemon.keys import Timeline
from ckptd.daemon.outcomes import Outcomes, gone
from ckptd.daemon.plan_exchange import know_plan, send_layout
from ckptd.daemon.session import Session, answered
from ckptd.daemon.slots import DATA_OFFSET
from ckptd.daemon.snapshots import Snapshot, Stage
from ckptd.daemon.telemetry import EventLog
from ckptd.daemon.wire_errors import wire_error
from ckptd.protos import error_pb2, segmented
from ckptd.protos.agent_pb2 import BeginReply, BeginRequest, Event, StagedRequest
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeMessage
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import HeldSnapshot

if TYPE_CHECKING:
    from ckptd.daemon.run_link import RunLink


@dataclass(kw_only=True, slots=True)
class BeginWait:
    """A rank that waits for the answer to Begin."""

    request: BeginRequest
    answer: asyncio.Future[BeginReply]


class NodeSave:
    """The saves of one run on one node."""

    def __init__(self, *, node: str, held: HeldJob, link: RunLink, log: EventLog) -> None:
        self._node = node
        self._held = held
        self._link = link
        self._log = log
        self._begins: dict[int, BeginWait] = {}
        self._given_up: dict[int, Error] = {}
        """By rank: the step that it cannot even begin, until it begins another one."""
        # Steps whose slots are being made, and why they have ended meanwhile: nobody else would give those slots up.
        self._going: dict[tuple[str, int], Error | None] = {}
        self._outcomes = Outcomes(held)

    def attached(self, session: Session) -> None:
        """A rank has come: it may wait for what it was told while it was away."""
        self._outcomes.tell(session, self._going)

    async def begin(self, session: Session, request: BeginRequest) -> BeginReply:
        """Ask the coordinator and wait; on go the rank's slot is ready."""
        self._link.check_alive()
        if bytes(request.layout_digest) not in session.layouts:
            raise DaemonError.of(
                f"rank {session.rank}: the layout of step {request.step} was not put",
                reason=error_pb2.REASON_INVALID_ARGUMENT,
                rank=session.rank,
                phase="begin",
            )
        session.about.ClearField("restored")
        self._given_up.pop(session.rank, None)
        waiting = BeginWait(request=request, answer=asyncio.get_running_loop().create_future())
        self._begins[session.rank] = waiting
        self._link.say(self._begin_message(session.rank, request))
        limit = session.about.options.begin_timeout_s
        timeout = min(limit, request.timeout_s) if request.timeout_s > 0 else limit
        try:
            return await answered(waiting.answer, timeout, is_cut_off=lambda: bool(self._link.trouble))
        except TimeoutError:
            raise DaemonError.of(
                f"step {request.step}: the coordinator at {self._link.about.endpoint} did not answer within {timeout:g} s"
                f"{self._link.trouble}",
                reason=error_pb2.REASON_DEADLINE_EXCEEDED,
                step=request.step,
                rank=session.rank,
                node=self._node,
                phase="begin",
            ) from None
        finally:
            if self._begins.get(session.rank) is waiting:
                del self._begins[session.rank]

    def _begin_message(self, rank: int, request: BeginRequest) -> NodeMessage:
        return NodeMessage(
            begin=NodeMessage.Begin(
                rank=rank,
                step=request.step,
                layout_digest=request.layout_digest,
                timeout_s=request.timeout_s,
                segmented_algorithms=[name for name in request.segmented_algorithms if name in segmented.KNOWN],
                prefers_segmented=request.prefers_segmented,
            )
        )

    def staged(self, session: Session, request: StagedRequest) -> None:
        """A rank has filled its slot."""
        snapshot = self.snapshot(request.step)
        slot = snapshot.slots.get(session.rank) if snapshot is not None else None
        # Another slot: that step was given up, and what is here is of the same number in the timeline before.
        if snapshot is None or slot is None or slot.number != request.slot:
            raise DaemonError.of(
                f"step {request.step}: it was given up meanwhile",
                reason=error_pb2.REASON_ABORTED,
                step=request.step,
                rank=session.rank,
                phase="stage",
            )
        self._held.stage(
            snapshot, session.rank, objects_bytes=request.objects_bytes, trailer_bytes=request.trailer_bytes
        )
        self._log.emit(
            "staged_local",
            job=self._link.about.job,
            timeline=snapshot.about.timeline,
            step=request.step,
            rank=session.rank,
            node=self._node,
        )
        self._link.say(
            NodeMessage(
                staged=NodeMessage.Staged(rank=session.rank, step=request.step, timeline=snapshot.about.timeline)
            )
        )

    def fail_step(self, session: Session, step: int, error: Error) -> None:
        """A rank cannot finish a step: it ends on all ranks."""
        failed = Error()
        failed.CopyFrom(error)
        failed.step, failed.rank = step, session.rank
        session.about.ClearField("restored")
        snapshot = self.snapshot(step)
        # Either is said again after a reconnect.
        if snapshot is None:
            self._given_up[session.rank] = failed
        elif snapshot.failed is None:
            snapshot.failed = failed
        self._link.say(
            NodeMessage(failed=NodeMessage.StepFailed(timeline=self._link.timeline, step=step, error=failed))
        )

    def rank_gone(self, rank: int, error: Error) -> None:
        """A rank has ended: its call ends."""
        self._given_up.pop(rank, None)
        waiting = self._begins.pop(rank, None)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_exception(DaemonError(error))

    def end(self, error: Error) -> None:
        """The run cannot go on: every waiting call gets the reason."""
        for wait in self._begins.values():
            if not wait.answer.done():
                wait.answer.set_exception(DaemonError(error))

    def say_again(self) -> None:
        """After a reconnect: every call without an answer."""
        for rank, wait in self._begins.items():
            self._link.say(self._begin_message(rank, wait.request))
        # Of no timeline: it was never begun, and the coordinator may be another one.
        for error in self._given_up.values():
            self._link.say(NodeMessage(failed=NodeMessage.StepFailed(step=error.step, error=error)))

    def on_message(self, message: CoordinatorMessage) -> None:
        """Take whatever the coordinator says about saving."""
        kind = message.WhichOneof("kind")
        if kind == "need_layout":
            self._link.spawn(send_layout(self._link, message.need_layout))
        elif kind == "begin":
            self._link.timeline = message.begin.timeline or self._link.timeline
            if message.begin.go:
                self._link.spawn(self._go(message.begin))
            else:
                self._no_go(message.begin)
        elif kind == "staged":
            self._tell_step(message.staged.timeline, message.staged.step, Event.STAGED)
        elif kind == "outcome":
            self._on_outcome(message.outcome)
        elif kind == "started":
            self._on_started(message.started)

    def snapshot(self, step: int) -> Snapshot | None:
        """Return this run's snapshot of a step, of its newest timeline."""
        found = [
            one
            for one in self._held.snapshots.values()
            if one.about.step == step and one.about.run_id == self._link.about.run_id and not one.dropped
        ]
        return max(found, key=lambda one: one.about.timeline) if found else None

    async def _go(self, decision: CoordinatorMessage.BeginDecision) -> None:
        """Lay out and hand out the slots of a step that is to be saved."""
        key = (decision.timeline, decision.step)
        if key in self._going:
            # Said once more to a rank that asked again: slots made twice would be lost. Whoever waits when those that are
            # being made are there is answered then.
            return
        waiting = self._waiting(decision.step)
        if not waiting:
            return
        # Of this timeline: one before may have committed a step of that number, and its slots are what restores read.
        snapshot = self._held.snapshots.get(key)
        if snapshot is not None and snapshot.dropped:
            snapshot = None
        self._going[key] = None
        try:
            if snapshot is None:
                snapshot = await self._begun(decision, waiting)
        except Exception as failure:  # told to the rank and to every other one
            error = wire_error(failure, phase="begin", step=decision.step, node=self._node)
            self._say_failed(decision, error)
            self._refuse(decision.step, error)
            return
        finally:
            ended = self._going.pop(key, None)
        if ended is not None:
            self._held.drop(snapshot)
            self._refuse(decision.step, ended)
            return
        for rank, wait in self._waiting(decision.step).items():
            slot = snapshot.slots.get(rank)
            if slot is None:
                error = _came_too_late(rank, decision.step, self._node)
                self._say_failed(decision, error)
                wait.answer.set_exception(DaemonError(error))
                continue
            wait.answer.set_result(
                BeginReply(
                    go=True,
                    plan_digest=decision.plan_digest,
                    slot=slot.number,
                    path=str(slot.path),
                    data_offset=DATA_OFFSET,
                    data_bytes=slot.header.data_bytes,
                    tail_offset=slot.header.tail_offset,
                    tail_capacity=slot.tail_capacity,
                    timeline=decision.timeline,
                    leave_uncompared=snapshot.about.HasField("compared_in"),
                    segmented_algorithm=snapshot.about.segmented_algorithm,
                )
            )

    def _waiting(self, step: int) -> dict[int, BeginWait]:
        """Return the ranks that wait to hear whether they may begin a step."""
        return {
            rank: wait for rank, wait in self._begins.items() if wait.request.step == step and not wait.answer.done()
        }

    def _refuse(self, step: int, error: Error) -> None:
        for wait in self._waiting(step).values():
            wait.answer.set_exception(DaemonError(error))

    def _say_failed(self, decision: CoordinatorMessage.BeginDecision, error: Error) -> None:
        self._link.say(
            NodeMessage(failed=NodeMessage.StepFailed(timeline=decision.timeline, step=decision.step, error=error))
        )

    async def _begun(self, decision: CoordinatorMessage.BeginDecision, waiting: dict[int, BeginWait]) -> Snapshot:
        """Learn the plan where it is new, and reserve a slot for every rank of the node."""
        for rank, wait in waiting.items():
            await know_plan(self._link, rank, bytes(wait.request.layout_digest), decision.plan_digest)
        about = HeldSnapshot(
            step=decision.step,
            timeline=decision.timeline,
            mesh=self._link.about.mesh,
            world=self._link.about.world,
            ranks=sorted(self._link.ranks),
            plan_digest=decision.plan_digest,
            base_indexes=decision.base_indexes,
            root=self._link.about.root,
            job=self._link.about.job,
            run_id=self._link.about.run_id,
            store_driver=self._link.about.options.store_driver,
            segmented_algorithm=decision.segmented_algorithm,
        )
        if decision.HasField("base"):
            about.base.CopyFrom(decision.base)
        if decision.HasField("compared_in"):
            about.compared_in.CopyFrom(decision.compared_in)
        tails = {rank: wait.request.tail_bytes for rank, wait in waiting.items()}
        processes = {rank: self._link.ranks[rank].about.process or self._link.ranks[rank].token for rank in waiting}
        return await self._held.begin(about, tails, processes, max(1, self._link.about.options.slots))

    def changed(self, snapshot: Snapshot) -> None:
        """An upload has ended: tell the coordinator, whichever timeline it was of."""
        about = snapshot.about
        if snapshot.index is not None:
            self._link.say(
                NodeMessage(sealed=NodeMessage.Sealed(timeline=about.timeline, step=about.step, index=snapshot.index))
            )
        elif snapshot.failed is not None:
            self._link.say(
                NodeMessage(
                    failed=NodeMessage.StepFailed(timeline=about.timeline, step=about.step, error=snapshot.failed)
                )
            )

    def _no_go(self, decision: CoordinatorMessage.BeginDecision) -> None:
        skipped = decision.error.reason == error_pb2.REASON_BUSY
        for wait in self._begins.values():
            if wait.request.step != decision.step or wait.answer.done():
                continue
            if skipped:
                wait.answer.set_result(BeginReply(go=False, skipped=decision.error, timeline=decision.timeline))
            else:
                wait.answer.set_exception(DaemonError(decision.error))

    def _on_outcome(self, outcome: CoordinatorMessage.Outcome) -> None:
        snapshot = self._held.snapshots.get((outcome.timeline, outcome.step))
        error = outcome.aborted if outcome.HasField("aborted") else None
        if snapshot is not None:
            if error is None:
                self._held.committed(snapshot)
            else:
                self._held.drop(snapshot)
        elif error is not None and (outcome.timeline, outcome.step) in self._going:
            self._going[outcome.timeline, outcome.step] = error
        self._tell_step(outcome.timeline, outcome.step, Event.COMMITTED if error is None else Event.ABORTED, error)

    def _on_started(self, started: CoordinatorMessage.Started) -> None:
        """The timeline runs: of older ones, what is listed counts, and everything else this node holds is dead."""
        self._link.timeline = started.timeline
        for session in self._link.ranks.values():
            session.tell(Event(timeline=started.timeline))
        listed = {(ref.timeline, ref.step) for ref in started.keeps}
        now = Timeline.parse(started.timeline)
        for key in self._going:
            if Timeline.parse(key[0]) < now:
                self._going[key] = gone(key[1])
        for key, snapshot in list(self._held.snapshots.items()):
            if Timeline.parse(key[0]) >= now:
                continue
            mine = snapshot.about.run_id == self._link.about.run_id
            if key in listed:
                if snapshot.stage is not Stage.COMMITTED:
                    self._held.committed(snapshot)
                    if mine:
                        self._tell_step(*key, Event.COMMITTED)
            else:
                self._held.drop(snapshot)
                if mine:
                    self._tell_step(*key, Event.ABORTED, gone(key[1]))
        self._outcomes.started(started)
        for session in self._link.ranks.values():
            if session.attached:
                self._outcomes.tell(session, self._going)

    def _tell_step(self, timeline: str, step: int, state: Event.State.ValueType, error: Error | None = None) -> None:
        if state in (Event.COMMITTED, Event.ABORTED):
            self._outcomes.note(timeline, step, error)
        for session in self._link.ranks.values():
            if session.attached:
                session.tell_step(timeline, step, state, error)


def _came_too_late(rank: int, step: int, node: str) -> Error:
    """Its call was broken off when the others got their slots: the step cannot become whole."""
    return make_error(
        error_pb2.REASON_ABORTED,
        f"step {step}: rank {rank} was away when the slots were made",
        step=step,
        rank=rank,
        node=node,
        phase="begin",
    )
