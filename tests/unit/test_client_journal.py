"""The client's event log, and a disk that takes no more of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckptd.client.journal import Journal


def test_s141_a_full_disk_costs_lines_of_the_log_and_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be written is counted, whoever emits goes on, and a line that was cut off spoils no other."""
    path = tmp_path / "events.jsonl"
    journal = Journal(path, rank=3)
    journal.emit("one")
    real = os.write

    def refuses(_fd: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
        journal.emit("cut")
        patch.setattr(os, "write", refuses)
        journal.emit("lost")
    journal.emit("two")
    journal.close()
    first, cut, *rest = path.read_text().splitlines()
    assert json.loads(first)["kind"] == "one"
    assert len(cut) == 5
    assert [(told["kind"], told.get("lines")) for told in map(json.loads, rest)] == [("events_lost", 2), ("two", None)]
