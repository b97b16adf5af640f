"""A coordinator, or a verb, that adopts steps of another one judges its comparisons alike."""

from __future__ import annotations

from fixtures.at_rest import NOW, build_node, make_claim, replicated_state, timeline
from fixtures.comparing import drifting, saved
from fixtures.coordinated import Play, Run

from ckptd.daemon import history, log_reader
from ckptd.daemon.comparisons import Comparisons
from ckptd.daemon.keys import StepId
from ckptd.daemon.offline import write_start
from ckptd.daemon.verify import Verdict, verify_step
from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import StepRef


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
