"""The things that are saved and restored, by kind: modules, optimizers, everything else, random number generators last.

Owns: telling the kinds apart, names, and that order: building what comes before may draw from the generators. Does not own: how
each is read.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from . import rng
from .errors import InvalidRequest
from .generators import Generator, TrackedGenerator
from .modules import TrackedModule
from .nested import Stateful, TrackedRng, TrackedStateful, TrackedValue
from .optimizers import TrackedOptimizer
from .sharding import PerRank, Sharded
from .state import check_text
from .tree import component

Trackable: TypeAlias = nn.Module | Sequence[nn.Module] | Optimizer | Stateful | Generator | PerRank
"""What `track` takes."""

Other: TypeAlias = TrackedStateful | TrackedValue | TrackedRng
"""What is neither a module nor an optimizer."""


class Things:
    """Tracked things by kind, in the order they were given."""

    def __init__(self) -> None:
        self.modules: list[TrackedModule] = []
        self.optimizers: list[TrackedOptimizer] = []
        self.others: list[Other] = []

    def add(self, name: str, thing: object) -> bool:
        """Add `thing` if it is of a kind that can be tracked."""
        per_rank = isinstance(thing, PerRank)
        if isinstance(thing, PerRank):
            thing = thing.value
        if isinstance(thing, nn.Module):
            self.modules.append(TrackedModule(name, [thing], per_rank=per_rank))
        elif isinstance(thing, list | tuple) and thing and all(isinstance(item, nn.Module) for item in thing):
            self.modules.append(TrackedModule(name, thing, per_rank=per_rank))
        elif isinstance(thing, Optimizer):
            self.optimizers.append(TrackedOptimizer(name, thing, per_rank=per_rank))
        elif isinstance(thing, Generator):
            self.others.append(TrackedGenerator(name, thing))
        elif isinstance(thing, Stateful) and not isinstance(thing, type | Sharded):
            self.others.append(TrackedStateful(name, thing, per_rank=per_rank))
        else:
            return False
        # Stable: generators come last, since loading the others may draw from them.
        self.others.sort(key=lambda other: isinstance(other, TrackedGenerator))
        return True

    def names(self) -> set[str]:
        """Return the names of all."""
        return {thing.name for thing in [*self.modules, *self.optimizers, *self.others]}

    def optimizers_by_name(self) -> dict[str, Optimizer]:
        """Return the optimizers themselves."""
        return {optimizer.name: optimizer.optimizer for optimizer in self.optimizers}

    def without(self, dropped: AbstractSet[str]) -> Things:
        """Return these things but for the dropped ones."""
        left = Things()
        left.modules = [module for module in self.modules if module.name not in dropped]
        left.optimizers = [optimizer for optimizer in self.optimizers if optimizer.name not in dropped]
        left.others = [other for other in self.others if other.name not in dropped]
        return left

    def with_state(self, state: MutableMapping[str, Any] | None, taken: set[str]) -> Things:
        """Return these things and those of a state the caller keeps."""
        if state is None:
            return self
        joined = Things()
        joined.modules, joined.optimizers, joined.others = [*self.modules], [*self.optimizers], [*self.others]
        for key, value in state.items():
            if not isinstance(key, str):
                raise InvalidRequest(f"state: the key {key!r} is no text", hint="top-level keys name what is saved")
            name = checked_name(key, taken)
            if not joined.add(name, value):
                joined.others.append(TrackedValue(name, state, key))
        return joined


def checked_name(name: str, taken: set[str]) -> str:
    """Return the name as it is stored.

    Raises:
        InvalidRequest: it is taken, or no text that can be stored.
    """
    if name == rng.NAME or component(name) in taken:
        why = (
            "the random number generators have this name"
            if name == rng.NAME
            else "something is tracked as this already"
        )
        raise InvalidRequest(f"{name}: {why}", hint="choose another name", key=name)
    check_text(name)
    return component(name)
