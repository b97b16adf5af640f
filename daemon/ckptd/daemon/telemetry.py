"""The event log: one JSON line for every boundary a snapshot crosses.

Owns: writing the lines. Does not own: what is worth saying. Chaos judges by this log; metrics and reports
are views of it. A line is written with one `write` to a file opened for appending, so that lines of several
threads and processes never mix.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


class EventLog:
    """Appends events to a file, or drops them where no path is given. Thread-safe."""

    def __init__(self, path: Path | None, **constant: object) -> None:
        self._constant = constant
        self._fd = -1
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def emit(self, kind: str, **fields: object) -> None:
        """Write one event. `kind` is one of the words of docs/events.md; bytes are ints, durations `seconds`."""
        if self._fd < 0:
            return
        line = {"t": round(time.time(), 6), "kind": kind, **self._constant, **fields}
        os.write(self._fd, (json.dumps(line, separators=(",", ":"), default=str) + "\n").encode())

    def close(self) -> None:
        """Close the file; later events are dropped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
