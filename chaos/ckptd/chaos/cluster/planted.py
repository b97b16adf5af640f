"""Faults from within the processes of a run: what the harness tells the module that sits in each of them.

Owns: the folder of a run where those processes look, and the proof of what they did. Does not own: what they do
(`planted.sitecustomize`). Invariant: a fault that no process has shown is not one that was done.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ckptd.chaos.planted
from ckptd.chaos.history import Event
from ckptd.chaos.local_faults import ClockFault, DiskFault
from ckptd.chaos.planted.sitecustomize import FOLDER, LOG, PARTS
from ckptd.chaos.schedule import PlannedFault

if TYPE_CHECKING:
    from ckptd.chaos.nemesis.injector import Struck

_CLOCK = struct.Struct("d")
_CALLS = {"quota": ("write", "EDQUOT"), "fsync": ("fsync", "ENOSPC"), "close": ("close", "ENOSPC")}
_PYTHONPATH = "PYTHONPATH"


def parts_wanted(faults: Sequence[PlannedFault]) -> tuple[str, ...]:
    """Return what must be planted so that the faults can strike from within; empty where none of them does."""
    shown = {word for fault in faults if (word := _shown_as(fault)) is not None}
    return tuple(sorted({word if word in ("raise", "clock") else "disk" for word in shown}))


def _shown_as(fault: PlannedFault) -> str | None:
    """Return the word by which a process's log tells a fault; None for a fault from outside."""
    if fault.do in ("raise", "clock"):
        return fault.do
    if isinstance(fault.local, DiskFault) and not fault.local.is_mounted:
        return _CALLS[fault.local.kind][0]
    return None


class Planted:
    """The folder of one run. For one thread.

    Args:
        folder: Made anew; part of the evidence.
        parts: What is planted, of "clock", "disk" and "raise".
    """

    def __init__(self, folder: Path, parts: Sequence[str]) -> None:
        self._folder, self._parts = folder, ",".join(parts)
        folder.mkdir(parents=True)
        self._shifts: set[float] = set()
        self._refusals: dict[str, set[str]] = {}

    def variables(self, node: str, ranks: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
        """Return what makes the processes of a node listen, and make the files in which they look.

        Args:
            node: Name of the node.
            ranks: Those that live there.
            environment: Of its processes.
        """
        folder = self._folder / node
        folder.mkdir(exist_ok=True)
        for name in ("clock", "clock.agent", *(f"clock.{rank}" for rank in ranks)):
            (folder / name).write_bytes(_CLOCK.pack(0.0))
        path = [str(Path(ckptd.chaos.planted.__file__).parent), environment.get(_PYTHONPATH, "")]
        return {FOLDER: str(folder), PARTS: self._parts, _PYTHONPATH: os.pathsep.join(filter(None, path))}

    def set_clock(self, node: str, who: str | None, shift_s: float) -> None:
        """Shift the clock of a whole node, or of its agent ("agent") or one rank (its number), from now on."""
        self._shifts.add(shift_s)
        path = self._folder / node / ("clock" if who is None else f"clock.{who}")
        with path.open("r+b") as file:
            file.write(_CLOCK.pack(shift_s))

    def refuse(self, node: str, fault: DiskFault, folder: Path) -> None:
        """Let a disk refuse one kind of call below `folder`, for the processes of a node."""
        call, error = _CALLS[fault.kind]
        self._refusals.setdefault(node, set()).add(f"{call} {error} {folder.resolve()}/")
        self._write(node)

    def accept(self, node: str, fault: DiskFault, folder: Path) -> None:
        """Take `refuse` back."""
        call, error = _CALLS[fault.kind]
        self._refusals.get(node, set()).discard(f"{call} {error} {folder.resolve()}/")
        self._write(node)

    def _write(self, node: str) -> None:
        draft = self._folder / node / "disk.draft"
        draft.write_text("".join(f"{line}\n" for line in sorted(self._refusals.get(node, ()))))
        draft.replace(self._folder / node / "disk")

    def true_time(self, event: Event) -> Event:
        """Return an event that was just read, with the time when it really happened.

        Clocks are off by a minute or more, and events are read within seconds: of all clocks of this run, its was the one
        that shows the time nearest to now.
        """
        now = time.time()
        # A node's clock and a rank's own may be off both.
        shifts = {one + other for one in (0.0, *self._shifts) for other in (0.0, *self._shifts)}
        shift = min(sorted(shifts, key=abs), key=lambda one: abs(event.t - one - now))
        return replace(event, t=round(event.t - shift, 6)) if shift else event

    def proved(self, struck: Sequence[Struck]) -> tuple[Struck, ...]:
        """Return the fates, those of faults that no process has shown as not done."""
        lines = [line for path in self._folder.glob(f"*/{LOG}") for line in path.read_text().splitlines()]
        shown = {line.split(" ", 2)[1] for line in lines}
        return tuple(
            replace(fate, fired=False, note=f"no process has shown it ({word})")
            if fate.fired and (word := _shown_as(fate.fault)) is not None and word not in shown
            else fate
            for fate in struck
        )


def shift_of(fault: PlannedFault) -> float:
    """Return by how much a clock's fault moves it, seconds."""
    return float(fault.local.shift_s) if isinstance(fault.local, ClockFault) else 0.0
