"""Faults from the field: one rank or node fails, is late, or is faster than the store; all ranks hear the same."""

from __future__ import annotations

import logging
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from fixtures.agents import Agents
from fixtures.client_job import ClientJob, state_of
from fixtures.raw_job import Job
from fixtures.raw_rank import RawRank
from fixtures.stored_root import latest, states, unproved

from ckptd.client import Checkpointer
from ckptd.client.errors import Aborted, CkptdError, Unavailable
from ckptd.client.handles import SaveHandle
from ckptd.daemon.catalog import StepState

pytestmark = pytest.mark.integration


def outcome(handle: SaveHandle) -> str:
    """Return how a save ended, within the deadline."""
    try:
        handle.wait(timeout=30)
    except CkptdError as error:
        return error.message
    return "durable"


def test_s007_a_coordinator_killed_between_the_last_report_and_the_record_leaves_nothing_in_between(
    agents: Agents, tmp_path: Path
) -> None:
    """Its agent dies before the record's put and comes back: the living ranks all hear the same end of the step."""
    root = f"file://{tmp_path}/root"
    nodes = [agents.new(start=False), agents.new()]
    nodes[0].start(env={"CKPTD_FAILPOINTS": "coordinator.before_decision=kill@2"})
    with ClientJob(root, nodes) as job:
        job.wait(job.save(1))
        handles = job.save(2)
        assert nodes[0].process is not None
        assert nodes[0].process.wait(timeout=30) == -9, "the failpoint must have fired"
        assert states(root)[2] is StepState.UNCOMMITTED
        nodes[0].start()
        ends = [outcome(handle) for handle in handles]
        assert len(set(ends)) == 1, f"ranks were told different things: {ends}"
        assert states(root)[2] is (StepState.COMMITTED if ends[0] == "durable" else StepState.ABORTED)
        job.wait(job.save(3))
    # A later run goes back and saves the same number again.
    with ClientJob(root, nodes) as job:
        job.check(job.restore(step=1, rollback=True), 1)
        job.wait(job.save(2))
    assert latest(root) == 2
    assert unproved(root) == []


def test_s023_ranks_that_come_at_different_times_never_make_a_mixed_step(agents: Agents, tmp_path: Path) -> None:
    """50 saves of 4 ranks, rank 2 late by a random time, then it dies in the midst: each step is of one step, or none."""
    draw = random.Random(23)
    root = f"file://{tmp_path}/root"
    job = Job(root, [agents.new()], 4, begin_timeout_s=5.0, wait_when_busy=True)
    job.restored()

    def late(rank: RawRank, step: int) -> bool:
        if rank.about.rank == 2:
            time.sleep(draw.uniform(0.0, 0.05))  # the rank's own pace, not a wait for anything
        return rank.save(step, raw_state(step, rank), {"step": b"%d" % step}).go

    for step in range(1, 51):
        assert job.each(partial(late, step=step)) == [True] * 4
    job.wait(50)
    reader = Job(root, [agents.new()], 4, read_only=True)
    for step in range(1, 51):
        for found, state, objects in reader.restored(step):
            assert found.step == step
            assert {one[0] for one in state} == {step}
            assert objects == {"step": b"%d" % step}
    reader.die()

    def dies(rank: RawRank) -> object:
        if rank.about.rank == 2:
            rank.die()
            return None
        try:
            return rank.save(51, raw_state(51, rank), {}).go
        except grpc.RpcError as refused:
            return refused.details()

    answers = job.each(dies)
    assert True not in answers, f"step 51 was begun without rank 2: {answers}"
    assert latest(root) == 50
    assert 51 not in states(root)
    job.die()


def raw_state(step: int, rank: RawRank) -> list[bytes]:
    """Return tensors whose every byte is the step."""
    return [bytes([step]) * (2000 + rank.about.world), bytes([step]) * 7]


@pytest.mark.parametrize("wait", [False, True], ids=["skip", "wait"])
def test_s024_a_store_slower_than_the_steps_is_met_by_all_ranks_alike(
    agents: Agents, tmp_path: Path, wait: bool
) -> None:
    """Saving at every step: steps are skipped on all ranks and counted, or all ranks wait; nothing mixes, nothing fails."""
    root = f"file://{tmp_path}/root"
    node = agents.new(env={"CKPTD_FAILPOINTS": "uploader.before_index=delay:0.15"})
    with ClientJob(root, [node], 3, wait_when_busy=wait) as job:
        saves = {step: job.save(step) for step in range(1, 13)}
        skipped = {step for step, handles in saves.items() if handles[0].skipped}
        for step, handles in saves.items():
            assert {handle.skipped for handle in handles} == {step in skipped}, f"step {step}"
            if step not in skipped:
                job.wait(handles)
        assert wait or skipped, "the store must have been too slow"
        assert not (wait and skipped)
        counted = [step for event in node.events("skipped") for step in event["steps"]]
        assert set(counted) == skipped
        assert len(counted) == len(skipped)
        kept = sorted(saves.keys() - skipped)
        assert list(states(root)) == kept
    with ClientJob(root, [node], 3, read_only=True) as job:
        for step in kept:
            job.check(job.restore(step=step), step)


class Loader:
    """A thing whose state cannot be read when it is broken."""

    def __init__(self) -> None:
        self.broken = False

    def state_dict(self) -> dict[str, Any]:
        if self.broken:
            raise ValueError("boom")
        return {"position": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def test_s033_a_callback_that_raises_on_one_rank_is_the_error_of_all(agents: Agents, tmp_path: Path) -> None:
    """Rank 3's state raises 'boom': all four hear "rank 3" and "boom" long before the deadline; the next save commits."""
    root = f"file://{tmp_path}/root"
    node = agents.new()
    loaders = [Loader() for _ in range(4)]
    with ClientJob(root, [node], 4, begin_timeout_s=30.0) as job:
        job.each(lambda ckpt: ckpt.track(loader=loaders[ckpt.rank]))
        job.wait(job.save(1))

        def told(ckpt: Checkpointer) -> str:
            try:
                handle = ckpt.save(2, state_of(2, ckpt.rank))
            except Aborted as error:
                return f"raised {error.message}"
            return outcome(handle)

        loaders[3].broken = True
        begun = time.monotonic()
        texts = job.each(told)
        assert time.monotonic() - begun < 10
        assert all("rank 3" in text and "boom" in text for text in texts), texts
        assert [text.startswith("raised") for text in texts] == [False, False, False, True]
        assert latest(root) == 1

        loaders[3].broken = False
        job.wait(job.save(2))
        assert node.process is not None
        assert node.process.poll() is None
    assert latest(root) == 2


def test_s034_an_upload_that_fails_on_one_node_is_the_failure_of_every_rank(agents: Agents, tmp_path: Path) -> None:
    """Rank 1's node cannot upload: every wait() says so with the same cause, and the newest step stays as it was."""
    root = f"file://{tmp_path}/root"
    nodes = [agents.new(), agents.new(start=False)]
    nodes[1].start(env={"CKPTD_FAILPOINTS": "uploader.before_index=error:disk on fire@2"})
    with ClientJob(root, nodes, 2) as job:
        job.wait(job.save(1))
        handles = job.save(2)
        ends = [outcome(handle) for handle in handles]
        assert len(set(ends)) == 1, ends
        assert "disk on fire" in ends[0]
        assert {handle.state for handle in handles} == {"failed"}
        assert latest(root) == 1
        assert states(root)[2] is StepState.ABORTED
        job.wait(job.save(3))
    assert latest(root) == 3


def test_s037_a_failed_background_save_is_reported_once_and_the_next_one_commits(
    agents: Agents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for save 1, and it fails: save 2 warns of it once on each rank, then commits; save 3 says nothing."""
    root = f"file://{tmp_path}/root"
    node = agents.new(env={"CKPTD_FAILPOINTS": "uploader.before_index=error:disk on fire@1"})
    with caplog.at_level(logging.WARNING, "ckptd.client"), ClientJob(root, [node], 2) as job:
        first = job.save(1)
        assert all(handle.settle(30) and handle.error is not None for handle in first)
        second = job.save(2)
        texts = [record.getMessage() for record in caplog.records if record.name == "ckptd.client"]
        assert len(texts) == 2
        assert all("step 1" in text and "disk on fire" in text for text in texts), texts
        job.wait(second)
        job.wait(job.save(3))
        assert len([record for record in caplog.records if record.name == "ckptd.client"]) == 2
    assert latest(root) == 3


@contextmanager
def chunks_blocked(root: Path) -> Iterator[None]:
    """Let every put of a chunk fail: a file stands where their folder should."""
    (root / "chunks").touch()
    yield
    (root / "chunks").unlink()


@contextmanager
def read_only(root: Path) -> Iterator[None]:
    """Mount the root read-only."""
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)


def test_s038_a_failed_save_does_not_spoil_the_next_one(agents: Agents, tmp_path: Path) -> None:
    """Puts fail for good, then work again: the same agent process commits the second save; one failed, one went well."""
    root = tmp_path / "root"
    root.mkdir()
    node = agents.new()
    assert node.process is not None
    pid = node.process.pid
    with ClientJob(f"file://{root}", [node], 2) as job:
        with chunks_blocked(root):
            for handle in job.save(1):
                with pytest.raises(Aborted, match="chunks/"):
                    handle.wait(timeout=30)
        job.wait(job.save(2))
    assert (node.process.pid, node.process.poll()) == (pid, None)
    assert [event["committed"] for event in node.events("decided")] == [False, True]


@pytest.mark.root
def test_s038_a_root_that_is_read_only_for_a_while_costs_the_saves_of_that_while(
    agents: Agents, tmp_path: Path
) -> None:
    """Not even the abort can be written: wait() ends by its deadline; writable again, the step ends and the next commits."""
    root = tmp_path / "root"
    root.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(root)], check=False).returncode:
        pytest.skip("this user cannot mount a file system")
    try:
        node = agents.new()
        with ClientJob(f"file://{root}", [node], 2) as job:
            job.wait(job.save(1))
            with read_only(root):
                handles = job.save(2)
                for handle in handles:
                    with pytest.raises(Unavailable, match="not durable after 1"):
                        handle.wait(timeout=1)
                node.wait_event("store_failed")
                assert latest(f"file://{root}") == 1
            assert {outcome(handle) == "durable" for handle in handles} == {False}
            job.wait(job.save(3))
        assert latest(f"file://{root}") == 3
        node.kill()
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)
