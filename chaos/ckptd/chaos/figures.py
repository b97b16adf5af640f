"""Figures of a run: how long training stood still, how long until steps were durable, how long recovery took. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ckptd.chaos.accounts import Account
from ckptd.chaos.history import History


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A distribution; all times in seconds.

    Attributes:
        name: What was measured.
        count: How often.
        median: Middle value; None when there is none.
        p99: 99th percentile, by nearest rank: a value that was measured.
        most: Largest value.
        values: All of them, ascending.
    """

    name: str
    count: int
    median: float | None
    p99: float | None
    most: float | None
    values: tuple[float, ...] = ()


def figures(history: History, told: Iterable[Account]) -> tuple[Figure, ...]:
    """Return the distributions of a run: stall, durability lag, restore and recovery time."""
    saves = history.of("save_returned", source="client", where=lambda e: not e.fields.get("skipped"))
    return (
        figure("stall of training per save and rank", _seconds(e.fields.get("seconds") for e in saves)),
        figure("durability lag: from a save's begin to its acknowledgement", lags(history)),
        figure("restore per rank", _seconds(e.fields.get("seconds") for e in history.of("restored", source="client"))),
        figure("recovery: from a fault to the next trained step", [a.recovery_s for a in told if a.recovery_s]),
    )


def figure(name: str, values: Iterable[float]) -> Figure:
    """Return the distribution of `values`."""
    found = tuple(sorted(round(value, 6) for value in values))
    if not found:
        return Figure(name=name, count=0, median=None, p99=None, most=None)
    return Figure(
        name=name,
        count=len(found),
        median=round(statistics.median(found), 6),
        p99=found[math.ceil(0.99 * len(found)) - 1],
        most=found[-1],
        values=found,
    )


def lags(history: History) -> list[float]:
    """Return the durability lag of each committed step: begun (or else staged), to acknowledged."""
    begun: dict[tuple[int | None, str], float] = {}
    for event in history.of("begun", "staged", source="agent"):
        key = (event.step, str(event.fields.get("timeline")))
        begun[key] = min(event.t, begun.get(key, event.t))
    found = []
    for event in history.of("acknowledged", source="agent"):
        start = begun.get((event.step, str(event.fields.get("timeline"))))
        if start is not None and event.fields.get("committed") is not False:
            found.append(event.t - start)
    for event in history.of("adopted", source="agent"):
        start = begun.get((event.step, str(event.fields.get("of"))))
        if start is not None:
            found.append(event.t - start)
    return found


def _seconds(values: Iterable[object]) -> list[float]:
    return [float(value) for value in values if isinstance(value, int | float)]
