"""Where a run left the undisturbed one's path, and what is likely missing. Pure.

Owns: the first divergence in the order of time, and the decision table of docs/chaos.md that turns it into advice.
Does not own: the verdict (`checkers`). It is advice: it names what to look at, never what is proved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptd.chaos.checkers.divergence import classify, wrong_names
from ckptd.chaos.evidence import DigestList, Evidence
from ckptd.chaos.history import History
from ckptd.chaos.launches import Told, told_by_launch
from ckptd.chaos.verdict import FailureClass

_SHOWN = 20
_PARTS: Mapping[str, frozenset[str]] = {
    "model": frozenset({"model", "module", "net", "weight", "bias", "layers"}),
    "generator": frozenset({"rng", "rngs", "generator", "generators", "random", "seed"}),
    "loader": frozenset({"loader", "dataloader", "dataset", "data", "sampler", "position", "iterator", "epoch"}),
    "scheduler": frozenset({"scheduler", "sched", "lr", "schedule"}),
    "scaler": frozenset({"scaler", "gradscaler"}),
    "optimizer": frozenset({"optim", "optimizer", "opt", "moments", "exp", "momentum"}),
}
_NOT_RESTORED = {
    "generator": "random number generators did not come back: one of your own must be tracked by itself",
    "loader": "the loader did not come back: track it, with its position, shuffling and workers in state_dict()",
    "scheduler": "the learning rate's schedule did not come back: track the scheduler",
    "scaler": "the gradient scaler did not come back: track it",
    "optimizer": "optimizer state did not come back: track the optimizer, and restore after it is built",
    "model": "tensors of the model did not come back: see whether they are parameters or persistent buffers",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The first divergence and advice.

    Attributes:
        launch: In which launch, from 1.
        step: At which step.
        rank: On which rank; None where only the loss tells.
        moment: "restore": right after the step was brought back; "step": after it was trained.
        names: Tensors and objects that differ there, the first ones, sorted.
        count: How many differ.
        loss_differs: Whether the loss printed for the step differs too.
        restored: The step that launch went on from; None if from none.
        after_restore: What the lists right after that restore say: "equal", "different", "not listed" or "no restore".
        cause: What to look at, one word or two: generator, loader, scheduler, …
        advice: The same in sentences.
        audit: What clients said may be missing from snapshots.
    """

    launch: int
    step: int
    rank: int | None
    moment: str
    names: tuple[str, ...]
    count: int
    loss_differs: bool
    restored: int | None
    after_restore: str
    cause: str
    advice: str
    audit: tuple[str, ...] = ()


def diagnose(undisturbed: Evidence, hurt: Evidence, history: History, *, repeated: bool) -> Diagnosis | None:
    """Return where the hurt run diverged first, in the order of time; None if nowhere.

    Args:
        undisturbed: Evidence of the run nobody hurt.
        hurt: Evidence of the other one.
        history: Its history.
        repeated: Whether a second undisturbed run was equal to the first.
    """
    right = {(entry.step, entry.rank): entry for entry in undisturbed.digests if entry.when == "step"}
    losses = dict(undisturbed.losses)
    for told in told_by_launch(history, hurt.digests):
        entry = _first(told.restores, right) or _first(told.steps, right)
        step = next((step for step, loss in told.losses if losses.get(step, loss) != loss), None)
        if entry is not None and entry.when == "step" and step is not None and step < entry.step:
            entry = None  # the loss told it first
        if entry is None and step is None:
            continue
        at = step if entry is None else entry.step
        assert at is not None
        names = [] if entry is None else wrong_names(right[entry.step, entry.rank], entry)
        failure, instead = FailureClass.SILENT_DIVERGENCE, ""
        if entry is not None:
            failure, instead = classify(entry, undisturbed.digests, (*told.restores, *told.steps))
        cause, advice = _advice(
            told,
            entry=entry,
            names=names,
            wrong_loss=step,
            undisturbed=undisturbed,
            right=right,
            failure=failure,
            instead=instead,
            repeated=repeated,
        )
        return Diagnosis(
            launch=told.launch,
            step=at,
            rank=None if entry is None else entry.rank,
            moment="step" if entry is None else entry.when,
            names=tuple(names[:_SHOWN]),
            count=len(names),
            loss_differs=step == at,
            restored=told.restored,
            after_restore=_after_restore(told, right),
            cause=cause,
            advice=advice,
            audit=hurt.audit or undisturbed.audit,
        )
    return None


def part_of(name: str) -> str:
    """Return what kind of state a name is likely of: generator, loader, scheduler, scaler, optimizer or model."""
    for word in re.split(r"[^a-z0-9]+", name.lower().replace("_", " ")):
        for part, words in _PARTS.items():
            if word in words:
                return part
    return "model"


def _first(lists: Sequence[DigestList], right: Mapping[tuple[int, int], DigestList]) -> DigestList | None:
    wrong = [
        entry
        for entry in lists
        if (entry.step, entry.rank) in right and wrong_names(right[entry.step, entry.rank], entry)
    ]
    return min(wrong, key=lambda entry: (entry.step, entry.rank), default=None)


def _after_restore(told: Told, right: Mapping[tuple[int, int], DigestList]) -> str:
    if told.restored is None:
        return "no restore"
    looked = [entry for entry in told.restores if (entry.step, entry.rank) in right]
    if not looked:
        return "not listed"
    return "different" if _first(looked, right) is not None else "equal"


def _advice(
    told: Told,
    *,
    entry: DigestList | None,
    names: Sequence[str],
    wrong_loss: int | None,
    undisturbed: Evidence,
    right: Mapping[tuple[int, int], DigestList],
    failure: FailureClass,
    instead: str,
    repeated: bool,
) -> tuple[str, str]:
    """Walk through the decision table, first match first; return cause and advice."""
    parts = sorted({part_of(name) for name in names})
    state = _after_restore(told, right)
    if state == "no restore":
        if repeated:
            return (
                "saving",
                "nothing had been restored, and two undisturbed runs were equal: a save or a fault changed live state",
            )
        return "script", (
            "nothing had been restored: the script may not be deterministic; --twice compares two undisturbed runs"
        )
    if state == "different" and failure is FailureClass.STALE_CONTENT:
        return "old content", f"{instead}: nothing untracked, but an older step's bytes came back"
    if state == "different" and failure is FailureClass.WRONG_REPLICA:
        return "one rank's copy", f"{instead}: only what this rank got, or made of it, is wrong"
    if state == "different":
        return " and ".join(parts), "; ".join(_NOT_RESTORED[part] for part in parts)
    unsure = "" if state == "equal" else "; a list right after the restore would tell a wrong restore from this"
    begun = (told.restored or 0) + 1
    rates = dict(undisturbed.rates)
    wrong_rate = next((step for step, rate in told.rates if rates.get(step, rate) != rate), None)
    first = min(step for step in (wrong_loss, None if entry is None else entry.step) if step is not None)
    if wrong_rate is not None and wrong_rate <= first:
        return "scheduler", f"the learning rate differs from step {wrong_rate} on: track the scheduler{unsure}"
    moved = [part for part in ("loader", "generator", "scheduler", "scaler") if part in parts]
    if moved:
        drawn = {
            "loader": "gave other data",
            "generator": "was drawn from differently",
            "scheduler": "moved on differently",
        }
        return moved[
            0
        ], f"the {moved[0]} {drawn.get(moved[0], 'went on differently')}: it has state that is not tracked{unsure}"
    if wrong_loss == begun:
        listed = {part_of(name) for one in told.restores for name in one.sha256}
        hidden = [part for part in ("generator", "loader") if part not in listed]
        if hidden:
            return " or ".join(hidden), (
                f"the first loss after the restore differs: something untracked feeds the step; the lists hold no "
                f"{' and no '.join(hidden)}{unsure}"
            )
        return "untracked input", (
            "the first loss after the restore differs though generators and loader are listed and equal: something "
            f"that the lists do not name feeds the step, or a kernel is not deterministic{unsure}"
        )
    if first == begun or wrong_loss == begun + 1:
        return "update", (
            f"the loss of step {begun} is equal and the state after it is not: the update differs, by learning rate "
            f"(scheduler), optimizer settings or gradient scaler, or a kernel is not deterministic{unsure}"
        )
    return "later", (
        f"steps {begun} to {first - 1} are equal: look at what happens every some steps (scheduler, end of an epoch, "
        f"evaluation), or a kernel is not deterministic{unsure}"
    )
