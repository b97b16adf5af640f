"""The RPCs between a rank and its agent: agent.proto, nothing more.

Owns: turning calls into calls of `Agent`, `RunLink` and `NodeRestore`, and their errors into statuses. Does not own any state.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

from ckptd.daemon import rpc
from ckptd.daemon.agent import Agent
from ckptd.daemon.any_mesh import Wanted
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.rpc import guarded, guarded_stream
from ckptd.protos import agent_pb2, agent_pb2_grpc, error_pb2, shard_table
from ckptd.protos.snapshot_pb2 import AliasTable

MIN_VERSION = 1
MAX_VERSION = 1
CAPABILITIES = ("shm",)
PLAN_PART_ROWS = 65_536
Context: TypeAlias = Any
"""grpc.aio.ServicerContext; grpc has no types."""


class AgentService(agent_pb2_grpc.AgentServicer):
    """Serves the ranks of this node. One per agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    @guarded
    async def Hello(self, request: agent_pb2.HelloRequest, context: Context) -> agent_pb2.HelloReply:  # noqa: N802
        """See agent.proto."""
        version = min(MAX_VERSION, request.max_version)
        if version < MIN_VERSION or version < request.min_version:
            raise DaemonError.of(
                f"no protocol version in common: the client speaks {request.min_version} to {request.max_version}, "
                f"this agent {MIN_VERSION} to {MAX_VERSION}",
                reason=error_pb2.REASON_VERSION_MISMATCH,
                hint="install versions of ckptd that are at most one apart",
            )
        return agent_pb2.HelloReply(
            version=version,
            capabilities=sorted(set(CAPABILITIES) & set(request.capabilities)),
            node=self._agent.node,
            ckptd_version=importlib.metadata.version("ckptd"),
            shm_probe_path=str(self._agent.probe_path),
            shm_probe_token=self._agent.probe_token,
            pid=os.getpid(),
        )

    @guarded
    async def Lead(self, request: agent_pb2.LeadRequest, context: Context) -> agent_pb2.LeadReply:  # noqa: N802
        """See agent.proto."""
        return agent_pb2.LeadReply(endpoint=await self._agent.lead(request))

    @guarded_stream
    async def Attach(self, request: agent_pb2.AttachRequest, context: Context) -> AsyncIterator[agent_pb2.Event]:  # noqa: N802
        """See agent.proto."""
        session = await self._agent.attach(request)
        try:
            while (event := await session.events.get()) is not None:
                yield event
        finally:
            self._agent.stream_ended(session)

    @guarded
    async def PutLayout(self, parts: AsyncIterator[agent_pb2.LayoutPart], context: Context) -> agent_pb2.LayoutReply:  # noqa: N802
        """See agent.proto."""
        first: agent_pb2.LayoutPart | None = None
        tables = []
        async for part in parts:
            first = first or part
            tables.append(part.rows)
        if first is None:
            raise DaemonError.of("a layout has at least one part", reason=error_pb2.REASON_INVALID_ARGUMENT)
        session, _ = self._agent.session(first.session)
        loop = asyncio.get_running_loop()
        try:
            table = await loop.run_in_executor(self._agent.threads, shard_table.concat, tables)
            digest = await loop.run_in_executor(self._agent.threads, shard_table.digest, table)
        except ValueError as wrong:
            raise DaemonError.of(str(wrong), reason=error_pb2.REASON_INVALID_ARGUMENT, rank=session.rank) from wrong
        if digest != first.digest:
            raise DaemonError.of(
                f"layout of rank {session.rank}: its digest does not fit its rows",
                reason=error_pb2.REASON_INVALID_ARGUMENT,
                rank=session.rank,
            )
        session.layouts.clear()
        aliases = AliasTable()
        aliases.CopyFrom(first.aliases)
        session.layouts[digest] = (table, aliases)
        return agent_pb2.LayoutReply()

    @guarded
    async def Begin(self, request: agent_pb2.BeginRequest, context: Context) -> agent_pb2.BeginReply:  # noqa: N802
        """See agent.proto."""
        session, link = self._agent.session(request.session)
        return await link.saves.begin(session, request)

    @guarded_stream
    async def GetPlan(self, request: agent_pb2.PlanRequest, context: Context) -> AsyncIterator[agent_pb2.PlanPart]:  # noqa: N802
        """See agent.proto."""
        session, link = self._agent.session(request.session)
        plan = link.held.plan_of(session.rank, request.plan_digest)
        if plan is None:
            raise DaemonError.of(
                f"plan {request.plan_digest.hex()[:16]} is unknown",
                reason=error_pb2.REASON_NOT_FOUND,
                rank=session.rank,
            )
        writer, offsets = list(plan.held.writer), plan.layout.offsets
        for at in range(0, max(1, len(writer)), PLAN_PART_ROWS):
            end = at + PLAN_PART_ROWS
            yield agent_pb2.PlanPart(writer=writer[at:end], stream_offset=offsets[at:end])

    @guarded
    async def WriteSlot(self, parts: AsyncIterator[agent_pb2.SlotBytes], context: Context) -> agent_pb2.SlotBytesReply:  # noqa: N802
        """See agent.proto."""
        first: agent_pb2.SlotBytes | None = None
        received = 0
        async for part in parts:
            if first is None:
                first = part
                session, link = self._agent.session(part.session)
                snapshot = link.saves.snapshot(part.step)
                slot = snapshot.slots.get(session.rank) if snapshot is not None else None
            # Each time: the call of a rank that was interrupted goes on, while the slot is the next step's, of the same process.
            if snapshot is None or slot is None or snapshot.dropped or snapshot.slots.get(session.rank) is not slot:
                raise DaemonError.of(
                    f"step {first.step}: it was given up meanwhile",
                    reason=error_pb2.REASON_ABORTED,
                    step=first.step,
                    rank=session.rank,
                    phase="stage",
                )
            try:
                slot.write(part.offset, part.data)
            except ValueError as wrong:
                raise DaemonError.of(str(wrong), reason=error_pb2.REASON_INVALID_ARGUMENT) from wrong
            received += len(part.data)
        return agent_pb2.SlotBytesReply(received=received)

    @guarded
    async def Staged(self, request: agent_pb2.StagedRequest, context: Context) -> agent_pb2.StagedReply:  # noqa: N802
        """See agent.proto."""
        session, link = self._agent.session(request.session)
        link.saves.staged(session, request)
        return agent_pb2.StagedReply()

    @guarded
    async def FailStep(self, request: agent_pb2.FailStepRequest, context: Context) -> agent_pb2.FailStepReply:  # noqa: N802
        """See agent.proto."""
        session, link = self._agent.session(request.session)
        link.saves.fail_step(session, request.step, rpc.cut(request.error))
        return agent_pb2.FailStepReply()

    @guarded_stream
    async def Restore(self, request: agent_pb2.RestoreRequest, context: Context) -> AsyncIterator[agent_pb2.StoredPart]:  # noqa: N802
        """See agent.proto."""
        session, link = self._agent.session(request.session)
        for part in await link.restores.ask(session, request):
            yield part

    @guarded_stream
    async def Want(  # noqa: N802
        self, parts: AsyncIterator[agent_pb2.WantPart], context: Context
    ) -> AsyncIterator[agent_pb2.FetchedPart]:
        """See agent.proto."""
        first: agent_pb2.WantPart | None = None
        wanted = Wanted()
        refused = None
        async for part in parts:
            first = first or part
            wanted.take(part)
            if part.HasField("refused"):
                refused = rpc.cut(part.refused)
        if first is None:
            raise DaemonError.of("a want has at least one part", reason=error_pb2.REASON_INVALID_ARGUMENT)
        session, link = self._agent.session(first.session)
        for answer in await link.restores.want(session, first.attempt, wanted, refused):
            yield answer

    @guarded_stream
    async def ReadRestored(  # noqa: N802
        self, request: agent_pb2.ReadRestoredRequest, context: Context
    ) -> AsyncIterator[agent_pb2.SlotBytes]:
        """See agent.proto."""
        _, link = self._agent.session(request.session)
        view = link.restores.readable(request.file, request.offset, request.nbytes)
        for at in range(0, len(view), rpc.PIECE_BYTES):
            piece = view[at : at + rpc.PIECE_BYTES]
            yield agent_pb2.SlotBytes(offset=request.offset + at, data=bytes(piece))

    @guarded
    async def RestoreDone(  # noqa: N802
        self, request: agent_pb2.RestoreDoneRequest, context: Context
    ) -> agent_pb2.RestoreDoneReply:
        """See agent.proto."""
        session, link = self._agent.session(request.session)
        if request.HasField("restored"):
            session.about.restored.CopyFrom(request.restored)
        link.restores.done(session, request.attempt, request.error if request.HasField("error") else None)
        return agent_pb2.RestoreDoneReply()

    @guarded
    async def Detach(self, request: agent_pb2.DetachRequest, context: Context) -> agent_pb2.DetachReply:  # noqa: N802
        """See agent.proto."""
        session, _ = self._agent.session(request.session)
        self._agent.detach(session)
        return agent_pb2.DetachReply()

    # Without failpoints: no step of the protocol, and nothing that fails.
    async def Status(self, request: agent_pb2.StatusRequest, context: Context) -> agent_pb2.StatusReply:  # noqa: N802
        """See agent.proto."""
        slots = [
            agent_pb2.StatusReply.SlotStatus(
                job=job.job,
                rank=rank,
                timeline=snapshot.about.timeline,
                step=snapshot.about.step,
                state=snapshot.stage.value,
                bytes=slot.nbytes,
            )
            for job in self._agent.jobs.values()
            for snapshot in job.snapshots.values()
            for rank, slot in snapshot.slots.items()
        ]
        return agent_pb2.StatusReply(
            node=self._agent.node,
            pid=os.getpid(),
            slots=slots,
            sessions=len(self._agent.sessions),
            coordinators=len(self._agent.coordinators),
        )
