"""Modules: their parameters and buffers under canonical names.

Owns: names (torch's own helper gives them once; later saves only compare keys), ties, frozen parameters, extra state.
Does not own: how tensors are cut into boxes. Invariant: every tensor collected is a live parameter or buffer, so that
a restore in place reaches it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK

from .errors import InvalidRequest
from .extra_state import EXTRA_STATE, ExtraState, taker_of
from .left_out import trained_left_out
from .nested import ask_fresh, live_leaves, tensor_sink
from .sharding import checked, is_out_of_reach, is_tensor_leaf, memory_of
from .state import FROZEN, TRAINED, Collector, Segment
from .stored import Stored
from .targets import Targets
from .tree import component
from .unchanged import Look, Place, is_plain, looks_of, places_of, same_looks, same_places
from .values import encode


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ParameterName:
    """Where a parameter was found."""

    tracked: str
    name: str
    scope: int


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SeenModule:
    """How a module's entries looked when they were last taken apart, and what that gave."""

    identities: list[int]
    looks: list[Look]
    places: list[Place]
    own: list[int]
    segment: Segment


class TrackedModule:
    """A module, or several with disjoint names (chunks of a pipeline)."""

    def __init__(self, name: str, modules: Sequence[nn.Module], *, per_rank: bool = False) -> None:
        self.name = name
        self._modules = list(modules)
        self.is_per_rank = per_rank
        self._scope = SCOPE_PER_RANK if per_rank else SCOPE_GLOBAL
        self._raw_keys: list[tuple[str, ...]] = [() for _ in self._modules]
        self._names: list[list[str]] = [[] for _ in self._modules]
        self._extra: list[frozenset[str]] = [frozenset() for _ in self._modules]
        self.extra_state = ExtraState({})
        """What a restore loads, since it was prepared."""
        self.left_out: list[tuple[str, torch.Tensor]] = []
        """Trained parameters, by path, that the last save did not find in the state_dict."""
        self.seen: SeenModule | None = None
        """The same object as after the save before exactly when nothing about the module changed; None: not known."""

    def _found(self) -> Iterator[tuple[nn.Module, Mapping[str, Any], list[str], frozenset[str]]]:
        """Yield each module with its state_dict of live values, their canonical names, and the keys of extra state."""
        for position, module in enumerate(self._modules):
            with torch.no_grad():
                # The state_dict hooks run: FSDP2 needs them, to give its sharded parameters and not gathered ones.
                found: Mapping[str, Any] = module.state_dict(keep_vars=True)
            keys = tuple(found)
            if keys != self._raw_keys[position]:
                self._extra[position] = self._extra_keys(module, found)
                self._names[position] = self._canonical(module, keys)
                self._raw_keys[position] = keys
                self.seen = None
            yield module, found, self._names[position], self._extra[position]

    def _entries(self) -> Iterator[tuple[nn.Module, str | None, str, Any]]:
        """Yield module, key of its state_dict where that is extra state, canonical name, live value."""
        for module, found, names, extra in self._found():
            for (key, value), name in zip(found.items(), names, strict=True):
                yield module, key if key in extra else None, name, value

    def _canonical(self, module: nn.Module, keys: Sequence[str]) -> list[str]:
        """Return torch's canonical names of `keys`: without the parts that DDP, compile and wrappers add."""
        given = list(get_model_state_dict(module))
        own, theirs = set(keys), set(given)
        # The helper keeps a name that was canonical already, and moves a changed one to the end, in order.
        changed = iter([name for name in given if name not in own])
        names = [key if key in theirs else next(changed) for key in keys]
        if len(set(names)) != len(keys):
            raise InvalidRequest(
                f"{self.name}: {type(module).__qualname__} gives {len(keys)} entries but {len(set(names))} canonical names",
                key=self.name,
            )
        return names

    def _extra_keys(self, module: nn.Module, found: Mapping[str, Any]) -> frozenset[str]:
        """Return the keys of extra state; everything else is a live tensor, whatever it is called."""
        live = {id(tensor) for tensor in module.parameters()} | {id(tensor) for tensor in module.buffers()}
        for key, value in found.items():
            if isinstance(value, torch.Tensor) and is_out_of_reach(value):
                checked(value, f"{self.name}/{component(key)}")  # torch cannot name the entries of such a module
        others = [key for key, value in found.items() if id(value) not in live]
        for key in others:
            if key.rpartition(".")[2] != EXTRA_STATE:
                raise InvalidRequest(
                    f"{self.name}/{key}: an entry of the module's state_dict that is neither a parameter nor a buffer of it",
                    hint="a state_dict hook made it, so it could not be restored in place; track the module as an object "
                    "with state_dict() and load_state_dict() of its own",
                    key=f"{self.name}/{key}",
                )
        return frozenset(others)

    def parameter_names(self, collector: Collector) -> Iterator[tuple[torch.Tensor, ParameterName]]:
        """Yield parameters with their names; a tied one comes once, under its first name."""
        seen: set[int] = set()
        for _, _, name, value in self._entries():
            if isinstance(value, nn.Parameter) and id(value) not in seen:
                seen.add(id(value))
                full = f"{self.name}/{component(name)}"
                scope = collector.scope_of(full, value, self._scope)
                yield value, ParameterName(tracked=self.name, name=name, scope=scope)

    def collect(self, collector: Collector) -> None:
        """Collect parameters, buffers and extra state."""
        found = list(self._found())
        values = [value for _, mapping, _, _ in found for value in mapping.values()]
        # After state_dict(): FSDP2 shards its parameters again in it.
        self.left_out = trained_left_out(self._modules, values)
        if self._repeat(collector, values):
            return
        self.seen, mark = None, collector.mark()
        owners: dict[tuple[object, ...], str] = {}
        extra: dict[str, object] = {}
        own: list[int] = []
        entries = (
            (key in extras, name)
            for _, mapping, names, extras in found
            for key, name in zip(mapping, names, strict=True)
        )
        for at, ((is_extra, name), value) in enumerate(zip(entries, values, strict=True)):
            full = f"{self.name}/{component(name)}"
            if is_extra:
                extra[name] = encode(
                    value, full, is_tensor=is_tensor_leaf, tensor=tensor_sink(collector, per_rank=True)
                )
                continue
            owner = owners.setdefault(memory_of(value), full)
            if owner != full:
                collector.alias(full, owner)
                continue
            frozen = isinstance(value, nn.Parameter) and not value.requires_grad
            collector.tensor(full, value, scope=self._scope, group=FROZEN if frozen else TRAINED)
            own.append(at)
        if extra:
            collector.object(self.name, extra)
        elif all(map(is_plain, values)):
            self.seen = SeenModule(
                identities=list(map(id, values)),
                looks=looks_of(values),
                places=places_of(values),
                own=own,
                segment=collector.segment(mark),
            )

    def _repeat(self, collector: Collector, values: list[Any]) -> bool:
        """Collect as in the save before, where these are the same tensors at the same places."""
        seen = self.seen
        return (
            seen is not None
            and list(map(id, values)) == seen.identities
            and same_looks(values, seen.looks)
            and same_places(values, seen.places)
            and collector.repeat(seen.segment, [values[at] for at in seen.own])
        )

    def prepare(self, stored: Stored, targets: Targets) -> None:
        """Ask for every parameter and buffer in place, and for the extra state.

        Raises:
            InvalidRequest: no module takes the extra state that one gives.
        """
        owners: dict[tuple[object, ...], str] = {}
        extra = False
        takers: dict[str, tuple[str, nn.Module]] = {}
        for module, key, name, value in self._entries():
            full = f"{self.name}/{component(name)}"
            if key is not None:
                extra = True
                if targets.takes_extra(full):
                    takers[name] = full, taker_of(module, key, full)
                ask_fresh(stored.names_below(full), live_leaves(full, value, per_rank=True), targets)
                targets.fresh_own(full)
                continue
            owner = owners.setdefault(memory_of(value), full)
            if owner != full:
                targets.tie(full, owner, value)
                continue
            targets.fill(full, value, scope=targets.scope_of(full, value, self._scope))
        self.extra_state = ExtraState(takers)
        if self.name in targets.shown.things:
            self._show_extra(stored, targets)
        if extra or targets.is_part(self.name):
            targets.object(self.name)

    def _show_extra(self, stored: Stored, targets: Targets) -> None:
        """Ask for the tensors of all stored extra state: a hook may know where it belongs by now."""
        for full in stored.names_below(self.name):
            key, slash, _ = full.removeprefix(f"{self.name}/").partition("/")
            if (slash or key.rpartition(".")[2] == EXTRA_STATE) and full not in targets.tensors:
                targets.fresh(full)

    def keep(self, targets: Targets) -> None:
        """Note every parameter and buffer as one that stays as it is; a module that could not be restored can be kept."""
        for module in self._modules:
            for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
                targets.keep(f"{self.name}/{component(name)}", tensor)

    def extra_names(self) -> list[str]:
        """Return the canonical names of the submodules' extra states."""
        return [name for _, key, name, _ in self._entries() if key is not None]

    def load(self, value: object) -> None:
        """Hand the extra state to the submodules it came from. Tensors were filled in place."""
        for _, module, item in list(self.extra_state.taken(value)):
            module.set_extra_state(item)
