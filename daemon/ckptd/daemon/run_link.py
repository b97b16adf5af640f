"""An agent's part in one run: its ranks on one side, the run's coordinator on the other.

Owns: the session with the coordinator, kept up across broken connections, and the calls of ranks that wait for an answer of the
coordinator. Does not own: slots and uploads (`held`), the restore's own work (`restores`). Everything runs on the agent's event
loop. Invariant: what has no answer yet is said again after every reconnect, and every wait ends by its deadline.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from ckptd.daemon import rpc
from ckptd.daemon.errors import DaemonError, FencedError, make_error
from ckptd.daemon.held import HeldJob
from ckptd.daemon.restores import NodeRestore
from ckptd.daemon.saves import NodeSave
from ckptd.daemon.session import Session
from ckptd.daemon.snapshots import Stage
from ckptd.daemon.telemetry import EventLog
from ckptd.protos import coordinator_pb2_grpc, error_pb2
from ckptd.protos.agent_pb2 import AttachRequest, Event
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeMessage
from ckptd.protos.error_pb2 import Error
from ckptd.protos.failpoints import failpoint

RECONNECT_S = (0.1, 2.0)


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
        self.about = AttachRequest()
        """Of the first rank; its `endpoint` is where the coordinator was looked for last."""
        self.about.CopyFrom(about)
        self.held = held
        self.ranks: dict[int, Session] = {}
        self.timeline = ""
        self._node = node
        self._incarnation = incarnation
        self._log = log
        self._on_closed = on_closed
        self._out: asyncio.Queue[NodeMessage | None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self.stub: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._ended: Error | None = None
        self._coordinator = ""
        self._endpoints = [about.endpoint]
        """Where the coordinator may be, by the word of ranks; the first is tried next. Its certificate proves it."""
        self.trouble = ""
        """Why there is no session with the coordinator, for the errors of those who wait for it; "" while there is one."""
        self.saves = NodeSave(node=node, held=held, link=self, log=log)
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
        # Elsewhere than before, where its agent was restarted and the old port is taken; ranks hear of that in any order.
        if session.about.endpoint not in self._endpoints:
            self._endpoints.insert(0, session.about.endpoint)
        self._log.emit("attached_local", job=self.about.job, rank=session.rank, node=self._node)
        if self._ended is not None:
            self._end_session(session, self._ended)
        else:
            if self.timeline:
                session.tell(Event(timeline=self.timeline))
            self.saves.attached(session)
            self.say_attached(session)

    def say_attached(self, session: Session) -> None:
        """Tell the coordinator of a rank; once more where something about it has changed."""
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
        self.saves.rank_gone(session.rank, lost)
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
                restored=about.restored if about.HasField("restored") else None,
                in_flight=about.in_flight,
            )
        )

    # ------------------------------------------------------------ the coordinator

    def say(self, message: NodeMessage) -> None:
        """Send where there is a session; else the hello of the next one says it all again."""
        if self._out is not None:
            failpoint("agent.before_say_", str(message.WhichOneof("kind")))
            self._out.put_nowait(message)

    async def _keep_connected(self) -> None:
        pause = RECONNECT_S[0]
        while not self._closed:
            self._out = asyncio.Queue()
            endpoint = self.about.endpoint = self._endpoints[0]
            is_heard = False
            try:
                self._channel = rpc.pinned_channel(endpoint, self.about.credentials.certificate)
                self.stub = coordinator_pb2_grpc.CoordinatorStub(self._channel)
                self._say_everything()
                call = self.stub.Session(self._messages(self._out), metadata=rpc.token_metadata(self.about.credentials))
                async for message in call:
                    pause, self.trouble, is_heard = RECONNECT_S[0], "", True
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
            if not is_heard and self._endpoints[0] == endpoint:
                self._endpoints.append(self._endpoints.pop(0))
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
        self.saves.say_again()
        self.restores.say_again()

    def _on_message(self, message: CoordinatorMessage) -> None:
        kind = message.WhichOneof("kind")
        failpoint("agent.heard_", str(kind))
        if kind == "refused":
            self._end(message.refused)
        elif kind == "fenced":
            self._end(message.fenced)
        elif kind in ("restore_chosen", "restore_go", "restore_error"):
            self.restores.on_message(message)
        elif kind == "welcome":
            if self._coordinator not in ("", message.welcome.incarnation):
                self.restores.coordinator_restarted()
            self._coordinator = message.welcome.incarnation
        else:
            self.saves.on_message(message)

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
        self.saves.end(error)
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
