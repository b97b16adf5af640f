"""A rank that asks again for a step that a death has ended hears so at once: the others have gone on, and never ask again."""

from __future__ import annotations

from fixtures.coordinated import MESH, NODES, Play, Run

from ckptd.daemon.coordinator import effects
from ckptd.protos import error_pb2
from ckptd.protos.coordinator_pb2 import Held, NodeMessage
from ckptd.protos.error_pb2 import Error


def refusals(run: Run) -> list[tuple[str, int, int]]:
    """Return (node, step, reason) of each no-go, and forget what was said."""
    found: list[tuple[str, int, int]] = [
        (to, m.begin.step, m.begin.error.reason) for to, m in run.said if m.HasField("begin") and not m.begin.go
    ]
    run.said.clear()
    return found


def reattach(run: Run, rank: int) -> None:
    """The rank's node comes with a new agent process that holds nothing."""
    run.hello(rank, incarnation="another")


def test_a_step_whose_agent_died_before_it_was_staged_is_refused_to_the_rank_that_asks_again() -> None:
    """The step is aborted for all; the next one goes as ever."""
    run = Play().run().attach()
    run.begin(1)
    run.settle()
    reattach(run, 1)
    run.settle()
    assert run.outcomes() == {1: False}
    run.said.clear()
    run.begin(1, ranks=(1,))
    assert refusals(run) == [(NODES[1], 1, error_pb2.REASON_NODE_LOST)]
    run.begin(2)
    run.settle()
    assert run.last("begin").begin.go
    assert run.last("begin").begin.step == 2


def test_a_step_begun_before_the_coordinator_restarted_is_refused_to_the_rank_that_asks_again() -> None:
    """Node 1 has slots of it, so its rank was told go; whether rank 0 asks before or after history is read is all the same."""
    for early in (True, False):
        play = Play()
        before = play.run().attach()
        before.save(1)
        before.settle()
        before.begin(2)
        before.settle()
        again = play.run()
        again.lead.run_id = before.lead.run_id
        held = [Held(timeline=before.timeline, step=2)]
        if early:
            again.hello(0)
            again.attach(held=held)
            assert again.state.claim is None
            again.begin(2, ranks=(0,))
            again.settle()
        else:
            again.attach(held=held)
            again.settle()
            again.begin(2, ranks=(0,))
        assert refusals(again) == [(NODES[0], 2, error_pb2.REASON_ABORTED)]
        again.begin(3)
        again.settle()
        assert again.last("begin").begin.go


def test_the_same_number_in_another_run_is_no_repetition() -> None:
    """What is left of a run before does not keep the next one from saving a step of that number."""
    play = Play()
    before = play.run().attach()
    before.save(1)
    before.settle()
    before.begin(2)
    before.settle()
    after = play.run().attach(held=[Held(timeline=before.timeline, step=2)])
    after.settle()
    after.wait(10_000.0)
    after.settle()
    after.begin(2)
    after.settle()
    assert after.last("begin").begin.go


def test_a_step_that_was_adopted_is_none_of_them() -> None:
    """It is whole, so every rank had staged it: nobody asks for it again, and it counts."""
    play = Play()
    before = play.run().attach()
    before.save(1)
    before.settle()
    before.begin(2)
    before.settle()
    before.stage(2)
    indexes = [before.put(2, rank) for rank in range(2)]
    again = play.run()
    again.lead.run_id = before.lead.run_id
    again.attach(held=[Held(timeline=before.timeline, step=2, ranks=[0, 1], index=indexes[0])])
    again.settle()
    assert [ref.step for ref in again.state.listed.keeps] == [1, 2]
    assert again.state.torn == {}


# ---------------------------------------------------------------- what a broken session swallowed


def breaks(run: Run, rank: int, *held: int) -> None:
    """The session of a rank's node breaks and is made anew by the same agent; what was said to the node last is lost."""
    run.apply(effects.NodeLost(node=NODES[rank], incarnation="i"))
    run.said.clear()
    run.hello(rank, held=[Held(timeline=run.timeline, step=step, ranks=[rank]) for step in held])
    run.say(
        rank,
        attached=NodeMessage.RankAttached(rank=rank, coordinate=[rank], world=2, mesh=MESH, options=run.lead.options),
    )


def test_a_skip_that_was_lost_is_said_again_to_the_rank_that_asks_again() -> None:
    """The others have gone on: it hears at once that the step was skipped, and begins the next one with them."""
    run = Play().run(slots=1).attach()
    run.begin(1)
    run.settle()
    run.begin(2)
    run.settle()
    run.stage(1)
    run.seal(1)
    run.settle()
    breaks(run, 1)
    run.begin(2, ranks=(1,))
    assert refusals(run) == [(NODES[1], 2, error_pb2.REASON_BUSY)]
    run.begin(3)
    run.settle()
    assert (run.last("begin").begin.step, run.last("begin").begin.go) == (3, True)


def test_a_skipped_number_that_is_used_again_is_refused_as_ever() -> None:
    """Each rank has heard of the skip: this is another save under the number of one, and no repetition."""
    run = Play().run(slots=1).attach()
    run.begin(1)
    run.settle()
    run.begin(2)
    run.settle()
    breaks(run, 1, 1)
    run.begin(2, ranks=(1,))
    assert refusals(run) == [(NODES[1], 2, error_pb2.REASON_BUSY)]
    run.begin(2, ranks=(1,))
    assert refusals(run) == []
    run.begin(2, ranks=(0,))
    run.settle()
    assert refusals(run) == [(node, 2, error_pb2.REASON_INVALID_STEP) for node in NODES]


def test_a_step_that_another_rank_ended_is_refused_to_the_rank_that_never_heard_go() -> None:
    """Both its go and its end were lost with the session; the ranks that heard them never ask for it again."""
    run = Play().run().attach()
    run.begin(1)
    run.settle()
    run.say(0, failed=NodeMessage.StepFailed(timeline=run.timeline, step=1, error=Error(message="disk full")))
    run.settle()
    assert run.outcomes() == {1: False}
    breaks(run, 1)
    run.begin(1, ranks=(1,))
    [(to, answer)] = [(to, m.begin) for to, m in run.said if m.HasField("begin")]
    assert (to, answer.step, answer.go, answer.error.message) == (NODES[1], 1, False, "disk full")
    run.begin(2)
    run.settle()
    assert run.last("begin").begin.go


def test_a_step_that_a_death_ended_may_be_saved_again_once_every_rank_has_restored() -> None:
    """Nobody waits for an answer to the old question any more, and the timeline is another one."""
    play = Play()
    before = play.run().attach()
    for step in (1, 2):
        before.save(step)
        before.settle()
    before.begin(3)
    before.settle()
    again = play.run()
    again.lead.run_id = before.lead.run_id
    again.attach(held=[Held(timeline=before.timeline, step=3)])
    again.settle()
    again.begin(3, ranks=(0,))
    assert refusals(again) == [(NODES[0], 3, error_pb2.REASON_ABORTED)]
    for rank in range(2):
        again.say(rank, restore=NodeMessage.Restore(rank=rank))
    again.settle()
    for rank in range(2):
        again.say(rank, restore_ready=NodeMessage.RestoreReady(rank=rank, attempt=1))
    again.settle()
    again.begin(3)
    again.settle()
    assert (again.last("begin").begin.step, again.last("begin").begin.go) == (3, True)
