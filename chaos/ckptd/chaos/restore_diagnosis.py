"""A script that starts again from its beginning though a step was there: told by the launches alone. Pure.

Owns: the first row of the tables of advice. It comes before all that looks at bits: a deterministic script that begins anew
trains the very bits of the undisturbed run again, so that nothing differs but what was lost. Does not own: the verdict
(`checkers`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.chaos.checkers.restores import found_there
from ckptd.chaos.diagnosis import Diagnosis
from ckptd.chaos.history import History

_CAUSE = "restore"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    """One launch, its source, and the time it spans.

    Attributes:
        number: From 1.
        begun: Seconds since the epoch.
        over: When the next one began; None for the last one.
        first: The first step that it trained.
        trained: When that was.
        restored: The step that rank 0 restored; None if none.
    """

    number: int
    begun: float
    over: float | None
    first: int
    trained: float
    restored: int | None


def diagnose_restore(history: History) -> Diagnosis | None:
    """Return the first launch that trained again what a listed step holds, with what its script did wrong; None if there is none.

    Only what is the script's own doing is told: a launch whose ranks asked for a step and were given none says nothing here.
    """
    for launch in _launches(history):
        if launch.restored is None:
            there = _there(history, launch)
            if not there or _asked(history, launch):
                continue
            text = (
                f"launch {launch.number} restored nothing, though step {max(there)} was listed, and went on with step "
                f"{launch.first}: call restore() before the first step, and go on from the step that it returns"
            )
        elif launch.first < launch.restored:
            text = (
                f"launch {launch.number} restored step {launch.restored}, and went on with step {launch.first}: go on with the "
                "step after the one that restore() returns"
            )
        else:
            continue
        return Diagnosis(
            launch=launch.number,
            step=launch.first,
            rank=None,
            moment="step",
            names=(),
            count=0,
            loss_differs=False,
            restored=launch.restored,
            after_restore="no restore" if launch.restored is None else "not used",
            cause=_CAUSE,
            advice=text,
        )
    return None


def _launches(history: History) -> list[_Launch]:
    """Return the launches after the first one that trained anything."""
    launched = history.of("launched", source="harness")
    found = []
    for number, event in enumerate(launched[1:], start=2):
        source = f"script {event.fields['launch']}"
        trained = next((one for one in history.of("step", source=source) if one.step is not None), None)
        restored = next(iter(history.of("restored", source=source)), None)
        if trained is None or trained.step is None:
            continue
        found.append(
            _Launch(
                number=int(event.fields["launch"]),
                begun=event.t,
                over=None if number == len(launched) else launched[number].t,
                first=trained.step,
                trained=trained.t,
                restored=None if restored is None else restored.step,
            )
        )
    return found


def _there(history: History, launch: _Launch) -> list[int]:
    """Return the steps that a launch could have gone on from, as its coordinator says, or else those before it."""
    found = found_there(history, after=launch.begun, before=launch.trained)
    if found is not None:
        return found
    told = history.of("acknowledged", source="agent", before=launch.begun)
    return [event.step for event in told if event.step is not None and event.fields.get("committed") is not False]


def _asked(history: History, launch: _Launch) -> bool:
    """Whether a rank of a launch asked for a step: its coordinator chose one, or that there is none, or a client got it."""
    chosen = history.of("restore_chosen", source="agent", after=launch.begun, before=launch.over)
    return bool(chosen or history.of("restored", source="client", after=launch.begun, before=launch.over))
