"""Follows files while they grow, and waits for what they say.

Owns: positions in files. Does not own: the meaning of lines (`history`). Invariant: each complete line is delivered
once, in order; an unfinished one is kept until its end comes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ckptd.chaos.history import Event, History, parse_event, parse_output, said_for_script

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
    script: str = ""
    tells_steps: bool = False

    def parse(self, line: str) -> list[Event]:
        told = parse_output(line, self.name, time.time()) if self.is_output else parse_event(line, self.name)
        if told is None:
            return []
        said = said_for_script(told, self.script, with_steps=self.tells_steps) if self.script else None
        return [told] if said is None else [told, said]


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
        # Source and step of each restore that was told: by the client, and by a line of the script that says the same.
        self._restores: set[tuple[str, int | None]] = set()

    def follow_events(self, path: Path, source: str) -> None:
        """Follow an event log from its beginning; a second call for the same file changes nothing."""
        self._sources.setdefault(path, _Source(name=source, tail=Tail(path), is_output=False))

    def follow_clients(self, path: Path, source: str, script: str, *, tells_steps: bool) -> None:
        """Follow the event log of ranks, and let rank 0's speak for the source `script` too: of restores, and of steps.

        Args:
            path: The log.
            source: Name of the clients.
            script: Name of the script's output in this launch.
            tells_steps: Each step that is saved counts as trained then: for a script that prints none.
        """
        self._sources.setdefault(
            path, _Source(name=source, tail=Tail(path), is_output=False, script=script, tells_steps=tells_steps)
        )

    def follow_output(self, path: Path, source: str) -> None:
        """Follow the output of a script from its beginning."""
        self._sources.setdefault(path, _Source(name=source, tail=Tail(path), is_output=True))

    def poll(self) -> list[Event]:
        """Add to the history what is new, sorted by time, and return it."""
        found = [
            event if source.is_output else self._true_time(event)
            for source in self._sources.values()
            for line in source.tail.lines()
            for event in source.parse(line)
        ]
        found.sort(key=lambda event: event.t)
        return [self._history.add(event) for event in found if self._is_news(event)]

    def _is_news(self, event: Event) -> bool:
        if event.kind != "restored" or not event.source.startswith("script"):
            return True
        told = (event.source, event.step)
        is_news = told not in self._restores
        self._restores.add(told)
        return is_news


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


def last_lines(paths: Iterable[Path], *, most: int = 8) -> str:
    """Return the last lines of some files that are not empty, each named; at most `most` of each."""
    told = []
    for path in paths:
        lines = [line for line in read_tail(path).splitlines() if line.strip()]
        if lines:
            told += [f"[{path.name}] {line}" for line in lines[-most:]]
    return "\n".join(told)
