"""Slots of a step that is over while its upload still reads them: the next step waits a moment, and is not lost."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fixtures.at_rest import small_state
from fixtures.coordinated import Play
from fixtures.held_jobs import held_job

from ckptd.daemon import held as held_module
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.snapshots import Snapshot, Stage
from ckptd.protos import error_pb2, shard_table
from ckptd.protos.snapshot_pb2 import HeldPlan, HeldSnapshot, IndexRef

TIMELINE = "00000001-aaaaaaaaaaaa"


class Uploader:
    """Uploads until it is let go, or told to stop."""

    def __init__(self) -> None:
        self.reads, self.may_end = threading.Event(), threading.Event()
        self.is_deaf = False
        self.cancelled: list[int] = []

    def upload(self, snapshot: Any, *, cancel: threading.Event, resumed: bool) -> IndexRef:
        """Read slots for as long as the test wants."""
        del resumed
        self.reads.set()
        while not self.may_end.wait(0.01):
            if cancel.is_set() and not self.is_deaf:
                self.cancelled.append(snapshot.step)
                raise RuntimeError("given up")
        return IndexRef(key="index")


class Node:
    """A job on a node, with one rank and one slot."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        self.uploader = Uploader()
        self.told: list[Stage] = []
        self.held = held_job(
            folder, threads, uploader=self.uploader, on_change=lambda snapshot: self.told.append(snapshot.stage)
        )

    async def begin(self, step: int) -> Snapshot:
        """Give the rank a slot for a step."""
        about = HeldSnapshot(
            step=step,
            timeline=TIMELINE,
            world=1,
            ranks=[0],
            plan_digest=b"p",
            root="memory://held",
            job="job",
            run_id="run",
        )
        return await self.held.begin(about, {0: 1000}, {0: "process"}, 1)

    async def uploading(self, step: int) -> Snapshot:
        """A step whose upload reads its slot."""
        rows = Play(states=small_state).run().layouts[0]
        await self.held.learn_plan(
            HeldPlan(rank=0, rows=rows, writer=[0] * shard_table.row_count(rows), plan_digest=b"p")
        )
        snapshot = await self.begin(step)
        snapshot.staged.add(0)
        snapshot.stage = Stage.STAGED
        self.held.uploads.add(snapshot)
        await asyncio.to_thread(self.uploader.reads.wait, 10)
        return snapshot


def play(tmp_path: Path, act: Any) -> None:
    async def run() -> None:
        with ThreadPoolExecutor(4) as threads:
            node = Node(tmp_path, threads)
            try:
                await act(node)
            finally:
                node.uploader.may_end.set()
                node.held.forget()

    asyncio.run(run())


def test_a_committed_step_that_is_uploaded_once_more_is_given_up_for_the_next(tmp_path: Path) -> None:
    """An agent that came back uploads what it found; that it counts already is heard in the midst of that."""

    async def act(node: Node) -> None:
        snapshot = await node.uploading(2)
        node.held.committed(snapshot)
        assert (await node.begin(3)).slots[0].header.step == 3
        assert node.uploader.cancelled == [2]

    play(tmp_path, act)


def test_a_step_that_was_aborted_in_its_upload_makes_way_for_the_next(tmp_path: Path) -> None:
    """Its upload lets go of the slot within moments: a save that comes in between is not lost as busy."""

    async def act(node: Node) -> None:
        node.held.drop(await node.uploading(2))
        assert (await node.begin(3)).slots[0].header.step == 3

    play(tmp_path, act)


def test_slots_that_nobody_gives_up_are_busy_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in flight is not waited for, nor is an upload that does not end in time."""

    async def act(node: Node) -> None:
        snapshot = await node.uploading(2)
        with pytest.raises(DaemonError) as busy:
            await node.begin(3)
        assert busy.value.error.reason == error_pb2.REASON_BUSY
        node.uploader.is_deaf = True
        node.held.drop(snapshot)
        monkeypatch.setattr(held_module, "FREED_WITHIN_S", 0.05)
        with pytest.raises(DaemonError) as busy:
            await node.begin(3)
        assert busy.value.error.reason == error_pb2.REASON_BUSY

    play(tmp_path, act)


def test_a_step_that_was_committed_meanwhile_stays_so(tmp_path: Path) -> None:
    """Its upload ends well a moment later: it is the memory tier's, and no step in flight."""

    async def act(node: Node) -> None:
        node.uploader.is_deaf = True
        snapshot = await node.uploading(2)
        node.held.committed(snapshot)
        node.uploader.may_end.set()
        assert node.held.uploads._worker is not None
        await node.held.uploads._worker
        assert snapshot.stage is Stage.COMMITTED
        assert node.told == []

    play(tmp_path, act)
