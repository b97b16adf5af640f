"""What cannot be told is unknown, never a pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixtures.sound_case import (
    HISTORY,
    T1,
    bounded,
    case,
    decision,
    hurt,
    not_green,
    told,
    undisturbed,
    with_root,
    without,
)

from ckptd.chaos import checkers
from ckptd.chaos.checkers.case import Case
from ckptd.chaos.evidence import Evidence
from ckptd.chaos.verdict import Verdict, overall


def test_a_cost_that_cannot_be_told_is_unknown() -> None:
    """A job that never trained again has no recovery time that could be within a bound."""
    history = told(*(entry for entry in without("restored") if not (entry[1] == "script 2" and entry[2] == "step")))
    red = not_green(case(history, scenario=bounded(lost_steps_max=9, recovery_s_max=9)))
    assert red["lost_work"][0] is Verdict.UNKNOWN
    assert red["recovery_time"][0] is Verdict.UNKNOWN


def test_a_root_that_cannot_be_swept_is_unknown() -> None:
    """Nobody knows what would be left."""
    red = not_green(case(evidence=with_root(sweep_error="a newer timeline was claimed")))
    assert red == {"objects_accounted": (Verdict.UNKNOWN, "the root cannot be swept: a newer timeline was claimed")}


def test_two_undisturbed_runs_that_differ_are_unknown_with_step_and_tensors() -> None:
    """What the script does not do twice in the same way cannot be judged."""
    first = undisturbed()
    lists = [replace(e, sha256={**e.sha256, "rng": "other"}) if e.step >= 4 else e for e in first.digests]
    again = replace(first, losses=(*first.losses[:3], (4, "0x9"), *first.losses[4:]), digests=tuple(lists))
    assert not_green(replace(case(), repeat=again))["deterministic"] == (
        Verdict.UNKNOWN,
        "the script is not deterministic: two undisturbed runs differ first at step 4, loss 0x4 and 0x9; at step 4, rank 0: rng",
    )
    assert "deterministic" not in not_green(replace(case(), repeat=first))
    assert first.root is not None
    saved = replace(first.root, decisions=(decision(2, T1), decision(4, T1, state="x"), decision(6, T1)))
    red = not_green(replace(case(), repeat=replace(first, root=saved)))
    assert red["deterministic"][1].endswith(
        "differ first at step 4, the state that was saved, though "
        "losses and lists are equal: seed python's and numpy's generators too"
    )


def test_a_fault_that_came_too_late_is_unknown_never_a_pass() -> None:
    """When the window had closed before the fault struck, nothing was proved."""
    looked = case(told(*HISTORY, (4.25, "agent 0", "sealed", {"step": 4, "timeline": T1})))
    assert not_green(looked).keys() == {"faults_fired"}
    assert overall(checkers.check(looked)) is Verdict.UNKNOWN
    assert "too late" in not_green(looked)["faults_fired"][1]


def test_nothing_to_compare_is_unknown() -> None:
    """A script that prints losses of no common step, no digests and saves nothing proves nothing."""
    looked = replace(case(evidence=Evidence(losses=((9, "0x9"),))), undisturbed=Evidence(losses=()))
    assert not_green(looked)["something_was_compared"][0] is Verdict.UNKNOWN


def test_digests_that_only_the_undisturbed_run_left_are_unknown() -> None:
    """Evidence that vanished is not evidence of equality."""
    looked = case(evidence=replace(hurt(), digests=()))
    assert not_green(looked)["same_digests"][0] is Verdict.UNKNOWN


def test_a_checker_that_crashes_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in a checker never makes a case green."""

    def broken(_case: Case) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(checkers, "CHECKS", (broken,))
    assert overall(checkers.check(case())) is Verdict.UNKNOWN


def test_no_finding_at_all_is_unknown() -> None:
    """Not having looked is not a pass."""
    assert overall([]) is Verdict.UNKNOWN
