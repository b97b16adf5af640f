"""What is likely missing, told by what was saved alone: for a script that prints nothing. Pure.

Owns: the decision table over saved states (docs/chaos.md). Does not own: the verdict, nor the table over a script's own
lists (`diagnosis`). Two witnesses: which names of the state differ first after a restore, and what the script held at
its first save and did not track. Neither can see what is not tracked change; but a gradient and a learning rate leave
different traces: moments that are equal beside parameters that are not were moved by another rate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptd.chaos.checkers.bits import losses_by_step
from ckptd.chaos.checkers.saved_states import shown, wrong_states
from ckptd.chaos.diagnosis import Diagnosis, part_of
from ckptd.chaos.evidence import Evidence
from ckptd.chaos.history import History
from ckptd.chaos.launches import Told, told_by_launch
from ckptd.chaos.saved import SavedState

_SHOWN = 20
_RATE = re.compile(r"/param_groups/\d+/(?:lr|momentum|betas|weight_decay)")
_MOMENTS = re.compile(
    r"/state/.*/(?:exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|square_avg|grad_avg|sum|exp_inf)$"
)
_INPUTS = ("loader", "generator")
_RATES = ("scheduler",)


@dataclass(frozen=True, kw_only=True, slots=True)
class _First:
    """Where a launch left the path.

    Attributes:
        told: What the launch said.
        step: The first step that is wrong.
        names: Names that differ in what was saved of it; empty where only its loss tells.
        loss: Whether its printed loss differs.
    """

    told: Told
    step: int
    names: tuple[str, ...]
    loss: bool

    @property
    def is_next(self) -> bool:
        """Whether it is the very next step after the restore, so that the trace is not yet blurred."""
        return self.step == (self.told.restored or 0) + 1


def diagnose_saved(undisturbed: Evidence, hurt: Evidence, history: History, *, repeated: bool) -> Diagnosis | None:
    """Return where the hurt run diverged first, in the order of launches, and what is likely missing; None if nowhere.

    Args:
        undisturbed: Evidence of the run nobody hurt.
        hurt: Evidence of the other one.
        history: Its history.
        repeated: Whether a second undisturbed run was equal to the first.
    """
    first = _first(undisturbed, hurt, history)
    if first is None:
        return None
    kinds = {name: kind for evidence in (undisturbed, hurt) for name, kind in evidence.tracked.items()}
    cause, advice = _advice(first, kinds, undisturbed, repeated=repeated)
    return Diagnosis(
        launch=first.told.launch,
        step=first.step,
        rank=None,
        moment="step",
        names=first.names[:_SHOWN],
        count=len(first.names),
        loss_differs=first.loss,
        restored=first.told.restored,
        after_restore="no restore" if first.told.restored is None else "not listed",
        cause=cause,
        advice=advice,
        audit=hurt.audit or undisturbed.audit,
    )


def _first(undisturbed: Evidence, hurt: Evidence, history: History) -> _First | None:
    losses = losses_by_step(undisturbed)
    wrong = list(wrong_states(undisturbed, hurt))
    launches = _launches(history)
    for told in told_by_launch(history, ()):
        mine = [(state, names) for state, names in wrong if launches.get(state.timeline) == told.launch]
        loss = next((step for step, value in told.losses if value not in losses.get(step, {value})), None)
        state, names = mine[0] if mine else (None, [])
        if state is None and loss is None:
            continue
        if state is None or (loss is not None and loss < state.step):
            assert loss is not None
            return _First(told=told, step=loss, names=(), loss=True)
        return _First(told=told, step=state.step, names=tuple(names), loss=loss == state.step)
    return None


def _launches(history: History) -> dict[str, int]:
    """Return the launch in which each timeline was claimed."""
    launched = [(event.t, int(event.fields["launch"])) for event in history.of("launched", source="harness")]
    return {
        str(event.fields.get("timeline")): max((n for t, n in launched if t <= event.t), default=1)
        for event in history.of("claimed", source="agent")
    }


def _advice(first: _First, kinds: Mapping[str, str], whole: Evidence, *, repeated: bool) -> tuple[str, str]:
    """Walk through the table, first match first; return cause and advice."""
    if first.told.restored is None:
        return _without_restore(repeated=repeated)
    if first.step <= first.told.restored:
        return "restore", (
            f"step {first.step} was trained again after step {first.told.restored} was restored: go on with the step after the "
            "one that restore() returns"
        )
    by_kind = _by_kind(first.names, kinds)
    begun, where = first.told.restored + 1, f"step {first.step}"
    rates = dict(whole.rates)
    rate = next((step for step, value in first.told.rates if rates.get(step, value) != value), None)
    if (rate is not None and rate <= first.step) or (by_kind and by_kind.keys() <= {"rate", "scheduler"}):
        text = f"the learning rate differs from {where} on, and nothing else does yet"
        return _named("scheduler", text, _RATES, kinds, whole, track="track the scheduler")
    if "model" in by_kind and _has_moments(whole, kinds) and "moments" not in by_kind:
        text = (
            f"parameters differ after {where} and the optimizer's moments do not: the gradients were equal, and another "
            "learning rate moved them"
        )
        return _named("scheduler", text, _RATES, kinds, whole, track="track the scheduler")
    if "loader" in by_kind and "loader" in kinds.values():
        text = f"the loader stands elsewhere after {where}: it is tracked, and has state that its state_dict() does not hold"
        return "loader", text
    since = "the very next step after the restore" if first.is_next else f"steps {begun} to {first.step}"
    drew = " (the process's own generators were drawn from differently too)" if "generator" in by_kind else ""
    text = f"{since} had other gradients: other data, or other random numbers{drew}"
    inputs = _INPUTS if first.is_next else (*_INPUTS, *_RATES)
    return _named(
        "input", text, inputs, kinds, whole, track="track it, or save what it needs in a tracked state_dict()"
    )


def _without_restore(*, repeated: bool) -> tuple[str, str]:
    # That there was something to restore is told before (`restore_diagnosis`).
    if repeated:
        return (
            "saving",
            "nothing had been restored, and two undisturbed runs were equal: a save or a fault changed live state",
        )
    return (
        "script",
        "nothing had been restored: the script may not be deterministic; --twice compares two undisturbed runs",
    )


def _by_kind(names: Sequence[str], kinds: Mapping[str, str]) -> dict[str, list[str]]:
    """Return names that differ by what they are: rate, moments, or a kind of state."""
    found: dict[str, list[str]] = {}
    for name in names:
        top = name.partition("/")[0].partition(" at ")[0]
        kind = "generator" if top == "rng" else kinds.get(top) or part_of(name)
        if kind == "optimizer" and _RATE.search(name):
            kind = "rate"
        elif kind == "optimizer" and _MOMENTS.search(name):
            kind = "moments"
        found.setdefault(kind, []).append(name)
    return found


def _has_moments(whole: Evidence, kinds: Mapping[str, str]) -> bool:
    states: Sequence[SavedState] = () if whole.root is None else whole.root.saved
    return any("moments" in _by_kind(list(state.names), kinds) for state in states[-1:])


def _named(
    cause: str, text: str, wanted: Sequence[str], kinds: Mapping[str, str], whole: Evidence, *, track: str
) -> tuple[str, str]:
    """Name what the script held of the wanted kinds and did not track; else say which kinds are not tracked at all."""
    held = [one for one in whole.untracked if one.kind in wanted]
    if held:
        found = [kind for kind in wanted if any(one.kind == kind for one in held)]
        return " or ".join(found), f"{text}. Not tracked: {shown([str(one) for one in held])}: {track}"
    absent = [kind for kind in wanted if kind not in kinds.values()]
    if absent:
        missing = " and ".join(f"no {'generator of its own' if kind == 'generator' else kind}" for kind in absent)
        return " or ".join(absent), f"{text}. {missing[0].upper()}{missing[1:]} is tracked: {track}"
    return cause if cause != "input" else "untracked input", (
        f"{text}, though {' and '.join(wanted)} are tracked: something that is not tracked feeds it, or a kernel is not "
        "deterministic"
    )
