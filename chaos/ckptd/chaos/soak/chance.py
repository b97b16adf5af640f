"""Chance that is the same everywhere: a stream of numbers that depends on a text and nothing else. Pure.

Owns: drawing. Does not own: what is drawn. `random.Random` promises the same floats for the same seed, not the same choices:
how it makes whole numbers of them has changed between versions of Python. A replay line must not depend on that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Chance:
    """Draws one after the other; the same ones for the same text, on any machine and with any Python.

    Args:
        text: What everything depends on.
    """

    def __init__(self, text: str) -> None:
        self._text, self._drawn = text, 0

    def below(self, end: int) -> int:
        """Return a number from 0 to `end` - 1."""
        self._drawn += 1
        digest = hashlib.sha256(f"{self._text}/{self._drawn}".encode()).digest()
        # 2^64 is so much more than any end here that no number is likelier than another by what could be seen.
        return int.from_bytes(digest[:8]) % end

    def between(self, least: int, most: int) -> int:
        """Return a number from `least` to `most`, both of them possible."""
        return least + self.below(most - least + 1)

    def percent(self, chance: int) -> bool:
        """Return whether something happens that does in `chance` of 100 cases."""
        return self.below(100) < chance

    def one_of(self, things: Sequence[T]) -> T:
        """Return one of the things, all equally likely."""
        return things[self.below(len(things))]

    def weighted(self, things: Sequence[T], weights: Sequence[int]) -> T:
        """Return one of the things, each as often as its weight says among all of them."""
        at = self.below(sum(weights))
        for thing, weight in zip(things, weights, strict=True):
            at -= weight
            if at < 0:
                return thing
        raise AssertionError("weights are from 0")
