"""One restore after another in a run: each is a question of its own, and what a broken session swallowed is said again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.coordinated import MESH, NODES, Play, Run
from fixtures.node_restores import chosen, node_restore

from ckptd.daemon import log_reader, restore_plan
from ckptd.daemon.any_mesh import Wanted
from ckptd.daemon.coordinator import effects
from ckptd.daemon.errors import CorruptError
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import RestoredStep, RestoreRequest
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeMessage
from ckptd.protos.error_pb2 import Error

ROTTEN = Error(reason=error_pb2.REASON_CORRUPT, message="rotten")


def saved(*steps: int) -> Play:
    """Return a job with these steps, whose run has ended."""
    play = Play()
    run = play.run().attach()
    for step in steps:
        run.save(step)
        run.settle()
    return play


def ask(run: Run, *ranks: int, **more: Any) -> None:
    run.said.clear()
    for rank in ranks:
        run.say(rank, restore=NodeMessage.Restore(rank=rank, **more))
    run.settle()


def ready(run: Run, *ranks: int, attempt: int | None = None) -> None:
    for rank in ranks:
        run.say(rank, restore_wanted=NodeMessage.RestoreWanted(rank=rank, attempt=attempt or run.state.attempts))
        run.say(rank, restore_ready=NodeMessage.RestoreReady(rank=rank, attempt=attempt or run.state.attempts))
    run.settle()


def done(run: Run, *ranks: int) -> None:
    for rank in ranks:
        run.say(rank, restore_done=NodeMessage.RestoreDone(rank=rank, attempt=run.state.attempts))
    run.settle()


def restored(run: Run, **more: Any) -> int:
    """Restore on both ranks to the end, and return the step."""
    ask(run, 0, 1, **more)
    ready(run, 0, 1)
    done(run, 0, 1)
    assert "restore_go" in run.kinds()
    return int(run.last("restore_chosen").restore_chosen.step.step)


def all_rotten(run: Run) -> Error:
    """Restore where every step that is offered is found bad, and return what the ranks are told."""
    ask(run, 0, 1)
    while run.kinds()[-1] == "restore_chosen" and run.last("restore_chosen").restore_chosen.found:
        run.say(1, restore_failed=NodeMessage.RestoreFailed(rank=1, attempt=run.state.attempts, error=ROTTEN))
        run.settle()
    return run.last("restore_error").restore_error.error


def breaks(run: Run, rank: int, restored: RestoredStep | None = None) -> None:
    """The session of a rank's node breaks and is made anew; what was said to the node last is lost."""
    run.apply(effects.NodeLost(node=NODES[rank], incarnation="i"))
    run.said.clear()
    run.hello(rank)
    run.say(
        rank,
        attached=NodeMessage.RankAttached(
            rank=rank, coordinate=[rank], world=2, mesh=MESH, options=run.lead.options, restored=restored
        ),
    )


def newest(run: Run) -> RestoredStep:
    ref = run.state.listed.newest()
    return RestoredStep(step=ref.step, timeline=ref.timeline)


def told(run: Run, rank: int) -> list[str]:
    return [kind for kind in run.kinds(NODES[rank]) if kind.startswith("restore")]


def listed(play: Play) -> list[int]:
    _, newest = log_reader.read_newest(play.store)
    assert newest is not None
    return [ref.step for ref in newest.listed]


# ---------------------------------------------------------------- no good step


def test_steps_that_were_all_found_bad_are_an_error_each_time_and_never_nothing() -> None:
    """Neither the same run nor the next one is told that there is nothing, and no record lists nothing."""
    play = saved(1, 2)
    run = play.run().attach()
    for _ in range(2):
        error = all_rotten(run)
        assert (error.reason, "[2, 1]" in error.message) == (error_pb2.REASON_CORRUPT, True)
    assert not run.is_running()
    assert listed(play) == [1, 2]
    assert all_rotten(play.run().attach()).reason == error_pb2.REASON_CORRUPT


def test_a_fault_that_passes_is_not_held_against_the_steps() -> None:
    """Nothing was written of what was found bad: the next restore of the run tries the newest again, and has it."""
    play = saved(1, 2)
    run = play.run().attach()
    all_rotten(run)
    assert restored(run) == 2
    assert listed(play) == [1, 2]


def test_a_step_that_was_left_before_the_restore_failed_is_not_left_in_silence() -> None:
    """Bad bytes, then another error: the next restore offers the newest again, and names it when it is left."""
    play = saved(1, 2)
    run = play.run().attach()
    ask(run, 0, 1)
    for error in (ROTTEN, Error(reason=error_pb2.REASON_STORE_FAILED, message="away")):
        run.say(1, restore_failed=NodeMessage.RestoreFailed(rank=1, attempt=run.state.attempts, error=error))
        run.settle()
    assert run.last("restore_error").restore_error.error.message == "away"
    ask(run, 0, 1)
    assert run.last("restore_chosen").restore_chosen.step.step == 2
    run.say(1, restore_failed=NodeMessage.RestoreFailed(rank=1, attempt=run.state.attempts, error=ROTTEN))
    run.settle()
    offer = run.last("restore_chosen").restore_chosen
    assert (offer.step.step, [bad.step.step for bad in offer.fell_back_from]) == (1, [2])


def test_after_a_run_that_began_from_nothing_beside_bad_steps_there_is_nothing_but_their_names() -> None:
    """It saved although it was told, and died before its first commit: it still hears of them, and the next run may start."""
    play = saved(1)
    run = play.run().attach()
    all_rotten(run)
    run.begin(1)
    run.settle()
    assert run.is_running()
    assert all_rotten(run).reason == error_pb2.REASON_CORRUPT
    for options in ({"read_only": True}, {}):
        after = play.run(**options).attach()
        ask(after, 0, 1)
        offer = after.last("restore_chosen").restore_chosen
        assert (offer.found, [bad.step.step for bad in offer.fell_back_from]) == (False, [1])


# ---------------------------------------------------------------- a new question


def test_a_second_restore_is_a_new_one_although_nodes_said_that_they_had_the_first() -> None:
    """Their sessions broke after it; whoever asks first waits for the others."""
    run = saved(1).run().attach()
    restored(run)
    breaks(run, 1, newest(run))
    ask(run, 0)
    assert told(run, 0) == []
    breaks(run, 1, newest(run))
    run.settle()
    assert told(run, 0) == []
    ask(run, 1)
    assert (told(run, 0), told(run, 1)) == (["restore_chosen"], ["restore_chosen"])


def test_a_second_restore_is_a_new_one_after_the_coordinator_came_back_too() -> None:
    """All ranks say that they have restored; then the first of them asks."""
    play = saved(1)
    before = play.run().attach()
    restored(before)
    had = newest(before)
    run = play.run()
    run.lead.run_id, run.lead.timeline = before.lead.run_id, before.timeline
    for rank in range(2):
        breaks(run, rank, had)
    run.settle()
    ask(run, 0)
    assert told(run, 0) == []
    ask(run, 1)
    assert (told(run, 0), told(run, 1)) == (["restore_chosen"], ["restore_chosen"])


@pytest.mark.parametrize("again", ["restored", "done"])
def test_a_word_of_having_copied_that_was_lost_keeps_nobody_from_asking_anew(again: str) -> None:
    """The agent says it again with its next session: in RankAttached, or by itself where the rank has asked meanwhile."""
    run = saved(1).run().attach()
    ask(run, 0, 1)
    ready(run, 0, 1)
    done(run, 1)
    breaks(run, 0, newest(run) if again == "restored" else None)
    if again == "done":
        done(run, 0)
    ask(run, 0)
    assert told(run, 0) == []
    ask(run, 1)
    assert (told(run, 0), told(run, 1)) == (["restore_chosen"], ["restore_chosen"])


def test_a_reader_that_was_told_of_nothing_is_told_of_what_was_saved_since() -> None:
    """Its agent says that the answer was had; then history is read anew, as for every restore of such a run."""
    play = Play()
    writer = play.run().attach()
    writer.settle()
    reader = play.run(read_only=True).attach()
    ask(reader, 0, 1)
    assert not reader.last("restore_chosen").restore_chosen.found
    writer.save(1)
    writer.settle()
    done(reader, 0, 1)
    assert restored(reader) == 1


def test_an_agent_says_that_a_rank_was_told_of_nothing_before_it_asks_again() -> None:
    """And says it once more after a reconnect, in the right order; a rank that was not told asks without it."""

    async def play() -> list[list[str]]:
        said: list[NodeMessage] = []
        restores, session = node_restore(said)
        heard = []
        for number in (1, 2):
            asked = asyncio.get_running_loop().create_task(restores.ask(session, RestoreRequest()))
            await asyncio.sleep(0)
            heard.append([str(one.WhichOneof("kind")) for one in said])
            said.clear()
            restores.say_again()
            heard.append([str(one.WhichOneof("kind")) for one in said])
            said.clear()
            nothing = CoordinatorMessage.RestoreChosen(attempt=number, found=False)
            restores.on_message(CoordinatorMessage(restore_chosen=nothing))
            assert not (await asked)[0].found.found
        return heard

    assert asyncio.run(play()) == [["restore"], ["restore"], ["restore_done", "restore"], ["restore_done", "restore"]]


def test_an_agent_says_again_that_a_rank_has_copied() -> None:
    """Until the coordinator is another one, which knows nothing of the attempt."""
    said: list[NodeMessage] = []

    async def play() -> None:
        restores, session = node_restore(said)
        restores._held.arena = SimpleNamespace(release=lambda _: None)  # type: ignore[assignment]
        restores.on_message(chosen(1))
        restores.done(session, 1, None)
        assert [one.restore_done.attempt for one in said] == [1]
        said.clear()
        restores.say_again()
        assert [one.restore_done.attempt for one in said] == [1]
        said.clear()
        restores.coordinator_restarted()
        restores.say_again()

    asyncio.run(play())
    assert said == []


# ---------------------------------------------------------------- what was lost with a session


def test_an_offer_that_was_lost_is_said_again_to_a_node_that_speaks_of_the_one_before() -> None:
    """An older step was chosen meanwhile; a node that has heard of it hears nothing twice."""
    run = saved(1, 2).run().attach()
    ask(run, 0, 1)
    ready(run, 1)
    run.say(0, restore_failed=NodeMessage.RestoreFailed(rank=0, attempt=1, error=ROTTEN))
    run.settle()
    breaks(run, 1)
    ready(run, 1, attempt=1)
    assert [m.restore_chosen.attempt for to, m in run.said if m.HasField("restore_chosen")] == [2]
    assert told(run, 1) == ["restore_chosen"]
    run.said.clear()
    ready(run, 0, attempt=1)
    assert told(run, 0) == []
    ready(run, 0, 1)
    assert "restore_go" in told(run, 1)


@pytest.mark.parametrize("word", ["ready", "failed"])
def test_an_error_that_was_lost_is_said_again_to_a_node_that_speaks_of_the_attempt(word: str) -> None:
    """Its ranks would wait for the end of their time; a node that has heard it, and a new question, are left alone."""
    run = saved(1).run().attach()
    ask(run, 0, 1, step=1)
    run.say(0, restore_failed=NodeMessage.RestoreFailed(rank=0, attempt=1, error=ROTTEN))
    run.settle()
    assert told(run, 1)[-1] == "restore_error"
    run.said.clear()
    ready(run, 1, attempt=1)
    assert told(run, 1) == []
    breaks(run, 1)
    if word == "ready":
        ready(run, 1, attempt=1)
    else:
        other = Error(reason=error_pb2.REASON_CORRUPT, message="rotten here too")
        run.say(1, restore_failed=NodeMessage.RestoreFailed(rank=1, attempt=1, error=other))
    assert [m.restore_error.error.message for to, m in run.said if m.HasField("restore_error")] == ["rotten"]
    assert told(run, 0) == []
    run.said.clear()
    ready(run, 1, attempt=1)
    assert told(run, 1) == []


@pytest.mark.parametrize("how", ["its indexes", "refused by the rank"])
def test_a_failure_that_was_lost_is_said_again(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Nothing else tells the coordinator: an offer that comes again does nothing where the indexes could not be read."""

    def bad(*_: object, **__: object) -> Any:
        raise CorruptError.of("one bit is wrong")

    monkeypatch.setattr(restore_plan, "load", bad)

    async def play() -> list[NodeMessage]:
        said: list[NodeMessage] = []
        restores, session = node_restore(said)
        restores._held.store = None  # type: ignore[assignment] # not reached
        restores.on_message(chosen(1))
        attempt = restores._attempt
        assert attempt is not None
        if how == "its indexes":
            await restores._load(attempt)
        else:
            refused = Error(reason=error_pb2.REASON_CORRUPT, message="one bit is wrong")
            waiting = asyncio.get_running_loop().create_task(restores.want(session, 1, Wanted(), refused))
            await asyncio.sleep(0)
            waiting.cancel()
        said.clear()
        restores.say_again()
        return said

    [again] = asyncio.run(play())
    assert (again.restore_failed.attempt, again.restore_failed.error.message) == (1, "one bit is wrong")


# ---------------------------------------------------------------- going back


@pytest.mark.parametrize("rollback", [False, True])
def test_a_run_that_goes_on_does_not_go_back_and_says_who_can(rollback: bool) -> None:
    """Its start record is written, and lists the newer steps: a restore that drops nothing is undone by the next start."""
    play = saved(800, 1000)
    run = play.run().attach()
    assert restored(run) == 1000
    ask(run, 0, 1, step=800, rollback=rollback)
    error = run.last("restore_error").restore_error.error
    assert (error.reason, error.step) == (error_pb2.REASON_INVALID_ARGUMENT, 800)
    assert "[1000]" in error.message
    assert "rollback=True" in error.hint
    assert restored(run, step=1000, rollback=rollback) == 1000
    assert restored(play.run().attach(), step=800, rollback=True) == 800
    assert listed(play) == [800]


def test_a_step_in_flight_is_not_dropped_behind_a_rollback_either() -> None:
    """It would be committed after all; without `rollback` nothing was promised of it."""
    run = saved(1).run().attach()
    restored(run)
    run.begin(2)
    run.settle()
    ask(run, 0, 1, step=1, rollback=True)
    assert "[2]" in run.last("restore_error").restore_error.error.message
    assert restored(run, step=1) == 1


def test_a_run_that_only_reads_goes_where_it_likes() -> None:
    """It drops nothing, and is asked for older steps to look at them."""
    run = saved(1, 2).run(read_only=True).attach()
    assert [restored(run), restored(run, step=1), restored(run, step=2)] == [2, 1, 2]
