"""Saves that cannot be: every rank gets one and the same error in time, nothing is lost, and the next proper save commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from fixtures.agents import AgentProcess, Agents, running_agents
from fixtures.raw_job import Job, error_of, state_of
from fixtures.raw_rank import RawRank
from fixtures.small_disk import small_disk

from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import BeginReply, Event, FailStepRequest, LayoutPart, SlotBytes
from ckptd.protos.error_pb2 import Error
from ckptd.protos.shard_table import ShardRow, build
from ckptd.protos.snapshot_pb2 import ShardTable

pytestmark = pytest.mark.integration

BEGIN_S = 3.0
SOON_S = 12.0
RANKS = 3


@pytest.fixture(scope="module")
def node() -> Iterator[AgentProcess]:
    """One agent for all that is refused: nothing of it may stay behind in it."""
    with running_agents() as made:
        yield made.new()


@pytest.fixture
def job(node: AgentProcess, tmp_path: Path) -> Iterator[Job]:
    """A run with step 1 committed; at the end it commits one more, and a new run restores that."""
    made = Job(f"file://{tmp_path}/root", [node], RANKS, begin_timeout_s=BEGIN_S)
    made.save(1)
    made.wait(1)
    yield made
    made.save(900)
    made.wait(900)
    made.detach()
    again = Job(f"file://{tmp_path}/root", [node], RANKS)
    again.check(again.restored(), 900)
    again.detach()
    assert not node.events("internal_error")


def errors_of(job: Job, call: Callable[[RawRank], object]) -> list[Error | None]:
    """Call on every rank at once, all within their deadline; returns each one's error."""

    def one(rank: RawRank) -> Error | None:
        began = time.monotonic()
        try:
            call(rank)
        except grpc.RpcError as failure:
            return error_of(failure)
        finally:
            assert time.monotonic() - began < SOON_S
        return None

    return job.each(one)


def refused(job: Job, call: Callable[[RawRank], object]) -> Error:
    """Call what must be refused on all ranks alike; returns the one error."""
    first, *others = errors_of(job, call)
    assert first is not None
    assert all(error == first for error in others)
    assert first.hint, "there must be a way out"
    return first


def save(rank: RawRank, step: int) -> BeginReply:
    """Save a step on one rank."""
    return rank.save(step, state_of(step, rank.about.rank), {})


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize("step", [10**12, 2**63, 2**64 - 1])
def test_a_step_beyond_its_twelve_digits_is_refused(job: Job, step: int) -> None:
    """INVALID_STEP with the step and the range; the run goes on."""
    error = refused(job, lambda rank: save(rank, step))
    assert (error.reason, error.step, error.phase) == (error_pb2.REASON_INVALID_STEP, step, "begin")
    assert f"step {step} is not in 0..999999999999" in error.message


def test_the_largest_step_can_be_saved(node: AgentProcess, tmp_path: Path) -> None:
    """10**12 - 1 is a step like any other: it commits and is restored."""
    job = Job(f"file://{tmp_path}/root", [node], 1)
    for step in (0, 10**12 - 1):
        job.save(step)
        job.wait(step)
    job.detach()
    again = Job(f"file://{tmp_path}/root", [node], 1)
    again.check(again.restored(), 10**12 - 1)
    again.detach()


@pytest.mark.parametrize("step", [1, 0])
def test_a_step_that_was_used_or_passed_is_refused(job: Job, step: int) -> None:
    """INVALID_STEP names the step that was begun last."""
    error = refused(job, lambda rank: save(rank, step))
    assert (error.reason, error.step) == (error_pb2.REASON_INVALID_STEP, step)
    assert "step 1 of this run was begun before" in error.message


def test_unequal_steps_are_refused_with_who_saved_which(job: Job) -> None:
    """RANKS_DISAGREE lists the ranks of each step, on all ranks; none of the steps is used up."""
    error = refused(job, lambda rank: save(rank, 5 if rank.about.rank == 1 else 6))
    assert (error.reason, list(error.ranks)) == (error_pb2.REASON_RANKS_DISAGREE, [0, 1, 2])
    assert "step 5 on ranks [1], step 6 on ranks [0, 2]" in error.message
    job.save(5)
    job.wait(5)


def test_ranks_that_do_not_save_are_named_within_the_deadline(job: Job) -> None:
    """RANKS_MISSING on the ranks that did, after begin_timeout_s and not much later."""
    began = time.monotonic()
    errors = errors_of(job, lambda rank: save(rank, 5) if rank.about.rank != 1 else None)
    assert BEGIN_S <= time.monotonic() - began < BEGIN_S + 3
    assert errors[1] is None
    assert errors[0] == errors[2]
    assert errors[0] is not None
    assert (errors[0].reason, list(errors[0].ranks)) == (error_pb2.REASON_RANKS_MISSING, [1])
    assert "save() must be called by every rank" in errors[0].hint


def test_a_step_that_is_not_there_is_not_found_and_unequal_restores_are_refused(job: Job) -> None:
    """NOT_FOUND lists the steps there are; RANKS_DISAGREE for different steps; RANKS_MISSING when some do not ask."""
    for step in (7, 10**12, 2**64 - 1):
        error = refused(job, lambda rank, step=step: rank.restore(step))  # type: ignore[misc]
        assert (error.reason, error.step) == (error_pb2.REASON_NOT_FOUND, step)
        assert f"there is no step {step}; existing steps: [1]" in error.message
    error = refused(job, lambda rank: rank.restore(rank.about.rank))
    assert error.reason == error_pb2.REASON_RANKS_DISAGREE
    errors = errors_of(job, lambda rank: rank.restore(timeout_s=1.0) if rank.about.rank else None)
    assert errors[1] is not None
    assert errors[1] == errors[2]
    assert (errors[1].reason, list(errors[1].ranks)) == (error_pb2.REASON_RANKS_MISSING, [0])


# ---------------------------------------------------------------- structures


def with_rows(change: Callable[[int, ShardRow], ShardRow | None]) -> Callable[[RawRank], object]:
    """Return a save whose first tensor was changed, by rank; None leaves it out."""

    def call(rank: RawRank) -> object:
        first, *rest = rank.rows(state_of(5, rank.about.rank))
        changed = change(rank.about.rank, first)
        return rank.begin(5, rank.put_rows([row for row in (changed, *rest) if row is not None]))

    return call


@pytest.mark.parametrize(
    ("reason", "words", "change"),
    [
        (
            "LAYOUT_MISMATCH",
            "but uint8 (7,) on rank 1",
            lambda rank, row: replace(row, global_shape=(7,)) if rank == 1 else row,
        ),
        ("LAYOUT_MISMATCH", "but int8 ", lambda rank, row: replace(row, dtype="int8") if rank == 2 else row),
        (
            "LAYOUT_MISMATCH",
            "is not inside",
            lambda rank, row: replace(row, offset=(row.offset[0] + 1,)) if rank == 2 else row,
        ),
        ("COVERAGE", "300000 elements are held by no rank", lambda rank, row: None if rank == 1 else row),
        (
            "COVERAGE",
            "overlap",
            lambda rank, row: replace(row, offset=(0,), length=(300_001,), nbytes=300_001) if not rank else row,
        ),
    ],
    ids=["shape", "dtype", "outside", "hole", "overlap"],
)
def test_unequal_structures_are_refused_before_anything_is_copied(
    job: Job, reason: str, words: str, change: Callable[[int, ShardRow], ShardRow | None]
) -> None:
    """Two shapes or dtypes of one tensor, a box outside, a hole, an overlap: the tensor and what is wrong, on all ranks."""
    error = refused(job, with_rows(change))
    assert (error_pb2.Reason.Name(error.reason), error.object) == (f"REASON_{reason}", "t0")
    assert (error.step, error.phase) == (5, "begin")
    assert words in error.message


def test_a_layout_that_is_not_what_it_says_is_refused(job: Job) -> None:
    """A layout never put, one with another digest, one whose columns do not fit: INVALID_ARGUMENT names the rank."""

    def put(rank: RawRank, rows: ShardTable) -> object:
        part = LayoutPart(session=rank.session, digest=b"0" * 32, rows=rows)
        return rank.stub.PutLayout(iter([part]), timeout=SOON_S)

    torn = build(job.ranks[0].rows(state_of(1, 0)))
    torn.nbytes.pop()
    calls: dict[str, Callable[[RawRank], object]] = {
        "the layout of step 5 was not put": lambda rank: rank.begin(5, b"0" * 32),
        "its digest does not fit its rows": lambda rank: put(rank, build(rank.rows(state_of(1, 0)))),
        "3 rows, but 2 entries in nbytes": lambda rank: put(rank, torn),
    }
    for words, call in calls.items():
        for number, error in enumerate(errors_of(job, call)):
            assert error is not None
            assert (error.reason, error.rank) == (error_pb2.REASON_INVALID_ARGUMENT, number)
            assert words in error.message


# ---------------------------------------------------------------- staging


@pytest.mark.parametrize("what", ["too long", "no trailer", "never begun", "outside"])
def test_a_rank_that_stages_nonsense_is_refused_and_fails_that_step_alone(job: Job, what: str) -> None:
    """Lengths beyond the slot, bytes that are no trailer, bytes outside the slot: that rank is told; then all hear ABORTED."""

    def call(rank: RawRank) -> object:
        state = state_of(5, rank.about.rank)
        reply = rank.begin(5, rank.put_layout(state))
        request: Any = rank.fill(reply, 5, state, {"a": b"b"})
        if rank.about.rank:
            return rank.stub.Staged(request, timeout=SOON_S)
        if what == "outside":
            part = SlotBytes(session=rank.session, step=5, slot=reply.slot, offset=1 << 40, data=b"x")
            return rank.stub.WriteSlot(iter([part]), timeout=SOON_S)
        if what == "never begun":
            request.step = 6
        elif what == "too long":
            request.trailer_bytes = 1 << 40
        else:
            request.objects_bytes, request.trailer_bytes = 0, 3
        return rank.stub.Staged(request, timeout=SOON_S)

    error, *others = errors_of(job, call)
    assert others == [None] * (RANKS - 1)
    assert error is not None
    expected = error_pb2.REASON_ABORTED if what == "never begun" else error_pb2.REASON_INVALID_ARGUMENT
    assert error.reason == expected, error
    first = job.ranks[0]
    first.stub.FailStep(FailStepRequest(session=first.session, step=5, error=error), timeout=SOON_S)
    job.wait(5, Event.ABORTED)


@pytest.mark.root
def test_full_shared_memory_is_said_in_bytes_and_the_next_save_works_after_freeing(
    agents: Agents, tmp_path: Path
) -> None:
    """NO_SPACE names the folder, the bytes needed and those free, on every rank of every node; nothing hangs or dies."""
    roomy = agents.new()
    with small_disk(tmp_path / "shm", "16m") as disk:
        tight = agents.new(start=False)
        tight.shm = disk.folder / "slots"
        tight.start()
        job = Job(f"file://{tmp_path}/root", [roomy, tight], 2, begin_timeout_s=BEGIN_S)
        disk.fill(but=1_000_000)
        for step in (1, 2):
            errors = errors_of(job, lambda rank, step=step: save(rank, step))  # type: ignore[misc]
            for rank, error in zip(job.ranks[2:], errors[2:], strict=True):
                assert error is not None
                assert (error.reason, error.object) == (error_pb2.REASON_NO_SPACE, str(tight.shm)), rank.about.rank
                numbers = [int(word) for word in error.message.replace(",", "").split() if word.isdigit()]
                needed, free = numbers
                assert needed >= sum(map(len, state_of(step, 0)))
                assert free <= 1_000_000
                assert "CKPTD_SHM_DIR" in error.hint
            for rank in job.ranks:
                told = rank.event("step", state=Event.ABORTED, step=step).step.error
                assert told.reason == error_pb2.REASON_NO_SPACE
        disk.clear()
        job.save(3)
        job.wait(3)
        job.detach()
        again = Job(f"file://{tmp_path}/root", [roomy, tight], 2)
        again.check(again.restored(), 3)
        again.detach()
        for node in (roomy, tight):
            node.kill()
