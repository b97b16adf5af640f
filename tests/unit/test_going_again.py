"""A node that is told go for one step more than once, or for one number in two timelines: each time each rank has one slot."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fixtures.at_rest import small_state
from fixtures.coordinated import Play
from fixtures.held_jobs import held_job
from fixtures.raw_rank import options, run_credentials

from ckptd.daemon.errors import DaemonError
from ckptd.daemon.run_link import RunLink
from ckptd.daemon.session import Session
from ckptd.daemon.slot_header import SlotState
from ckptd.daemon.telemetry import EventLog
from ckptd.daemon.uploader import Uploader
from ckptd.protos import error_pb2, shard_table
from ckptd.protos.agent_pb2 import AttachRequest, BeginReply, BeginRequest, StagedRequest
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeMessage
from ckptd.protos.snapshot_pb2 import AliasTable, HeldPlan, StepRef
from ckptd.storage_backends.memory import MemoryStore

TIMELINE = "00000001-aaaaaaaaaaaa"
NEXT_TIMELINE = "00000002-bbbbbbbbbbbb"
LAYOUT, PLAN = b"layout", b"plan"
DEADLINE_S = 60.0
GO = CoordinatorMessage(begin=CoordinatorMessage.BeginDecision(step=7, timeline=TIMELINE, go=True, plan_digest=PLAN))


class Node:
    """Two ranks of a run on a node with real slots; nobody plays the coordinator but the test."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor, *, slots: int) -> None:
        store, log = MemoryStore("memory://held"), EventLog(None)
        self.held = held_job(folder, threads, store=store, log=log, uploader=Uploader(store, events=log))
        about = [
            AttachRequest(
                job="job",
                root="memory://held",
                run_id="run",
                rank=rank,
                world=2,
                coordinate=[rank],
                endpoint="127.0.0.1:1",
                credentials=run_credentials(),
                options=options(slots=slots, begin_timeout_s=DEADLINE_S),
                process=f"process {rank}",
            )
            for rank in range(2)
        ]
        self.link = RunLink(about[0], node="node", incarnation="i", held=self.held, log=log, on_closed=lambda _: None)
        self.sessions = [Session(token=str(rank), about=one) for rank, one in enumerate(about)]
        self._said: list[NodeMessage] = []
        self.link.say = self._said.append  # type: ignore[method-assign, assignment]
        self._keeps_connected = set(self.link._tasks)

    async def attach(self) -> None:
        """Let both ranks come, with layouts that make a plan the node knows."""
        layouts = Play(states=small_state).run().layouts
        for rank, session in enumerate(self.sessions):
            self.link.attach(session)
            rows = layouts[rank]
            session.layouts[LAYOUT] = (rows, AliasTable())
            writer = [rank] * shard_table.row_count(rows)
            await self.held.learn_plan(
                HeldPlan(
                    rank=rank,
                    coordinate=[rank],
                    rows=rows,
                    writer=writer,
                    aliases=AliasTable(),
                    layout_digest=LAYOUT,
                    plan_digest=PLAN,
                )
            )

    async def settled(self) -> None:
        """Wait until all that was heard is dealt with."""
        await asyncio.gather(*(self.link._tasks - self._keeps_connected))

    def asks(self, rank: int) -> asyncio.Task[BeginReply]:
        """Let a rank ask to save step 7."""
        request = BeginRequest(session=str(rank), step=7, layout_digest=LAYOUT, tail_bytes=100)
        return asyncio.get_running_loop().create_task(self.link.saves.begin(self.sessions[rank], request))

    async def goes(self, timeline: str) -> list[BeginReply]:
        """Let both ranks begin step 7 in a timeline, which lists the step of the first one."""
        keeps = [StepRef(step=7, timeline=TIMELINE)] if timeline != TIMELINE else []
        started = CoordinatorMessage.Started(timeline=timeline, keeps=keeps)
        self.link.saves.on_message(CoordinatorMessage(started=started))
        calls = [self.asks(rank) for rank in range(2)]
        await asyncio.sleep(0)
        go = CoordinatorMessage()
        go.CopyFrom(GO)
        go.begin.timeline = timeline
        self.link.saves.on_message(go)
        return await asyncio.wait_for(asyncio.gather(*calls), DEADLINE_S)

    async def saved(self, timeline: str, fill: int) -> list[BeginReply]:
        """Let both ranks save step 7 in a timeline, and the step be committed."""
        self.held.uploads.add = lambda _: None  # type: ignore[method-assign, assignment]
        replies = await self.goes(timeline)
        for rank, reply in enumerate(replies):
            self.stage(rank, reply, fill)
        self.held.committed(self.held.snapshots[timeline, 7])
        return replies

    def stage(self, rank: int, reply: BeginReply, fill: int) -> None:
        """Let a rank fill the slot it was given, and say so."""
        with Path(reply.path).open("r+b") as file:
            file.seek(reply.data_offset)
            file.write(bytes([fill]) * reply.data_bytes)
        request = StagedRequest(session=str(rank), step=7, slot=reply.slot)
        self.link.saves.staged(self.sessions[rank], request)

    def staged(self) -> list[tuple[int, str]]:
        """Return (rank, timeline) of what was staged, as the coordinator is told."""
        return [(one.staged.rank, one.staged.timeline) for one in self._said if one.HasField("staged")]

    def failures(self) -> list[str]:
        """Return why steps failed, as the coordinator is told."""
        return [one.failed.error.message for one in self._said if one.HasField("failed")]

    def writing(self) -> list[tuple[int, int]]:
        """Return (rank, number) of each slot that is being filled."""
        return [(one.rank, one.number) for one in self.held.pool.slots if one.header.state is SlotState.WRITING]

    async def close(self) -> None:
        """End the link, and all that it runs."""
        tasks = list(self.link._tasks)
        self.link.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.held.forget()


def play(folder: Path, act: Callable[[Node], Awaitable[None]], *, slots: int = 2) -> None:
    """Let something happen on a node with two ranks."""

    async def run() -> None:
        with ThreadPoolExecutor(4) as threads:
            node = Node(folder, threads, slots=slots)
            try:
                await node.attach()
                await act(node)
            finally:
                await node.close()

    asyncio.run(run())


@pytest.mark.parametrize("slots", [1, 2])
def test_a_step_that_is_go_twice_takes_one_slot_of_each_rank(tmp_path: Path, slots: int) -> None:
    """Both ranks asked again, and each question was answered: the second answer comes while slots are being made."""

    async def act(node: Node) -> None:
        calls = [node.asks(rank) for rank in range(2)]
        await asyncio.sleep(0)
        node.link.saves.on_message(GO)
        node.link.saves.on_message(GO)
        replies = await asyncio.gather(*calls)
        await node.settled()
        assert node.failures() == []
        assert [reply.go for reply in replies] == [True, True]
        assert node.writing() == [(rank, reply.slot) for rank, reply in enumerate(replies)]
        snapshot = node.link.saves.snapshot(7)
        assert snapshot is not None
        node.held.drop(snapshot)
        assert node.writing() == []

    play(tmp_path, act, slots=slots)


def test_a_rank_that_asks_again_while_its_slot_is_made_is_answered(tmp_path: Path) -> None:
    """Its session broke, and its first call with it: the slots that are being made are for the second."""
    made, may_go_on = threading.Event(), threading.Event()

    async def act(node: Node) -> None:
        acquire = node.held.pool.acquire

        def held_up(*arguments: Any, **more: Any) -> Any:
            made.set()
            may_go_on.wait(DEADLINE_S)
            return acquire(*arguments, **more)

        node.held.pool.acquire = held_up  # type: ignore[method-assign]
        first, other = node.asks(0), node.asks(1)
        await asyncio.sleep(0)
        node.link.saves.on_message(GO)
        await asyncio.to_thread(made.wait, DEADLINE_S)
        first.cancel()
        second = node.asks(0)
        await asyncio.sleep(0)
        may_go_on.set()
        replies = await asyncio.wait_for(asyncio.gather(second, other), DEADLINE_S)
        assert node.failures() == []
        assert node.writing() == [(rank, reply.slot) for rank, reply in enumerate(replies)]

    play(tmp_path, act)


def test_a_rank_that_was_away_when_slots_were_made_hears_so_at_once(tmp_path: Path) -> None:
    """It asks again and there is no slot of it: the step ends on all ranks, and nobody waits for a deadline."""

    async def act(node: Node) -> None:
        other = node.asks(1)
        await asyncio.sleep(0)
        node.link.saves.on_message(GO)
        assert (await other).go
        again = node.asks(0)
        await asyncio.sleep(0)
        node.link.saves.on_message(GO)
        with pytest.raises(DaemonError) as caught:
            await asyncio.wait_for(again, DEADLINE_S / 2)
        assert (caught.value.error.reason, caught.value.error.rank) == (error_pb2.REASON_ABORTED, 0)
        assert node.failures() == [caught.value.error.message]

    play(tmp_path, act)


def test_a_number_of_the_timeline_before_gets_slots_of_its_own(tmp_path: Path) -> None:
    """The coordinator came back in the living run, and the script uses the number again: the committed step keeps its bytes."""

    async def act(node: Node) -> None:
        replies = {TIMELINE: await node.saved(TIMELINE, 1), NEXT_TIMELINE: await node.saved(NEXT_TIMELINE, 2)}
        assert node.failures() == []
        assert node.staged() == [(rank, timeline) for timeline in (TIMELINE, NEXT_TIMELINE) for rank in range(2)]
        for timeline, fill in ((TIMELINE, 1), (NEXT_TIMELINE, 2)):
            slots = node.held.snapshots[timeline, 7].slots
            assert {rank: set(slot.data) for rank, slot in slots.items()} == {0: {fill}, 1: {fill}}
            assert [str(slot.path) for slot in slots.values()] == [reply.path for reply in replies[timeline]]

    play(tmp_path, act)


def test_what_was_given_up_is_not_staged_as_the_step_of_that_number_before(tmp_path: Path) -> None:
    """The rank that has filled its slot hears that the step is over, and the coordinator nothing of the committed one."""

    async def act(node: Node) -> None:
        await node.saved(TIMELINE, 1)
        replies = await node.goes(NEXT_TIMELINE)
        told = node.staged()
        node.held.drop(node.held.snapshots[NEXT_TIMELINE, 7])
        with pytest.raises(DaemonError) as caught:
            node.stage(0, replies[0], 2)
        assert caught.value.error.reason == error_pb2.REASON_ABORTED
        assert node.staged() == told

    play(tmp_path, act)
