"""Everything else that can be tracked: objects with `state_dict()` and `load_state_dict()`, and plain nested values.

Owns: taking a nested value apart into shards and one object, and putting it together again. Does not own: what types
an object may hold (`values`). Invariant: a plain tensor here is the rank's own; a `DTensor` or `Sharded` is a piece
of a global one.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK

from . import rng
from .sharding import PLAIN_TYPES, PerRank, Sharded, is_tensor_leaf, memory_of, per_rank_value, pieces_of
from .shown import How
from .state import Collector
from .stored import Stored
from .targets import Targets
from .tree import Grafts, leaves
from .values import MAX_DEPTH, encode


@runtime_checkable
class Stateful(Protocol):
    """What torch calls stateful."""

    def state_dict(self) -> Any:
        """Return the state as a nested value."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take the state over."""


def default_scope(leaf: object) -> int:
    """Return the scope of a tensor in a nested value."""
    return SCOPE_GLOBAL if isinstance(leaf, DTensor | Sharded) else SCOPE_PER_RANK


def _collect(name: str, value: object, collector: Collector, *, per_rank: bool) -> None:
    owners: dict[tuple[object, ...], str] = {}

    def sink(below: str, leaf: object) -> str:
        scope = SCOPE_PER_RANK if per_rank else default_scope(leaf)
        owner = owners.setdefault((collector.scope_of(below, leaf, scope), *_same_tensor(leaf)), below)
        # A tensor in two places is stored once; the object refers to it twice, so it is tied when it is decoded.
        return owner if owner != below else collector.tensor(below, leaf, scope=scope)

    collector.object(name, encode(value, name, is_tensor=is_tensor_leaf, tensor=sink))


def _same_tensor(leaf: object) -> tuple[object, ...]:
    """Return what is equal for leaves that are one tensor: alike on all ranks, with or without elements there."""
    leaf = per_rank_value(leaf)
    if isinstance(leaf, Sharded):
        return (id(leaf.tensor), tuple(leaf.global_shape), tuple(leaf.offsets))
    # Where a piece is empty its memory says nothing, and the ranks' objects must not differ by that.
    return memory_of(leaf) if type(leaf) in PLAIN_TYPES else (id(leaf),)  # type: ignore[arg-type] # a plain tensor


def _live_leaves(name: str, value: object) -> dict[str, object]:
    return dict(leaves(value, is_leaf=is_tensor_leaf, prefix=name, depth=MAX_DEPTH))


def _fill_empty(live: dict[str, object], names: list[str], targets: Targets) -> None:
    """Take shards without elements on this rank as they are: they have no row, but the object refers to them."""
    for name in live.keys() - set(names):
        if isinstance(leaf := per_rank_value(live[name]), DTensor | Sharded) and not pieces_of(leaf, name).boxes:
            targets.fill(name, live[name], scope=default_scope(leaf))


def _made_like(leaf: object) -> object | None:
    """Return fresh memory held as `leaf` is, where nothing stored would say how: as a piece, said to be a rank's own."""
    inner = per_rank_value(leaf)
    made: object | None = None
    with torch.no_grad():
        if isinstance(inner, Sharded):
            made = Sharded(torch.empty_like(inner.tensor), inner.global_shape, inner.offsets)
        elif isinstance(inner, DTensor) and isinstance(leaf, PerRank):
            made = torch.empty_like(inner)
    return PerRank(made) if made is not None and isinstance(leaf, PerRank) else made


class TrackedStateful:
    """An object with `state_dict()` and `load_state_dict()`."""

    def __init__(self, name: str, thing: Stateful, *, per_rank: bool = False) -> None:
        self.name = name
        self._thing = thing
        self.is_per_rank = per_rank

    def collect(self, collector: Collector) -> None:
        """Collect what `state_dict()` gives now."""
        _collect(self.name, self._thing.state_dict(), collector, per_rank=self.is_per_rank)

    def prepare(self, stored: Stored, targets: Targets) -> None:
        """Ask for all that is stored. Into fresh tensors: `state_dict()` need not give the live ones."""
        names = stored.names_below(self.name)
        like = _live_leaves(self.name, self._thing.state_dict())
        _fill_empty(like, names, targets)
        for name in names:
            made = _made_like(like.get(name))
            if made is not None:
                targets.fill(name, made, scope=default_scope(made), how=How.MADE)
            else:
                leaf = like.get(name)
                targets.fresh(name, like=leaf if isinstance(leaf, DTensor) else None)
        targets.fresh_own(self.name)
        targets.object(self.name)

    def load(self, value: object) -> None:
        """Hand the value to `load_state_dict()`."""
        self._thing.load_state_dict(value)


class TrackedValue:
    """A plain nested value in a mapping that the caller keeps."""

    def __init__(self, name: str, holder: MutableMapping[str, Any], key: str) -> None:
        self.name = name
        self._holder = holder
        self._key = key

    @property
    def is_per_rank(self) -> bool:
        """Whether the value was declared to be each rank's own."""
        return isinstance(self._holder[self._key], PerRank)

    def collect(self, collector: Collector) -> None:
        """Collect the value as it is now."""
        _collect(self.name, self._holder[self._key], collector, per_rank=False)

    def prepare(self, stored: Stored, targets: Targets) -> None:
        """Ask for all that is stored: in place where a fitting tensor stands, else into fresh tensors."""
        held = self._holder[self._key]
        is_own = isinstance(held, PerRank) and not is_tensor_leaf(held)
        live = _live_leaves(self.name, per_rank_value(held) if is_own else held)
        names = stored.names_below(self.name)
        _fill_empty(live, names, targets)
        how = How.SHOWN if self.name in targets.shown.things else How.IN_PLACE
        for name in names:
            leaf = live.get(name)
            if leaf is None:
                targets.fresh(name)
            else:
                scope = SCOPE_PER_RANK if is_own else default_scope(per_rank_value(leaf))
                targets.fill(name, leaf, scope=scope, how=how)
        targets.fresh_own(self.name)
        targets.object(self.name)

    def keep(self, targets: Targets) -> None:
        """Note every tensor as one that stays as it is."""
        for name, leaf in _live_leaves(self.name, per_rank_value(self._holder[self._key])).items():
            targets.keep(name, leaf)

    def load(self, value: object, grafts: Grafts) -> None:
        """Put the value into the mapping, keeping the containers that stand there."""
        held = self._holder[self._key]
        if isinstance(held, PerRank) and not is_tensor_leaf(held):
            # What was said of the whole still holds with the next save.
            self._holder[self._key] = PerRank(grafts.graft(held.value, value))
        else:
            self._holder[self._key] = grafts.graft(held, value)


class TrackedRng:
    """The random number generators of the process."""

    name = rng.NAME
    is_per_rank = True

    def collect(self, collector: Collector) -> None:
        """Collect their state."""
        collector.object(self.name, encode(rng.capture(), self.name))

    def prepare(self, _stored: Stored, targets: Targets) -> None:
        """Ask for their state."""
        targets.object(self.name)

    def load(self, value: Any) -> None:
        """Set them; bytes are a derived seed."""
        if isinstance(value, bytes):
            rng.reseed(value)
        else:
            rng.apply(value)


Hook = Callable[[object], object]
"""Takes a stored value, returns the one to load."""
