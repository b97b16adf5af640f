"""Where each launch went on from: a listed step, and the newest that was possible.

What was possible is told by two witnesses that know nothing of each other: the coordinator of that launch (which steps
it found listed and adopted), and the events before it (which steps were acknowledged, or staged whole on nodes that
are still there).
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.chaos.checkers.case import Case
from ckptd.chaos.history import Event, History
from ckptd.chaos.verdict import FailureClass, Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """One launch and where it went on from.

    Attributes:
        launch: Its number.
        t: When it was launched.
        step: The step it restored; 0 for a new beginning.
        went_on: When it restored or trained first.
    """

    launch: int
    t: float
    step: int
    went_on: float


def restored_newest(case: Case) -> Finding:
    """Every launch went on from a step that was listed or adopted, and none newer was there."""
    history = case.performance.history
    starts = [start for event in history.of("launched", source="harness") if (start := _start(history, event))]
    looked = 0
    for start in starts:
        if text := _not_listed(history, start) or _older_than_staged(case, start):
            return Finding.failed("restored_newest", FailureClass.LOST_WORK, f"launch {start.launch} {text}")
        looked += start.step > 0
    return Finding.passed("restored_newest", f"{looked} restores, each of the newest step there was")


def _start(history: History, launched: Event) -> _Start | None:
    source = f"script {launched.fields['launch']}"
    restored = next(iter(history.of("restored", source=source)), None)
    trained = next(iter(history.of("step", source=source)), None)
    first = restored or trained
    if first is None:
        return None
    step = (restored.step or 0) if restored is not None else 0
    return _Start(launch=int(launched.fields["launch"]), t=launched.t, step=step, went_on=first.t)


def _not_listed(history: History, start: _Start) -> str:
    """Compare with what the launch's coordinator found; "" if it is right or nobody says."""
    there = found_there(history, after=start.t, before=start.went_on)
    if there is None:
        return ""
    if start.step and start.step not in there:
        return f"restored step {start.step}, which was not listed; {_steps(there)}"
    newest = max(there, default=0)
    if start.step < newest:
        return f"went on from step {start.step}, but step {newest} was listed"
    return ""


def found_there(history: History, *, after: float, before: float) -> list[int] | None:
    """Return the steps that a launch's coordinator found listed or adopted, and whose content was good; None if nobody says.

    Args:
        history: Of the run.
        after: When it was launched.
        before: When it went on.
    """
    resolved = history.of("resolved", source="agent", after=after, before=before)
    if not resolved:
        return None
    # A coordinator that died while it started is followed by another: the last one counts.
    found = resolved[-1].fields
    bad = {
        event.step
        for event in history.of("quarantined", source="agent", before=before)
        if event.fields.get("timeline") == found.get("timeline")
    }
    return [int(step) for step in [*found.get("listed", []), *found.get("adopted", [])] if step not in bad]


def _older_than_staged(case: Case, start: _Start) -> str:
    """Compare with the newest step whose bytes were the agents' of nodes that are all still there."""
    history = case.performance.history
    lost = history.last("node_replaced", "node_rebooted", source="harness", before=start.t)
    given_up = {
        (event.step, event.fields.get("timeline"))
        for event in history.of("decided", "acknowledged", source="agent", before=start.went_on)
        if event.fields.get("committed") is False
    }
    if case.hurt.root is not None:
        # A coordinator may die between the marker of an abort and the word of it.
        given_up |= {(fact.step, fact.timeline) for fact in case.hurt.root.decisions if not fact.committed}
    bad = {event.step for event in history.of("quarantined", source="agent", before=start.went_on)}
    staged = [
        event.step
        for event in history.of("staged", source="agent", after=None if lost is None else lost.t, before=start.t)
        if event.step is not None
        and (event.step, event.fields.get("timeline")) not in given_up
        and not _was_looked_at(history, event, start)
    ]
    newest = max((step for step in staged if step not in bad), default=0)
    if start.step < newest:
        return f"went on from step {start.step}, but all bytes of step {newest} were staged on nodes that lived on"
    return ""


def _was_looked_at(history: History, staged: Event, start: _Start) -> bool:
    """Whether all of a step was in the store, and the launch's coordinator would not have it: its content was wrong."""

    def same(event: Event) -> bool:
        return event.step == staged.step and event.fields.get("timeline") == staged.fields.get("timeline")

    refused = history.of(
        "not_adopted",
        source="agent",
        before=start.went_on,
        where=lambda e: e.step == staged.step and e.fields.get("of") == staged.fields.get("timeline"),
    )
    wanted = {e.rank for e in history.of("staged_local", source="agent", before=start.went_on, where=same)}
    sealed = {
        rank
        for event in history.of("sealed-local", source="agent", before=start.went_on, where=same)
        for rank in event.fields.get("ranks", ())
    }
    return bool(refused) and wanted <= sealed


def _steps(steps: list[int]) -> str:
    return f"there were {', '.join(map(str, sorted(steps)))}" if steps else "there was none"
