"""An agent's part in one run: its ranks on one side, the run's coordinator on the other.

Owns: the session with the coordinator, kept up across broken connections, and the calls of ranks that wait for an answer of the
coordinator. Does not own: slots and uploads (`held`), the restore's own work (`restores`). Everything runs on the agent's event
loop. Invariant: what has no answer yet is said again after every reconnect, and every wait ends by its deadline.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from ckptd.daemon import rpc
from ckptd.daemon.errors import DaemonError, FencedError, make_error
from ckptd.daemon.held import HeldJob, Snapshot, Stage, wire_error
from ckptd.daemon.keys import Timeline
from ckptd.daemon.restores import NodeRestore
from ckptd.daemon.session import Session, answered
from ckptd.daemon.slots import DATA_OFFSET
from ckptd.daemon.telemetry import EventLog
from ckptd.protos import coordinator_pb2_grpc, error_pb2, shard_table
from ckptd.protos.agent_pb2 import AttachRequest, BeginReply, BeginRequest, Event, StagedRequest
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeLayoutPart, NodeMessage, NodePlanRequest
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import HeldPlan, HeldSnapshot

RECONNECT_S = (0.1, 2.0)


@dataclass(kw_only=True, slots=True)
class BeginWait:
    """A rank that waits for the answer to Begin."""

    request: BeginRequest
    answer: asyncio.Future[BeginReply]


class RunLink:
    """One run on this node."""

    def __init__(
        self,
        about: AttachRequest,
        *,
        node: str,
        incarnation: str,
        held: HeldJob,
        log: EventLog,
        on_closed: Callable[[RunLink], None],
    ) -> None:
        self.about = about
        self.held = held
        self.ranks: dict[int, Session] = {}
        self.timeline = ""
        self._node = node
        self._incarnation = incarnation
        self._log = log
        self._on_closed = on_closed
        self._begins: dict[int, BeginWait] = {}
        self._out: asyncio.Queue[NodeMessage | None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._ended: Error | None = None
        self.trouble = ""
        """Why there is no session with the coordinator, for the errors of those who wait for it; "" while there is one."""
        self.restores = NodeRestore(node=node, held=held, link=self, log=log)
        self._spawn(self._keep_connected())

    # ------------------------------------------------------------ ranks

    def attach(self, session: Session) -> None:
        """A rank has come."""
        before = self.ranks.get(session.rank)
        if before is not None and before is not session:
            before.end()
            session.layouts = before.layouts if before.about.process == session.about.process else {}
        self.ranks[session.rank] = session
        self._log.emit("attached_local", job=self.about.job, rank=session.rank, node=self._node)
        if self._ended is not None:
            self._end_session(session, self._ended)
        else:
            if self.timeline:
                session.tell(Event(timeline=self.timeline))
            self.say(self._attached(session))

    def gone(self, session: Session, *, clean: bool, why: str) -> None:
        """A rank has ended: in order, or its process died or its stream broke for good."""
        if self.ranks.get(session.rank) is not session or not session.attached:
            return
        session.end()
        self._log.emit(
            "rank_lost" if not clean else "rank_detached",
            job=self.about.job,
            rank=session.rank,
            node=self._node,
            error=why,
        )
        lost = make_error(error_pb2.REASON_RANK_FAILED, f"rank {session.rank}: {why}", rank=session.rank)
        waiting = self._begins.pop(session.rank, None)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_exception(DaemonError(lost))
        self.restores.rank_gone(session.rank)
        session.gone = NodeMessage.RankGone(rank=session.rank, clean=clean, why=lost)
        self.say(NodeMessage(gone=session.gone))
        if self._ended is not None and not self.live_ranks:
            self.close()

    @property
    def live_ranks(self) -> list[int]:
        """Ranks that are attached, ascending."""
        return sorted(rank for rank, session in self.ranks.items() if session.attached)

    def _attached(self, session: Session) -> NodeMessage:
        about = session.about
        return NodeMessage(
            attached=NodeMessage.RankAttached(
                rank=about.rank,
                coordinate=about.coordinate,
                world=about.world,
                mesh=about.mesh,
                options=about.options,
            )
        )

    # ------------------------------------------------------------ saving

    async def begin(self, session: Session, request: BeginRequest) -> BeginReply:
        """Ask the coordinator and wait; on go the rank's slot is ready."""
        self.check_alive()
        if bytes(request.layout_digest) not in session.layouts:
            raise DaemonError.of(
                f"rank {session.rank}: the layout of step {request.step} was not put",
                reason=error_pb2.REASON_INVALID_ARGUMENT,
                rank=session.rank,
                phase="begin",
            )
        waiting = BeginWait(request=request, answer=asyncio.get_running_loop().create_future())
        self._begins[session.rank] = waiting
        self.say(self._begin_message(session.rank, request))
        limit = session.about.options.begin_timeout_s
        timeout = min(limit, request.timeout_s) if request.timeout_s > 0 else limit
        try:
            return await answered(waiting.answer, timeout, is_cut_off=lambda: bool(self.trouble))
        except TimeoutError:
            raise DaemonError.of(
                f"step {request.step}: the coordinator at {self.about.endpoint} did not answer within {timeout:g} s"
                f"{self.trouble}",
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
                rank=rank, step=request.step, layout_digest=request.layout_digest, timeout_s=request.timeout_s
            )
        )

    def staged(self, session: Session, request: StagedRequest) -> None:
        """A rank has filled its slot."""
        snapshot = self.snapshot(request.step)
        if snapshot is None or session.rank not in snapshot.slots:
            raise DaemonError.of(
                f"step {request.step}: it was given up meanwhile",
                reason=error_pb2.REASON_ABORTED,
                step=request.step,
                rank=session.rank,
                phase="stage",
            )
        self.held.stage(
            snapshot, session.rank, objects_bytes=request.objects_bytes, trailer_bytes=request.trailer_bytes
        )
        self._log.emit(
            "staged_local",
            job=self.about.job,
            timeline=snapshot.about.timeline,
            step=request.step,
            rank=session.rank,
            node=self._node,
        )
        self.say(
            NodeMessage(
                staged=NodeMessage.Staged(rank=session.rank, step=request.step, timeline=snapshot.about.timeline)
            )
        )

    def fail_step(self, session: Session, step: int, error: Error) -> None:
        """A rank cannot finish a step: it ends on all ranks."""
        failed = Error()
        failed.CopyFrom(error)
        failed.step, failed.rank = step, session.rank
        snapshot = self.snapshot(step)
        if snapshot is not None and snapshot.failed is None:
            snapshot.failed = failed  # said again after a reconnect
        self.say(NodeMessage(failed=NodeMessage.StepFailed(timeline=self.timeline, step=step, error=failed)))

    def snapshot(self, step: int) -> Snapshot | None:
        """Return this run's snapshot of a step, of its newest timeline."""
        found = [
            one
            for one in self.held.snapshots.values()
            if one.about.step == step and one.about.run_id == self.about.run_id and not one.dropped
        ]
        return max(found, key=lambda one: one.about.timeline) if found else None

    async def _go(self, decision: CoordinatorMessage.BeginDecision) -> None:
        """Lay out and hand out the slots of a step that is to be saved."""
        waiting = {rank: wait for rank, wait in self._begins.items() if wait.request.step == decision.step}
        if not waiting or self.snapshot(decision.step) is not None:
            return
        try:
            for rank, wait in waiting.items():
                if self.held.plan_of(rank, decision.plan_digest) is None:
                    await self._fetch_plan(rank, bytes(wait.request.layout_digest), decision.plan_digest)
            about = HeldSnapshot(
                step=decision.step,
                timeline=decision.timeline,
                mesh=self.about.mesh,
                world=self.about.world,
                ranks=sorted(self.ranks),
                plan_digest=decision.plan_digest,
                base_indexes=decision.base_indexes,
                root=self.about.root,
                job=self.about.job,
                run_id=self.about.run_id,
                store_driver=self.about.options.store_driver,
            )
            if decision.HasField("base"):
                about.base.CopyFrom(decision.base)
            tails = {rank: wait.request.tail_bytes for rank, wait in waiting.items()}
            processes = {rank: self.ranks[rank].about.process or self.ranks[rank].token for rank in waiting}
            snapshot = await self.held.begin(about, tails, processes, max(1, self.about.options.slots))
        except Exception as failure:  # told to the rank and to every other one
            error = wire_error(failure, phase="begin", step=decision.step, node=self._node)
            self.say(
                NodeMessage(failed=NodeMessage.StepFailed(timeline=decision.timeline, step=decision.step, error=error))
            )
            for wait in waiting.values():
                if not wait.answer.done():
                    wait.answer.set_exception(DaemonError(error))
            return
        for rank, wait in waiting.items():
            slot = snapshot.slots[rank]
            if not wait.answer.done():
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
                    )
                )

    async def _fetch_plan(self, rank: int, layout_digest: bytes, plan_digest: bytes) -> None:
        writers: list[int] = []
        request = NodePlanRequest(run_id=self.about.run_id, rank=rank, plan_digest=plan_digest)
        async for part in self._stub.FetchPlan(request, metadata=rpc.token_metadata(self.about.credentials)):
            writers.extend(part.writer)
        session = self.ranks[rank]
        rows, aliases = session.layouts[layout_digest]
        await self.held.learn_plan(
            HeldPlan(
                rank=rank,
                coordinate=session.about.coordinate,
                rows=rows,
                aliases=aliases,
                writer=writers,
                layout_digest=layout_digest,
                plan_digest=plan_digest,
            )
        )

    async def _send_layout(self, need: CoordinatorMessage.NeedLayout) -> None:
        session = self.ranks.get(need.rank)
        if session is None or bytes(need.digest) not in session.layouts:
            return
        rows, _ = session.layouts[bytes(need.digest)]

        async def parts() -> AsyncIterator[NodeLayoutPart]:
            for at, part in enumerate(shard_table.split(rows)):
                made = NodeLayoutPart(rows=part)
                if at == 0:
                    made.run_id, made.rank, made.digest = self.about.run_id, need.rank, need.digest
                yield made

        await self._stub.SendLayout(parts(), metadata=rpc.token_metadata(self.about.credentials))

    def changed(self, snapshot: Snapshot) -> None:
        """An upload has ended: tell the coordinator, whichever timeline it was of."""
        about = snapshot.about
        if snapshot.index is not None:
            self.say(
                NodeMessage(sealed=NodeMessage.Sealed(timeline=about.timeline, step=about.step, index=snapshot.index))
            )
        elif snapshot.failed is not None:
            self.say(
                NodeMessage(
                    failed=NodeMessage.StepFailed(timeline=about.timeline, step=about.step, error=snapshot.failed)
                )
            )

    # ------------------------------------------------------------ the coordinator

    def say(self, message: NodeMessage) -> None:
        """Send where there is a session; else the hello of the next one says it all again."""
        if self._out is not None:
            self._out.put_nowait(message)

    async def _keep_connected(self) -> None:
        pause = RECONNECT_S[0]
        while not self._closed:
            self._out = asyncio.Queue()
            try:
                self._channel = rpc.pinned_channel(self.about.endpoint, self.about.credentials.certificate)
                self._stub = coordinator_pb2_grpc.CoordinatorStub(self._channel)
                self._say_everything()
                call = self._stub.Session(
                    self._messages(self._out), metadata=rpc.token_metadata(self.about.credentials)
                )
                async for message in call:
                    pause, self.trouble = RECONNECT_S[0], ""
                    self._on_message(message)
            except grpc.aio.AioRpcError as failure:
                error = rpc.error_of(failure)
                self.trouble = f"; the last connection to it failed: {error.message}"
                if error.reason == error_pb2.REASON_PERMISSION_DENIED:
                    self._end(error)
            finally:
                out, self._out = self._out, None
                if out is not None:
                    out.put_nowait(None)
                if self._channel is not None:
                    await self._channel.close()
            if not self.live_ranks and self.ranks:
                self.close()
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, RECONNECT_S[1])

    async def _messages(self, queue: asyncio.Queue[NodeMessage | None]) -> AsyncIterator[NodeMessage]:
        while (message := await queue.get()) is not None:
            yield message

    def _say_everything(self) -> None:
        """Begin a session: who we are, what we hold, and every call without an answer."""
        hello = NodeMessage.NodeHello(
            node=self._node,
            incarnation=self._incarnation,
            hostname=socket.gethostname(),
            run_id=self.about.run_id,
            held=[one.wire() for one in self.held.snapshots.values() if one.stage is not Stage.COMMITTED],
        )
        self.say(NodeMessage(hello=hello))
        for session in self.ranks.values():
            if session.attached:
                self.say(self._attached(session))
            elif session.gone is not None:
                self.say(NodeMessage(gone=session.gone))
        for rank, wait in self._begins.items():
            self.say(self._begin_message(rank, wait.request))
        self.restores.say_again()

    def _on_message(self, message: CoordinatorMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "refused":
            self._end(message.refused)
        elif kind == "fenced":
            self._end(message.fenced)
        elif kind == "need_layout":
            self._spawn(self._send_layout(message.need_layout))
        elif kind == "begin":
            self.timeline = message.begin.timeline or self.timeline
            if message.begin.go:
                self._spawn(self._go(message.begin))
            else:
                self._no_go(message.begin)
        elif kind == "staged":
            self._tell_step(message.staged.timeline, message.staged.step, Event.STAGED)
        elif kind == "outcome":
            self._on_outcome(message.outcome)
        elif kind == "started":
            self._on_started(message.started)
        elif kind in ("restore_chosen", "restore_go", "restore_error"):
            self.restores.on_message(message)

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
        snapshot = self.held.snapshots.get((outcome.timeline, outcome.step))
        error = outcome.aborted if outcome.HasField("aborted") else None
        if snapshot is not None:
            if error is None:
                self.held.committed(snapshot)
            else:
                self.held.drop(snapshot)
        self._tell_step(outcome.timeline, outcome.step, Event.COMMITTED if error is None else Event.ABORTED, error)

    def _on_started(self, started: CoordinatorMessage.Started) -> None:
        """The timeline runs: of older ones, what is listed counts, and everything else this node holds is dead."""
        self.timeline = started.timeline
        for session in self.ranks.values():
            session.tell(Event(timeline=started.timeline))
        listed = {(ref.timeline, ref.step) for ref in started.keeps}
        now = Timeline.parse(started.timeline)
        for key, snapshot in list(self.held.snapshots.items()):
            if Timeline.parse(key[0]) >= now:
                continue
            mine = snapshot.about.run_id == self.about.run_id
            if key in listed:
                if snapshot.stage is not Stage.COMMITTED:
                    self.held.committed(snapshot)
                    if mine:
                        self._tell_step(*key, Event.COMMITTED)
            else:
                self.held.drop(snapshot)
                if mine:
                    gone = make_error(
                        error_pb2.REASON_ABORTED,
                        f"step {key[1]} was not whole when the coordinator restarted",
                        step=key[1],
                        phase="commit",
                    )
                    self._tell_step(*key, Event.ABORTED, gone)

    def _tell_step(self, timeline: str, step: int, state: Event.State.ValueType, error: Error | None = None) -> None:
        for session in self.ranks.values():
            if session.attached:
                session.tell_step(timeline, step, state, error)

    # ------------------------------------------------------------ end

    def check_alive(self) -> None:
        """Refuse a call of a run that cannot go on.

        Raises:
            DaemonError: why it cannot; `FencedError` when a newer timeline has taken over.
        """
        if self._ended is not None:
            raise (FencedError if self._ended.reason == error_pb2.REASON_FENCED else DaemonError)(self._ended)

    def _end(self, error: Error) -> None:
        """The run cannot go on: every waiting call and every session gets the reason."""
        if self._ended is not None:
            return
        self._ended = error
        self._log.emit("run_ended", job=self.about.job, timeline=self.timeline, node=self._node, error=error.message)
        for wait in self._begins.values():
            if not wait.answer.done():
                wait.answer.set_exception(DaemonError(error))
        self.restores.end(error)
        for session in self.ranks.values():
            if session.attached:
                self._end_session(session, error)

    def _end_session(self, session: Session, error: Error) -> None:
        fenced = error.reason == error_pb2.REASON_FENCED
        session.tell(Event(fenced=error) if fenced else Event(failed=error))

    def close(self) -> None:
        """End the link; sessions of living ranks end too. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for session in self.ranks.values():
            session.end()
        self.restores.close()
        if self._out is not None:
            self._out.put_nowait(None)
        self._on_closed(self)

    def spawn(self, work: Any) -> None:
        """Run work of this run on the event loop."""
        self._spawn(work)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            if not done.cancelled() and (failure := done.exception()) is not None:
                self._log.emit("internal_error", job=self.about.job, node=self._node, error=repr(failure))

        task.add_done_callback(ended)
