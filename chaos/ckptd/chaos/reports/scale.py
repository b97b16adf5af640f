"""Where a moment stands on a timeline: linear where something happens, squeezed where nothing does for long.

Processes take tens of seconds to start and milliseconds to save: true to scale, nobody would see a save. Owns: the
squeeze and the axis. Invariant: order is kept, and every squeezed pause says how long it was.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

# Of the width: what a squeezed pause takes, and from where on one is squeezed.
_PAUSE, _LONG = 0.05, 0.12
# A pause is much longer than what lies between other events, not just one of few.
_TIMES_MEAN = 3.0
_MOST_PAUSES = 12
# Nothing touches the edges.
_EDGE = 2.0
_STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)
# Ticks nearer than this, in percent of the width, would overlap.
_APART = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A place on the axis.

    Attributes:
        at: Percent of the width.
        text: What stands below it.
    """

    at: float
    text: str


class Scale:
    """From seconds to percent of the width.

    Args:
        moments: When something happens, seconds from the beginning.
        seconds: The whole time.
    """

    def __init__(self, moments: Iterable[float], seconds: float) -> None:
        self._moments = sorted({0.0, seconds, *(min(max(t, 0.0), seconds) for t in moments)})
        gaps = [later - earlier for earlier, later in pairwise(self._moments)]
        squeezed, total = _squeezed(gaps)
        self._is_squeezed = [index in squeezed for index in range(len(gaps))]
        self._places = [0.0]
        for index, gap in enumerate(gaps):
            self._places.append(self._places[-1] + (_PAUSE * total if index in squeezed else gap))
        self._width = self._places[-1] or 1.0

    def at(self, t: float) -> float:
        """Return a moment's place in percent."""
        t = min(max(t, 0.0), self._moments[-1])
        index = min(max(bisect.bisect_right(self._moments, t) - 1, 0), len(self._moments) - 2)
        before, after = self._moments[index], self._moments[index + 1]
        part = (t - before) / (after - before) if after > before else 0.0
        place = self._places[index] + part * (self._places[index + 1] - self._places[index])
        return _EDGE + (100 - 2 * _EDGE) * place / self._width

    def pauses(self) -> list[tuple[float, float, float]]:
        """Return the squeezed pauses: left and right in percent, and how long each was in seconds."""
        return [
            (self.at(before), self.at(after), after - before)
            for (before, after), squeezed in zip(pairwise(self._moments), self._is_squeezed, strict=True)
            if squeezed
        ]

    def ticks(self) -> list[Tick]:
        """Return the ticks of the axis, none of them within a squeezed pause."""
        edges = [0.0]
        for (before, after), squeezed in zip(pairwise(self._moments), self._is_squeezed, strict=True):
            edges += [before, after] if squeezed else []
        edges.append(self._moments[-1])
        found: list[Tick] = []
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            width = self.at(end) - self.at(begin)
            step = next((s for s in _STEPS if width * s >= _APART * (end - begin)), _STEPS[-1])
            number = int(begin / step)
            while number * step <= end:
                t = number * step
                if t >= begin and (not found or self.at(t) - found[-1].at >= _APART):
                    found.append(Tick(at=self.at(t), text=f"{t:g} s" if step >= 1 else f"{t:.1f} s"))
                number += 1
        return found


def _squeezed(gaps: list[float]) -> tuple[set[int], float]:
    """Return which gaps are squeezed, and the whole width in seconds then."""
    longest_first = sorted(range(len(gaps)), key=lambda index: -gaps[index])
    rest = sum(gaps)
    total = rest
    squeezed: set[int] = set()
    for index in longest_first[:_MOST_PAUSES]:
        mean = rest / (len(gaps) - len(squeezed))
        if gaps[index] <= max(_LONG * total, _TIMES_MEAN * mean):
            break
        squeezed.add(index)
        rest -= gaps[index]
        total = rest / (1 - _PAUSE * len(squeezed))
    return squeezed, total
