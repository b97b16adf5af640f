"""Values of a timeline: lanes with bars and marks. Times are seconds from the run's first event."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that lasted.

    Attributes:
        kind: What it was; the page's legend names them.
        begin: When it began.
        end: When it ended.
        title: What is said when it is pointed at.
        label: What is written into it, if there is room.
    """

    kind: str
    begin: float
    end: float
    title: str
    label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Something that happened; attributes as in `Span`."""

    kind: str
    t: float
    title: str
    label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One row.

    Attributes:
        name: Whose.
        group: Kind of lane: faults, steps, rank, coordinator, durable, agent.
        spans: Bars, the lower ones first.
        marks: Points.
    """

    name: str
    group: str
    spans: tuple[Span, ...] = ()
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All of a run.

    Attributes:
        seconds: From the first event to the last.
        lanes: From top to bottom.
        faults: Moments at which the job was hurt, numbered by their labels.
        diverged: Where the run left the undisturbed one's path; None if it did not.
    """

    seconds: float
    lanes: tuple[Lane, ...]
    faults: tuple[Mark, ...]
    diverged: Mark | None = None
