"""When the replicas of a step are compared, and what a difference ends."""

from __future__ import annotations

from functools import partial

import pytest
from fixtures.at_rest import replicated_state
from fixtures.comparing import commit_of, drifting, saved, why_aborted

from ckptd.daemon import log_reader
from ckptd.daemon.comparisons import parse_policy
from ckptd.daemon.verify import Verdict, verify_step
from ckptd.protos import error_pb2
from ckptd.protos.coordinator_pb2 import NodeMessage
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import StepRef


@pytest.mark.parametrize(
    ("text", "every"),
    [("", 1), ("always", 1), ("first", 0), ("every:1", 1), ("every:2", 2), ("every:999999", 999999)],
)
def test_policies_are_read(text: str, every: int) -> None:
    """An older client sends nothing, which is always."""
    assert parse_policy(text) == every


@pytest.mark.parametrize(
    "text", ["never", "every", "every:0", "every:01", "every:-1", "every:1000000", "FIRST", "first "]
)
def test_what_is_no_policy_is_refused(text: str) -> None:
    """With the text and what there is."""
    with pytest.raises(ValueError, match=r"always, first, every:N"):
        parse_policy(text)


@pytest.mark.parametrize(
    ("policy", "compared"),
    [("always", [1, 2, 3, 4, 5, 6, 7]), ("first", [1]), ("every:3", [1, 4, 7]), ("every:2", [1, 3, 5, 7])],
)
def test_steps_are_compared_as_the_policy_says(policy: str, compared: list[int]) -> None:
    """Every step says in its record in which one its layout was last compared; each is good; the log says it too."""
    play = drifting()
    run = play.run(verify_replicas=policy).attach()
    assert saved(run, *range(1, 8)) == compared
    _, newest = log_reader.read_newest(play.store)
    assert newest is not None
    for ref in newest.listed:
        commit = commit_of(run, ref.step)
        last = max(step for step in compared if step <= ref.step)
        assert commit.HasField("compared_in") is (ref.step not in compared)
        if ref.step not in compared:
            assert (commit.compared_in.step, commit.compared_in.timeline) == (last, run.timeline)
        assert verify_step(play.store, newest, ref).verdict is Verdict.GOOD
    assert [e.fields["step"] for e in run.log if e.kind == "begun" and e.fields["compared"]] == compared


def test_the_state_digest_does_not_depend_on_the_policy() -> None:
    """It is made of what is written: equal for one state under all of them."""
    digests = []
    for policy in ("always", "first", "every:2"):
        run = drifting().run(verify_replicas=policy).attach()
        saved(run, 1, 2, 3)
        digests.append([commit_of(run, step).state_digest for step in (1, 2, 3)])
    assert digests[0] == digests[1] == digests[2]


def test_a_replica_that_differs_is_caught_at_the_first_save() -> None:
    """Under "first": on both nodes alike, by tensor, box and ranks; and the next step is compared again."""
    run = drifting(1).run(verify_replicas="first").attach()
    assert saved(run, 1, 2, 3) == [1, 2]
    why = why_aborted(run, 1)
    assert why.reason == error_pb2.REASON_REPLICAS_DIFFER
    assert (why.object, list(why.ranks)) == ("w", [0, 1])
    assert "box [0:64]" in why.message
    assert run.outcomes() == {1: False, 2: True, 3: True}


def test_a_replica_that_differs_is_caught_at_the_nth_save() -> None:
    """Under "every:3" what drifts in step 2 is caught in step 4, and in each one from there until it is good again."""
    run = drifting(2, 3, 4, 5).run(verify_replicas="every:3").attach()
    assert saved(run, *range(1, 9)) == [1, 4, 5, 6]
    assert run.outcomes() == {1: True, 2: True, 3: True, 4: False, 5: False, 6: True, 7: True, 8: True}
    assert why_aborted(run, 4).reason == why_aborted(run, 5).reason == error_pb2.REASON_REPLICAS_DIFFER


def test_steps_that_begin_before_the_first_comparison_is_committed_are_compared() -> None:
    """It could still find that replicas differ: nothing relies on what is undecided."""
    run = drifting().run(verify_replicas="first", slots=3).attach()
    for step in (1, 2):
        run.begin(step)
        run.settle()
    assert (run.word(1), run.word(2)) == (None, None)
    for step in (1, 2):
        run.stage(step)
        run.seal(step)
        run.settle()
    assert saved(run, 3) == []
    assert run.word(3) == StepRef(step=2, timeline=run.timeline)


def test_a_comparison_that_is_under_way_counts_for_the_next_n_saves() -> None:
    """Slow uploads do not make "every:N" compare more often, and the record names the last one that was committed."""
    run = drifting().run(verify_replicas="every:2", slots=3).attach()
    assert saved(run, 1, 2) == [1]
    for step in (3, 4, 5):
        run.begin(step)
        run.settle()
    assert [run.word(step) is None for step in (3, 4, 5)] == [True, False, True]
    for step in (3, 4, 5):
        run.stage(step)
        run.seal(step)
    run.settle()
    assert run.word(4) == StepRef(step=1, timeline=run.timeline)
    assert commit_of(run, 4).compared_in.step == 3


def test_a_divergence_ends_the_steps_in_flight_that_rely_on_what_was_before_it() -> None:
    """Step 4 was begun uncompared while 3 was under way; 3 finds a difference: 4 is not committed unseen."""
    run = drifting(3).run(verify_replicas="every:2", slots=3).attach()
    saved(run, 1, 2)
    for step in (3, 4):
        run.begin(step)
        run.settle()
    assert run.word(4) is not None
    for step in (3, 4):
        run.stage(step)
        run.seal(step)
    run.settle()
    assert run.outcomes() == {1: True, 2: True, 3: False, 4: False}
    assert why_aborted(run, 4).reason == error_pb2.REASON_NOT_COMPARED
    for step in (5, 6):  # the difference takes back what was known: one comparison must be committed first
        run.begin(step)
        run.settle()
    assert (run.word(5), run.word(6)) == (None, None)


@pytest.mark.parametrize("policy", ["first", "every:3"])
def test_a_compared_step_that_is_aborted_is_made_up_for(policy: str) -> None:
    """The next one that begins is compared instead, however the first one ended."""
    run = drifting().run(verify_replicas=policy).attach()
    run.begin(1)
    run.settle()
    run.say(1, failed=NodeMessage.StepFailed(timeline=run.timeline, step=1, error=Error(message="no space")))
    run.settle()
    assert run.outcomes() == {1: False}
    assert saved(run, 2, 3, 4) == [2]
    if policy == "every:3":
        run.begin(5)
        run.settle()
        assert run.word(5) is None
        run.say(1, failed=NodeMessage.StepFailed(timeline=run.timeline, step=5, error=Error(message="no space")))
        run.settle()
        assert saved(run, 6, 7, 8) == [6]


def test_a_skipped_save_counts_for_nothing() -> None:
    """The save that is Nth and finds no slot leaves the comparison to the next one."""
    run = drifting().run(verify_replicas="every:2", slots=1).attach()
    assert saved(run, 1) == [1]
    run.begin(2)
    run.settle()
    run.begin(3)
    run.settle()
    assert [e.fields["steps"] for e in run.log if e.kind == "skipped"] == [[3]]
    run.stage(2)
    run.seal(2)
    run.settle()
    assert saved(run, 4, 5) == [4]
    assert run.word(2) is not None


def test_another_layout_is_compared_at_its_first_save_and_so_is_the_old_one_again() -> None:
    """What was equal in other boxes says nothing of these."""
    run = drifting().run(verify_replicas="first").attach()
    assert saved(run, 1, 2) == [1]
    run.relayout(partial(replicated_state, elements=32))
    assert saved(run, 3, 4) == [3]
    run.relayout(replicated_state)
    assert saved(run, 5, 6) == [5]
    assert commit_of(run, 6).plan_digest == commit_of(run, 1).plan_digest != commit_of(run, 3).plan_digest


def test_a_restore_makes_the_next_save_be_compared() -> None:
    """What was compared before says nothing of what was loaded; a step in flight across it proves nothing either."""
    run = drifting().run(verify_replicas="first", slots=3).attach()
    assert saved(run, 1, 2) == [1]
    run.begin(3)
    run.settle()
    for rank in range(2):
        run.say(rank, restore=NodeMessage.Restore(rank=rank))
    run.settle()
    attempt = run.last("restore_chosen").restore_chosen.attempt
    for rank in range(2):
        run.say(rank, restore_ready=NodeMessage.RestoreReady(rank=rank, attempt=attempt))
    run.settle()
    assert run.kinds()[-1] == "restore_go"
    run.stage(3)
    run.seal(3)
    run.settle()
    assert run.outcomes()[3]
    assert saved(run, 4, 5) == [4]


def test_a_step_in_flight_across_a_restore_backs_nothing_after_it() -> None:
    """It is compared and committed after the restore, but it holds what was before."""
    run = drifting().run(verify_replicas="first", slots=3).attach()
    run.begin(1)
    run.settle()
    run.say(0, restore=NodeMessage.Restore(rank=0))
    run.stage(1)
    run.seal(1)
    run.settle()
    assert run.outcomes() == {1: True}
    assert saved(run, 2, 3) == [2]


def test_both_nodes_hear_the_same_word() -> None:
    """Once per step, in one message."""
    run = drifting().run(verify_replicas="every:3").attach()
    saved(run, *range(1, 8))
    for step in range(1, 8):
        begins = [(to, m.begin) for to, m in run.said if m.WhichOneof("kind") == "begin" and m.begin.step == step]
        assert {to for to, _ in begins} == {"node-a", "node-b"}
        assert len({begin.SerializeToString(deterministic=True) for _, begin in begins}) == 1


def test_a_rank_with_another_policy_ends_the_start_on_all_ranks() -> None:
    """RANKS_DISAGREE with both ranks, both values and the way out."""
    run = drifting().run(verify_replicas="first")
    for rank in range(2):
        run.hello(rank)
    other = run.lead.options.__class__()
    other.CopyFrom(run.lead.options)
    other.verify_replicas = "every:5"
    for rank, options in ((0, run.lead.options), (1, other)):
        about = NodeMessage.RankAttached(rank=rank, coordinate=[rank], world=2, mesh=run.lead.mesh, options=options)
        run.say(rank, attached=about)
    for node in ("node-a", "node-b"):
        refused = [m.refused for to, m in run.said if to == node and m.WhichOneof("kind") == "refused"]
        assert [error.reason for error in refused] == [error_pb2.REASON_RANKS_DISAGREE]
        assert list(refused[0].ranks) == [0, 1]
        assert "rank 1 comes with verify_replicas 'every:5', rank 0 with 'first'" in refused[0].message
        assert "CKPTD_VERIFY_REPLICAS" in refused[0].hint


def test_no_value_and_always_are_one() -> None:
    """A rank of an older client beside a new one."""
    run = drifting().run(verify_replicas="always")
    run.hello(0)
    about = NodeMessage.RankAttached(rank=0, coordinate=[0], world=2, mesh=run.lead.mesh)
    run.say(0, attached=about)
    assert "refused" not in run.kinds()
