"""How long a matrix takes: an estimate before, and what is left on the way. Pure.

Owns: seconds of a cell by what it does, measured on a machine that was not busy, and how much slower this one is. Surveys,
starts and whatever else takes time count as part of the cells that were run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptd.chaos.matrix.cells import Cell

SECONDS = {"kill": 2.0, "pause": 3.0, "lose": 2.6, "freeze": 4.5, "kill all": 2.2}
"""Seconds of a worker for a cell, by action: two workers on two cores with nothing else to do."""
_GUESS_S = 20.0
"""The measurements weigh as much as so many seconds of this matrix."""


class Pace:
    """Learns from what is done. For one thread.

    Args:
        cells: Those that are due.
        workers: How many run at once.
    """

    def __init__(self, cells: Iterable[Cell], workers: int) -> None:
        self._expected = {str(cell): SECONDS[cell.action] for cell in cells}
        self._left = sum(self._expected.values())
        self._done = 0.0
        self._workers = workers

    def done(self, cell: str) -> None:
        """Note that a cell has its result."""
        self._left -= self._expected[cell]
        self._done += self._expected[cell]

    def left_s(self, took_s: float) -> float:
        """Return the seconds that the rest will take, `took_s` having gone by since the start."""
        slower = (took_s * self._workers + _GUESS_S) / (self._done + _GUESS_S)
        return max(0.0, self._left * slower / self._workers)
