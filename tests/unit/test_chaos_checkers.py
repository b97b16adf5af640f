"""Checkers: a sound case is green, and each violation planted into it turns exactly the right check red."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import pytest

from ckptd.chaos import checkers
from ckptd.chaos.accounts import Account, accounts
from ckptd.chaos.checkers.case import Case
from ckptd.chaos.conductor import Performance
from ckptd.chaos.evidence import DigestList, Evidence
from ckptd.chaos.history import Event, History
from ckptd.chaos.nemesis.injector import Struck
from ckptd.chaos.root import DecisionFact, RootFacts
from ckptd.chaos.scenario import Expectation, Fault, Moment, Scenario, Target
from ckptd.chaos.schedule import PlannedFault
from ckptd.chaos.verdict import FailureClass, Finding, Verdict, failure_counts, overall, worst

T1, T2 = "00000001-aaaaaaaaaaaa", "00000002-bbbbbbbbbbbb"
Entry: TypeAlias = tuple[float, str, str, Mapping[str, object]]
MOMENT = Moment(event="staged", nth=2, before="sealed")
SCENARIO = Scenario(
    name="s",
    title="t",
    faults=(Fault(do="kill", target=Target(kind="rank", which=1), at=MOMENT),),
    expect=Expectation(restored_from=("memory",), restored_step="fault", committed="fault", relaunches=(1, 1)),
)


def digests(step: int, *, when: str = "step") -> list[DigestList]:
    # A replicated tensor, a replicated object, and a generator of each rank's own.
    sha = {"model/w": f"w{step}", "loader": f"l{step}"}
    return [
        DigestList(step=step, rank=rank, when=when, loss=None, sha256=sha | {"rng": f"r{step}.{rank}"})
        for rank in (0, 1)
    ]


def decision(step: int, timeline: str, *, committed: bool = True, state: str | None = None) -> DecisionFact:
    digest = (state or f"state{step}") if committed else ""
    return DecisionFact(step=step, timeline=timeline, committed=committed, state_digest=digest, record="r")


def undisturbed() -> Evidence:
    return Evidence(
        losses=tuple((step, f"0x{step}") for step in range(1, 7)),
        digests=tuple(entry for step in (2, 4, 6) for entry in digests(step)),
        root=RootFacts(
            timelines=(T1,),
            decisions=tuple(decision(step, T1) for step in (2, 4, 6)),
            listed=((2, T1), (4, T1), (6, T1)),
            newest=f"log/{T1}.000000000006.json",
        ),
    )


def hurt() -> Evidence:
    """Killed while step 4 was being uploaded, restored from it, ended well."""
    return Evidence(
        losses=(*((step, f"0x{step}") for step in (1, 2, 3, 4, 5)), *((step, f"0x{step}") for step in (5, 6))),
        digests=(*digests(2), *digests(4), *digests(4, when="restore"), *digests(6)),
        root=RootFacts(
            timelines=(T1, T2),
            decisions=(decision(2, T1), decision(4, T1), decision(6, T2)),
            listed=((2, T1), (4, T1), (6, T2)),
            newest=f"log/{T2}.000000000006.json",
        ),
    )


def told(*entries: Entry) -> History:
    history = History()
    for t, source, kind, fields in entries:
        history.add(Event(t=t, source=source, kind=kind, fields=fields))
    return history


HISTORY: tuple[Entry, ...] = (
    (0.0, "harness", "launched", {"launch": 1}),
    (1.0, "agent 0", "claimed", {"timeline": T1}),
    (1.1, "agent 0", "resolved", {"timeline": T1, "listed": [], "adopted": []}),
    (1.2, "agent 0", "started", {"timeline": T1}),
    (2.0, "agent 0", "begun", {"step": 2, "timeline": T1}),
    (2.1, "agent 0", "staged", {"step": 2, "timeline": T1}),
    (2.2, "agent 0", "sealed", {"step": 2, "timeline": T1}),
    (2.3, "agent 0", "acknowledged", {"step": 2, "timeline": T1, "committed": True}),
    (2.4, "script 1", "step", {"step": 2, "loss": "0x2"}),
    (4.0, "agent 0", "begun", {"step": 4, "timeline": T1}),
    (4.1, "agent 0", "staged", {"step": 4, "timeline": T1}),
    (4.2, "script 1", "step", {"step": 5, "loss": "0x5"}),
    (4.3, "harness", "fault", {"do": "kill", "target": "rank 1"}),
    (4.5, "harness", "exited", {"launch": 1, "by_fault": True}),
    (5.0, "harness", "launched", {"launch": 2}),
    (6.0, "agent 0", "claimed", {"timeline": T2}),
    (6.4, "agent 0", "resolved", {"timeline": T2, "listed": [2], "adopted": [4]}),
    (6.5, "agent 0", "adopted", {"step": 4, "of": T1, "timeline": T2}),
    (6.6, "agent 0", "started", {"timeline": T2}),
    (7.0, "script 2", "restored", {"step": 4, "tier": "memory"}),
    (7.5, "script 2", "step", {"step": 5, "loss": "0x5"}),
    (7.9, "agent 0", "begun", {"step": 6, "timeline": T2}),
    (8.0, "agent 0", "acknowledged", {"step": 6, "timeline": T2, "committed": True}),
)
RESTORED_2: Entry = (7.0, "script 2", "restored", {"step": 2, "tier": "memory"})


def without(*kinds: str) -> tuple[Entry, ...]:
    return tuple(entry for entry in HISTORY if entry[2] not in kinds)


def case(
    history: History | None = None,
    *,
    evidence: Evidence | None = None,
    scenario: Scenario = SCENARIO,
    fired: bool = True,
    t: float = 4.3,
    **performance: object,
) -> Case:
    planned = PlannedFault(index=0, do="kill", kind="rank", which=1, at=MOMENT)
    fate = Struck(fault=planned, fired=fired, t=t, step=4, note="" if fired else "its moment never came")
    values: dict[str, object] = {
        "history": history or told(*HISTORY),
        "finished": True,
        "launches": 2,
        "struck": (fate,),
        "why": "",
        "agent_ends": {"agent 0": 0},
        "leaks": (),
        "shared": {},
    }
    performed = Performance(**(values | performance))  # type: ignore[arg-type]
    return Case(
        scenario=scenario,
        undisturbed=undisturbed(),
        hurt=evidence or hurt(),
        performance=performed,
        accounts=tuple(accounts(performed, nproc=2)),
    )


def not_green(looked: Case) -> dict[str, tuple[Verdict, str]]:
    found = checkers.check(looked)
    return {f.check: (f.verdict, f.text) for f in found if f.verdict is not Verdict.PASS}


def with_root(**changes: object) -> Evidence:
    evidence = hurt()
    assert evidence.root is not None
    return replace(evidence, root=replace(evidence.root, **changes))  # type: ignore[arg-type]


def changed_digest(step: int, rank: int | None, name: str, *, when: str, to: str | None = "flipped") -> Evidence:
    """Change one name's digest on one rank, or on all; `to` None removes it."""
    evidence = hurt()
    lists = []
    for entry in evidence.digests:
        if (entry.step, entry.when) == (step, when) and rank in (None, entry.rank):
            kept = {one: digest for one, digest in entry.sha256.items() if one != name}
            lists.append(replace(entry, sha256=kept if to is None else kept | {name: to}))
        else:
            lists.append(entry)
    return replace(evidence, digests=tuple(lists))


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


def test_another_launchs_right_copy_makes_no_wrong_replica() -> None:
    """A step that was right on all ranks before the fault and is wrong on all after it diverged silently."""
    evidence = changed_digest(6, None, "loader", when="step")
    before = replace(hurt(), digests=(*digests(2), *digests(4), *digests(6), *evidence.digests[4:]))
    found = {f.check: f for f in checkers.check(case(evidence=before))}["same_digests"]
    assert found.failure is FailureClass.SILENT_DIVERGENCE
    assert found.text == "first at step 6, rank 0: loader differs"


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


def bounded(**bounds: int) -> Scenario:
    return replace(SCENARIO, expect=replace(SCENARIO.expect, **bounds))  # type: ignore[arg-type]


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


def test_an_account_of_a_new_beginning_says_step_0() -> None:
    """A job that restored nothing lost all it had trained."""
    history = told(*without("restored"))
    account: Account = case(history).accounts[0]
    assert (account.restored_step, account.restored_from, account.lost_steps) == (0, None, 5)
