"""What a rank that cannot map a slot sends goes into the step that it was sent for, and into no later one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest
from fixtures.held_jobs import held_job

from ckptd.daemon.agent_service import AgentService
from ckptd.daemon.rpc import ERROR_METADATA
from ckptd.daemon.saves import NodeSave
from ckptd.daemon.slots import DATA_OFFSET
from ckptd.daemon.snapshots import Snapshot
from ckptd.daemon.telemetry import EventLog
from ckptd.protos import error_pb2, shard_table
from ckptd.protos.agent_pb2 import SlotBytes, SlotBytesReply
from ckptd.protos.error_pb2 import Error
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import HeldPlan, HeldSnapshot

NBYTES = 512


class RefusedError(Exception):
    """The status of a call."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.message)
        self.error = error


class Context:
    """Of a call."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> NoReturn:
        """End it."""
        del code, details
        raise RefusedError(Error.FromString(dict(trailing_metadata)[ERROR_METADATA]))


class Node:
    """A node with one rank, one slot and the service that the rank calls."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        self.held = held_job(folder, threads)
        link: Any = SimpleNamespace(about=SimpleNamespace(run_id="run"), held=self.held)
        link.saves = NodeSave(node="node", held=self.held, link=link, log=EventLog(None))
        agent: Any = SimpleNamespace(session=lambda _: (SimpleNamespace(rank=0), link))
        self._service = AgentService(agent)

    async def begin(self, step: int, timeline: str = "00000001-aaaaaaaaaaaa") -> Snapshot:
        """Give the rank's process the slot for a step."""
        row = ShardRow(
            name="w", dtype="uint8", scope=0, global_shape=(NBYTES,), offset=(0,), length=(NBYTES,), nbytes=NBYTES
        )
        plan = HeldPlan(rank=0, rows=shard_table.build([row]), writer=[0], layout_digest=b"l", plan_digest=b"p")
        await self.held.learn_plan(plan)
        about = HeldSnapshot(step=step, timeline=timeline, world=1, ranks=[0], plan_digest=b"p", run_id="run")
        return await self.held.begin(about, {0: 1000}, {0: "process"}, 1)

    async def write(self, parts: AsyncIterator[SlotBytes]) -> SlotBytesReply:
        """Call WriteSlot."""
        reply: SlotBytesReply = await self._service.WriteSlot(parts, Context())
        return reply


def play(folder: Path, act: Callable[[Node], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        with ThreadPoolExecutor(2) as threads:
            node = Node(folder, threads)
            try:
                await act(node)
            finally:
                node.held.forget()

    asyncio.run(run())


def part(step: int, at: int, nbytes: int) -> SlotBytes:
    return SlotBytes(session="s", step=step, offset=DATA_OFFSET + at, data=bytes([step]) * nbytes)


class Left:
    """The call of a rank that was interrupted in the midst: gRPC's thread sends the second half when `go` is set."""

    def __init__(self, step: int) -> None:
        self.go, self.has_sent = asyncio.Event(), asyncio.Event()
        self._step = step

    async def parts(self) -> AsyncIterator[SlotBytes]:
        """Send both halves."""
        yield part(self._step, 0, NBYTES // 2)
        self.has_sent.set()
        await self.go.wait()
        yield part(self._step, NBYTES // 2, NBYTES // 2)


async def whole(step: int) -> AsyncIterator[SlotBytes]:
    yield part(step, 0, NBYTES)


@pytest.mark.parametrize(
    ("step", "timeline"), [(6, "00000001-aaaaaaaaaaaa"), (5, "00000002-bbbbbbbbbbbb")], ids=["next", "same, anew"]
)
def test_a_call_that_goes_on_after_its_step_was_given_up_is_refused(tmp_path: Path, step: int, timeline: str) -> None:
    """The same process has the same slot for another step by then, or for the same one of another timeline."""

    async def act(node: Node) -> None:
        before = await node.begin(5)
        slot, left = before.slots[0], Left(5)
        calling = asyncio.ensure_future(node.write(left.parts()))
        await left.has_sent.wait()
        node.held.drop(before)
        after = await node.begin(step, timeline)
        assert after.slots[0] is slot
        data = bytes(slot.data)
        left.go.set()
        with pytest.raises(RefusedError) as refused:
            await calling
        assert (refused.value.error.reason, refused.value.error.step) == (error_pb2.REASON_ABORTED, 5)
        assert bytes(slot.data) == data
        assert (await node.write(whole(step))).received == NBYTES
        assert bytes(slot.data) == bytes([step]) * NBYTES

    play(tmp_path, act)


def test_a_call_for_a_step_whose_slot_is_still_read_is_refused(tmp_path: Path) -> None:
    """It was given up, and only waits for a reader to be free."""

    async def act(node: Node) -> None:
        snapshot, left = await node.begin(5), Left(5)
        release = node.held.read_lease(snapshot)
        calling = asyncio.ensure_future(node.write(left.parts()))
        await left.has_sent.wait()
        node.held.drop(snapshot)
        data = bytes(snapshot.slots[0].data)
        left.go.set()
        with pytest.raises(RefusedError):
            await calling
        assert bytes(snapshot.slots[0].data) == data
        release()

    play(tmp_path, act)
