"""Optimizers: their state under canonical parameter names, read and put back without a step.

Owns: reading `optimizer.state` and `param_groups`, making state that a fresh optimizer does not have yet. Does not
own: parameter names (`modules` finds them). Invariant: no method of the optimizer runs, so no hook fires and no state
appears that was not saved. How state is stored: see `optimizer_state`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ckptd.protos import error_pb2
from ckptd.protos.snapshot_pb2 import SCOPE_PER_RANK, Value

from . import optimizer_merge, optimizer_rates
from .errors import InvalidRequest
from .modules import ParameterName
from .optimizer_state import HeldState, Names, Seen, as_held, check_empty, device_of, empty_shard
from .sharding import is_tensor_leaf, pieces_of
from .state import FROZEN, TRAINED, Collector
from .stored import Stored
from .targets import Targets
from .tree import component, split, text_key
from .unchanged import have_memory, is_plain, looks_of, same_looks
from .values import encode
from .wrapped_optimizers import check_keeps


class TrackedOptimizer:
    """One optimizer."""

    def __init__(self, name: str, optimizer: Optimizer, *, per_rank: bool = False) -> None:
        self.name = name
        self._optimizer = self.optimizer = optimizer
        self._per_rank = per_rank
        self._group_names: dict[tuple[str, ...], Value] = {}
        self._seen: Seen | None = None

    def _parameters(self, names: Names) -> Iterator[tuple[int, torch.Tensor, str, int]]:
        """Yield group number, parameter, its name and the scope of its state."""
        position = 0
        tracked = {found.tracked for found in names.values()}
        mine = {
            names[id(parameter)].tracked
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in names
        }
        qualified = len(mine) > 1 and len(tracked) > 1
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                found = names.get(id(parameter))
                if found is None:
                    # In no tracked module: only its place names it, and ranks need not agree about places.
                    yield number, parameter, f"#{position}", SCOPE_PER_RANK
                else:
                    name = f"{found.tracked}/{found.name}" if qualified else found.name
                    yield number, parameter, name, SCOPE_PER_RANK if self._per_rank else found.scope
                position += 1

    def tensor_names(self, names: Names) -> dict[str, str]:
        """Return the names of the parameters' own tensors, and what their state is called here."""
        return {
            f"{names[id(parameter)].tracked}/{component(names[id(parameter)].name)}": name
            for _, parameter, name, _ in self._parameters(names)
            if id(parameter) in names
        }

    def _state_name(self, parameter: str, key: str) -> str:
        return f"{self.name}/state/{component(parameter)}/{component(key)}"

    def collect(self, collector: Collector, names: Names) -> None:
        """Collect state tensors and the object.

        Raises:
            InvalidRequest: state that belongs to no parameter of a group, or cannot be stored.
        """
        seen = self._seen
        if seen is None or not self._repeat(collector, seen, names):
            self._seen = None
            seen = self._take_apart(collector, names)
        pairs = zip(self._optimizer.param_groups, seen.group_names, strict=True)
        hyperparameters = [self._group(group, held, number) for number, (group, held) in enumerate(pairs)]
        # Not compared between ranks: stages of a pipeline number other groups alike.
        sink = functools.partial(collector.tensor, scope=SCOPE_PER_RANK)
        whole = {"param_groups": hyperparameters, **seen.held}
        collector.object(self.name, encode(whole, self.name, is_tensor=is_tensor_leaf, tensor=sink))

    def _repeat(self, collector: Collector, seen: Seen, names: Names) -> bool:
        """Collect as in the save before, where parameters and state look as they did."""
        groups = [group["params"] for group in self._optimizer.param_groups]
        if names is not seen.names or [list(map(id, group)) for group in groups] != seen.parameters:
            return False
        parameters = list(itertools.chain.from_iterable(groups))
        # The same names mean that the modules have found their parameters unchanged just now.
        unnamed = [parameter for parameter in parameters if id(parameter) not in names]
        if [parameter.requires_grad for parameter in unnamed] != seen.trained:
            return False
        state = self._optimizer.state
        views: list[torch.Tensor] = []
        with_state = 0
        for parameter, keys in zip(parameters, seen.keys, strict=True):
            entries = state.get(parameter)
            if entries is None and keys is None:
                continue
            if entries is None or tuple(entries) != keys:
                return False
            with_state += 1
            views += entries.values()
        return (
            with_state == len(state)
            and len(set(map(id, views))) == len(views)
            and same_looks(unnamed, seen.looks)
            and same_looks(views, seen.state_looks)
            and have_memory(views)
            and collector.repeat(seen.segment, views)
        )

    def _take_apart(self, collector: Collector, names: Names) -> Seen:
        """Collect the state tensors; remembered where all are plain and stand directly under their parameter."""
        found, mark = HeldState(), collector.mark()
        parameters: list[torch.Tensor] = []
        values: list[Any] = []
        keys: list[tuple[object, ...] | None] = []
        groups: list[list[str]] = [[] for _ in self._optimizer.param_groups]
        seen: set[int] = set()
        owners: dict[tuple[int, int], str] = {}
        for number, parameter, name, scope in self._parameters(names):
            groups[number].append(name)
            parameters.append(parameter)
            seen.add(id(parameter))
            group = TRAINED if parameter.requires_grad else FROZEN
            entries = self._optimizer.state.get(parameter)
            keys.append(None if entries is None else tuple(entries))
            values += (entries or {}).values()
            for key, value in (entries or {}).items():
                full = self._state_name(name, key)
                if isinstance(key, str) and is_tensor_leaf(value):
                    pieces, scope_here = found.add(name, key, pieces_of(value, full), value, parameter, scope)
                    scope_here = collector.scope_of(full, value, scope_here)
                    # Without elements here it has no row that could be referred to.
                    owner = owners.setdefault((id(value), scope_here), full) if pieces.boxes else full
                    if owner == full:
                        collector.pieces(full, pieces, scope=scope_here, group=group)
                    else:
                        found.state.setdefault(name, {})[key] = Value(tensor=owner)
                else:
                    sink = functools.partial(collector.tensor, scope=scope, group=group)
                    encoded = encode(value, full, is_tensor=is_tensor_leaf, tensor=sink)
                    found.state.setdefault(name, {})[key] = encoded
        if any(id(key) not in seen for key in self._optimizer.state):
            raise InvalidRequest(
                f"{self.name}: the optimizer holds state for something that is in none of its param_groups",
                key=self.name,
            )
        plain = not found.state and all(map(is_plain, values)) and all(map(is_plain, parameters))
        unnamed = [parameter for parameter in parameters if id(parameter) not in names]
        made = Seen(
            names=names,
            parameters=[list(map(id, group["params"])) for group in self._optimizer.param_groups],
            looks=looks_of(unnamed) if plain else [],
            trained=[parameter.requires_grad for parameter in unnamed],
            keys=keys,
            state_looks=looks_of(values) if plain else [],
            group_names=groups,
            held=found.as_value(),
            segment=collector.segment(mark),
        )
        self._seen = made if plain else None
        return made

    def _group(self, group: Mapping[str, Any], names: list[str], number: int) -> dict[str, object]:
        key = tuple(names)
        if key not in self._group_names:
            self._group_names = {**self._group_names, key: encode(names, f"{self.name}/param_groups/{number}/params")}
        return {word: self._group_names[key] if word == "params" else value for word, value in group.items()}

    def prepare(self, stored: Stored, targets: Targets, names: Names) -> None:
        """Ask for all stored state: in place where it stands already, else into fresh tensors."""
        parameters = {name: (parameter, scope) for _, parameter, name, scope in self._parameters(names)}
        prefix = f"{self.name}/state"
        depth = len(split(prefix))

        def live_at(parts: Sequence[str], parameter: torch.Tensor) -> object:
            return self._optimizer.state.get(parameter, {}).get(text_key(parts[1])) if len(parts) == 2 else None

        # As collected, so that the keys of the state stand in the order in which the optimizer made them.
        for name in stored.as_collected(stored.names_below(prefix)):
            parts = split(name)[depth:]
            found = parameters.get(text_key(parts[0]) or "")
            if found is None:
                continue  # reported as "only in the snapshot"
            parameter, scope = found
            check_keeps(self.name, self._optimizer, parameter)
            live = live_at(parts, parameter)
            if is_tensor_leaf(live) and targets.fits(name, live, scope=scope):
                targets.fill(name, live, scope=scope)
            else:
                device = device_of(stored, name, parameter)
                # A plain tensor of another shape than its shard is stored as the rank's own; nested ones are not told apart.
                is_beside = len(parts) == 2 and text_key(parts[1]) is not None
                targets.fresh(name, like=parameter, device=device, is_beside=is_beside)
        optimizer_rates.prepare(f"{self.name}/param_groups", self._optimizer.param_groups, stored, targets)
        for name in stored.as_collected(name for name, _ in stored.own_below(prefix)):
            parts = split(name)[depth:]
            if (found := parameters.get(text_key(parts[0]) or "")) is not None:
                live = live_at(parts, found[0])
                targets.reshard(name, live if is_tensor_leaf(live) else None)
        targets.fresh_own(f"{self.name}/param_groups")
        targets.object(self.name)

    def merged(self, values: Sequence[Any], names: Names) -> dict[str, Any]:
        """Join the objects of all stored ranks of another mesh into the one of this rank.

        Raises:
            InvalidRequest: as `optimizer_merge.merged`.
        """
        here: list[set[str]] = [set() for _ in self._optimizer.param_groups]
        for number, _, name, _ in self._parameters(names):
            here[number].add(name)
        for value in values:
            _groups(value, self.name)
        return optimizer_merge.merged(self.name, values, here)

    def verify(self, value: Any, names: Names) -> None:
        """Check the stored groups against the optimizer's, before anything is touched.

        Raises:
            InvalidRequest: other groups, or other parameters in one.
        """
        stored = _groups(value, self.name)
        here: list[set[str]] = [set() for _ in self._optimizer.param_groups]
        for number, parameter, name, _ in self._parameters(names):
            here[number].add(name)
            for key, look in value["empty"].get(name, {}).items():
                check_empty(self._live(parameter, key), parameter, self._state_name(name, key), look)
        there = [set(group["params"]) for group in stored]
        if here == there:
            return
        differing = [number for number, (a, b) in enumerate(zip(here, there, strict=False)) if a != b]
        first = sorted(here[differing[0]] ^ there[differing[0]])[:3] if differing else []
        raise InvalidRequest(
            f"{self.name}: the snapshot has {len(there)} param_groups, the optimizer {len(here)}; "
            f"{len(differing)} of them hold other parameters{': ' + ', '.join(first) if first else ''}",
            reason=error_pb2.REASON_LAYOUT_MISMATCH,
            hint="build the optimizer with the same param_groups as the run that saved; strict=False is about names, and half "
            f'an optimizer is none: drop=("{self.name}",) leaves it as it is here',
            key=f"{self.name}/param_groups",
            phase="restore",
        )

    def _live(self, parameter: torch.Tensor, key: str) -> object:
        return self._optimizer.state.get(parameter, {}).get(key)

    def load(
        self,
        value: Any,
        tensors: Mapping[str, object],
        names: Names,
        rates: optimizer_rates.Rates | None = None,
    ) -> None:
        """Put state and hyperparameters in place; state that was not saved goes away.

        Keys of tensors stand in the order in which they were collected, what is no tensor after them.

        Args:
            value: The decoded object.
            tensors: Restored tensors by name.
            names: Of parameters.
            rates: Puts back hyperparameters that are tensors, of other optimizers of this restore too.
        """
        prefix = f"{self.name}/state"
        depth = len(split(prefix))
        direct: dict[str, dict[str, Any]] = {}
        for name, tensor in tensors.items():
            if name.startswith(f"{prefix}/") and len(parts := split(name)[depth:]) == 2:
                parameter_name, key = map(text_key, parts)
                if parameter_name is not None and key is not None:  # other keys are in the object
                    direct.setdefault(parameter_name, {})[key] = tensor
        called: list[list[str]] = [[] for _ in self._optimizer.param_groups]
        once: dict[int, Any] = {}
        """id of a restored tensor: how it is held here. It may be in the state under several names."""
        states: list[tuple[torch.Tensor, str, dict[Any, Any]]] = []
        for number, parameter, name, _ in self._parameters(names):
            called[number].append(name)
            held = direct.get(name, {})
            with torch.no_grad():
                for key, look in value["empty"].get(name, {}).items():
                    held.setdefault(key, empty_shard(self._live(parameter, key), parameter, key, look))
            state: dict[Any, Any] = {key: as_held(tensor, parameter, value, name, key) for key, tensor in held.items()}
            once.update({id(tensor): state[key] for key, tensor in held.items()})
            states.append((parameter, name, state))
        for parameter, name, state in states:
            for key, item in value["state"].get(name, {}).items():
                if isinstance(key, str) and isinstance(item, torch.Tensor):
                    item = once.setdefault(id(item), as_held(item, parameter, value, name, key))  # noqa: PLW2901 - as held
                state[key] = item
            if state or parameter in self._optimizer.state:
                entries = self._optimizer.state[parameter]
                entries.clear()
                entries.update(state)
                if not state:
                    del self._optimizer.state[parameter]
        pairs: list[tuple[dict[str, Any], str, object]] = []
        for group, stored, params in zip(self._optimizer.param_groups, value["param_groups"], called, strict=True):
            given = optimizer_merge.given_names(stored)
            for key, found in stored.items():
                if key == optimizer_merge.GIVEN_NAMES and given:
                    # By position, and parameters may stand in another order here.
                    group[key] = [given[name] for name in params]
                elif key != "params":
                    pairs.append((group, key, found))
        (rates or optimizer_rates.Rates()).put(pairs)


def _groups(value: Any, name: str) -> list[dict[str, Any]]:
    if isinstance(value, dict) and isinstance(value.get("param_groups"), list):
        groups: list[dict[str, Any]] = value["param_groups"]
        return groups
    raise InvalidRequest(
        f"{name}: stored is no optimizer's state",
        reason=error_pb2.REASON_LAYOUT_MISMATCH,
        hint="track things under the names they were saved under",
        key=name,
        phase="restore",
    )


def parameter_names(found: Iterable[tuple[torch.Tensor, ParameterName]]) -> dict[int, ParameterName]:
    """Return the names by identity. The parameters must stay alive as long as the mapping is used."""
    names: dict[int, ParameterName] = {}
    for parameter, name in found:
        names.setdefault(id(parameter), name)
    return names
