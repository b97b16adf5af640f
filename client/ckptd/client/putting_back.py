"""Putting everything back that one restore brings: what is asked for, decoded, checked and loaded.

Owns: the order of these, for all kinds of things together. Does not own: asking the agent (`restoring`), or how a thing is
loaded. Invariant: nothing is loaded before everything was decoded and checked.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from torch import nn

from . import optimizer_rates, rng
from .alike import alike
from .differences import misfit, two_values
from .generators import Generator, TrackedGenerator
from .modules import TrackedModule
from .nested import Hook, LiveGrafts, Stateful, TrackedRng, TrackedValue
from .optimizer_state import Names
from .reshard_hooks import ReshardHooks
from .resharding import Absent, Gathered, decoded, undecided
from .stored import Stored
from .targets import Targets
from .things import Other, Things
from .tree import component
from .wanted import ObjectKey
from .wrapped_optimizers import check_restored

log = logging.getLogger("ckptd.client")


class Restoring:
    """One restore: first `targets` are checked, then objects decoded, then everything is loaded."""

    def __init__(
        self,
        targets: Targets,
        *,
        things: Things,
        given: Mapping[str, object],
        generators: TrackedRng,
        names: Names,
        hooks: Mapping[str, Hook],
        reshard: ReshardHooks,
        dropped: AbstractSet[str],
    ) -> None:
        self.tracked = things.names() | {rng.NAME}
        """Names of everything tracked, dropped or not."""
        kept: list[TrackedModule | Other] = [*things.modules, *things.others]
        kept = [thing for thing in kept if thing.name in dropped]
        tracked = things.optimizers_by_name()
        things = things.without(dropped)
        self._modules, self._names, self._hooks, self._reshard = things.modules, names, hooks, reshard
        others: list[Other] = [*things.others, *([generators] if rng.NAME not in dropped else [])]
        self._optimizers = [optimizer for optimizer in things.optimizers if targets.takes(optimizer.name)]
        self._others = [other for other in others if targets.takes(other.name)]
        kept += [other for other in others if not targets.takes(other.name)]
        self._values: dict[str, Any] = {}
        self._given = given
        self._stored_extra: dict[str, list[str]] = {}
        """Of another mesh: module: keys of the extra state that its stored ranks held."""
        self.targets = targets
        stored = targets.stored
        for name in dropped:
            targets.drop(name)
        self.targets.shown.show(name for name in self.tracked if self._has_hook(name))
        for thing in kept:
            # What other things' `state_dict()` gives need not be live, and nothing of them is asked for.
            if isinstance(thing, TrackedModule | TrackedValue):
                thing.keep(targets)
        taken = [each.name for each in self._optimizers if each.name in stored.objects]
        optimizer_rates.keep(tracked, taken, targets)
        for module in self._modules:
            module.prepare(stored, self.targets)
        for optimizer in self._optimizers:
            if optimizer.name in stored.objects:
                optimizer.prepare(stored, self.targets, names)
            else:
                # Missing: what is stored of its state alone would be half an optimizer.
                self.targets.object(optimizer.name)
        for other in self._others:
            other.prepare(stored, self.targets)
        self._check_hooks(stored)
        with_state = {each.name for each in self._optimizers if stored.names_below(f"{each.name}/state")}
        check_restored({name: each for name, each in tracked.items() if name in with_state}, tracked)

    def _has_hook(self, name: str) -> bool:
        is_elsewhere = self.targets.stored.elsewhere is not None
        return name in self._hooks or (is_elsewhere and self._reshard.of_thing(name) is not None)

    def _check_hooks(self, stored: Stored) -> None:
        """Refuse what only a hook can decide and has none, before anything is asked for."""
        for thing in [*self._modules, *self._others] if stored.elsewhere is not None else ():
            declared = thing.is_per_rank and thing.name != rng.NAME and thing.name in self.targets.objects_asked
            if declared and self._reshard.of_thing(thing.name) is None:
                assert stored.elsewhere is not None
                raise undecided(thing.name, stored.elsewhere, is_per_rank=True)

    def decode(self, objects: Mapping[ObjectKey, bytes]) -> None:
        """Decode and check all objects, and run hooks on them. Nothing live is touched.

        What is wanted and `is_fresh` must be filled: objects refer to it, and hooks see it.

        Raises:
            SnapshotCorrupt: bytes that are no stored value.
            InvalidRequest: a value that does not fit what is tracked.
        """
        self.targets.complete()
        elsewhere = self.targets.stored.elsewhere
        modules = {module.name for module in self._modules}
        if elsewhere is None:
            values: dict[str, Any] = {}
            for (stored_name, _), data in objects.items():
                name = self.targets.object_here(stored_name)
                tensor = functools.partial(self._tensor, lenient=name in modules)
                values[name] = self.targets.value(name, decoded(stored_name, data, tensor))
        else:
            gathered = Gathered(elsewhere, self.targets, objects)
            gathered.reshard_tensors()
            values = {name: self._gathered(name, gathered) for name in gathered.names}
            self._stored_extra = {name: gathered.keys(name) for name in gathered.names if name in modules}
        for name, value in values.items():
            hook = self._hooks.get(name)
            made = hook(value) if hook is not None else value
            self._values[name] = self.targets.returned(name, made) if name in self.targets.shown.things else made
        for optimizer in self._optimizers:
            if optimizer.name in self._values:
                optimizer.verify(self._values[optimizer.name], self._names)
        self._check_same()
        for other in self._others:
            if isinstance(other, TrackedGenerator | TrackedRng) and other.name in self._values:
                other.verify(self._values[other.name])
        seen: dict[int, tuple[str, Any]] = {}
        for module in self._modules:
            module.extra_state.check(self._values.get(module.name), seen)

    def with_extra(
        self, missing: tuple[str, ...], unexpected: tuple[str, ...], *, strict: bool, step: int
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what is missing and unexpected with the keys of extra state, which are known when it was decoded.

        Raises:
            InvalidRequest: (strict) there are such keys.
        """
        lacking: list[str] = []
        left: list[str] = []
        for module in self._modules:
            if module.name in self.targets.misfits.missing:
                continue
            lacking += module.extra_state.missing(self._values.get(module.name))
            left += self._left_extra(module)
        if strict and (lacking or left):
            hint = "strict=False takes what fits"
            raise misfit(tuple(lacking), tuple(left), {}, hint=hint, step=step)
        return (*missing, *lacking), tuple(sorted({*unexpected, *left}))

    def _left_extra(self, module: TrackedModule) -> list[str]:
        """Return the full names of stored extra state that no submodule here takes, once hooks have seen it."""
        elsewhere = self.targets.stored.elsewhere
        if elsewhere is not None and elsewhere.world > 1:
            return []  # another rank may take it
        value = self._values.get(module.name) if elsewhere is None else self._stored_extra.get(module.name)
        keys = [key for key in value if isinstance(key, str)] if isinstance(value, dict | list) else []
        here = set(module.extra_names())
        names = [f"{module.name}/{component(key)}" for key in keys if key not in here]
        return [name for name in names if self.targets.takes_extra(name)]

    def _check_same(self) -> None:
        """Refuse two values for one object that is tracked under two names."""
        first: dict[int, str] = {}
        for name, thing in self._given.items():
            # Plain values are taken apart, and of modules only the extra state is here.
            if name not in self._values or isinstance(thing, nn.Module) or not isinstance(thing, Stateful | Generator):
                continue
            other = first.setdefault(id(thing), name)
            if other != name and not alike(self._values[other], self._values[name]):
                raise two_values(name, other)

    def _gathered(self, name: str, gathered: Gathered) -> Any:
        for optimizer in self._optimizers:
            if optimizer.name == name:
                return optimizer.merged(list(gathered.values(name, lenient=True).values()), self._names)
        hook, elsewhere = self._reshard.of_thing(name), gathered.elsewhere
        if name == rng.NAME and hook is None:
            if elsewhere.world == len(gathered.data(name)) == 1:
                return next(iter(gathered.values(name).values()))
            log.warning(
                "the random number generators are seeded anew from step %d: it was saved on another mesh",
                elsewhere.step,
            )
            return rng.derived(gathered.data(name), elsewhere.coordinates, elsewhere.here, step=elsewhere.step)
        for module in self._modules:
            if module.name == name:
                return gathered.of_module(name, module.extra_state.keys, hook=hook)
        is_per_rank = any(other.name == name and other.is_per_rank for other in self._others)
        return gathered.one(name, hook=hook, is_per_rank=is_per_rank and name != rng.NAME)

    def _tensor(self, name: str, *, lenient: bool) -> object:
        here = self.targets.tensor_here(name)
        if here not in self.targets.tensors:
            if lenient and here in self.targets.stored.rows:
                return Absent()  # of extra state that is not here, or not restored
            raise ValueError(f"it refers to a tensor {name!r} that is not stored")
        return self.targets.tensors[here]

    def load(self) -> None:
        """Give everything its state; tensors are filled already. What was not fetched stays as it is."""
        self.targets.finish()
        # After the casts: what is cast for a tensor that overlaps itself goes into memory of its own first.
        self.targets.settle()
        for module in self._modules:
            module.load(self._values.get(module.name))
        rates = optimizer_rates.Rates(self.targets.standing())
        for optimizer in self._optimizers:
            if optimizer.name in self._values:
                optimizer.load(self._values[optimizer.name], self.targets.tensors, self._names, rates)
        grafts = LiveGrafts(alike, self.targets.tensors.values())
        for other in self._others:
            if other.name not in self._values:
                continue
            if isinstance(other, TrackedValue):
                other.load(self._values[other.name], grafts)
            else:
                other.load(self._values[other.name])
