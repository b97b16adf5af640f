"""Every check, and every class of failure, is turned red by a violation that is planted for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from fixtures.sound_case import (
    HISTORY,
    RESTORED_2,
    T1,
    T2,
    Entry,
    bounded,
    case,
    changed_digest,
    decision,
    hurt,
    not_green,
    told,
    with_root,
    without,
)

from ckptd.chaos import checkers
from ckptd.chaos.checkers.case import Case
from ckptd.chaos.verdict import FailureClass, Finding, Verdict, failure_counts, overall, worst


def test_a_sound_case_passes_every_check() -> None:
    """Nothing is red, nothing is unknown, and the account says where the job went on from."""
    looked = case()
    assert not_green(looked) == {}
    assert overall(checkers.check(looked)) is Verdict.PASS
    (account,) = looked.accounts
    assert (account.step, account.restored_step, account.restored_from) == (4, 4, "memory")
    assert account.lost_steps == 1
    assert account.recovery_s == pytest.approx(3.2)


CUT_OFF_LOST: Entry = (9.0, "agent 1", "rank_lost", {"rank": 1})
CUT_OFF_STOPPED: Entry = (9.1, "agent 1", "stopped", {"flushed": True})


def cut_off_case(*after: Entry, code: int | None = 0) -> Case:
    history = told(
        *HISTORY,
        (0.5, "agent 1", "attached_local", {"rank": 1}),
        (4.4, "harness", "node_replaced", {"node": "1", "by": "1.1", "cut_off": True}),
        *after,
    )
    return case(history, agent_ends={"agent 0": 0, "agent 1": code})


def test_an_agent_that_is_cut_off_ends_its_waits() -> None:
    """What became of its ranks is said, and it ends; uploads to a store that nobody reaches may be left."""
    assert not_green(cut_off_case(CUT_OFF_LOST, CUT_OFF_STOPPED)).keys() & {"cut_off_ended", "no_leaks"} == set()
    fenced: Entry = (8.9, "agent 1", "fenced", {"timeline": T1})
    unflushed = cut_off_case(fenced, CUT_OFF_STOPPED, code=3)
    assert not_green(unflushed).keys() & {"cut_off_ended", "no_leaks"} == set()
    # A rank that came back after the run had ended waits again.
    back: Entry = (9.05, "agent 1", "attached_local", {"rank": 1})
    assert "rank 1" in not_green(cut_off_case(fenced, back, CUT_OFF_STOPPED))["cut_off_ended"][1]
    # Of an agent that was not cut off that code is no good end.
    assert "no_leaks" in not_green(case(agent_ends={"agent 0": 3}))


VIOLATIONS: list[tuple[str, Callable[[], Case], str, FailureClass, str]] = [
    (
        "a bit of one copy of a tensor differs right after the restore",
        lambda: case(evidence=changed_digest(4, 1, "model/w", when="restore")),
        "same_digests",
        FailureClass.WRONG_REPLICA,
        "first at step 4, rank 1 right after a restore: model/w differs; other ranks' copies of model/w are right",
    ),
    (
        "what only one rank has differs",
        lambda: case(evidence=changed_digest(4, 1, "rng", when="restore")),
        "same_digests",
        FailureClass.SILENT_DIVERGENCE,
        "first at step 4, rank 1 right after a restore: rng differs",
    ),
    (
        "all copies differ",
        lambda: case(evidence=changed_digest(6, None, "loader", when="step")),
        "same_digests",
        FailureClass.SILENT_DIVERGENCE,
        "first at step 6, rank 0: loader differs",
    ),
    (
        "a rank gets what another one should have",
        lambda: case(evidence=changed_digest(4, 1, "rng", when="restore", to="r4.0")),
        "same_digests",
        FailureClass.WRONG_REPLICA,
        "rng differs; it is what rank 0 should hold",
    ),
    (
        "the content is that of an older step",
        lambda: case(evidence=changed_digest(4, None, "model/w", when="restore", to="w2")),
        "same_digests",
        FailureClass.STALE_CONTENT,
        "model/w differs; it is the content of step 2",
    ),
    (
        "a tensor is missing",
        lambda: case(evidence=changed_digest(4, None, "model/w", when="restore", to=None)),
        "same_digests",
        FailureClass.SILENT_DIVERGENCE,
        "rank 0 right after a restore: model/w is missing",
    ),
    (
        "a loss differs in its last bit",
        lambda: case(evidence=replace(hurt(), losses=(*hurt().losses[:-1], (6, "0x7")))),
        "same_losses",
        FailureClass.SILENT_DIVERGENCE,
        "first at step 6: 0x7 instead of 0x6",
    ),
    (
        "a loss is that of another step",
        lambda: case(evidence=replace(hurt(), losses=(*hurt().losses[:-1], (6, "0x5")))),
        "same_losses",
        FailureClass.STALE_CONTENT,
        "first at step 6: 0x5 instead of 0x6, which is that of step 5",
    ),
    (
        "a step is not trained",
        lambda: case(evidence=replace(hurt(), losses=hurt().losses[:-1])),
        "same_end",
        FailureClass.LOST_WORK,
        "steps 6 were never trained",
    ),
    (
        "a state digest differs",
        lambda: case(evidence=with_root(decisions=(decision(2, T1), decision(4, T1, state="x"), decision(6, T2)))),
        "same_state_digests",
        FailureClass.SILENT_DIVERGENCE,
        "first at step 4: x instead of state4",
    ),
    (
        "a state digest is that of an older step",
        lambda: case(evidence=with_root(decisions=(decision(2, T1), decision(4, T1, state="state2"), decision(6, T2)))),
        "same_state_digests",
        FailureClass.STALE_CONTENT,
        "first at step 4: state2 instead of state4, which is that of step 2",
    ),
    (
        "the state digest of a torn step differs",
        lambda: case(
            evidence=with_root(
                decisions=(decision(2, T1), decision(4, T1, state="x"), decision(6, T2)),
                problems=("step 4: it holds the ranks [0], not 0..1 once each",),
                torn=((4, T1),),
            )
        ),
        "same_state_digests",
        FailureClass.TORN_SNAPSHOT,
        "first at step 4: x instead of state4; the step is torn",
    ),
    (
        "nothing is listed at the end",
        lambda: case(evidence=with_root(listed=())),
        "same_state_digests",
        FailureClass.LOST_WORK,
        "lists no step at all; the undisturbed one lists 2, 4, 6",
    ),
    (
        "a listed step mixes two steps",
        lambda: case(evidence=with_root(problems=("step 4: i is of step 2",))),
        "one_cut",
        FailureClass.TORN_SNAPSHOT,
        "hurt run: step 4: i is of step 2",
    ),
    (
        "an acknowledged step is lost",
        lambda: case(evidence=with_root(listed=((4, T1), (6, T2)))),
        "acknowledged_kept",
        FailureClass.LOST_WORK,
        f"step 2 of {T1} was acknowledged and is not listed",
    ),
    (
        "a restart goes back behind an acknowledged step",
        lambda: case(told(*HISTORY, (4.2, "agent 0", "acknowledged", {"step": 6, "timeline": T2}))),
        "acknowledged_kept",
        FailureClass.LOST_WORK,
        "launch 2 went on from step 4, but step 6 was acknowledged",
    ),
    (
        "a restart goes on from an older step than its coordinator listed",
        lambda: case(told(*without("restored", "staged"), RESTORED_2)),
        "restored_newest",
        FailureClass.LOST_WORK,
        "launch 2 went on from step 2, but step 4 was listed",
    ),
    (
        "a restart goes on from a step that nobody listed",
        lambda: case(told(*without("restored"), (7.0, "script 2", "restored", {"step": 3, "tier": "memory"}))),
        "restored_newest",
        FailureClass.LOST_WORK,
        "launch 2 restored step 3, which was not listed; there were 2, 4",
    ),
    (
        "a restart begins anew though steps are listed",
        lambda: case(told(*without("restored"))),
        "restored_newest",
        FailureClass.LOST_WORK,
        "launch 2 went on from step 0, but step 4 was listed",
    ),
    (
        "a step that was staged whole on living nodes is forgotten",
        lambda: case(told(*without("restored", "resolved"), RESTORED_2)),
        "restored_newest",
        FailureClass.LOST_WORK,
        "launch 2 went on from step 2, but all bytes of step 4 were staged on nodes that lived on",
    ),
    (
        "a step is both committed and aborted",
        lambda: case(evidence=with_root(decisions=(*hurt().root.decisions, decision(4, T1, committed=False)))),  # type: ignore[union-attr]
        "one_decision",
        FailureClass.SPLIT_HISTORY,
        f"step 4 of {T1} has 2 different decisions",
    ),
    (
        "a step is listed in two timelines",
        lambda: case(evidence=with_root(listed=((2, T1), (4, T1), (4, T2), (6, T2)))),
        "one_decision",
        FailureClass.SPLIT_HISTORY,
        "step 4 is listed in two timelines",
    ),
    (
        "a zombie acknowledges a step after the job went on without it",
        lambda: case(told(*HISTORY, (7.8, "agent 1", "acknowledged", {"step": 5, "timeline": T1, "committed": True}))),
        "zombie_without_effect",
        FailureClass.SPLIT_HISTORY,
        f"agent 1 acknowledged step 5 of {T1} after {T2} had started without it",
    ),
    (
        "the newest record is a zombie's",
        lambda: case(evidence=with_root(newest=f"log/{T1}.000000000006.json")),
        "zombie_without_effect",
        FailureClass.SPLIT_HISTORY,
        f"but {T2} is the newest timeline that started",
    ),
    (
        "an agent dies by itself",
        lambda: case(told(*HISTORY, (8.1, "harness", "agent_died", {"agent": "0", "code": 1, "by_fault": False}))),
        "deaths_explained",
        FailureClass.HARD_FAIL,
        "agent 0 died by itself, exit 1",
    ),
    (
        "a process is left behind",
        lambda: case(leaks=("process 7: python",)),
        "no_leaks",
        FailureClass.LEAK,
        "left behind: process 7: python",
    ),
    (
        "a socket is left behind",
        lambda: case(left_files={"0": ("/run/agent.sock",)}),
        "no_leaks",
        FailureClass.LEAK,
        "left behind: /run/agent.sock of node 0",
    ),
    (
        "an object stays that nothing needs",
        lambda: case(evidence=with_root(unaccounted=("chunks/aa/x", ".ckptd-tmp/y"))),
        "objects_accounted",
        FailureClass.LEAK,
        "no record needs chunks/aa/x; .ckptd-tmp/y, and no sweep deletes it",
    ),
    (
        "a sweep would delete what is needed",
        lambda: case(evidence=with_root(sweep_takes_needed=("chunks/aa/x",))),
        "objects_accounted",
        FailureClass.LOST_WORK,
        "a sweep would delete chunks/aa/x, which the newest record needs",
    ),
    (
        "an agent ends badly when asked",
        lambda: case(agent_ends={"agent 0": 4}),
        "no_leaks",
        FailureClass.HARD_FAIL,
        "ended badly on SIGTERM: agent 0 (exit 4)",
    ),
    (
        "an agent does not end when asked",
        lambda: case(agent_ends={"agent 0": None}),
        "no_hang",
        FailureClass.HARD_FAIL,
        "agent 0 did not end on SIGTERM",
    ),
    (
        "a wait does not end within its deadline",
        lambda: case(
            told(*HISTORY, (9.0, "harness", "deadline", {"what": "the next sign of progress", "seconds": 60}))
        ),
        "no_hang",
        FailureClass.HARD_FAIL,
        "the next sign of progress did not come within 60 s",
    ),
    (
        "the run does not come to its end",
        lambda: case(finished=False, why="the run did not come within 600 s"),
        "finished",
        FailureClass.HARD_FAIL,
        "did not finish: the run did not come",
    ),
    (
        "more steps are trained again than allowed",
        lambda: case(scenario=bounded(lost_steps_max=0)),
        "lost_work",
        FailureClass.LOST_WORK,
        "after kill rank 1 1 steps were trained again, at most 0 may be",
    ),
    (
        "training goes on later than allowed",
        lambda: case(scenario=bounded(recovery_s_max=3)),
        "recovery_time",
        FailureClass.SLOW_RECOVERY,
        "training went on 3.2 s after kill rank 1, not within 3 s",
    ),
    (
        "the fault did not fire",
        lambda: case(fired=False),
        "faults_fired",
        FailureClass.FAULT_MISSED,
        "did not fire: kill rank 1",
    ),
    (
        "the restore comes from the wrong tier",
        lambda: case(told(*HISTORY, (6.9, "agent 0", "fetched", {"bytes_by_tier": {"memory": 1, "store": 5}}))),
        "expected_restores",
        FailureClass.UNEXPECTED_COURSE,
        "restored from mixed, not from memory",
    ),
    (
        "the job goes on from an older step",
        lambda: case(told(*without("restored"), RESTORED_2)),
        "expected_restores",
        FailureClass.LOST_WORK,
        "went on from step 2, not from step 4",
    ),
    (
        "the step in flight is dropped",
        lambda: case(evidence=with_root(listed=((2, T1), (4, T2), (6, T2)))),
        "expected_commit",
        FailureClass.LOST_WORK,
        f"step 4 of {T1} was in flight and is not listed",
    ),
    (
        "the job dies once more than it should",
        lambda: case(launches=3),
        "expected_relaunches",
        FailureClass.UNEXPECTED_COURSE,
        "2 relaunches, not 1..1",
    ),
    (
        "an agent that was cut off leaves a rank waiting",
        lambda: cut_off_case(CUT_OFF_STOPPED),
        "cut_off_ended",
        FailureClass.HARD_FAIL,
        "agent 1 was cut off, and its event log does not say what became of rank 1",
    ),
    (
        "an agent that was cut off ends without a word",
        lambda: cut_off_case(CUT_OFF_LOST),
        "cut_off_ended",
        FailureClass.HARD_FAIL,
        "agent 1 was cut off and asked to end, and its event log does not say that it did",
    ),
    (
        "an agent that was cut off does not end",
        lambda: cut_off_case(CUT_OFF_LOST, code=None),
        "cut_off_ended",
        FailureClass.HARD_FAIL,
        "agent 1 was cut off, and did not end on SIGTERM when its ranks had ended",
    ),
]


@pytest.mark.parametrize(
    ("what", "build", "check", "failure", "text"), VIOLATIONS, ids=[entry[0] for entry in VIOLATIONS]
)
def test_a_planted_violation_turns_its_check_red(
    what: str, build: Callable[[], Case], check: str, failure: FailureClass, text: str
) -> None:
    """Each violation is found by the check that is there for it, which says what, where and of which kind."""
    looked = build()
    red = not_green(looked)
    assert red[check][0] is Verdict.FAIL
    assert text in red[check][1]
    assert {f.check: f.failure for f in checkers.check(looked)}[check] is failure
    assert overall(checkers.check(looked)) is Verdict.FAIL


def test_every_check_is_turned_red_by_a_planted_violation() -> None:
    """No check is there that nothing can fail, but for those that only ever know or do not know."""
    names = {finding.check for finding in checkers.check(case())}
    assert names - {entry[2] for entry in VIOLATIONS} == {
        "deterministic",
        "compared_after_restore",
        "something_was_compared",
        "expected_fencing",
    }


def test_every_class_of_failure_is_reached() -> None:
    """Each class of docs/chaos.md is given by some check."""
    assert {entry[3] for entry in VIOLATIONS} == set(FailureClass)


def test_the_worst_class_is_told_first() -> None:
    """A silent divergence outranks a leak, and any failure an unknown."""
    looked = case(evidence=changed_digest(4, 1, "rng", when="restore"), leaks=("process 7",))
    found = checkers.check(looked)
    assert failure_counts(found) == {FailureClass.SILENT_DIVERGENCE: 1, FailureClass.LEAK: 1}
    first = worst(found)
    assert first is not None
    assert first.check == "same_digests"


def test_a_failure_without_a_class_cannot_be_made() -> None:
    """Neither can a pass with one."""
    with pytest.raises(AssertionError, match="a failure has a class"):
        Finding(check="x", verdict=Verdict.FAIL, text="")
    with pytest.raises(AssertionError, match="a failure has a class"):
        Finding(check="x", verdict=Verdict.PASS, text="", failure=FailureClass.LEAK)
