"""What looks like a violation and is none: each check knows what may happen."""

from __future__ import annotations

from dataclasses import replace

from fixtures.sound_case import (
    HISTORY,
    RESTORED_2,
    SCENARIO,
    T1,
    T2,
    Entry,
    bounded,
    case,
    changed_digest,
    decision,
    digests,
    hurt,
    not_green,
    told,
    with_root,
    without,
)

from ckptd.chaos import checkers
from ckptd.chaos.accounts import Account
from ckptd.chaos.checkers.case import Case
from ckptd.chaos.scenario import Expectation
from ckptd.chaos.verdict import FailureClass, Verdict


def test_another_launchs_right_copy_makes_no_wrong_replica() -> None:
    """A step that was right on all ranks before the fault and is wrong on all after it diverged silently."""
    evidence = changed_digest(6, None, "loader", when="step")
    before = replace(hurt(), digests=(*digests(2), *digests(4), *digests(6), *evidence.digests[4:]))
    found = {f.check: f for f in checkers.check(case(evidence=before))}["same_digests"]
    assert found.failure is FailureClass.SILENT_DIVERGENCE
    assert found.text == "first at step 6, rank 0: loader differs"


def test_a_late_acknowledgement_of_a_step_that_was_found_decided_is_no_sin() -> None:
    """A zombie may say what the newer timeline knows already: the step counts."""
    late: Entry = (7.8, "agent 1", "acknowledged", {"step": 4, "timeline": T1, "committed": True})
    assert "zombie_without_effect" not in not_green(case(told(*HISTORY, late)))


def test_a_quarantined_step_is_not_the_newest_possible() -> None:
    """What was found bad is passed over, and the next older step is right."""
    bad: Entry = (6.7, "agent 0", "quarantined", {"step": 4, "timeline": T2, "of": T1})
    assert "restored_newest" not in not_green(case(told(*without("restored"), bad, RESTORED_2)))


def test_what_was_staged_on_a_lost_node_need_not_come_back() -> None:
    """Bytes that were only in the memory of a node that is gone are gone."""
    lost: Entry = (4.4, "harness", "node_replaced", {"node": "1", "by": "1.1"})
    found: Entry = (6.4, "agent 0", "resolved", {"timeline": T2, "listed": [2], "adopted": []})
    history = told(*without("restored", "resolved", "adopted"), lost, found, RESTORED_2)
    assert "restored_newest" not in not_green(case(history))


def refused_case(*sealed: int) -> Case:
    """Step 4 was staged on both ranks, sealed for some, and not adopted."""
    history = told(
        *without("restored", "resolved", "adopted"),
        *((4.05, f"agent {rank}", "staged_local", {"step": 4, "timeline": T1, "rank": rank}) for rank in (0, 1)),
        (5.5, "agent 0", "sealed-local", {"step": 4, "timeline": T1, "ranks": list(sealed)}),
        (6.3, "agent 0", "not_adopted", {"step": 4, "of": T1, "timeline": T2, "error": "replicas differ"}),
        (6.4, "agent 0", "resolved", {"timeline": T2, "listed": [2], "adopted": []}),
        RESTORED_2,
    )
    return case(history)


def test_a_step_whose_content_was_refused_need_not_come_back() -> None:
    """All of it was in the store and looked at; a step that was not uploaded is another matter."""
    assert "restored_newest" not in not_green(refused_case(0, 1))
    assert "all bytes of step 4 were staged" in not_green(refused_case(0))["restored_newest"][1]


def test_a_step_that_was_aborted_need_not_come_back() -> None:
    """Its bytes were staged, and given up."""
    aborted: Entry = (4.25, "agent 0", "decided", {"step": 4, "timeline": T1, "committed": False})
    found: Entry = (6.4, "agent 0", "resolved", {"timeline": T2, "listed": [2], "adopted": []})
    history = told(*without("restored", "resolved", "adopted"), aborted, found, RESTORED_2)
    assert "restored_newest" not in not_green(case(history))
    # The coordinator died before it could say so; the marker stands in the root.
    unsaid = told(*without("restored", "resolved", "adopted"), found, RESTORED_2)
    assert "restored_newest" in not_green(case(unsaid))
    marked = with_root(decisions=(decision(2, T1), decision(4, T1, committed=False), decision(6, T2)))
    assert "restored_newest" not in not_green(case(unsaid, evidence=marked))


def test_costs_within_their_bounds_pass_and_unbounded_ones_are_told() -> None:
    """The bound itself is allowed; without one the figure is only reported."""
    texts = {f.check: f.text for f in checkers.check(case(scenario=bounded(lost_steps_max=1, recovery_s_max=4)))}
    assert texts["lost_work"] == "1 steps trained again, at most 1 allowed after each fault"
    assert texts["recovery_time"] == "training again after 3.2 s at most, 4 s allowed"
    texts = {f.check: f.text for f in checkers.check(case())}
    assert texts["lost_work"] == "1 steps trained again, no bound given"
    assert texts["recovery_time"] == "training again after 3.2 s at most, no bound given"


def test_retention_may_drop_acknowledged_steps() -> None:
    """What the retention in the newest record cannot keep is not lost."""
    looked = case(evidence=with_root(listed=((4, T1), (6, T2)), keep_last=2))
    assert "acknowledged_kept" not in not_green(looked)


def zombie_case(*after: Entry, newest: str = T2) -> Case:
    history = told(
        (0.0, "harness", "launched", {"launch": 1}),
        (1.0, "agent 0", "claimed", {"timeline": T1}),
        (4.0, "agent 0", "begun", {"step": 4, "timeline": T1}),
        (4.4, "harness", "node_replaced", {"node": "0", "by": "0.1"}),
        (5.0, "harness", "launched", {"launch": 2}),
        (6.0, "agent 0.1", "claimed", {"timeline": T2}),
        (8.0, "harness", "fault", {"do": "continue", "target": "coordinator", "fired": True}),
        *after,
    )
    scenario = replace(SCENARIO, expect=Expectation(fenced=True))
    return case(history, scenario=scenario, evidence=with_root(newest=f"log/{newest}.000000000006.json"))


FENCED: Entry = (8.5, "agent 0", "fenced", {"timeline": T1})


def test_a_zombie_must_be_fenced_and_acknowledge_nothing() -> None:
    """Fenced and silent is green; silent alone, or an acknowledgement, or a newest record of its own, is red."""
    assert "expected_fencing" not in not_green(zombie_case(FENCED))
    assert "never said that it is fenced" in not_green(zombie_case())["expected_fencing"][1]
    acknowledged: Entry = (8.4, "agent 0", "acknowledged", {"step": 4, "timeline": T1})
    assert "acknowledged step 4 after" in not_green(zombie_case(acknowledged, FENCED))["expected_fencing"][1]
    assert "is the zombie's" in not_green(zombie_case(FENCED, newest=T1))["expected_fencing"][1]


def test_an_account_of_a_new_beginning_says_step_0() -> None:
    """A job that restored nothing lost all it had trained."""
    history = told(*without("restored"))
    account: Account = case(history).accounts[0]
    assert (account.restored_step, account.restored_from, account.lost_steps) == (0, None, 5)


def test_a_coordinator_that_is_cut_off_may_finish_until_another_one_leads() -> None:
    """What it had decided it may say; not after the newer claim."""

    def found(acknowledged_at: float) -> dict[str, tuple[Verdict, str]]:
        history = told(
            (0.0, "harness", "launched", {"launch": 1}),
            (1.0, "agent 0", "claimed", {"timeline": T1}),
            (4.3, "harness", "fault", {"do": "network", "target": "partition between coordinator and the other nodes"}),
            (4.4, "harness", "node_replaced", {"node": "0", "by": "0.1", "cut_off": True}),
            (6.0, "agent 0.1", "claimed", {"timeline": T2}),
            (acknowledged_at, "agent 0", "acknowledged", {"step": 4, "timeline": T1}),
            FENCED,
        )
        return not_green(case(history, scenario=replace(SCENARIO, expect=Expectation(fenced=True))))

    assert "expected_fencing" not in found(4.5)
    assert "acknowledged step 4 after" in found(6.1)["expected_fencing"][1]


def test_a_marker_of_abort_that_came_after_another_run_had_adopted_its_step_is_no_decision() -> None:
    """Who puts it looks at the claims, and is fenced before it tells anybody; one that was told is a split."""
    adopted = replace(decision(4, T1), record=f"log/{T2}.start.json")
    root = with_root(decisions=(decision(2, T1), adopted, decision(4, T1, committed=False), decision(6, T2)))
    assert "one_decision" not in not_green(case(told(*without("acknowledged"), FENCED), evidence=root))
    late: Entry = (7.8, "agent 0", "acknowledged", {"step": 4, "timeline": T1, "committed": False})
    looked = not_green(case(told(*HISTORY, late), evidence=root))
    assert "step 4" in looked["one_decision"][1]
