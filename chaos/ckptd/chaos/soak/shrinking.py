"""Makes a failing thing of parts shorter and simpler, as long as it fails: delta debugging. Pure but for the predicate.

Owns: the search and its bound. Does not own: what parts are (`parts`) and whether something fails (`reproducing`). The way
is that of Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (2002): leave out halves, then smaller
pieces, until no single part can be left out; then make what is left simpler, one thing at a time, and look again whether a
part can go. Invariant: what is returned failed when it was tried; nothing is tried twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Piece = TypeVar("Piece", bound=Hashable)


class Enough(Exception):  # noqa: N818 - no error: a bound is reached
    """No more tries; a predicate may raise it, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shrunk(Generic[Piece]):
    """What is left.

    Attributes:
        parts: They fail together.
        tries: How often it was asked whether something fails.
        is_minimal: No single part can be left out, and none made simpler; False when the bound on tries came first.
    """

    parts: tuple[Piece, ...]
    tries: int
    is_minimal: bool


def shrink(
    parts: Sequence[Piece],
    fails: Callable[[tuple[Piece, ...]], bool],
    *,
    simpler: Callable[[Piece], Iterable[Piece]] = lambda _piece: (),
    most: int,
) -> Shrunk[Piece]:
    """Return fewer and simpler parts that still fail.

    Args:
        parts: They fail; that is not tried again. Nothing at all is taken not to fail.
        fails: Asked at most `most` times, never twice for the same. It may raise Enough.
        simpler: Parts to put in the place of one, the simplest first; must come to an end when followed.
        most: Bound on tries.
    """
    search = _Search(fails, most)
    kept = tuple(parts)
    try:
        while True:
            before = kept
            kept = search.fewer(kept)
            kept = search.plainer(kept, simpler)
            if kept == before:
                return Shrunk(parts=kept, tries=search.tries, is_minimal=True)
    except Enough:
        return Shrunk(parts=search.best if search.best is not None else kept, tries=search.tries, is_minimal=False)


class _Search(Generic[Piece]):
    def __init__(self, fails: Callable[[tuple[Piece, ...]], bool], most: int) -> None:
        self._fails, self._most = fails, most
        self._known: dict[tuple[Piece, ...], bool] = {}
        self.tries = 0
        self.best: tuple[Piece, ...] | None = None

    def _does_fail(self, parts: tuple[Piece, ...]) -> bool:
        if not parts:
            return False
        if parts not in self._known:
            if self.tries >= self._most:
                raise Enough
            self.tries += 1
            self._known[parts] = self._fails(parts)
        if self._known[parts]:
            # Each accepted step starts from the one before: the last that failed is the best.
            self.best = parts
        return self._known[parts]

    def fewer(self, parts: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """Leave out what can be left out, large pieces first; no single part can be in the end."""
        size = max(1, len(parts) // 2)
        while len(parts) > 1:
            for begin in range(0, len(parts), size):
                rest = parts[:begin] + parts[begin + size :]
                if self._does_fail(rest):
                    parts = rest
                    size = max(1, min(size, len(parts) // 2))
                    break
            else:
                if size == 1:
                    break
                size = max(1, size // 2)
        return parts

    def plainer(self, parts: tuple[Piece, ...], simpler: Callable[[Piece], Iterable[Piece]]) -> tuple[Piece, ...]:
        """Put simpler parts in the place of what is there, until none does."""
        at = 0
        while at < len(parts):
            for other in simpler(parts[at]):
                changed = (*parts[:at], other, *parts[at + 1 :])
                if self._does_fail(changed):
                    parts = changed
                    break
            else:
                at += 1
        return parts
