"""Diagnosis: the first divergence in the order of time, and the row of the decision table that fits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from ckptd.chaos.diagnosis import Diagnosis, diagnose, part_of
from ckptd.chaos.evidence import DigestList, Evidence
from ckptd.chaos.history import Event, History
from ckptd.chaos.launches import told_by_launch

NAMES = ("model/w", "optim/w/exp_avg", "rng/torch", "loader")
RESTORED = 4
LAST = 8


def sha(step: int, changed: Mapping[str, str] | None = None, names: Sequence[str] = NAMES) -> dict[str, str]:
    return {name: f"{name}@{step}" for name in names} | dict(changed or {})


def entry(step: int, when: str = "step", changed: Mapping[str, str] | None = None, **more: object) -> DigestList:
    rank = int(str(more.get("rank", 0)))
    names = more.get("names", NAMES)
    assert isinstance(names, tuple)
    return DigestList(step=step, rank=rank, when=when, loss=None, sha256=sha(step, changed, names))


def undisturbed(*, rates: bool = False, names: tuple[str, ...] = NAMES) -> Evidence:
    return Evidence(
        losses=tuple((step, f"0x{step}") for step in range(1, LAST + 1)),
        digests=tuple(entry(step, names=names) for step in range(1, LAST + 1)),
        rates=tuple((step, f"0x0.{step}") for step in range(1, LAST + 1)) if rates else (),
    )


def history(
    second: Mapping[int, str] | None = None,
    *,
    rates: Mapping[int, str] | None = None,
    first: Mapping[int, str] | None = None,
) -> History:
    """Launch 1 trains steps 1 to 5; launch 2 goes on from step 4. `first` and `second` are losses that differ."""
    told = History()
    say(told, 0.0, "harness", "launched", {"launch": 1})
    for step in range(1, 6):
        loss = (first or {}).get(step, f"0x{step}")
        say(told, float(step), "script 1", "step", {"step": step, "loss": loss, "lr": f"0x0.{step}"})
    say(told, 6.0, "harness", "launched", {"launch": 2})
    say(told, 7.0, "script 2", "restored", {"step": RESTORED, "tier": "memory"})
    for step in range(RESTORED + 1, LAST + 1):
        fields: dict[str, object] = {"step": step, "loss": (second or {}).get(step, f"0x{step}")}
        fields["lr"] = (rates or {}).get(step, f"0x0.{step}")
        say(told, 8.0 + step, "script 2", "step", fields)
    return told


def say(told: History, t: float, source: str, kind: str, fields: dict[str, object]) -> None:
    told.add(Event(t=t, source=source, kind=kind, fields=fields))


def hurt(
    *,
    restore: Mapping[str, str] | None = None,
    steps: Mapping[int, Mapping[str, str]] | None = None,
    listed: bool = True,
    first: Mapping[int, Mapping[str, str]] | None = None,
    names: tuple[str, ...] = NAMES,
    audit: tuple[str, ...] = (),
) -> Evidence:
    lists = [entry(step, changed=(first or {}).get(step), names=names) for step in range(1, 6)]
    lists += [entry(RESTORED, "restore", restore, names=names)] if listed else []
    lists += [entry(step, changed=(steps or {}).get(step), names=names) for step in range(RESTORED + 1, LAST + 1)]
    return Evidence(digests=tuple(lists), audit=audit)


def found(evidence: Evidence, told: History, whole: Evidence | None = None, *, repeated: bool = False) -> Diagnosis:
    diagnosis = diagnose(whole or undisturbed(), evidence, told, repeated=repeated)
    assert diagnosis is not None
    return diagnosis


def test_equal_runs_need_no_diagnosis() -> None:
    """Nothing diverged, nothing is said."""
    assert diagnose(undisturbed(), hurt(), history(), repeated=True) is None


def test_the_lists_of_a_rank_are_given_to_the_launches_that_wrote_them() -> None:
    """A rank that wrote nothing in the first launch is not mistaken for one that was in it."""
    late = [entry(RESTORED, "restore", rank=1), entry(5, rank=1)]
    first, second = told_by_launch(history(), [*hurt().digests, *late])
    assert [(e.rank, e.step) for e in first.steps] == [(0, step) for step in range(1, 6)]
    assert [(e.rank, e.step) for e in second.restores] == [(0, RESTORED), (1, RESTORED)]
    assert [(e.rank, e.step) for e in second.steps] == [*((0, step) for step in range(5, LAST + 1)), (1, 5)]
    assert (first.restored, second.restored) == (None, RESTORED)


def test_a_first_launch_that_goes_on_from_an_earlier_job_keeps_its_lists() -> None:
    """Its restore is its own, not the next launch's of the same step."""
    told = History()
    for launch, t in ((1, 0.0), (2, 5.0)):
        say(told, t, "harness", "launched", {"launch": launch})
        say(told, t + 1, f"script {launch}", "restored", {"step": RESTORED, "tier": "store"})
    first, second = told_by_launch(told, [entry(RESTORED, "restore"), entry(5), entry(RESTORED, "restore"), entry(5)])
    assert [(one.launch, len(one.restores), len(one.steps)) for one in (first, second)] == [(1, 1, 1), (2, 1, 1)]


@pytest.mark.parametrize(
    ("names", "cause"),
    [
        (("rng/torch",), "generator"),
        (("loader",), "loader"),
        (("optim/w/exp_avg",), "optimizer"),
        (("model/w",), "model"),
        (("loader", "rng/torch"), "generator and loader"),
    ],
)
def test_what_differs_right_after_a_restore_did_not_come_back(names: tuple[str, ...], cause: str) -> None:
    """The names say what to track."""
    wrong = dict.fromkeys(names, "other")
    diagnosis = found(hurt(restore=wrong), history())
    assert (diagnosis.launch, diagnosis.step, diagnosis.rank, diagnosis.moment) == (2, RESTORED, 0, "restore")
    assert diagnosis.after_restore == "different"
    assert diagnosis.cause == cause
    assert diagnosis.names == names
    assert "did not come back" in diagnosis.advice


def test_an_older_steps_content_right_after_a_restore_is_no_untracked_thing() -> None:
    """Bytes of step 2 in place of those of step 4 are ckptd's fault, not the script's."""
    diagnosis = found(hurt(restore={name: f"{name}@2" for name in NAMES}), history())
    assert diagnosis.cause == "old content"
    assert "it is the content of step 2" in diagnosis.advice


def test_a_first_loss_that_differs_after_an_equal_restore_is_something_untracked_that_feeds_the_step() -> None:
    """Generators and loader that the lists do not hold are named first."""
    names = ("model/w", "optim/w/exp_avg")
    wrong = {5: "0x9", 6: "0x9"}
    evidence = hurt(steps={5: {"model/w": "x"}}, names=names, audit=("1 generators: gen",))
    diagnosis = found(evidence, history(wrong), undisturbed(names=names))
    assert (diagnosis.launch, diagnosis.step, diagnosis.after_restore) == (2, 5, "equal")
    assert diagnosis.loss_differs
    assert diagnosis.cause == "generator or loader"
    assert "the lists hold no generator and no loader" in diagnosis.advice
    assert diagnosis.audit == ("1 generators: gen",)


def test_a_first_loss_that_differs_although_all_inputs_are_listed_is_something_unnamed() -> None:
    """When generators and loader are equal, the lists do not name what is missing."""
    diagnosis = found(hurt(steps={5: {"model/w": "x"}}), history({5: "0x9"}))
    assert diagnosis.cause == "untracked input"


@pytest.mark.parametrize(("name", "cause"), [("loader", "loader"), ("rng/torch", "generator")])
def test_a_loader_or_generator_that_moves_on_differently_is_named(name: str, cause: str) -> None:
    """It was equal right after the restore and is not after the first step: it holds more state than is tracked."""
    diagnosis = found(hurt(steps={5: {"model/w": "x", name: "x"}}), history({5: "0x9"}))
    assert diagnosis.cause == cause
    assert "it has state that is not tracked" in diagnosis.advice


def test_a_learning_rate_that_differs_is_the_scheduler() -> None:
    """The printed rate tells it before any loss does."""
    told = history({6: "0x9"}, rates={5: "0x0.9", 6: "0x0.9"})
    diagnosis = found(hurt(steps={5: {"model/w": "x"}}), told, undisturbed(rates=True))
    assert diagnosis.cause == "scheduler"
    assert "differs from step 5 on" in diagnosis.advice


def test_an_equal_first_loss_with_another_state_after_it_is_the_update() -> None:
    """Forward was right; learning rate, optimizer settings or scaler are not."""
    diagnosis = found(hurt(steps={5: {"model/w": "x"}}), history({6: "0x9"}))
    assert (diagnosis.step, diagnosis.loss_differs) == (5, False)
    assert diagnosis.cause == "update"


def test_a_divergence_some_steps_later_is_something_that_acts_now_and_then() -> None:
    """Steps that were equal are told."""
    diagnosis = found(hurt(steps={7: {"model/w": "x"}, 8: {"model/w": "x"}}), history({8: "0x9"}))
    assert diagnosis.cause == "later"
    assert diagnosis.advice.startswith("steps 5 to 6 are equal")


def test_without_lists_right_after_the_restore_the_advice_says_what_would_help() -> None:
    """A wrong restore and an untracked thing cannot be told apart then."""
    diagnosis = found(hurt(steps={5: {"model/w": "x"}}, listed=False), history({5: "0x9"}))
    assert diagnosis.after_restore == "not listed"
    assert "would tell a wrong restore from this" in diagnosis.advice


@pytest.mark.parametrize(("repeated", "cause"), [(False, "script"), (True, "saving")])
def test_a_divergence_before_any_restore_is_not_the_restores(repeated: bool, cause: str) -> None:
    """The script, where nobody knows that it is deterministic; else a save or a fault."""
    evidence = hurt(first={3: {"model/w": "x"}}, restore={"model/w": "y"})
    diagnosis = found(evidence, history(first={3: "0x9"}), repeated=repeated)
    assert (diagnosis.launch, diagnosis.step, diagnosis.after_restore) == (1, 3, "no restore")
    assert diagnosis.cause == cause


def test_losses_alone_are_enough() -> None:
    """A script that lists nothing gets a step, and no names."""
    whole = Evidence(losses=undisturbed().losses)
    diagnosis = found(Evidence(), history({6: "0x9"}), whole)
    assert (diagnosis.step, diagnosis.rank, diagnosis.names, diagnosis.count) == (6, None, (), 0)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model/layers.0.weight", "model"),
        ("optim/layers.0.weight/exp_avg", "optimizer"),
        ("rng/cuda", "generator"),
        ("loader/generator", "loader"),
        ("lr_scheduler", "scheduler"),
        ("grad_scaler", "scaler"),
        ("opt/param_groups", "optimizer"),
        ("model/data_norm.weight", "model"),
    ],
)
def test_names_are_sorted_into_kinds_of_state(name: str, part: str) -> None:
    """The first word that is known decides."""
    assert part_of(name) == part
