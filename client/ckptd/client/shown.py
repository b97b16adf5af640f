"""Tensors that hooks see before anything live is touched: what stands for which live one, and the way back.

Owns: the live tensors of plain values whose hooks are asked, and what stood for each. Does not own: the memory (`stand_ins`),
or asking the hooks (`putting_back`). Invariant: a hook gets no live tensor, and what it passes on ends up in the live one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from .tree import mapped
from .values import MAX_DEPTH


class How(enum.Enum):
    """How a tensor is filled."""

    IN_PLACE = enum.auto()
    """It is live: touched when all was checked."""
    SHOWN = enum.auto()
    """It is live, and a hook sees its value before: in fresh memory until then."""
    MADE = enum.auto()
    """It was made for this restore: at once."""


class Shown:
    """What hooks see in one restore.

    Attributes:
        things: Names of the things whose values they see.
    """

    def __init__(self) -> None:
        self.things: frozenset[str] = frozenset()
        self._standing: dict[str, tuple[object, object]] = {}

    def show(self, things: Iterable[str]) -> None:
        """Say which things' values hooks see before these are loaded."""
        self.things = frozenset(things)

    def add(self, name: str, leaf: object, stands: object) -> None:
        """Say that `stands` is what hooks see of the live `leaf`."""
        self._standing[name] = leaf, stands

    def returned(self, thing: str, value: object) -> tuple[object, set[str]]:
        """Return what hooks made of a thing's value, with live tensors in the place of those that stood for them.

        Returns:
            The value, and the names of the live tensors that are not in it.
        """
        below = f"{thing}/"
        mine = {name: pair for name, pair in self._standing.items() if name == thing or name.startswith(below)}
        live = {id(stands): (name, leaf) for name, (leaf, stands) in mine.items()}
        taken: set[str] = set()

        def swapped(item: object) -> object:
            if (found := live.get(id(item))) is None:
                return item
            taken.add(found[0])
            return found[1]

        return mapped(value, swapped, depth=MAX_DEPTH), mine.keys() - taken
