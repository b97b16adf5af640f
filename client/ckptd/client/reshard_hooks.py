"""The user's word on what was each rank's own: hooks for tracked things, and for single tensors.

Owns: what a hook gets, and finding the one for a name. Does not own: calling it (`resharding`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .patterns import is_pattern, matches
from .tree import component


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class StoredPiece:
    """What one stored rank held of a tracked entry.

    Attributes:
        coordinate: Its place on the mesh that saved, axis by axis.
        value: What `state_dict()` gave there; for a tensor of a module or an optimizer, the tensor, in host memory.
    """

    coordinate: Mapping[str, int]
    value: Any


ReshardHook = Callable[[Sequence[StoredPiece], Mapping[str, int]], object]
"""Takes all stored pieces, ordered by stored rank, and this rank's coordinate; returns the value to load here."""


class ReshardHooks:
    """Hooks by the name they were given for."""

    def __init__(self) -> None:
        self._given: dict[str, ReshardHook] = {}

    def add(self, name: str, hook: ReshardHook) -> None:
        """Ask `hook` for what is tracked as `name`, or for the tensors that `name` is the name or a pattern of."""
        self._given.pop(name, None)
        self._given[name] = hook

    def of_thing(self, name: str) -> ReshardHook | None:
        """Return the hook for the value of a tracked thing; `name` is a component."""
        return next((hook for given, hook in self._given.items() if component(given) == name), None)

    def of_tensor(self, name: str) -> ReshardHook | None:
        """Return the hook for a tensor: of its own name, else of the pattern that was given last."""
        exact = self._given.get(name)
        if exact is not None:
            return exact
        fitting = [hook for given, hook in self._given.items() if is_pattern(given) and matches(name, given)]
        return fitting[-1] if fitting else None
