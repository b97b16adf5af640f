"""A step whose replicas were not compared counts only with a word that stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from fixtures.at_rest import build_node, replicated_state, timeline
from fixtures.comparing import commit_of, drifting, saved, why_aborted
from fixtures.coordinated import Play

from ckptd.daemon import log_reader
from ckptd.daemon.cli.show import show
from ckptd.daemon.comparisons import Comparisons
from ckptd.daemon.keys import StepId, parse_key
from ckptd.daemon.records import parse_record
from ckptd.daemon.slabs import SlabReader
from ckptd.daemon.state_diff import diff_steps
from ckptd.daemon.step_copy import copy_step, plan_copy
from ckptd.daemon.stored_step import read_stored_step
from ckptd.daemon.verify import Verdict, verify_step
from ckptd.protos import error_pb2
from ckptd.protos.coordinator_pb2 import NodeMessage
from ckptd.protos.snapshot_pb2 import StepRef
from ckptd.storage_backends.local import LocalStore


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
