"""How long a matrix takes: an estimate before, and what is left on the way. Pure.

Owns: seconds of a cell by what it does, first from measurements on a machine that was not busy, then from this matrix itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ckptd.chaos.matrix.cells import Cell

SECONDS = {"kill": 2.0, "pause": 3.0, "lose": 2.6, "freeze": 4.5, "kill all": 2.2}
"""Seconds of a cell by action, two workers on two cores; a first guess."""
_GUESS_COUNTS = 5
"""The guess weighs as much as so many cells."""


class Pace:
    """Learns from results. For one thread.

    Args:
        cells: Those that are due.
        workers: How many run at once.
    """

    def __init__(self, cells: Iterable[Cell], workers: int) -> None:
        self._action = {str(cell): cell.action for cell in cells}
        self._left = Counter(self._action.values())
        self._workers = workers
        self._took = {action: [seconds] * _GUESS_COUNTS for action, seconds in SECONDS.items()}

    def done(self, cell: str, seconds: float) -> None:
        """Note how long a cell took."""
        action = self._action[cell]
        self._left[action] -= 1
        self._took[action].append(seconds)

    def left_s(self) -> float:
        """Return the seconds that the rest will take."""
        total = sum(
            count * sum(self._took[action]) / len(self._took[action]) for action, count in self._left.items() if count
        )
        return total / self._workers
