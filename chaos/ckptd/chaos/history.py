"""What happened in a run: events in the order they were seen.

Owns: the value of an event, the reading of event logs and of the script's output, and look-ups. Does not own: files
(`watch`) nor judgement (`checkers`). Sources are "agent N" (event log of node N's agents), "client N" (of its ranks),
"script N" (its output) and "harness" (what we did ourselves).

Events of the harness: launched, exited, fault, lifted, given_up, agent_died, agent_started, node_replaced, node_rebooted,
woken, deadline, cached.
Events of the script: step (step; loss and lr if they are printed), restored (step, tier). A script that does not print
them is spoken for by its client's event log (`said_for_script`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from typing import Any

# `12:`-like prefixes come from launchers that mark each line with its rank.
_STEP = re.compile(r"(?:^|\s)step (\d+) loss (\S+)(?: lr (\S+))?\s*$")
_RESTORED = re.compile(r"(?:^|\s)restored step=(\d+) tier=(\w+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        t: Seconds since the epoch: as its source says; for the script, when the line was read.
        source: Who says so.
        kind: One word.
        fields: What else it says, e.g. step, rank, timeline, error.
    """

    t: float
    source: str
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The step it concerns; None if none."""
        return _whole(self.fields.get("step"))

    @property
    def rank(self) -> int | None:
        """The global rank it concerns; None if none."""
        return _whole(self.fields.get("rank"))


class History:
    """Events of one run, appended only. For one thread."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        # Positions by kind: most questions are about a few of very many events.
        self._by_kind: dict[str, list[int]] = {}

    def add(self, event: Event) -> Event:
        """Append an event and return it."""
        self._by_kind.setdefault(event.kind, []).append(len(self._events))
        self._events.append(event)
        return event

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def since(self, position: int) -> list[Event]:
        """Return what was added after the history had `position` events."""
        return self._events[position:]

    def of(
        self,
        *kinds: str,
        source: str | None = None,
        where: Callable[[Event], bool] | None = None,
        after: float | None = None,
        before: float | None = None,
    ) -> list[Event]:
        """Return the events of these kinds, in order; `source` is a whole source or its first word."""
        positions = merge(*(self._by_kind.get(kind, ()) for kind in dict.fromkeys(kinds)))
        return [
            event
            for event in map(self._events.__getitem__, positions)
            if (source is None or event.source == source or event.source.partition(" ")[0] == source)
            and (after is None or event.t >= after)
            and (before is None or event.t <= before)
            and (where is None or where(event))
        ]

    def last(self, *kinds: str, source: str | None = None, before: float | None = None) -> Event | None:
        """Return the newest such event by time, None if there is none."""
        return max(self.of(*kinds, source=source, before=before), key=lambda event: event.t, default=None)

    def to_lines(self) -> str:
        """Return the events as JSON lines, in order; `from_lines` reads them."""
        return "".join(
            json.dumps({"t": event.t, "source": event.source, "kind": event.kind, "fields": dict(event.fields)}) + "\n"
            for event in self._events
        )

    @classmethod
    def from_lines(cls, text: str) -> History:
        """Return the history that `to_lines` wrote.

        Raises:
            ValueError: Names the line that cannot be read.
        """
        history = cls()
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                told = json.loads(line)
                history.add(Event(**{**told, "fields": dict(told["fields"])}))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"line {number} is no event: {error!r}") from None
        return history


def step_in_flight(history: History, t: float) -> int | None:
    """Return the oldest step that was begun and neither decided nor given up at time `t`; None if none."""
    begun = {event.step for event in history.of("begun", "staged", source="agent", before=t)}
    ended = {event.step for event in history.of("decided", "acknowledged", source="agent", before=t)}
    return min((step for step in begun - ended if step is not None), default=None)


def parse_event(line: str, source: str) -> Event | None:
    """Return the event of one line of an event log; None when it is none."""
    try:
        told = json.loads(line)
        return Event(t=float(told.pop("t")), source=source, kind=str(told.pop("kind")), fields=told)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def parse_output(line: str, source: str, t: float) -> Event | None:
    """Return the event that a line of the script's output tells; None for any other line."""
    if found := _STEP.search(line):
        rate = {} if found[3] is None else {"lr": found[3]}
        return Event(t=t, source=source, kind="step", fields={"step": int(found[1]), "loss": found[2], **rate})
    if found := _RESTORED.search(line):
        return Event(t=t, source=source, kind="restored", fields={"step": int(found[1]), "tier": found[2]})
    return None


def said_for_script(event: Event, script: str, *, with_steps: bool) -> Event | None:
    """Return what rank 0's client says in the place of a script that prints nothing; None for other events.

    Args:
        event: Of a client.
        script: The script's source.
        with_steps: A step that is saved was trained, whatever becomes of the save.
    """
    if event.rank != 0 or event.step is None:
        return None
    if event.kind == "restored":
        fields = {"step": event.step, "tier": str(event.fields.get("tier"))}
        return Event(t=event.t, source=script, kind="restored", fields=fields)
    if event.kind == "save_returned" and with_steps:
        return Event(t=event.t, source=script, kind="step", fields={"step": event.step})
    return None


def _whole(value: object) -> int | None:
    # Protobuf's JSON mapping writes 64-bit integers as text.
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and value.isdigit() else None
