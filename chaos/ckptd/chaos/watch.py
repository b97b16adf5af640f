"""Follows files while they grow, and waits for what they say.

Owns: positions in files. Does not own: the meaning of lines (`history`). Invariant: each complete line is delivered
once, in order; an unfinished one is kept until its end comes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ckptd.chaos.history import Event, History, parse_event, parse_output

# Bound on how late an event is seen; one round over some ten files costs 0.1 ms.
TICK = timedelta(milliseconds=20)


class Tail:
    """New complete lines of one file; a file that is not there yet is empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def lines(self) -> list[str]:
        """Return the complete lines since the last call."""
        try:
            if self._path.stat().st_size <= self._position:
                return []
            with self._path.open("rb") as file:
                file.seek(self._position)
                grown = file.read()
        except FileNotFoundError:
            return []
        self._position += len(grown)
        *whole, self._rest = (self._rest + grown).split(b"\n")
        return [line.decode("utf-8", errors="replace") for line in whole]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    name: str
    tail: Tail
    is_output: bool

    def parse(self, line: str) -> Event | None:
        if self.is_output:
            return parse_output(line, self.name, time.time())
        return parse_event(line, self.name)


class Watcher:
    """Moves lines of event logs and outputs into a history. For one thread.

    Args:
        history: Where to.
        true_time: Sets an event's time right, where its source's clock may be wrong.
    """

    def __init__(self, history: History, true_time: Callable[[Event], Event] = lambda event: event) -> None:
        self._history = history
        self._true_time = true_time
        self._sources: dict[Path, _Source] = {}

    def follow_events(self, path: Path, source: str) -> None:
        """Follow an event log from its beginning; a second call for the same file changes nothing."""
        self._sources.setdefault(path, _Source(name=source, tail=Tail(path), is_output=False))

    def follow_output(self, path: Path, source: str) -> None:
        """Follow the output of a script from its beginning."""
        self._sources.setdefault(path, _Source(name=source, tail=Tail(path), is_output=True))

    def poll(self) -> list[Event]:
        """Add to the history what is new, sorted by time, and return it."""
        found = [
            event if source.is_output else self._true_time(event)
            for source in self._sources.values()
            for line in source.tail.lines()
            if (event := source.parse(line)) is not None
        ]
        found.sort(key=lambda event: event.t)
        return [self._history.add(event) for event in found]


def wait_until(is_true: Callable[[], bool], *, within: timedelta) -> bool:
    """Look again and again until `is_true` or the time is over; return whether it was."""
    end = time.monotonic() + within.total_seconds()
    while not is_true():
        if time.monotonic() >= end:
            return False
        time.sleep(TICK.total_seconds())
    return True


def read_tail(path: Path, *, most: int = 2000) -> str:
    """Return the last `most` bytes of a file as text; empty when there is none."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - most))
        return file.read().decode("utf-8", errors="replace")
    return ""
