"""The record of what the proxy did: one JSON line per fault that was really done, written before anybody sees its effect."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptd.storage_backends.fault_script import Fault, Fired


class Ledger:
    """Appends lines to a file; each is one write, so that a reader and a kill see whole lines.

    Args:
        path: Made when missing.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._orders: list[Fault] = []

    def number(self, fault: Fault) -> int:
        """Give an order its number, from 1: two of one kind are two, and equal ones too."""
        self._orders.append(fault)
        return len(self._orders)

    def done(self, fired: Fired, **more: object) -> None:
        """Say that a fault was done to a call: of which order, what, to which call, and how often it has been by now."""
        fault = fired.fault
        order = next((at for at, one in enumerate(self._orders, start=1) if one is fault), None)
        self.say(fault.kind, order=order, op=fired.op, key=fired.key, call=fired.call, struck=fired.struck, **more)

    def say(self, fault: str, **more: object) -> None:
        """Write a line about a fault that is of no single call."""
        line = json.dumps({"t": round(time.time(), 6), "fault": fault, **more})
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_ledger(path: Path) -> Iterator[dict[str, Any]]:
    """Give the whole lines that stand there now."""
    if not path.exists():
        return
    *lines, _unfinished = path.read_bytes().split(b"\n")
    for line in lines:
        entry: dict[str, Any] = json.loads(line)
        yield entry
