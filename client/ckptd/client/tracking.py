"""The things a Checkpointer tracks: what each is, and the order they are saved and restored in.

Owns: telling modules, optimizers and stateful objects apart; the order (modules, optimizers, everything else, random
number generators last: building what comes before may draw from them). Does not own: how each is read. Invariant:
nothing is loaded before everything was decoded and checked.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from . import rng
from .alike import alike
from .differences import misfit, two_values
from .errors import CkptdError, InvalidRequest
from .generators import Generator, TrackedGenerator
from .modules import SeenModule, TrackedModule
from .nested import Hook, Stateful, TrackedRng, TrackedStateful, TrackedValue
from .optimizer_state import Names
from .optimizers import TrackedOptimizer, parameter_names
from .reshard_hooks import ReshardHook, ReshardHooks
from .resharding import Absent, Gathered, decoded, undecided
from .selecting import EVERYTHING, Choice, ChosenTargets
from .sharding import PerRank, Sharded, per_rank_value
from .state import Collected, Collector, check_text
from .stored import Stored
from .targets import ObjectKey, Targets
from .tree import Grafts, component
from .wrapped_optimizers import check_collected, check_restored

log = logging.getLogger("ckptd.client")

Trackable: TypeAlias = nn.Module | Sequence[nn.Module] | Optimizer | Stateful | Generator | PerRank
"""What `track` takes."""

_Other: TypeAlias = TrackedStateful | TrackedValue | TrackedRng


class CaptureFailedError(Exception):
    """A tracked thing's own code raised while its state was read; `__cause__` is what it raised."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.name = name


@contextlib.contextmanager
def _blamed(name: str) -> Iterator[None]:
    try:
        yield
    except CkptdError:
        raise
    except Exception as error:
        raise CaptureFailedError(name, error) from error


class _Things:
    """Tracked things by kind, in the order they were given."""

    def __init__(self) -> None:
        self.modules: list[TrackedModule] = []
        self.optimizers: list[TrackedOptimizer] = []
        self.others: list[_Other] = []

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

    def without(self, dropped: AbstractSet[str]) -> _Things:
        """Return these things but for the dropped ones."""
        left = _Things()
        left.modules = [module for module in self.modules if module.name not in dropped]
        left.optimizers = [optimizer for optimizer in self.optimizers if optimizer.name not in dropped]
        left.others = [other for other in self.others if other.name not in dropped]
        return left

    def with_state(self, state: MutableMapping[str, Any] | None, taken: set[str]) -> _Things:
        """Return these things and those of a state the caller keeps."""
        if state is None:
            return self
        joined = _Things()
        joined.modules, joined.optimizers, joined.others = [*self.modules], [*self.optimizers], [*self.others]
        for key, value in state.items():
            if not isinstance(key, str):
                raise InvalidRequest(f"state: the key {key!r} is no text", hint="top-level keys name what is saved")
            name = _checked_name(key, taken)
            if not joined.add(name, value):
                joined.others.append(TrackedValue(name, state, key))
        return joined


def _checked_name(name: str, taken: set[str]) -> str:
    if name == rng.NAME or component(name) in taken:
        why = (
            "the random number generators have this name"
            if name == rng.NAME
            else "something is tracked as this already"
        )
        raise InvalidRequest(f"{name}: {why}", hint="choose another name", key=name)
    check_text(name)
    return component(name)


class Tracking:
    """What one Checkpointer tracks. Not thread-safe.

    Args:
        per_rank: Patterns of tensor names that are the rank's own.
    """

    def __init__(self, per_rank: Sequence[str] = ()) -> None:
        self._things = _Things()
        self._collector = Collector(per_rank)
        self._taken: set[str] = set()
        self._given: dict[str, object] = {}
        self._hooks: dict[str, Hook] = {}
        self._reshard = ReshardHooks()
        self._rng = TrackedRng()
        self._seen: tuple[list[SeenModule | None], Names] = ([], {})

    def add(self, name: str, thing: object) -> None:
        """Track `thing` as `name` from now on.

        Raises:
            InvalidRequest: the name is taken, or `thing` is of no kind that can be tracked.
        """
        quoted = _checked_name(name, self._taken)
        if not self._things.add(quoted, thing):
            raise InvalidRequest(
                f"{name}: a {type(thing).__qualname__} cannot be tracked",
                hint="track a module, a list of modules, an optimizer, a generator, or an object with state_dict() and "
                "load_state_dict(); pass plain values to save(step, state) and restore_into(state)",
                key=name,
            )
        self._taken.add(quoted)
        self._given[quoted] = thing

    def given(self, state: Mapping[str, Any] | None) -> dict[str, object]:
        """Return what is tracked, and the values of a state that the caller keeps, by name."""
        return {**self._given, **{component(key): value for key, value in (state or {}).items()}}

    def scope_of(self, name: str, leaf: object, default: int) -> int:
        """Return the scope of a tensor, see `Collector.scope_of`."""
        return self._collector.scope_of(name, leaf, default)

    def on_load(self, name: str, hook: Hook) -> None:
        """Let `hook` change the stored value of `name` before it is loaded."""
        self._hooks[component(name)] = hook

    def on_reshard(self, name: str, hook: ReshardHook) -> None:
        """Let `hook` choose the value of `name`, or of the tensors it fits, from those of all ranks of another mesh."""
        self._reshard.add(name, hook)

    def collect(self, state: MutableMapping[str, Any] | None) -> Collected:
        """Read the state of everything. Nothing is changed; the views in the result alias live tensors.

        Raises:
            InvalidRequest: something cannot be stored; `key` names it.
            CaptureFailedError: a tracked thing's own code raised.
        """
        things = self._things.with_state(state, self._taken)
        collector = self._collector
        collector.begin()
        for module in things.modules:
            with _blamed(module.name):
                module.collect(collector)
        names = self._names_after_collecting(things)
        for optimizer in things.optimizers:
            with _blamed(optimizer.name):
                optimizer.collect(collector, names)
        for other in [*things.others, self._rng]:
            with _blamed(other.name):
                other.collect(collector)
        collected = collector.finish()
        check_collected(things.optimizers_by_name(), collected.views)
        return collected

    def _names_after_collecting(self, things: _Things) -> Names:
        """Return the same names, as the same object, where no module has changed since the save before."""
        seen = [module.seen for module in things.modules]
        if None in seen or seen != self._seen[0] or not things.optimizers:
            self._seen = (seen, self._parameter_names(things))
        return self._seen[1]

    def _parameter_names(self, things: _Things) -> Names:
        if not things.optimizers:
            return {}
        return parameter_names(pair for module in things.modules for pair in module.parameter_names(self._collector))

    def restoring(
        self,
        stored: Stored,
        state: MutableMapping[str, Any] | None,
        chosen: Choice = EVERYTHING,
        drop: Sequence[str] = (),
    ) -> Restoring:
        """Compare what is stored with what is tracked, but for what is dropped; see `Restoring`.

        Raises:
            InvalidRequest: `drop` names what is not tracked, or the choice does not fit, see `ChosenTargets`.
        """
        things = self._things.with_state(state, self._taken)
        names = self._parameter_names(things)
        whole, parts = _dropped(drop, things)

        def restoring(apart: Mapping[str, int]) -> Restoring:
            return Restoring(
                self._targets(stored, things, names, chosen, parts, apart=apart),
                things=things,
                given={name: per_rank_value(thing) for name, thing in self.given(state).items()},
                generators=self._rng,
                names=names,
                hooks=self._hooks,
                reshard=self._reshard,
                dropped=whole,
            )

        made = restoring({})
        # Which live tensors share memory is known when all have been named; then those are asked for apart.
        shared = made.targets.sharing()
        if not shared:
            return made
        del made  # and with it the memory of all that does not stand here yet, before it is made again
        return restoring(shared)

    def _targets(
        self,
        stored: Stored,
        things: _Things,
        names: Names,
        chosen: Choice,
        dropped: Sequence[str],
        *,
        apart: Mapping[str, int],
    ) -> Targets:
        scope_of, hooks = self._collector.scope_of, self._reshard
        if chosen.is_everything:
            return Targets(stored, scope_of, apart, hooks=hooks, dropped=dropped)
        return ChosenTargets(
            stored,
            scope_of,
            chosen=chosen,
            modules=[module.name for module in things.modules],
            others=[other.name for other in [*things.others, self._rng]],
            optimizers={optimizer.name: optimizer.tensor_names(names) for optimizer in things.optimizers},
            apart=apart,
            hooks=hooks,
            dropped=dropped,
        )


def _dropped(drop: Sequence[str], things: _Things) -> tuple[set[str], list[str]]:
    """Return the names of dropped things, and the texts that drop tensors of modules.

    Raises:
        InvalidRequest: neither.
    """
    tracked, modules = things.names() | {rng.NAME}, {module.name for module in things.modules}
    whole = {component(text) for text in drop if component(text) in tracked}
    parts = [text for text in drop if component(text) not in tracked]
    for text in parts:
        head, slash, _ = text.partition("/")
        if slash and head in modules:
            continue
        if slash and head in tracked:
            raise InvalidRequest(
                f"drop: {text!r} is a part of {head!r}, which is restored as a whole or not at all",
                hint=f"drop {head!r}; tensors of modules can be dropped singly",
                key=text,
                phase="restore",
            )
        raise InvalidRequest(f"drop: {text} is not tracked", key=text, phase="restore")
    return whole, parts


class Restoring:
    """One restore: first `targets` are checked, then objects decoded, then everything is loaded."""

    def __init__(
        self,
        targets: Targets,
        *,
        things: _Things,
        given: Mapping[str, object],
        generators: TrackedRng,
        names: Names,
        hooks: Mapping[str, Hook],
        reshard: ReshardHooks,
        dropped: AbstractSet[str],
    ) -> None:
        self.tracked = things.names() | {rng.NAME}
        """Names of everything tracked, dropped or not."""
        kept: list[TrackedModule | _Other] = [*things.modules, *things.others]
        kept = [thing for thing in kept if thing.name in dropped]
        tracked = things.optimizers_by_name()
        things = things.without(dropped)
        self._modules, self._names, self._hooks, self._reshard = things.modules, names, hooks, reshard
        others: list[_Other] = [*things.others, *([generators] if rng.NAME not in dropped else [])]
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
            if module.name in self.targets.missing:
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
        written: dict[object, Tensor] = {}
        for optimizer in self._optimizers:
            if optimizer.name in self._values:
                optimizer.load(self._values[optimizer.name], self.targets.tensors, self._names, written)
        grafts = Grafts(alike)
        for other in self._others:
            if other.name not in self._values:
                continue
            if isinstance(other, TrackedValue):
                other.load(self._values[other.name], grafts)
            else:
                other.load(self._values[other.name])
