"""A script that prints nothing: what was saved is compared by name, and what is likely missing is named from it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ckptd.chaos import fitness
from ckptd.chaos.checkers import bits
from ckptd.chaos.checkers.saved_states import different, unseeded, wrong_states
from ckptd.chaos.conductor import Performance
from ckptd.chaos.diagnosis import Diagnosis
from ckptd.chaos.evidence import Evidence, Untracked
from ckptd.chaos.history import Event, History, said_for_script
from ckptd.chaos.judging import judge, nondeterminism
from ckptd.chaos.nemesis.injector import Struck
from ckptd.chaos.record import Record, load_record, save_record
from ckptd.chaos.report import exit_code, render_line
from ckptd.chaos.restore_diagnosis import diagnose_restore
from ckptd.chaos.root import DecisionFact, RootFacts, read_root
from ckptd.chaos.saved import SavedState
from ckptd.chaos.saved_diagnosis import diagnose_saved
from ckptd.chaos.scenario import Expectation, Fault, Moment, Scenario, Target
from ckptd.chaos.schedule import PlannedFault
from ckptd.chaos.verdict import Finding, Verdict

T1, T2 = "00000001-aaaaaaaaaaaa", "00000002-bbbbbbbbbbbb"
RESTORED, LAST = 3, 6
KINDS = {"net": "model", "adam": "optimizer", "data": "loader", "warmup": "scheduler"}
WEIGHT, MOMENT, RATE = "net/w", "adam/state/w/exp_avg", "adam/param_groups/0/lr at world 0"
DATA, WARMUP = "data/position at world 0", "warmup/last_epoch at world 0"
TORCH, PYTHON = "rng/torch at world 0", "rng/python at world 0"
NAMES = (WEIGHT, MOMENT, RATE, DATA, WARMUP, TORCH)
LOADER = Untracked(kind="loader", name="train_data in main() of train.py", type="Batches")
SCHEDULER = Untracked(kind="scheduler", name="warmup in main() of train.py", type="LambdaLR")
NOISE = Untracked(kind="generator", name="noise in main() of train.py", type="Generator")


def state(step: int, timeline: str, wrong: tuple[str, ...] = (), more: Mapping[str, str] | None = None) -> SavedState:
    names = {name: f"{name}@{step}" for name in NAMES} | dict.fromkeys(wrong, "x") | dict(more or {})
    return SavedState(step=step, timeline=timeline, names=names)


def evidence(
    states: list[SavedState], *, untracked: tuple[Untracked, ...] = (), kinds: Mapping[str, str] = KINDS
) -> Evidence:
    facts = tuple(
        DecisionFact(
            step=one.step,
            timeline=one.timeline,
            committed=True,
            state_digest=str(sorted(one.names.values())),
            record="r",
        )
        for one in states
    )
    root = RootFacts(
        timelines=(T1,),
        decisions=facts,
        listed=tuple((one.step, one.timeline) for one in states),
        saved=tuple(states),
        newest=f"log/{states[-1].timeline}.x" if states else "",
    )
    return Evidence(root=root, saves=tuple(one.step for one in states), tracked=kinds, untracked=untracked)


def undisturbed(*untracked: Untracked, kinds: Mapping[str, str] = KINDS) -> Evidence:
    return evidence([state(step, T1) for step in range(1, LAST + 1)], untracked=untracked, kinds=kinds)


def hurt(wrong: Mapping[int, tuple[str, ...]], *untracked: Untracked, kinds: Mapping[str, str] = KINDS) -> Evidence:
    states = [state(step, T1 if step <= RESTORED else T2, wrong.get(step, ())) for step in range(1, LAST + 1)]
    return evidence(states, untracked=untracked, kinds=kinds)


def history(*, restored: int | None = RESTORED, asked: bool = False, first: int | None = None) -> History:
    """Launch 1 saves steps 1 to 3, launch 2 goes on from there; or from `first`, whatever it restored."""
    told = History()

    def say(t: float, source: str, kind: str, **fields: object) -> None:
        told.add(Event(t=t, source=source, kind=kind, fields=fields))

    say(0.0, "harness", "launched", launch=1)
    say(1.0, "agent 0", "claimed", timeline=T1)
    for step in range(1, RESTORED + 1):
        say(1.0 + step, "client 0", "save_returned", rank=0, step=step)
        say(1.0 + step, "script 1", "step", step=step)
        say(1.1 + step, "agent 0", "acknowledged", step=step, timeline=T1, committed=True)
    say(5.0, "harness", "fault", do="kill", fired=True)
    say(6.0, "harness", "launched", launch=2)
    say(7.0, "agent 0", "claimed", timeline=T2)
    say(7.5, "agent 0", "resolved", timeline=T2, listed=list(range(1, RESTORED + 1)), adopted=[])
    if asked:
        say(7.6, "agent 0", "restore_chosen", step=None)
    if restored is not None:
        say(8.0, "script 2", "restored", step=restored, tier="memory")
    for step in range((restored or 0) + 1 if first is None else first, LAST + 1):
        say(8.0 + step, "client 0", "save_returned", rank=0, step=step)
        say(8.0 + step, "script 2", "step", step=step)
    return told


def found(wrong: Mapping[int, tuple[str, ...]], *untracked: Untracked, without: str = "") -> Diagnosis:
    kinds = {name: kind for name, kind in KINDS.items() if kind != without}
    diagnosis = diagnose_saved(
        undisturbed(*untracked, kinds=kinds), hurt(wrong, *untracked, kinds=kinds), history(), repeated=True
    )
    assert diagnosis is not None
    return diagnosis


def test_equal_states_need_no_diagnosis() -> None:
    """Nothing diverged, nothing is said."""
    assert diagnose_saved(undisturbed(LOADER), hurt({}, LOADER), history(), repeated=True) is None


def test_other_gradients_and_an_untracked_loader_name_the_loader() -> None:
    """Launch, step, names, and the variable that holds it."""
    diagnosis = found({4: (WEIGHT, MOMENT), 5: (WEIGHT, MOMENT)}, LOADER, without="loader")
    assert (diagnosis.launch, diagnosis.step, diagnosis.restored) == (2, 4, RESTORED)
    assert diagnosis.names == (MOMENT, WEIGHT)
    assert diagnosis.cause == "loader"
    assert "Not tracked: train_data in main() of train.py (Batches)" in diagnosis.advice


def test_other_gradients_with_a_tracked_loader_name_the_generator_that_the_script_holds() -> None:
    """The loader is tracked and stands where it should: what else is random is left."""
    diagnosis = found({4: (WEIGHT, MOMENT)}, NOISE)
    assert diagnosis.cause == "generator"
    assert "noise in main() of train.py (Generator)" in diagnosis.advice


@pytest.mark.parametrize("wrong", [(RATE,), (WEIGHT,), (WEIGHT, RATE)])
def test_equal_moments_beside_other_parameters_or_rates_name_the_scheduler(wrong: tuple[str, ...]) -> None:
    """The gradients were equal, so that the data were; also where a loader and a generator are not tracked either."""
    diagnosis = found({4: wrong}, LOADER, NOISE, SCHEDULER, without="scheduler")
    assert diagnosis.cause == "scheduler"
    assert "warmup in main() of train.py (LambdaLR)" in diagnosis.advice
    assert "train_data" not in diagnosis.advice


def test_a_tracked_loader_that_stands_elsewhere_is_named_itself() -> None:
    """It has state that its state_dict() does not hold."""
    assert found({4: (WEIGHT, MOMENT, DATA)}, NOISE).cause == "loader"


def test_sparse_saves_leave_all_that_is_not_tracked_in_doubt() -> None:
    """Some steps after the restore a wrong rate has spoiled the moments too."""
    assert found({6: (WEIGHT, MOMENT)}, LOADER, SCHEDULER, without="loader").cause == "loader or scheduler"


def test_where_nothing_untracked_was_seen_the_kinds_that_are_not_tracked_are_named() -> None:
    """A loader in a closure is out of sight; that none is tracked is not."""
    diagnosis = found({4: (WEIGHT, MOMENT)}, without="loader")
    assert diagnosis.cause == "loader or generator"
    assert "No loader and no generator of its own is tracked" in diagnosis.advice


def still(timeline: str, python: str, *, moves: bool = False) -> Evidence:
    return evidence(
        [state(step, timeline, more={PYTHON: f"{python}{step if moves else ''}"}) for step in range(1, LAST + 1)]
    )


def test_a_generator_that_nobody_seeds_and_nothing_draws_from_is_left_out() -> None:
    """Python's own differs between two processes of a sound script."""
    one, other = still(T1, "a"), still(T1, "b")
    assert unseeded(one, other) == {PYTHON}
    assert list(wrong_states(one, other)) == []
    assert bits.self_difference(one, other) == ""


def test_a_generator_that_is_drawn_from_is_not_left_out() -> None:
    """Then the script is not deterministic, and says which generator to seed."""
    told = bits.self_difference(still(T1, "a", moves=True), still(T1, "b", moves=True))
    assert (
        told
        == f"two undisturbed runs differ first at step 1, saved: {PYTHON} (seed python's and numpy's generators too)"
    )


def test_a_generator_that_did_not_come_back_is_not_left_out() -> None:
    """It stands still in each launch, and is another one after the restore: nobody may take that for unseeded."""
    broken = evidence([state(step, T1, more={PYTHON: "b" if step <= RESTORED else "c"}) for step in range(1, LAST + 1)])
    (first, names), *_ = wrong_states(still(T1, "a"), broken)
    assert (first.step, names) == (1, [PYTHON])


def test_names_on_one_side_only_differ() -> None:
    """A tensor that vanished is no equal one."""
    assert different({"a": "1", "b": "2"}, {"a": "1", "c": "3"}) == ["b", "c"]


def test_a_step_in_flight_that_retention_dropped_since_is_not_lost(tmp_path: Path) -> None:
    """A script that keeps its newest step alone resumes as well as any."""
    kept = hurt({})
    assert kept.root is not None
    newest = ((LAST, T2),)
    checked = record(replace(kept, root=replace(kept.root, listed=newest, saved=kept.root.saved[-1:], keep_last=1)))
    checked.performance.history.add(  # type: ignore[union-attr]
        Event(t=2.9, source="agent 0", kind="begun", fields={"step": 3, "timeline": T1})
    )
    expecting = replace(checked, scenario=replace(checked.scenario, expect=Expectation(committed="fault")))
    assert (
        finding(expecting, "expected_commit", tmp_path).text == f"step 3 of {T1} would have been dropped by retention"
    )
    assert judge(expecting, tmp_path).verdict is Verdict.PASS


def test_what_a_stored_step_holds_goes_by_the_names_of_its_tensors_and_of_the_parts_of_its_objects() -> None:
    """Of a root as it lies in the golden files: two readings agree, and every digest is one name's own."""
    facts = read_root((Path(__file__).parent.parent / "golden" / "format-1").as_uri(), {}, by_name=True)
    assert [one.step for one in facts.saved] == [step for step, _ in facts.listed]
    names = dict(facts.saved[-1].names)
    assert {"count", "frozen", "norm", "loader/position at dp 1, tp 0"} <= names.keys()
    assert names["loader/rank at dp 0, tp 0"] != names["loader/rank at dp 0, tp 1"]
    assert read_root((Path(__file__).parent.parent / "golden" / "format-1").as_uri(), {}).saved == ()


FAULT = PlannedFault(index=0, do="kill", kind="rank", which=0, at=Moment(event="staged", nth=2))


def record(
    after: Evidence, *, told: History | None = None, fired: bool = True, launches: int = 2, preset: str = "ci"
) -> Record:
    fate = Struck(fault=FAULT, fired=fired, t=5.0, step=3, note="") if fired else Struck(fault=FAULT)
    performance = Performance(
        history=told or history(),
        finished=True,
        launches=launches,
        struck=(fate,),
        why="",
        agent_ends={"agent 0": 0},
        leaks=(),
        shared={},
    )
    planned = Fault(do="kill", target=Target(kind="rank", which=0), at=FAULT.at)
    return Record(
        scenario=Scenario(name="s", title="t", faults=(planned,)),
        nnodes=1,
        nproc=2,
        store="local",
        seed=1,
        command=("train.py",),
        undisturbed=undisturbed(LOADER),
        repeat=undisturbed(LOADER),
        hurt=after,
        performance=performance,
        preset=preset,
    )


def finding(checked: Record, check: str, out: Path) -> Finding:
    return next(one for one in judge(checked, out).findings if one.check == check)


def test_a_script_that_prints_nothing_is_judged_by_what_it_saved(tmp_path: Path) -> None:
    """Equal states pass all of bit-exactness; a planted difference fails it with step and name, also from disk."""
    good = record(hurt({}))
    assert [one for one in judge(good, tmp_path).findings if one.verdict is not Verdict.PASS] == []
    bad = record(hurt({5: (WEIGHT, MOMENT), 6: (WEIGHT,)}))
    told = finding(bad, "same_state_digests", tmp_path)
    assert told.verdict is Verdict.FAIL
    assert told.text.startswith(f"first at step 5: {MOMENT}, {WEIGHT}; state digest ")
    report = judge(bad, tmp_path)
    assert report.diagnosis is not None
    assert report.diagnosis.cause == "loader"
    assert report.replay.startswith("ckptd chaos run --preset ci --only s --nnodes 1 --nproc 2")
    save_record(bad, tmp_path)
    assert judge(load_record(tmp_path), tmp_path) == report


def test_steps_that_were_saved_count_as_trained(tmp_path: Path) -> None:
    """A hurt run that ends early is seen without a printed line."""
    short = record(replace(hurt({}), saves=(1, 2, 3, 4)))
    assert finding(short, "same_end", tmp_path).text == "steps 5, 6 were never trained"


def test_nothing_compared_after_the_restore_is_no_pass(tmp_path: Path) -> None:
    """Equal states of the time before the fault prove nothing."""
    early = record(evidence([state(step, T1) for step in range(1, RESTORED + 1)]))
    told = finding(early, "compared_after_restore", tmp_path)
    assert told.verdict is Verdict.UNKNOWN
    assert "nothing that came after launch 2 went on from step 3" in told.text


def test_losses_that_several_ranks_print_are_compared_as_one_of_the_steps() -> None:
    """Two ranks print their own; a line that is lost among others is no difference, another value is."""
    both = Evidence(losses=((1, "a"), (1, "b"), (2, "c"), (2, "d")))
    assert bits.self_difference(both, Evidence(losses=((1, "b"), (1, "a"), (2, "c")))) == ""
    assert "step 2, loss c or d and c or x" in bits.self_difference(
        both, Evidence(losses=((1, "a"), (2, "c"), (2, "x")))
    )


def test_saves_by_the_clock_are_no_ground_for_a_verdict() -> None:
    """Two undisturbed runs that save other steps cannot be told from a hurt one that lost some."""
    told = bits.self_difference(Evidence(saves=(2, 4)), Evidence(saves=(2, 5)))
    assert "step 4, which only one of them saves: save every so many steps, not by the clock" in told


def client(kind: str, **fields: object) -> Event:
    return Event(t=1.0, source="client 0", kind=kind, fields=fields)


def test_the_client_speaks_for_a_script_that_prints_nothing() -> None:
    """Of rank 0 alone: restores always, steps where they are asked for."""
    saved = client("save_returned", rank=0, step=4, skipped=True)
    told = said_for_script(saved, "script 2", with_steps=True)
    assert told == Event(t=1.0, source="script 2", kind="step", fields={"step": 4})
    assert said_for_script(saved, "script 2", with_steps=False) is None
    assert said_for_script(client("save_returned", rank=1, step=4), "script 2", with_steps=True) is None
    back = said_for_script(client("restored", rank=0, step=3, tier="store"), "script 2", with_steps=False)
    assert back == Event(t=1.0, source="script 2", kind="restored", fields={"step": 3, "tier": "store"})


def performance(*events: tuple[str, str, Mapping[str, object]], **changed: object) -> Performance:
    told = History()
    for source, kind, fields in events:
        told.add(Event(t=1.0, source=source, kind=kind, fields=fields))
    values: dict[str, object] = {"history": told, "finished": True, "launches": 1, "struck": (), "why": ""}
    values |= {"agent_ends": {}, "leaks": (), "shared": {}}
    return Performance(**(values | changed))  # type: ignore[arg-type]


ATTACHED = ("agent 0", "attached_local", {"rank": 0})
BEGUN = ("agent 0", "begun", {"step": 1})
SAVED = ("client 0", "save_returned", {"rank": 0, "step": 1, "error": "STORE_DENIED"})
EMPTY = Evidence(saves=(1,), root=RootFacts())


@pytest.mark.parametrize(
    ("went", "left", "reason", "text"),
    [
        (
            performance(finished=False, why="launch 1 died by itself: boom"),
            EMPTY,
            "fails by itself",
            "boom; it printed last:\nout",
        ),
        (performance(), Evidence(), "does not use the client", "made no Checkpointer"),
        (performance(SAVED), EMPTY, "uses another agent", "leave socket=, run_dir= and embedded= to the environment"),
        (performance(ATTACHED), Evidence(), "never saves", "never called save()"),
        (
            performance(ATTACHED, BEGUN, SAVED),
            EMPTY,
            "saves elsewhere",
            '"Checkpointer()" takes it from the environment',
        ),
        (
            performance(ATTACHED, BEGUN, SAVED),
            replace(EMPTY, root=RootFacts(timelines=(T1,))),
            "never saves",
            "called save() 1 times and nothing was committed: STORE_DENIED",
        ),
    ],
)
def test_a_script_that_cannot_be_judged_is_said_so_in_plain_words(
    went: Performance, left: Evidence, reason: str, text: str
) -> None:
    """Each reason with the way out, and what the script printed last where that helps."""
    unfit = fitness.unfit(went, left, output="out")
    assert unfit is not None
    assert unfit.reason == reason
    assert text in unfit.text


def test_a_script_that_saved_is_fit_and_a_dead_agent_is_not_its_fault() -> None:
    """Doubles of agents that tell no attachment count too."""
    good = replace(EMPTY, root=RootFacts(timelines=(T1,), listed=((1, T1),)))
    assert fitness.unfit(performance(ATTACHED, BEGUN, SAVED), good, output="") is None
    assert fitness.unfit(performance(BEGUN), Evidence(), output="") is None
    died = performance(("harness", "agent_died", {}), finished=False, why="x")
    assert fitness.unfit(died, EMPTY, output="") is None


def test_a_script_that_ends_before_the_fault_is_unknown_in_a_preset_and_a_failure_by_name(tmp_path: Path) -> None:
    """A preset is made for any script; of a scenario by its name it may be the scenario that is wrong."""
    report = judge(record(hurt({}), fired=False, launches=1), tmp_path)
    assert (report.verdict, report.unfit, report.exit_code) == (Verdict.UNKNOWN, "ends too early", 4)
    assert "kill rank 0 waits for event staged (no. 2), but the script saved 6 steps" in report.findings[0].text
    named = judge(record(hurt({}), fired=False, launches=1, preset=""), tmp_path)
    assert (named.verdict, named.exit_code) == (Verdict.FAIL, 1)
    assert exit_code([report, named]) == 1
    assert exit_code([report, judge(record(hurt({})), tmp_path)]) == 4
    assert exit_code([]) == 3


def test_two_undisturbed_runs_that_saved_other_things_are_not_deterministic(tmp_path: Path) -> None:
    """The first step and the names are said, though nothing is printed."""
    wavers = replace(record(hurt({})), repeat=hurt({2: (WEIGHT,)}))
    assert nondeterminism(wavers) == f"two undisturbed runs differ first at step 2, saved: {WEIGHT}"


def begun_anew(**how: Any) -> Record:
    """Launch 2 starts from step 1, and trains the very bits again: both timelines list them."""
    states = [state(step, T1) for step in range(1, RESTORED + 1)] + [state(step, T2) for step in range(1, LAST + 1)]
    return record(evidence(states), told=history(restored=None, **how))


def test_a_launch_that_restored_nothing_is_told_to_though_every_bit_is_right(tmp_path: Path) -> None:
    """A deterministic script that begins anew differs nowhere: what is lost is told by the launches, and first of all."""
    report = judge(begun_anew(), tmp_path)
    assert report.verdict is Verdict.FAIL
    red = {one.check: one.text for one in report.findings if one.verdict is Verdict.FAIL}
    assert red["restored_newest"] == "launch 2 went on from step 0, but step 3 was listed"
    assert "same_state_digests" not in red
    assert report.diagnosis is not None
    assert (report.diagnosis.cause, report.diagnosis.launch, report.diagnosis.step) == ("restore", 2, 1)
    assert report.diagnosis.advice.startswith(
        "launch 2 restored nothing, though step 3 was listed, and went on with step 1: call"
    )
    console = Console(file=io.StringIO(), width=300)
    render_line(report, console)
    assert "likely: restore: launch 2 restored nothing" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_restore_that_was_asked_for_and_not_given_is_not_the_scripts_fault(tmp_path: Path) -> None:
    """The coordinator answered that there is nothing, though it had found a step: nobody is told to call restore()."""
    report = judge(begun_anew(asked=True), tmp_path)
    assert report.verdict is Verdict.FAIL
    assert report.diagnosis is None


def test_a_launch_before_which_nothing_was_listed_has_nothing_to_restore() -> None:
    """To begin anew is right then."""
    told = History()
    for event in history(restored=None):
        fields = {**event.fields, "listed": []} if event.kind == "resolved" else event.fields
        told.add(replace(event, fields=fields))
    assert diagnose_restore(history(restored=None)) is not None
    assert diagnose_restore(told) is None
    assert diagnose_restore(history()) is None


@pytest.mark.parametrize("launches", [0, 1])
def test_a_run_of_one_launch_has_nothing_to_restore(launches: int) -> None:
    """Nor has one that was never launched."""
    told = History()
    for event in history(restored=None):
        if event.kind != "launched" or event.fields["launch"] <= launches:
            told.add(event)
    assert diagnose_restore(told) is None


def test_a_restored_step_that_is_not_used_is_named() -> None:
    """The state came back, and the loop began where it always does."""
    found = diagnose_restore(history(first=1))
    assert found is not None
    assert (found.cause, found.restored, found.after_restore) == ("restore", RESTORED, "not used")
    assert found.advice.startswith("launch 2 restored step 3, and went on with step 1: go on with the step after")


def test_a_step_that_is_trained_twice_names_the_loop() -> None:
    """The loop goes on with the step that came back, not with the next one."""
    told = diagnose_saved(undisturbed(), hurt_from(RESTORED), history(first=RESTORED), repeated=True)
    assert told is not None
    assert told.cause == "restore"
    assert told.advice.startswith("step 3 was trained again after step 3 was restored")


def hurt_from(first: int) -> Evidence:
    states = [state(step, T1) for step in range(1, RESTORED + 1)]
    return evidence(states + [state(step, T2, (WEIGHT,)) for step in range(first, LAST + 1)])
