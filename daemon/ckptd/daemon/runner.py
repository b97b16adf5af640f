"""Runs a pure coordinator: executes its effects on the store and the network.

Owns: one asyncio task that feeds the coordinator one event at a time, the TLS server of the run, and the outgoing queue of every
node's session. Does not own: any decision. Everything here runs on the agent's event loop; blocking work goes to threads.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Any, TypeAlias

import grpc.aio

from ckptd.daemon import keys, rpc
from ckptd.daemon.coordinator import Coordinator, effects
from ckptd.daemon.errors import DaemonError, make_error
from ckptd.daemon.liveness import ask_run
from ckptd.daemon.log_writer import put_once
from ckptd.daemon.telemetry import EventLog
from ckptd.protos import coordinator_pb2_grpc, error_pb2, shard_table
from ckptd.protos.agent_pb2 import LeadRequest
from ckptd.protos.coordinator_pb2 import (
    CoordinatorMessage,
    NodeLayoutPart,
    NodeLayoutReply,
    NodeMessage,
    NodePlanPart,
    NodePlanRequest,
    PingReply,
    PingRequest,
)
from ckptd.protos.failpoints import failpoint
from ckptd.protos.snapshot_pb2 import ShardTable
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import NotFound

TICK_S = 0.5
PLAN_PART_ROWS = 65_536
Context: TypeAlias = Any
"""grpc.aio.ServicerContext; grpc has no types."""


def utc_now() -> str:
    """Return the time as RFC 3339 in UTC: information only, never compared."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")


class CoordinatorRunner(coordinator_pb2_grpc.CoordinatorServicer):
    """One coordinator with its server. Make it with `start`; everything on one event loop."""

    def __init__(
        self,
        lead: LeadRequest,
        store: ObjectStore,
        *,
        threads: Executor,
        log: EventLog,
        versions: dict[str, str],
        on_claimed: Callable[[CoordinatorRunner], None],
        on_closed: Callable[[CoordinatorRunner], None],
        node_grace_s: float,
    ) -> None:
        self.lead = lead
        self._store = store
        self._threads = threads
        self._log = log
        self._versions = versions
        self._on_claimed = on_claimed
        self._on_closed = on_closed
        self._node_grace_s = node_grace_s
        self._events: asyncio.Queue[effects.Event] = asyncio.Queue()
        self._outgoing: dict[str, asyncio.Queue[CoordinatorMessage | None]] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._server = rpc.new_server()
        self._coordinator: Coordinator | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self.endpoint = ""
        self.port = 0

    async def start(self, *, listen_host: str, advertise_host: str, port: int) -> None:
        """Bind, listen and begin to take events. `port` 0 takes any.

        Raises:
            DaemonError: the port is taken.
        """
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, self._server)
        bound = _bind(self._server, listen_host, port, self.lead)
        await self._server.start()
        self.port = bound
        self.endpoint = rpc.endpoint_of(advertise_host, bound)
        shown = LeadRequest()
        shown.CopyFrom(self.lead)
        shown.root = self._store.url  # it goes into messages: without a password
        self._coordinator = Coordinator(
            shown,
            incarnation=secrets.token_hex(8),
            endpoint=self.endpoint,
            certificate_sha256=rpc.certificate_sha256(self.lead.credentials.certificate),
            nonce=keys.new_nonce,
            stamp=utc_now,
            now=time.monotonic(),
            versions=self._versions,
            node_grace_s=self._node_grace_s,
        )
        self._loop_task = asyncio.get_running_loop().create_task(self._run())

    @property
    def live_ranks(self) -> int:
        """Ranks that a second start must not disturb."""
        return self._coordinator.state.ranks_that_go_on() if self._coordinator is not None else 0

    def supersede(self) -> None:
        """The same agent leads a newer run of the job that has claimed: end."""
        self._events.put_nowait(effects.Superseded())

    async def stop(self) -> None:
        """End at once; what is decided is in the store, the rest is for the next timeline."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        for task in list(self._work):
            task.cancel()
        for queue in self._outgoing.values():
            queue.put_nowait(None)
        await self._server.stop(grace=1.0)

    # ------------------------------------------------------------ the loop

    async def _run(self) -> None:
        assert self._coordinator is not None
        while True:
            for effect in self._coordinator.apply(await self._next_event(), time.monotonic()):
                if isinstance(effect, effects.Close):
                    self._log.emit("coordinator_closed", job=self.lead.job, why=effect.why)
                    self._on_closed(self)
                    return
                self._execute(effect)

    async def _next_event(self) -> effects.Event:
        try:
            # Not wait_for: where an event comes as `stop` cancels the loop, Python 3.11 forgets that it was cancelled, and
            # `stop` would wait for ever.
            async with asyncio.timeout(TICK_S):
                return await self._events.get()
        except TimeoutError:
            return effects.Tick()

    def _execute(self, effect: effects.Effect) -> None:
        if isinstance(effect, effects.Send):
            queue = self._outgoing.get(effect.node)
            if queue is not None:
                failpoint("coordinator.before_send_", str(effect.message.WhichOneof("kind")))
                queue.put_nowait(effect.message)
        elif isinstance(effect, effects.Log):
            self._log.emit(effect.kind, **effect.fields)
        elif isinstance(effect, effects.Do):
            task = asyncio.get_running_loop().create_task(self._do(effect))
            self._work.add(task)
            task.add_done_callback(self._work.discard)

    async def _do(self, effect: effects.Do) -> None:
        loop = asyncio.get_running_loop()
        operation = effect.operation
        try:
            if isinstance(operation, effects.Probe):
                failpoint("coordinator.before_probe")
                result: Any = await ask_run(operation.claim)
            elif isinstance(operation, effects.GetMany):
                failpoint("coordinator.before_", operation.label)
                gets = [loop.run_in_executor(self._threads, self._get, key) for key in operation.keys]
                result = await asyncio.gather(*gets)
            else:
                result = await loop.run_in_executor(self._threads, self._blocking, operation)
        except Exception as failure:  # thrown into the procedure that asked
            self._events.put_nowait(effects.Done(lane=effect.lane, error=failure))
            return
        if isinstance(operation, effects.Put) and operation.label == "claim":
            self._on_claimed(self)
        self._events.put_nowait(effects.Done(lane=effect.lane, result=result))

    def _blocking(self, operation: effects.Operation) -> Any:
        """Execute one operation in a thread."""
        if isinstance(operation, effects.ListKeys):
            failpoint("coordinator.before_", operation.label)
            return [info.key for info in self._store.list(operation.prefix)]
        if isinstance(operation, effects.Get):
            failpoint("coordinator.before_", operation.label)
            return self._get(operation.key)
        if isinstance(operation, effects.Put):
            failpoint("coordinator.before_", operation.label)
            put_once(self._store, operation.key, operation.data)
            failpoint("coordinator.after_", operation.label)
            return None
        assert isinstance(operation, effects.Compute)
        return operation.function(*operation.arguments)

    def _get(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except NotFound:
            return None

    # ------------------------------------------------------------ the service

    async def Session(  # noqa: N802 - the name in the .proto
        self, messages: AsyncIterator[NodeMessage], context: Context
    ) -> AsyncIterator[CoordinatorMessage]:
        """Serve one node's session: see coordinator.proto."""
        await self._check_token(context)
        first = await anext(messages, None)
        if first is None or first.WhichOneof("kind") != "hello" or first.hello.run_id != self.lead.run_id:
            await rpc.abort(
                context, make_error(error_pb2.REASON_INVALID_ARGUMENT, "the first message must be this run's hello")
            )
        node, incarnation = first.hello.node, first.hello.incarnation
        old = self._outgoing.get(node)
        if old is not None:
            old.put_nowait(None)
        queue: asyncio.Queue[CoordinatorMessage | None] = asyncio.Queue()
        self._outgoing[node] = queue

        async def read() -> None:
            try:
                failpoint("coordinator.received_hello")
                self._events.put_nowait(effects.NodeSaid(node=node, message=first))
                async for message in messages:
                    failpoint("coordinator.received_", str(message.WhichOneof("kind")))
                    self._events.put_nowait(effects.NodeSaid(node=node, message=message))
            finally:
                queue.put_nowait(None)

        reader = asyncio.get_running_loop().create_task(read())
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            # Before any await: gRPC may cancel this handler at every one, and the node would never count as lost.
            reader.cancel()
            if self._outgoing.get(node) is queue:
                del self._outgoing[node]
                self._events.put_nowait(effects.NodeLost(node=node, incarnation=incarnation))
            await asyncio.gather(reader, return_exceptions=True)

    async def SendLayout(self, parts: AsyncIterator[NodeLayoutPart], context: Context) -> NodeLayoutReply:  # noqa: N802
        """Take a rank's layout: see coordinator.proto."""
        await self._check_token(context)
        failpoint("coordinator.received_SendLayout")
        rank, digest = 0, b""
        tables: list[ShardTable] = []
        async for part in parts:
            if not tables:
                rank, digest = part.rank, bytes(part.digest)
            tables.append(part.rows)
        try:
            table = await asyncio.get_running_loop().run_in_executor(self._threads, _checked_table, tables, digest)
        except ValueError as wrong:
            await rpc.abort(
                context, make_error(error_pb2.REASON_INVALID_ARGUMENT, f"layout of rank {rank}: {wrong}", rank=rank)
            )
        self._events.put_nowait(effects.LayoutReceived(rank=rank, digest=digest, rows=table))
        return NodeLayoutReply()

    async def FetchPlan(self, request: NodePlanRequest, context: Context) -> AsyncIterator[NodePlanPart]:  # noqa: N802
        """Give a rank its writers: see coordinator.proto."""
        await self._check_token(context)
        failpoint("coordinator.received_FetchPlan")
        plan = self._coordinator.state.plan if self._coordinator is not None else None
        if plan is None or plan.digest != request.plan_digest or request.rank not in plan.writers:
            await rpc.abort(
                context,
                make_error(error_pb2.REASON_NOT_FOUND, f"plan {request.plan_digest.hex()[:16]} is not the present one"),
            )
        writers = plan.writers[request.rank]
        for at in range(0, max(1, len(writers)), PLAN_PART_ROWS):
            yield NodePlanPart(writer=writers[at : at + PLAN_PART_ROWS])

    async def Ping(self, request: PingRequest, context: Context) -> PingReply:  # noqa: N802
        """Say whether this run lives: see coordinator.proto."""
        del request, context
        return PingReply(run_id=self.lead.run_id, live_ranks=self.live_ranks)

    async def _check_token(self, context: Context) -> None:
        if not rpc.has_token(context, self.lead.credentials.token):
            await rpc.abort(
                context, make_error(error_pb2.REASON_PERMISSION_DENIED, "the run's token is missing or wrong")
            )


def _checked_table(tables: list[ShardTable], digest: bytes) -> ShardTable:
    table = shard_table.concat(tables)
    if shard_table.digest(table) != digest:
        raise ValueError("its digest does not fit its rows")
    return table


def _bind(server: grpc.aio.Server, host: str, port: int, lead: LeadRequest) -> int:
    try:
        bound: int = server.add_secure_port(rpc.endpoint_of(host, port), rpc.server_credentials(lead.credentials))
    except RuntimeError as failure:
        raise DaemonError.of(
            f"cannot listen on {rpc.endpoint_of(host, port)}: {failure}",
            reason=error_pb2.REASON_UNAVAILABLE,
            hint="--listen must be an address of this host; choose another --port, or 0 for any",
        ) from failure
    return bound
