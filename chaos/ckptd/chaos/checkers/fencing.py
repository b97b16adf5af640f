"""Zombies: processes of a superseded timeline that wake up again have no effect on history."""

from __future__ import annotations

from collections.abc import Iterator

from ckptd.chaos.checkers.case import Case
from ckptd.chaos.verdict import FailureClass, Finding


def zombie_without_effect(case: Case) -> Finding:
    """What a superseded timeline did after a newer one had started counts for nothing, in any scenario.

    It may acknowledge a step late only if the newer timeline had found that step decided; and the newest record is
    of the newest timeline that started.
    """
    for text in _effects(case):
        return Finding.failed("zombie_without_effect", FailureClass.SPLIT_HISTORY, text)
    timelines = {str(e.fields.get("timeline")) for e in case.performance.history.of("started", source="agent")}
    return Finding.passed("zombie_without_effect", f"{len(timelines)} timelines, one after the other")


def _effects(case: Case) -> Iterator[str]:
    history = case.performance.history
    started = {str(event.fields.get("timeline")): event.t for event in history.of("started", source="agent")}
    known: dict[str, set[int]] = {}
    for event in history.of("resolved", source="agent"):
        steps = [*event.fields.get("listed", []), *event.fields.get("adopted", [])]
        known.setdefault(str(event.fields.get("timeline")), set()).update(steps)
    for event in history.of("acknowledged", source="agent"):
        timeline = str(event.fields.get("timeline"))
        newer = min((other for other, t in started.items() if other > timeline and t < event.t), default=None)
        is_commit = event.fields.get("committed") is not False
        if newer is not None and is_commit and event.step not in known.get(newer, set()):
            yield f"{event.source} acknowledged step {event.step} of {timeline} after {newer} had started without it"
    root = case.hurt.root
    newest = max(started, default="")
    if root is not None and root.newest and newest and newest not in root.newest:
        yield f"the newest record is {root.newest}, but {newest} is the newest timeline that started"
