"""Everything else that can be tracked: objects with `state_dict()` and `load_state_dict()`, and plain nested values.

Owns: taking a nested value apart into shards and one object, and putting it together again. Does not own: what types
an object may hold (`values`). Invariant: a plain tensor here is the rank's own; a `DTensor` or `Sharded` is a piece
of a global one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK

from . import rng
from .sharding import (
    PLAIN_TYPES,
    PerRank,
    Sharded,
    is_out_of_reach,
    is_tensor_leaf,
    memory_of,
    per_rank_value,
    pieces_of,
)
from .shown import How
from .state import Collector
from .stored import Stored
from .targets import Targets
from .tree import Grafts, children
from .values import MAX_DEPTH, TensorSink, encode


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


def tensor_sink(collector: Collector, *, per_rank: bool) -> TensorSink:
    """Return what takes the tensors of one value: each once, so that one in several places is tied when it is decoded."""
    owners: dict[tuple[object, ...], str] = {}

    def sink(below: str, leaf: object) -> str:
        scope = SCOPE_PER_RANK if per_rank else default_scope(leaf)
        owner = owners.setdefault((collector.scope_of(below, leaf, scope), *_same_tensor(leaf)), below)
        return owner if owner != below else collector.tensor(below, leaf, scope=scope)

    return sink


def _collect(name: str, value: object, collector: Collector, *, per_rank: bool) -> None:
    sink = tensor_sink(collector, per_rank=per_rank)
    collector.object(name, encode(value, name, is_tensor=is_tensor_leaf, tensor=sink))


def _same_tensor(leaf: object) -> tuple[object, ...]:
    """Return what is equal for leaves that are one tensor: alike on all ranks, with or without elements there."""
    leaf = per_rank_value(leaf)
    if isinstance(leaf, Sharded):
        return (id(leaf.tensor), tuple(leaf.global_shape), tuple(leaf.offsets))
    # Where a piece is empty its memory says nothing, and the ranks' objects must not differ by that.
    return memory_of(leaf) if type(leaf) in PLAIN_TYPES else (id(leaf),)  # type: ignore[arg-type] # a plain tensor


class Live(NamedTuple):
    """A live tensor leaf, and its scope where no pattern says another."""

    leaf: object
    scope: int


def live_leaves(name: str, value: object, *, per_rank: bool = False) -> dict[str, Live]:
    """Return the tensor leaves of a live value by name. What stands in a `PerRank` is the rank's own, as when it is saved."""
    found: dict[str, Live] = {}

    def walk(at: str, item: object, depth: int, *, own: bool) -> None:
        if is_tensor_leaf(item):
            found[at] = Live(item, SCOPE_PER_RANK if own else default_scope(per_rank_value(item)))
        elif depth > 0 and isinstance(item, PerRank):
            walk(at, item.value, depth - 1, own=True)
        elif depth > 0:
            for part, below in children(item):
                walk(f"{at}/{part}", below, depth - 1, own=own)

    walk(name, value, MAX_DEPTH, own=per_rank)
    return found


def _fill_empty(live: Mapping[str, Live], names: list[str], targets: Targets) -> None:
    """Take shards without elements on this rank as they are: they have no row, but the object refers to them."""
    for name in live.keys() - set(names):
        if isinstance(leaf := per_rank_value(live[name].leaf), DTensor | Sharded) and not pieces_of(leaf, name).boxes:
            targets.fill(name, live[name].leaf, scope=default_scope(leaf))


def ask_fresh(names: Iterable[str], live: Mapping[str, Live], targets: Targets) -> None:
    """Ask for stored tensors of a value that is handed over anew: into fresh memory, held and placed as the live ones are."""
    for name in names:
        leaf, scope = live.get(name, _NOTHING)
        made = _made_like(leaf)
        if made is not None:
            targets.fill(name, made, scope=default_scope(made), how=How.MADE)
            continue
        is_own = targets.scope_of(name, leaf, scope) == SCOPE_PER_RANK
        if isinstance(leaf, DTensor) and is_own:
            # What is stored is this rank's piece, and does not say of what.
            with torch.no_grad():
                made = torch.empty_like(leaf, requires_grad=False)
            if targets.fits(name, made, scope=scope):
                targets.fill(name, made, scope=scope, how=How.MADE)
                continue
        targets.fresh(name, like=leaf if isinstance(leaf, DTensor) else None, device=_device_of(leaf))


_NOTHING = Live(None, SCOPE_PER_RANK)


def _device_of(leaf: object) -> torch.device | None:
    """Return where a fresh tensor belongs in the stead of `leaf`; None: nothing says so."""
    inner = per_rank_value(leaf)
    if not isinstance(inner, torch.Tensor) or is_out_of_reach(inner) or inner.is_meta:
        return None
    return inner.device


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


class LiveGrafts(Grafts):
    """Puts restored values in the place of live ones; what was said and what is a parameter there stays so.

    Args:
        alike: See `Grafts`.
        filled: The tensors that the restore filled.
    """

    def __init__(self, alike: Callable[[object, object], bool], filled: Iterable[object]) -> None:
        super().__init__(alike)
        self._filled: set[int] = set()
        self.note(filled)

    def note(self, filled: Iterable[object]) -> None:
        """Take these for tensors that the restore filled, too; they must live as long as this."""
        self._filled.update(map(id, filled))

    def graft(self, target: object, restored: object) -> object:
        """Put `restored` in the place of `target` and return what stands there, see `Grafts`."""
        if isinstance(target, PerRank) and not is_tensor_leaf(target) and not isinstance(restored, PerRank):
            # What was said of the whole still holds with the next save.
            inner = self.graft(target.value, restored)
            return target if inner is target.value else PerRank(inner)
        if id(restored) in self._filled and is_tensor_leaf(target):
            return _held_as(target, restored)
        return super().graft(target, restored)


def _held_as(target: object, restored: object) -> object:
    """Return a tensor that is stored once for several places as this place holds it: as a parameter, with gradients, or not."""
    live, found = per_rank_value(target), per_rank_value(restored)
    if found is live or not isinstance(live, torch.Tensor) or not isinstance(found, torch.Tensor):
        return restored
    if isinstance(live, nn.Parameter) == isinstance(found, nn.Parameter) and live.requires_grad == found.requires_grad:
        return restored
    if not is_out_of_reach(live) and memory_of(live) == memory_of(found):
        return target
    made = found.detach()
    if isinstance(live, nn.Parameter):
        made = nn.Parameter(made, requires_grad=live.requires_grad)
    elif live.requires_grad and (made.is_floating_point() or made.is_complex()):
        made.requires_grad_()
    return PerRank(made) if isinstance(target, PerRank) else made


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
        live = live_leaves(self.name, self._thing.state_dict(), per_rank=self.is_per_rank)
        _fill_empty(live, names, targets)
        ask_fresh(names, live, targets)
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
        live = live_leaves(self.name, self._holder[self._key])
        names = stored.names_below(self.name)
        _fill_empty(live, names, targets)
        how = How.SHOWN if self.name in targets.shown.things else How.IN_PLACE
        for name in names:
            if (found := live.get(name)) is None:
                targets.fresh(name)
            else:
                targets.fill(name, found.leaf, scope=found.scope, how=how)
        targets.fresh_own(self.name)
        targets.object(self.name)

    def keep(self, targets: Targets) -> None:
        """Note every tensor as one that stays as it is."""
        for name, found in live_leaves(self.name, self._holder[self._key]).items():
            targets.keep(name, found.leaf)

    def load(self, value: object, grafts: LiveGrafts) -> None:
        """Put the value into the mapping, keeping the containers that stand there."""
        held = self._holder[self._key]
        # What a hook has seen of a live tensor was another one.
        grafts.note(found.leaf for found in live_leaves(self.name, held).values())
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

    def verify(self, value: object) -> None:
        """Check that they can be set; nothing is.

        Raises:
            InvalidRequest: they cannot.
        """
        if not isinstance(value, bytes):
            rng.verify(value)

    def load(self, value: Any) -> None:
        """Set them; bytes are a derived seed."""
        if isinstance(value, bytes):
            rng.reseed(value)
        else:
            rng.apply(value)


Hook = Callable[[object], object]
"""Takes a stored value, returns the one to load."""
