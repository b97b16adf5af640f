"""Replicas may go uncompared in a step only on the coordinator's word, and the word only on a step that was compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import blake3
import pytest
import typer
from fixtures.at_rest import NOW, Shard, build_node, make_claim, replicated_state, timeline
from fixtures.coordinated import Play, Run
from fixtures.coordinator_walks import coordinator_walk
from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon import history, log_reader
from ckptd.daemon.cli.show import show
from ckptd.daemon.comparisons import Comparisons, parse_policy
from ckptd.daemon.coordinator.comparing import Schedule
from ckptd.daemon.keys import StepId, Timeline, decision_key, parse_key
from ckptd.daemon.offline import write_start
from ckptd.daemon.records import parse_record
from ckptd.daemon.slabs import SlabReader
from ckptd.daemon.state_diff import diff_steps
from ckptd.daemon.step_copy import copy_step, plan_copy
from ckptd.daemon.stored_step import read_stored_step
from ckptd.daemon.verify import Verdict, verify_step
from ckptd.protos import error_pb2
from ckptd.protos.coordinator_pb2 import NodeMessage
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Committed, StepRef
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.local import LocalStore

State = Mapping[int, tuple[Sequence[Shard], Mapping[str, bytes]]]
DIFFER = Error(reason=error_pb2.REASON_REPLICAS_DIFFER)


def drifting(*steps: int) -> Play:
    """Return a play whose ranks hold different values of "w" in these steps."""

    def states(node: str, own: StepId) -> State:
        return replicated_state(node, own, diverged=own.step in steps)

    return Play(states=states)


def saved(run: Run, *steps: int) -> list[int]:
    """Save steps to their ends and return those in which replicas were to be compared."""
    for step in steps:
        run.save(step)
        run.settle()
    return [step for step in steps if run.word(step) is None]


def commit_of(run: Run, step: int) -> Committed:
    """Return a step's commit as it lies in the store."""
    key = decision_key(run.state.timeline, step)
    return parse_record(run.store.get(key), key).decision.committed


def why_aborted(run: Run, step: int) -> Error:
    """Return what all nodes were told of an aborted step."""
    told = [(to, m.outcome) for to, m in run.said if m.WhichOneof("kind") == "outcome" and m.outcome.step == step]
    assert {to for to, _ in told} == {"node-a", "node-b"}
    assert len({outcome.SerializeToString(deterministic=True) for _, outcome in told}) == 1
    return told[0][1].aborted


# ---------------------------------------------------------------- the setting


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


# ---------------------------------------------------------------- when a step is compared


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


@given(
    st.integers(0, 5),
    st.lists(st.sampled_from(["commit", "abort", "differ", "restore", "layout"]), min_size=1, max_size=40),
)
def test_no_schedule_relies_on_what_was_not_committed_or_lies_behind_a_restore(every: int, events: list[str]) -> None:
    """Decisions may lag by two steps; a word always names a compared, committed step with this plan since the last reset."""
    schedule = Schedule(every=every)
    plan, good, gap = b"a", set[int](), 0
    in_flight: list[tuple[int, int, bool, str]] = []
    owed = False
    for step, event in enumerate(events):
        if event == "restore":
            schedule.reset()
            good, owed = set(), False
        if event == "layout":
            plan = bytes([plan[0] ^ 1])
            good, owed = set(), False
        word = schedule.begin(plan)
        assert (word is None) or word in good
        if every == 1 or owed or not good:
            assert word is None
        gap = 0 if word is None else gap + 1
        assert every == 0 or gap < every
        owed = owed and word is not None
        in_flight.append((step, schedule.round, word is None, event))
        if len(in_flight) > 2:
            old, begun_in, was_compared, end = in_flight.pop(0)
            if end in {"abort", "differ"}:
                differs = end == "differ"
                schedule.aborted(begun_in=begun_in, was_compared=was_compared, differs=differs)
                if begun_in == schedule.round:
                    owed = owed or was_compared
                    good = set() if differs else good
            else:
                schedule.committed(old, begun_in=begun_in, was_compared=was_compared)
                if was_compared and begun_in == schedule.round:
                    good.add(old)


def test_show_says_where_replicas_were_last_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In words, and in the record's own field names."""
    run = Play(states=replicated_state, store=LocalStore(tmp_path)).run(verify_replicas="first").attach()
    saved(run, 1, 2, 3)
    for step, said in (
        (1, "compared in this step"),
        (3, f"not compared in this step; last in step 1 of {run.timeline}"),
    ):
        with pytest.raises(typer.Exit) as ended:
            show(f"file://{tmp_path}", step)
        assert ended.value.exit_code == 0
        lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
        assert ["replicas", said] in lines
    with pytest.raises(typer.Exit):
        show(f"file://{tmp_path}", 3, json=True)
    assert json.loads(capsys.readouterr().out)["committed"]["compared_in"] == {"step": "1", "timeline": run.timeline}


def test_a_step_that_was_left_uncompared_is_copied_and_compared_with_others(tmp_path: Path) -> None:
    """Its copy is good by itself, though the step that was compared is not there; diffs see its bits, not the zeros."""
    play = drifting()
    run = play.run(verify_replicas="first").attach()
    saved(run, 1, 2, 3)
    target = LocalStore(tmp_path)
    copy_step(play.store, target, plan_copy(play.store, read_stored_step(play.store, 3)))
    _, newest = log_reader.read_newest(target)
    assert newest is not None
    assert verify_step(target, newest, newest.listed[0]).verdict is Verdict.GOOD
    before, after, copied = (
        (step, SlabReader(store, step))
        for store, step in (
            (play.store, read_stored_step(play.store, 2)),
            (play.store, read_stored_step(play.store, 3)),
            (target, read_stored_step(target, 3)),
        )
    )
    assert [diff.key.name for diff in diff_steps(before, copied, values=False).tensors] == ["v", "w"]
    assert diff_steps(after, copied).is_equal


# ---------------------------------------------------------------- who may leave fingerprints out


@pytest.mark.parametrize("before", [(), (1, 2)], ids=["nothing was compared", "an earlier step was"])
def test_fingerprints_that_are_missing_without_a_word_abort_the_step(before: tuple[int, ...]) -> None:
    """Whatever the indexes say of themselves, and of a step that would back them: the coordinator knows what it said."""
    run = drifting().run(verify_replicas="every:2").attach()
    saved(run, *before)
    run.begin(3)
    run.settle()
    run.stage(3)
    assert run.word(3) is None
    for rank, node in enumerate(("node-a", "node-b")):
        built = build_node(
            run.state.claim,
            3,
            node,
            replicated_state(node, StepId(run.state.timeline, 3)),
            base=run.state.steps[3].base,
            plan_digest=run.state.plan.digest,
            compared_in=StepRef(step=1, timeline=run.timeline),
            uncompared=True,
        )
        run.say(rank, sealed=NodeMessage.Sealed(timeline=run.timeline, step=3, index=built.put(run.store)))
    run.settle()
    assert run.outcomes()[3] is False
    assert why_aborted(run, 3).reason == error_pb2.REASON_NOT_COMPARED
    assert list(why_aborted(run, 3).ranks) == [0, 1]
    assert saved(run, 4) == [4]


def test_a_rank_that_compares_all_the_same_is_compared() -> None:
    """An older agent or client knows nothing of words; what it gives is looked at, and the record says so."""
    play = drifting(3)
    run = play.run(verify_replicas="first").attach()
    saved(run, 1)
    for step in (2, 3):
        run.begin(step)
        run.settle()
        run.stage(step)
        for rank, node in enumerate(("node-a", "node-b")):
            built = build_node(
                run.state.claim,
                step,
                node,
                play.states(node, StepId(run.state.timeline, step)),
                base=run.state.steps[step].base,
                plan_digest=run.state.plan.digest,
            )
            run.say(rank, sealed=NodeMessage.Sealed(timeline=run.timeline, step=step, index=built.put(run.store)))
        run.settle()
    assert run.word(2) is not None
    assert not commit_of(run, 2).HasField("compared_in")
    assert why_aborted(run, 3).reason == error_pb2.REASON_REPLICAS_DIFFER


@pytest.mark.parametrize(
    ("word", "plan", "known", "is_backed"),
    [
        (4, "p", Comparisons(timeline="t", step=4, plan_digest="p"), True),
        (4, "p", Comparisons(timeline="t", step=6, plan_digest="p"), True),
        (4, "p", Comparisons(timeline="t", step=6, plan_digest="p", differed=5), True),
        (4, "p", Comparisons(timeline="t", step=4, plan_digest="p", differed=5), False),
        (4, "p", Comparisons(timeline="t", step=3, plan_digest="p"), False),
        (4, "p", Comparisons(timeline="u", step=4, plan_digest="p"), False),
        (4, "p", Comparisons(timeline="t", step=4, plan_digest="q"), False),
        (4, "", Comparisons(timeline="t", step=4, plan_digest=""), False),
        (0, "p", Comparisons(timeline="t"), False),
    ],
)
def test_what_backs_a_word(word: int, plan: str, known: Comparisons, is_backed: bool) -> None:
    """A committed comparison of the same plan in the same timeline, no older than the word, and no difference since."""
    assert known.backs(StepRef(step=word, timeline="t"), plan) is is_backed


# ---------------------------------------------------------------- a coordinator that adopts


def left_behind(run: Run, *steps: int) -> None:
    """Save steps whose decisions are never written."""
    for step in steps:
        run.begin(step)
        run.settle()
    for step in steps:
        run.put(step, 0)
        run.put(step, 1)


def resumed(play: Play, policy: str = "always") -> Run:
    """Return the next run's coordinator, after it has resolved history and saved a step."""
    run = play.run(verify_replicas=policy).attach()
    run.save(100)
    run.settle()
    return run


def adopted(run: Run) -> list[object]:
    return [event.fields["step"] for event in run.log if event.kind == "adopted"]


def declined(run: Run) -> dict[object, str]:
    return {event.fields["step"]: str(event.fields["error"]) for event in run.log if event.kind == "not_adopted"}


def test_an_uncompared_step_is_adopted_on_what_the_newest_record_says() -> None:
    """As the coordinator that died would have committed it; and the new one begins with a comparison of its own."""
    play = drifting()
    run = play.run(verify_replicas="first", keep_last=1, slots=4).attach()
    saved(run, 1, 2)
    left_behind(run, 3)
    after = resumed(play, "first")
    assert adopted(after) == [3]
    assert after.word(100) is None
    _, newest = log_reader.read_newest(play.store)
    assert newest is not None
    commit = log_reader.read_committed(play.store, newest, next(ref for ref in newest.listed if ref.step == 3))
    assert commit.posthumous
    assert (commit.compared_in.step, commit.compared_in.timeline) == (1, run.timeline)
    for ref in newest.listed:
        assert verify_step(play.store, newest, ref).verdict is Verdict.GOOD


def test_a_verb_that_adopts_judges_alike() -> None:
    """`ckptd retain` and its like are starts too."""
    play = drifting()
    run = play.run(verify_replicas="first", slots=4).attach()
    saved(run, 1, 2)
    left_behind(run, 3)
    written = write_start(play.store, created_at=NOW, nonce=lambda: "f" * 12)
    assert [step.step for step in written.adopted] == [3]


def test_a_step_behind_one_that_differs_is_not_adopted_uncompared() -> None:
    """Whether the difference was found before the coordinator died, or is found by the one that adopts."""
    for is_decided in (True, False):
        play = drifting(3)
        run = play.run(verify_replicas="every:2", slots=4).attach()
        saved(run, 1, 2)
        for step in (3, 4):
            run.begin(step)
            run.settle()
        assert (run.word(3), run.word(4)) == (None, StepRef(step=1, timeline=run.timeline))
        for rank in range(2):
            run.put(4, rank)
        if is_decided:
            run.stage(3)
            run.seal(3)
            run.settle()
            assert run.outcomes()[3] is False
        else:
            for rank in range(2):
                run.put(3, rank)
        offline = write_start(play.store, created_at=NOW, nonce=lambda: "f" * 12)
        assert offline.adopted == []
        after = resumed(play)
        assert adopted(after) == []


def test_the_coordinator_that_adopts_declines_a_step_behind_a_difference() -> None:
    """And says why; a compared step behind it is adopted, and backs what follows."""
    play = drifting(3)
    run = play.run(verify_replicas="every:2", slots=6).attach()
    saved(run, 1, 2)
    left_behind(run, 3, 4, 5, 6)
    assert [run.word(step) is None for step in (3, 4, 5, 6)] == [True, False, True, False]
    after = resumed(play)
    assert adopted(after) == [5, 6]
    assert "replicas differ" in declined(after)[3]
    assert "did not compare their replicas" in declined(after)[4]


def test_a_step_whose_policy_cannot_be_known_is_not_adopted() -> None:
    """The newest record is a start record, or of a program that did not say with which plan a step was saved."""
    claim = make_claim(timeline(1))
    word = StepRef(step=1, timeline=claim.timeline)
    built = [
        build_node(claim, 2, node, replicated_state(node, StepId(timeline(1), 2)), compared_in=word, uncompared=True)
        for node in ("node-a", "node-b")
    ]
    refs, blobs = [one.ref for one in built], [one.index for one in built]
    plan = "5" * 64
    for known in (
        None,
        Comparisons(timeline=claim.timeline),
        Comparisons(timeline=claim.timeline, step=1),
        Comparisons(timeline=claim.timeline, step=1, plan_digest=plan),
    ):
        verdict = history.adoption(claim, 2, refs, blobs, (), NOW, known)
        assert isinstance(verdict, Error)
        assert verdict.reason == error_pb2.REASON_NOT_COMPARED
        assert list(verdict.ranks) == [0, 1]


def test_a_restarted_coordinator_begins_with_a_comparison() -> None:
    """It knows nothing of what was loaded or saved before it."""
    play = drifting()
    run = play.run(verify_replicas="first").attach()
    assert saved(run, 1, 2) == [1]
    again = play.run(verify_replicas="first")
    again.lead.run_id = run.lead.run_id
    again.attach().settle()
    assert again.is_running()
    assert saved(again, 3, 4) == [3]


def test_what_a_record_says_of_comparisons() -> None:
    """A compared step stands for itself, another one for the step it names; start records and other timelines for nothing."""
    play = drifting(4)
    run = play.run(verify_replicas="every:3").attach()
    saved(run, 1, 2)
    _, newest = log_reader.read_newest(play.store)
    assert newest is not None
    plan = commit_of(run, 1).plan_digest
    assert Comparisons.of_history(newest.record, {}) == Comparisons(timeline=run.timeline, step=1, plan_digest=plan)
    saved(run, 3, 4)
    _, newest = log_reader.read_newest(play.store)
    assert newest is not None
    known = Comparisons.of_history(newest.record, newest.aborted)
    assert known == Comparisons(timeline=run.timeline, step=1, plan_digest=plan, differed=4)
    foreign = {StepId(timeline(9), step.step): marker for step, marker in newest.aborted.items()}
    assert Comparisons.of_history(newest.record, foreign).differed == -1
    starts = [key for key in (info.key for info in play.store.list("log/")) if ".start." in key]
    assert parse_key(starts[0]) is not None
    start = parse_record(play.store.get(starts[0]), starts[0])
    assert Comparisons.of_history(start, {}) == Comparisons(timeline=run.timeline)


# ---------------------------------------------------------------- random walks


def has_drifted(own: StepId) -> bool:
    """Whether the ranks hold different values at a step of the walks: at every fourth or so."""
    return blake3.blake3(f"{own.step} {own.timeline}".encode()).digest()[0] < 64


def drifting_state(node: str, own: StepId) -> State:
    return replicated_state(node, own, diverged=has_drifted(own))


def unbacked(store: ObjectStore, seen: Counter[str]) -> list[str]:
    """Return what is listed in a store and should never have been committed."""
    _, newest = log_reader.read_newest(store)
    markers = [parse_record(store.get(info.key), info.key) for info in store.list("log/") if ".claim." not in info.key]
    differed = [
        (marker.timeline, marker.decision.step)
        for marker in markers
        if marker.decision.aborted.why.reason == error_pb2.REASON_REPLICAS_DIFFER
    ]
    bad = []
    for ref in newest.listed if newest is not None else ():
        commit = log_reader.read_committed(store, newest, ref)  # type: ignore[arg-type]  # there is one where it lists
        named = commit.compared_in if commit.HasField("compared_in") else ref
        seen["uncompared"] += named is not ref
        if named.timeline != ref.timeline or has_drifted(StepId(Timeline.parse(named.timeline), named.step)):
            bad.append(f"{StepId.of(ref)} is committed on {named.step}, where replicas differ")
        if any(line == ref.timeline and named.step < step < ref.step for line, step in differed):
            bad.append(f"{StepId.of(ref)} is committed behind a difference found since step {named.step}")
    return bad


def walked(seed: int, seen: Counter[str]) -> list[str]:
    """Play a random interleaving of two runs, a sweep, and ranks that drift."""
    policies = ["every:2", "first", "every:3"]
    bad, _ = coordinator_walk(
        seed,
        runs=2,
        sweeps=1,
        quarantines=False,
        seen=seen,
        policies=policies,
        states=drifting_state,
        also=lambda store: unbacked(store, seen),
    )
    return [f"seed {seed}: {text}" for text in bad]


def test_no_walk_commits_a_step_on_a_comparison_that_does_not_stand() -> None:
    """In every state of random interleavings, restarts and adoptions among them; the protocol's properties hold too."""
    seen: Counter[str] = Counter()
    for seed in range(4):
        assert not walked(seed, seen)
    print(f"seeds 0..3: {dict(seen)}")  # noqa: T201 - shown with -s, to judge the walks by
    assert seen["acked"] > 5, seen
    assert seen["uncompared"] > 5, seen
    assert seen["told aborted"] > 2, seen
    assert seen["adopted"], seen


def test_walks_find_a_coordinator_that_forgets_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do bite."""
    monkeypatch.setattr(Comparisons, "note_refused", lambda *_: None)
    for seed in range(200):
        if any("behind a difference" in text for text in walked(seed, Counter())):
            return
    pytest.fail("200 walks found nothing")
