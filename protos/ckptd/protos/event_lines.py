"""Events as lines of a file: one JSON object for each, alike on both ends of the wire.

Owns: writing a line so that it is whole, or left out and counted. Does not own: what is worth saying (the client's `journal`,
the daemon's `telemetry`). A line is written with one `write` to a file opened for appending, so that lines of several threads
and processes never mix. A file that cannot be written, its disk being full, must not stop what it tells of: lines are counted
and left out, and `events_lost` stands before the next one that can be written.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path


class EventLines:
    """Appends events to a file, or drops them where no path is given. Thread-safe.

    Args:
        path: The file; made, and its folders, where there is none. None: nothing is written.
        **constant: Fields of every line.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path | None, **constant: object) -> None:
        self._constant = constant
        self._fd = -1
        self._lock = threading.Lock()
        self._lost = 0
        self._torn = False
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @property
    def is_on(self) -> bool:
        """Whether events are written at all."""
        return self._fd >= 0

    def emit(self, kind: str, **fields: object) -> None:
        """Write one event; bytes are ints, durations `seconds`. Never fails for the file's sake."""
        if self._fd < 0:
            return
        with self._lock:
            data = self._line("events_lost", {"lines": self._lost}) if self._lost else b""
            data += self._line(kind, fields)
            try:
                # A line that the end of the disk cut off is ended first.
                data = b"\n" + data if self._torn else data
                whole = os.write(self._fd, data) == len(data)
            except OSError:
                self._lost += 1
                return
            self._torn, self._lost = not whole, 0 if whole else self._lost + 1

    def _line(self, kind: str, fields: Mapping[str, object]) -> bytes:
        line = {"t": round(time.time(), 6), "kind": kind, **self._constant, **fields}
        return (json.dumps(line, separators=(",", ":"), default=str) + "\n").encode()

    def close(self) -> None:
        """Close the file; later events are dropped. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
