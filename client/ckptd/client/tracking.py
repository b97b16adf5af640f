"""The things a Checkpointer tracks: what each is, and the order they are saved and restored in.

Owns: what is tracked and given, reading all of it, and what a restore is compared with. Does not own: the kinds of things
and their order (`things`), how each is read, or loading them (`putting_back`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from . import rng
from .errors import CkptdError, InvalidRequest
from .left_out import check_left_out
from .modules import SeenModule
from .nested import Hook, TrackedRng
from .optimizer_state import Names
from .optimizers import parameter_names
from .putting_back import Restoring
from .reshard_hooks import ReshardHook, ReshardHooks
from .selecting import EVERYTHING, Choice, ChosenTargets
from .sharding import per_rank_value
from .state import Collected, Collector
from .stored import Stored
from .targets import Targets
from .things import Things, checked_name
from .tree import component
from .wrapped_optimizers import check_collected


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


class Tracking:
    """What one Checkpointer tracks. Not thread-safe.

    Args:
        per_rank: Patterns of tensor names that are the rank's own.
    """

    def __init__(self, per_rank: Sequence[str] = ()) -> None:
        self._things = Things()
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
        quoted = checked_name(name, self._taken)
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
        if left := [(each.name, *pair) for each in things.modules for pair in each.left_out]:
            check_left_out(left, collected, {other.name for other in things.others})
        return collected

    def _names_after_collecting(self, things: Things) -> Names:
        """Return the same names, as the same object, where no module has changed since the save before."""
        seen = [module.seen for module in things.modules]
        if None in seen or seen != self._seen[0] or not things.optimizers:
            self._seen = (seen, self._parameter_names(things))
        return self._seen[1]

    def _parameter_names(self, things: Things) -> Names:
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
        things: Things,
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


def _dropped(drop: Sequence[str], things: Things) -> tuple[set[str], list[str]]:
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
