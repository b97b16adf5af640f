"""Faults from the field: which step is the newest, what happens when it is bad, and when there is none."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures.agents import Agents
from fixtures.client_job import ClientJob
from fixtures.raw_job import Job
from fixtures.stored_root import latest, objects_of, states, tree, unproved

from ckptd.client.errors import InvalidRequest, SnapshotNotFound
from ckptd.daemon import slot_header
from ckptd.daemon.catalog import StepState

pytestmark = pytest.mark.integration


def test_s006_zero_byte_files_of_the_newest_step_are_passed_over_with_one_warning(
    agents: Agents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All chunks of the newest step cut to nothing, node lost: each rank restores the step before and says why, once."""
    root = tmp_path / "root"
    node = agents.new()
    with ClientJob(f"file://{root}", [node], 2) as job:
        for step in (1, 2):
            job.wait(job.save(step))
    node.kill()
    node.wipe()
    node.start()
    for path in objects_of(root, 2, "chunks"):
        path.chmod(0o600)
        path.write_bytes(b"")
    with caplog.at_level(logging.WARNING, "ckptd.client"), ClientJob(f"file://{root}", [node], 2) as job:
        answers = job.restore()
        job.check(answers, 1)
        for found, _ in answers:
            assert found is not None
            assert [bad.step for bad in found.fell_back_from] == [2]
        job.wait(job.save(3))
    warnings = [record.getMessage() for record in caplog.records if record.name == "ckptd.client"]
    assert len(warnings) == 2, f"one for each rank: {warnings}"
    assert all("step 2 was left for step 1" in text and "chunks/" in text for text in warnings)
    assert states(f"file://{root}") == {
        1: StepState.COMMITTED,
        2: StepState.QUARANTINED,
        3: StepState.COMMITTED,
    }


def test_s010_at_every_moment_the_newest_step_is_there_in_full(agents: Agents, tmp_path: Path) -> None:
    """Chunks take long, records do not; whatever a reader sees as newest proves good, also after a SIGKILL."""
    root = f"file://{tmp_path}/root"
    node = agents.new(env={"CKPTD_FAILPOINTS": "uploader.before_put=delay:0.3"})
    job = Job(root, [node], 2)
    job.restored()
    draw = random.Random(10)
    seen: list[int | None] = []
    stop = threading.Event()
    failures: list[str] = []

    def poll() -> None:
        while not stop.is_set():
            seen.append(latest(root))
            if seen[-1] is not None:
                failures.extend(unproved(root, newest_only=True))
            stop.wait(0.05)

    poller = threading.Thread(target=poll)
    poller.start()
    for step in range(1, 5):
        job.save(step)
        job.wait(step)
    job.save(5)
    time.sleep(draw.uniform(0.0, 0.6))  # the moment of the fault, not a wait for anything
    assert node.kill() == -9
    job.die()
    stop.set()
    poller.join()
    assert failures == []
    assert len(set(seen)) >= 3, f"the polls must have fallen between the commits: {seen}"
    assert [step for step in seen if step is not None] == sorted(step for step in seen if step is not None)
    assert unproved(root) == []


def test_s013_steps_are_ordered_as_numbers_for_newest_and_for_retention(agents: Agents, tmp_path: Path) -> None:
    """900, 9900, 10000, 100000 with keep_last=2: newest is 100000, kept are 10000 and 100000; bad numbers are refused."""
    root = f"file://{tmp_path}/root"
    node = agents.new()
    with ClientJob(root, [node], keep_last=2) as job:
        for step in (900, 9900, 10000, 100000):
            job.wait(job.save(step))
        for wrong in (-1, 10**12, True, 1.5):
            with pytest.raises(InvalidRequest, match="0 to 999999999999"):
                job.save(wrong)  # type: ignore[arg-type]
    assert latest(root) == 100000
    assert states(root) == {10000: StepState.COMMITTED, 100000: StepState.COMMITTED}
    with ClientJob(root, [node], keep_last=2) as job:
        job.check(job.restore(), 100000)


def test_s016_a_step_that_does_not_exist_is_an_error_on_all_ranks_that_lists_those_that_do(
    agents: Agents, tmp_path: Path
) -> None:
    """restore(step=50) where 10 to 40 exist: SnapshotNotFound on both ranks, and nothing but the claim is written."""
    root = tmp_path / "root"
    node = agents.new()
    with ClientJob(f"file://{root}", [node], 2) as job:
        for step in (10, 20, 30, 40):
            job.wait(job.save(step))
    before = tree(root)
    with ClientJob(f"file://{root}", [node], 2) as job:
        for rank in [job.start(at, lambda ckpt: ckpt.restore(step=50)) for at in range(2)]:
            with pytest.raises(SnapshotNotFound, match=r"\[10, 20, 30, 40\]"):
                rank.result(timeout=30)
    new = sorted(tree(root).keys() - before.keys())
    assert all(name.endswith(".claim.json") for name in new), new
    assert latest(f"file://{root}") == 40


@pytest.mark.s3
def test_s016_a_wrong_bucket_is_said_to_be_missing_on_all_ranks(agents: Agents, fresh_root: Callable[[], str]) -> None:
    """A root in a bucket that does not exist is refused at once; the bucket is not made."""
    right = fresh_root()
    wrong = right.replace("s3://", "s3://not-")
    node = agents.new()
    begun = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"(?i)bucket"):
        ClientJob(wrong, [node], 2)
    assert time.monotonic() - begun < 20
    with ClientJob(right, [node], 2) as job:
        assert [found for found, _ in job.restore()] == [None, None]


def test_s017_a_root_that_does_not_exist_yet_gives_none_on_every_rank_and_one_line(
    agents: Agents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first run of a script: no exception, the same answer everywhere, one line of information a rank."""
    node = agents.new()
    with (
        caplog.at_level(logging.INFO, "ckptd.client"),
        ClientJob(f"file://{tmp_path}/not/yet/there", [node], 4) as job,
    ):
        assert [found for found, _ in job.restore()] == [None] * 4
        lines = [record for record in caplog.records if record.name == "ckptd.client"]
        assert [record.levelname for record in lines] == ["INFO"] * 4
        assert all("nothing to restore" in record.getMessage() for record in lines)
        job.wait(job.save(1))


def test_s025_a_newer_component_without_its_commit_is_not_mixed_in(agents: Agents, tmp_path: Path) -> None:
    """Rank 0's node has put all of step 501, rank 1's has not: every part that comes back is of step 500."""
    root = tmp_path / "root"
    nodes = [agents.new(), agents.new(start=False)]
    nodes[1].start(env={"CKPTD_FAILPOINTS": "uploader.before_put=kill@3"})
    job = Job(f"file://{root}", nodes, 1)
    job.save(500)
    job.wait(500)
    job.save(501)
    nodes[0].wait_event("sealed-local", step=501)
    assert nodes[1].process is not None
    assert nodes[1].process.wait(timeout=30) == -9, "the failpoint must have fired"
    job.die()
    assert objects_of(root, 501, "index"), "rank 0's part of step 501 must be there"
    (root / "loader-501.json").write_text(json.dumps({"position": 501}))
    nodes[1].wipe()
    nodes[1].start()
    again = Job(f"file://{root}", nodes, 1)
    again.check(again.restored(), 500)
    again.detach()


def test_s028_bytes_a_node_holds_are_used_only_when_they_prove_to_be_the_steps(agents: Agents, tmp_path: Path) -> None:
    """Swapped nodes, each with slots of the other's rank, then damaged slots: the result is that of an empty node."""
    root = f"file://{tmp_path}/root"
    nodes = [agents.new(), agents.new()]
    job = Job(root, nodes, 1)
    for step in (1, 2):
        job.save(step)
        job.wait(step)
    job.detach()

    swapped = Job(root, nodes[::-1], 1)
    answers = swapped.restored()
    swapped.check(answers, 2)
    swapped.detach()

    for path in nodes[0].shm.glob("*.slot"):
        data = bytearray(path.read_bytes())
        header = slot_header.decode(bytes(data[:4096]))
        assert header is not None
        data[header.tail_offset - header.data_bytes : header.tail_offset] = b"\x5a" * header.data_bytes
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(data[4096:])
    damaged = Job(root, nodes, 1)
    answers = damaged.restored()
    damaged.check(answers, 2)
    damaged.detach()
    fetched = nodes[0].events("fetched")[-1]["bytes_by_tier"]
    assert fetched.get("store", 0) > 0, f"the damaged slot must not have served: {fetched}"


def test_s046_a_step_saved_twice_stays_one_step_and_survives_retention(agents: Agents, tmp_path: Path) -> None:
    """Each number once in a run: the second save is refused. After a restart it replaces, and keep_last=1 keeps it."""
    root = f"file://{tmp_path}/root"
    node = agents.new()
    with ClientJob(root, [node], keep_last=1) as job:
        job.wait(job.save(100))
        with pytest.raises(InvalidRequest, match="step 100 was already used"):
            job.save(100)
    assert states(root) == {100: StepState.COMMITTED}
    with ClientJob(root, [node], keep_last=1) as job:
        job.check(job.restore(), 100)
        job.wait(job.save(100))
    assert states(root) == {100: StepState.COMMITTED}
    node.kill()
    node.wipe()
    node.start()
    with ClientJob(root, [node], keep_last=1) as job:
        job.check(job.restore(), 100)
