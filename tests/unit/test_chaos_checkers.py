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
from ckptd.chaos.verdict import Verdict, overall

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
    sha = {"model/w": f"w{step}", "loader": f"l{step}"}
    return [DigestList(step=step, rank=rank, when=when, loss=None, sha256=dict(sha)) for rank in (0, 1)]


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
    (6.5, "agent 0", "adopted", {"step": 4, "of": T1, "timeline": T2}),
    (7.0, "script 2", "restored", {"step": 4, "tier": "memory"}),
    (7.5, "script 2", "step", {"step": 5, "loss": "0x5"}),
    (8.0, "agent 0", "acknowledged", {"step": 6, "timeline": T2, "committed": True}),
)


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


def changed_digest(step: int, rank: int, name: str, *, when: str) -> Evidence:
    evidence = hurt()
    lists = [
        replace(entry, sha256={**entry.sha256, name: "flipped"})
        if (entry.step, entry.rank, entry.when) == (step, rank, when)
        else entry
        for entry in evidence.digests
    ]
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


VIOLATIONS: list[tuple[str, Callable[[], Case], str, str]] = [
    (
        "a bit of a tensor differs right after the restore",
        lambda: case(evidence=changed_digest(4, 1, "model/w", when="restore")),
        "same_digests",
        "first at step 4, rank 1 right after a restore: model/w differs",
    ),
    (
        "an object differs at the end",
        lambda: case(evidence=changed_digest(6, 0, "loader", when="step")),
        "same_digests",
        "first at step 6, rank 0: loader differs",
    ),
    (
        "a loss differs in its last bit",
        lambda: case(evidence=replace(hurt(), losses=(*hurt().losses[:-1], (6, "0x7")))),
        "same_losses",
        "first at step 6: 0x7 instead of 0x6",
    ),
    (
        "a step is not trained",
        lambda: case(evidence=replace(hurt(), losses=hurt().losses[:-1])),
        "same_end",
        "steps 6 were never trained",
    ),
    (
        "a state digest differs",
        lambda: case(evidence=with_root(decisions=(decision(2, T1), decision(4, T1, state="x"), decision(6, T2)))),
        "same_state_digests",
        "first at step 4: x instead of state4",
    ),
    (
        "a listed step mixes two steps",
        lambda: case(evidence=with_root(problems=("step 4: i is of step 2",))),
        "one_cut",
        "hurt run: step 4: i is of step 2",
    ),
    (
        "an acknowledged step is lost",
        lambda: case(evidence=with_root(listed=((4, T1), (6, T2)))),
        "acknowledged_kept",
        f"step 2 of {T1} was acknowledged and is not listed",
    ),
    (
        "a restart goes back behind an acknowledged step",
        lambda: case(told(*HISTORY[:9], (4.2, "agent 0", "acknowledged", {"step": 6, "timeline": T2}), *HISTORY[9:])),
        "acknowledged_kept",
        "launch 2 went on from step 4, but step 6 was acknowledged",
    ),
    (
        "a step is both committed and aborted",
        lambda: case(evidence=with_root(decisions=(*hurt().root.decisions, decision(4, T1, committed=False)))),  # type: ignore[union-attr]
        "one_decision",
        f"step 4 of {T1} has 2 different decisions",
    ),
    (
        "a step is listed in two timelines",
        lambda: case(evidence=with_root(listed=((2, T1), (4, T1), (4, T2), (6, T2)))),
        "one_decision",
        "step 4 is listed in two timelines",
    ),
    (
        "an agent dies by itself",
        lambda: case(told(*HISTORY, (8.1, "harness", "agent_died", {"agent": "0", "code": 1, "by_fault": False}))),
        "deaths_explained",
        "agent 0 died by itself, exit 1",
    ),
    (
        "a process is left behind",
        lambda: case(leaks=("process 7: python",)),
        "no_leaks",
        "left behind: process 7: python",
    ),
    (
        "an agent does not end when asked",
        lambda: case(agent_ends={"agent 0": None}),
        "no_leaks",
        "agent 0 did not end on SIGTERM",
    ),
    (
        "the run does not come to its end",
        lambda: case(finished=False, why="the run did not come within 600 s"),
        "finished",
        "did not finish: the run did not come",
    ),
    ("the fault did not fire", lambda: case(fired=False), "faults_fired", "did not fire: kill rank 1"),
    (
        "the restore comes from the wrong tier",
        lambda: case(told(*HISTORY, (6.9, "agent 0", "fetched", {"bytes_by_tier": {"memory": 1, "store": 5}}))),
        "expected_restores",
        "restored from mixed, not from memory",
    ),
    (
        "the job goes on from an older step",
        lambda: case(told(*HISTORY[:15], (7.0, "script 2", "restored", {"step": 2, "tier": "memory"}), *HISTORY[16:])),
        "expected_restores",
        "went on from step 2, not from step 4",
    ),
    (
        "the step in flight is dropped",
        lambda: case(evidence=with_root(listed=((2, T1), (4, T2), (6, T2)))),
        "expected_commit",
        f"step 4 of {T1} was in flight and is not listed",
    ),
    (
        "the job dies once more than it should",
        lambda: case(launches=3),
        "expected_relaunches",
        "2 relaunches, not 1..1",
    ),
]


@pytest.mark.parametrize(("what", "build", "check", "text"), VIOLATIONS, ids=[entry[0] for entry in VIOLATIONS])
def test_a_planted_violation_turns_its_check_red(what: str, build: Callable[[], Case], check: str, text: str) -> None:
    """Each violation is found by the check that is there for it, which says what and where."""
    looked = build()
    red = not_green(looked)
    assert red[check][0] is Verdict.FAIL
    assert text in red[check][1]
    assert overall(checkers.check(looked)) is Verdict.FAIL


def test_a_fault_that_came_too_late_is_unknown_never_a_pass() -> None:
    """When the window had closed before the fault struck, nothing was proved."""
    looked = case(told(*HISTORY[:9], (4.25, "agent 0", "sealed", {"step": 4, "timeline": T1}), *HISTORY[9:]))
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


def test_an_account_of_a_new_beginning_says_step_0() -> None:
    """A job that restored nothing lost all it had trained."""
    history = told(*(entry for entry in HISTORY if entry[2] != "restored"))
    account: Account = case(history).accounts[0]
    assert (account.restored_step, account.restored_from, account.lost_steps) == (0, None, 5)
