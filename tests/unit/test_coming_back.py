"""A coordinator that comes back finds what its ranks went through before, and a start finds whether a run can go on at all."""

from __future__ import annotations

import pytest
from fixtures.coordinated import MESH, NODES, Play, Run

from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import RestoredStep
from ckptd.protos.coordinator_pb2 import NodeMessage
from ckptd.protos.error_pb2 import Error


def attached(run: Run, rank: int, restored: RestoredStep | None = None) -> None:
    """A rank comes, with what it says of its last restore."""
    run.say(
        rank,
        attached=NodeMessage.RankAttached(
            rank=rank, coordinate=[rank], world=2, mesh=MESH, options=run.lead.options, restored=restored
        ),
    )


def came_back(play: Play, before: Run, restored: RestoredStep | None) -> Run:
    """Return the run's next coordinator: rank 0 has no answer yet, rank 1 says `restored`."""
    run = play.run()
    run.lead.run_id, run.lead.timeline = before.lead.run_id, before.timeline
    for rank, told in ((0, None), (1, restored)):
        run.hello(rank)
        attached(run, rank, told)
    run.settle()
    run.said.clear()
    return run


def saved(*steps: int) -> tuple[Play, Run]:
    """Return a job with these steps, and a second run of it that has claimed."""
    play = Play()
    first = play.run().attach()
    for step in steps:
        first.save(step)
        first.settle()
    run = play.run().attach()
    run.settle()
    return play, run


def newest(run: Run) -> RestoredStep:
    """Return the newest listed step, as a rank would say that it has restored it."""
    ref = run.state.listed.newest()
    return RestoredStep() if ref is None else RestoredStep(step=ref.step, timeline=ref.timeline)


def kinds(run: Run) -> list[tuple[str, str]]:
    return [(to, str(m.WhichOneof("kind"))) for to, m in run.said if str(m.WhichOneof("kind")).startswith("restore")]


# ---------------------------------------------------------------- restore


def test_a_rank_without_answer_is_not_kept_waiting_for_those_that_have_restored() -> None:
    """It alone is offered the same step, and may copy once it is ready; the others hear nothing and are not waited for."""
    play, before = saved(1, 2)
    run = came_back(play, before, newest(before))
    run.say(0, restore=NodeMessage.Restore(rank=0))
    run.settle()
    assert kinds(run) == [(NODES[0], "restore_chosen")]
    chosen = run.last("restore_chosen").restore_chosen
    assert chosen.step.step == 2
    run.say(0, restore_ready=NodeMessage.RestoreReady(rank=0, attempt=chosen.attempt))
    run.settle()
    assert (NODES[0], "restore_go") in kinds(run)


def test_what_was_restored_may_be_said_after_the_other_has_asked() -> None:
    """A rank that was still copying when the coordinator died says so when it is done."""
    play, before = saved(1)
    run = came_back(play, before, None)
    run.say(0, restore=NodeMessage.Restore(rank=0))
    run.settle()
    assert kinds(run) == []
    attached(run, 1, newest(before))
    run.settle()
    assert kinds(run) == [(NODES[0], "restore_chosen")]


def test_that_there_was_nothing_is_an_answer_too() -> None:
    """A job's first start: the rank that has not heard of it yet hears it, and begins."""
    play, before = saved()
    run = came_back(play, before, RestoredStep())
    run.say(0, restore=NodeMessage.Restore(rank=0))
    run.settle()
    assert not run.last("restore_chosen").restore_chosen.found


@pytest.mark.parametrize(
    "other", ["an older step", "another question", "it has begun to save", "it asks again", "nothing"]
)
def test_what_does_not_fit_is_no_answer(other: str) -> None:
    """One step for all ranks: where the others hold another one, or have gone on, all are waited for."""
    play, before = saved(1, 2)
    had = newest(before)
    if other == "an older step":
        had.step = 1
    elif other == "nothing":
        had = RestoredStep()
    run = came_back(play, before, had)
    if other == "it has begun to save":
        run.begin(3, ranks=(1,))
    elif other == "it asks again":
        run.say(1, restore=NodeMessage.Restore(rank=1, step=1))
    run.say(0, restore=NodeMessage.Restore(rank=0, step=1 if other == "another question" else None))
    run.settle()
    assert (NODES[0], "restore_chosen") not in kinds(run)


def test_a_step_that_others_have_restored_is_left_for_no_older_one() -> None:
    """They hold it already: the rank that cannot have it fails, whatever else is listed."""
    play, before = saved(1, 2)
    run = came_back(play, before, newest(before))
    run.say(0, restore=NodeMessage.Restore(rank=0))
    run.settle()
    attempt = run.last("restore_chosen").restore_chosen.attempt
    bad = Error(reason=error_pb2.REASON_CORRUPT, message="rotten")
    run.say(0, restore_failed=NodeMessage.RestoreFailed(rank=0, attempt=attempt, error=bad))
    run.settle()
    assert run.last("restore_error").restore_error.error.message == "rotten"
    assert [kind for _, kind in kinds(run)].count("restore_chosen") == 1


# ---------------------------------------------------------------- fenced meanwhile


def test_a_run_that_was_taken_over_hears_so_without_waiting_for_all_its_ranks() -> None:
    """The others may have heard of it before the coordinator died, and be gone for good."""
    play, before = saved(1)
    play.run(takeover=True).attach().settle()
    run = play.run()
    run.lead.run_id, run.lead.timeline = before.lead.run_id, before.timeline
    run.wait(0.5)
    run.settle()
    assert not run.closed
    run.hello(0)
    attached(run, 0)
    fenced = run.last("fenced").fenced
    assert fenced.reason == error_pb2.REASON_FENCED
    assert before.timeline in fenced.message


def test_a_coordinator_that_only_comes_back_is_not_fenced_by_its_own_claims() -> None:
    """The run's newest claim may be of a coordinator before this one that rank 0 never heard of."""
    play, before = saved(1)
    between = came_back(play, before, None)
    assert between.timeline > before.timeline
    run = came_back(play, before, None)
    assert run.state.fenced is None
    assert run.timeline > between.timeline


# ---------------------------------------------------------------- visibly alive


def test_a_run_that_has_lost_a_rank_is_not_alive() -> None:
    """Every save needs all ranks: what is left of it, on a node that hangs, say, stands in no start's way."""
    run = Play().run().attach()
    run.settle()
    assert run.state.ranks_that_go_on() == 2
    run.say(0, gone=NodeMessage.RankGone(rank=0, clean=False, why=Error(message="killed")))
    assert run.state.ranks_that_go_on() == 0
    attached(run, 0)
    assert run.state.ranks_that_go_on() == 2


def test_a_rank_that_has_ended_in_order_takes_nobody_with_it() -> None:
    """The others may have much to finish, and are not disturbed."""
    run = Play().run().attach()
    run.settle()
    run.say(0, gone=NodeMessage.RankGone(rank=0, clean=True))
    assert run.state.ranks_that_go_on() == 1


def test_a_run_that_is_half_there_is_waited_for_until_its_silent_nodes_are_given_up() -> None:
    """A node that hangs answers nobody, and its connection breaks after half a minute; then the start goes on by itself."""
    play = Play()
    play.run().attach().settle()
    second = play.run(alive=1).attach()
    second.settle()
    for _ in range(60):
        second.wait(0.5)
        second.settle()
    assert second.state.refusal is None
    second.alive = 0
    second.wait(0.5)
    second.settle()
    assert second.state.timeline.number == 2


def test_a_start_whose_ranks_have_died_meanwhile_claims_nothing() -> None:
    """One that was paused and wakes when the job has moved on finds its ranks gone: its claim would fence whoever runs now."""
    play = Play()
    play.run().attach().settle()
    second = play.run(alive=2).attach()
    second.settle()
    second.say(0, gone=NodeMessage.RankGone(rank=0, clean=False, why=Error(message="killed")))
    second.alive = 0
    second.wait(0.5)
    second.settle()
    refused = second.last("refused").refused
    assert (refused.reason, list(refused.ranks)) == (error_pb2.REASON_RANKS_MISSING, [0])
    assert [info.key for info in play.store.list("log/") if "claim" in info.key and "00000002" in info.key] == []
