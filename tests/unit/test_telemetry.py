"""The event log: whole lines, whoever writes at once, and never in the way of what it tells of."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from ckptd.daemon.telemetry import EventLog

WRITERS, LINES = 4, 500


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Parse every line of a log; raises where one is not whole."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_of_threads_and_logs_that_write_to_one_file_never_mix(tmp_path: Path) -> None:
    """Two logs on one file, two threads on each, long and short lines: every line is whole, and each writer's in order."""
    path = tmp_path / "events.jsonl"
    logs = [EventLog(path), EventLog(path)]

    def write(writer: int) -> None:
        for number in range(LINES):
            logs[writer % 2].emit("put", writer=writer, number=number, key="x" * (number * 37 % 9000))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = lines_of(path)
    assert len(found) == WRITERS * LINES
    for writer in range(WRITERS):
        assert [line["number"] for line in found if line["writer"] == writer] == list(range(LINES))


def test_a_line_has_time_kind_constants_and_fields_of_any_type(tmp_path: Path) -> None:
    """What JSON does not know is written as text, line breaks stay inside the line, and fields win over constants."""
    log = EventLog(tmp_path / "new" / "folder" / "events.jsonl", job="größe\n", rank=1)
    log.emit("put", rank=2, path=Path("/a"), error=None, bytes=1 << 60)
    (line,) = lines_of(tmp_path / "new" / "folder" / "events.jsonl")
    assert line.pop("t") > 1e9
    assert line == {"kind": "put", "job": "größe\n", "rank": 2, "path": "/a", "error": None, "bytes": 1 << 60}


def test_a_log_is_private_and_appended_to(tmp_path: Path) -> None:
    """The file is the user's own, an agent that starts again goes on in it, and after `close` nothing is written."""
    path = tmp_path / "events.jsonl"
    for number in range(2):
        log = EventLog(path)
        log.emit("listening", number=number)
        log.close()
        log.close()
        log.emit("late")
    assert [line["number"] for line in lines_of(path)] == [0, 1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_without_a_path_events_are_dropped() -> None:
    """No log is a log that costs nothing."""
    log = EventLog(None)
    log.emit("put", unprintable=object())
    log.close()


def test_a_full_disk_stops_nobody_and_is_told_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that cannot be written are counted; the next whole line is preceded by their number, and a torn one is ended."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    room = [10, 0, 0]
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if not room:
            return real(fd, data)
        left = room.pop(0)
        if not left:
            raise OSError(28, "No space left on device")
        return real(fd, data[:left])

    monkeypatch.setattr(os, "write", write)
    for number in range(5):
        log.emit("put", number=number)
    torn, *rest = path.read_text().splitlines()
    assert torn.startswith('{"t":')
    found = [json.loads(line) for line in rest]
    assert [(line["kind"], line.get("lines"), line.get("number")) for line in found] == [
        ("events_lost", 3, None),
        ("put", None, 3),
        ("put", None, 4),
    ]


def test_a_device_that_is_always_full_is_survived() -> None:
    """/dev/full refuses every write, as a full disk does."""
    log = EventLog(Path("/dev/full"))
    for _ in range(3):
        log.emit("put")
    log.close()
