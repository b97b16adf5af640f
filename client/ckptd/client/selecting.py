"""What of a step a restore takes: chosen names only, under other names, cast where that was asked.

Owns: the caller's choice, and targets that follow it. Does not own: comparing (`targets`) or names (`mapping`).
Invariant: what is not chosen is not touched, and nothing is cast before all bytes were verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL

from .copying import writing
from .differences import tied
from .errors import InvalidRequest
from .mapping import Names, RenamedStored, Renaming
from .patterns import is_pattern, matches
from .reshard_hooks import ReshardHooks
from .sharding import Pieces, dtype_of, pieces_of
from .shown import How
from .stored import Stored
from .targets import Targets
from .tree import component, split


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a restore takes; everything under its own name and dtype by default.

    Attributes:
        only: Names, beginnings or patterns; None for everything.
        names: The rule from stored names to names here, or None.
        cast: Whether floating dtypes may differ.
    """

    only: tuple[str, ...] | None = None
    names: Renaming | None = None
    cast: bool = False

    @property
    def is_everything(self) -> bool:
        """Whether nothing was chosen."""
        return self.only is None and self.names is None and not self.cast

    def takes(self, name: str) -> bool:
        """Say whether `name` is chosen."""
        return self.only is None or any(matches(name, pattern) for pattern in self.only)

    def takes_whole(self, name: str) -> bool:
        """Say whether the thing tracked as `name` is chosen, as a whole."""
        return self.takes(name) or f"{name}/" in (self.only or ()) or f"{name}/*" in (self.only or ())

    def reaches(self, name: str) -> bool:
        """Say whether something of the module tracked as `name` may be chosen."""
        return self.takes_whole(name) or any(
            pattern.startswith(f"{name}/") or is_pattern(pattern) for pattern in self.only or ()
        )


EVERYTHING = Choice()


def choice(only: str | Iterable[str] | None, names: Names | None, *, cast: bool) -> Choice:
    """Return the checked choice.

    Raises:
        InvalidRequest: nothing can be chosen so.
    """
    patterns: tuple[str, ...] | None = None
    if only is not None:
        patterns = (only,) if isinstance(only, str) else tuple(only)
        if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise InvalidRequest(
                f"only={only!r} names nothing", hint='write only=["model"], or leave it out', key="only"
            )
    return Choice(only=patterns, names=None if names is None else Renaming(names), cast=bool(cast))


class ChosenTargets(Targets):
    """Targets of a choice.

    Args:
        stored: What is there.
        scope_of: The collector's rule.
        chosen: The choice.
        modules: Names of the modules tracked here.
        others: Names of everything else tracked here but optimizers.
        optimizers: Optimizers tracked here, see `RenamedStored`.
        apart: See `Targets`.
        hooks: See `Targets`.
        dropped: See `Targets`.

    Raises:
        InvalidRequest: the choice names nothing tracked here, a part of what is restored whole, or two names become
            one.
    """

    def __init__(
        self,
        stored: Stored,
        scope_of: Callable[[str, object, int], int],
        *,
        chosen: Choice,
        modules: Iterable[str],
        others: Iterable[str],
        optimizers: Mapping[str, Mapping[str, str]],
        apart: Mapping[str, int] | None = None,
        hooks: ReshardHooks | None = None,
        dropped: Sequence[str] = (),
    ) -> None:
        self._renamed = None if chosen.names is None else RenamedStored(stored, chosen.names, optimizers)
        super().__init__(self._renamed or stored, scope_of, apart, hooks=hooks, dropped=dropped)
        self._chosen = chosen
        self._modules, self._optimizers = frozenset(modules), frozenset(optimizers)
        self._casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._casts_apart: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._cast_from: dict[int, torch.dtype] = {}
        """id of a live tensor, which stays alive in `tensors` or `_tied`: the dtype it is stored in."""
        self._tied: list[object] = []
        self._counters: dict[str, frozenset[str]] = {}
        """Optimizer: components of keys whose state has no dimensions beside a parameter that has some."""
        for pattern in chosen.only or ():
            _check_pattern(pattern, self._modules, self._optimizers | frozenset(others))

    def takes(self, name: str) -> bool:
        """Say whether the thing tracked as `name`, which is no module, is restored."""
        return self._chosen.takes_whole(name)

    def fill(self, name: str, leaf: object, *, scope: int = SCOPE_GLOBAL, how: How = How.IN_PLACE) -> None:
        """Ask for a tensor to be filled, if it is chosen."""
        self._live.add(name)
        if not self._is_chosen(name):
            self.keep(name, leaf)
            return
        super().fill(name, leaf, scope=scope, how=how)
        source = self.stored.source(name)
        if self._chosen.cast and self.tensors.get(name) is leaf and source is not None and source in self.stored.rows:
            self._note_cast(leaf, dtype_of(self.stored.rows[source][0].dtype))

    def _note_cast(self, leaf: object, stored: torch.dtype) -> None:
        if isinstance(leaf, torch.Tensor) and leaf.dtype != stored:
            self._cast_from[id(leaf)] = stored

    def _is_chosen(self, name: str) -> bool:
        top = name.split("/", 1)[0]
        return self._chosen.takes(name) or (self._chosen.takes_whole(top))

    def tie(self, name: str, owner: str, leaf: object) -> None:
        """Say that `leaf`, called `name`, shares the memory of `owner`: both are chosen, or none.

        Raises:
            InvalidRequest: one of them is.
        """
        taken = self._is_chosen(name)
        if taken != self._is_chosen(owner):
            raise tied("only", name, owner)
        if taken:
            super().tie(name, owner, leaf)
            if (stored := self._cast_from.get(id(self.tensors.get(owner)))) is not None:
                self._cast_from[id(leaf)] = stored
                self._tied.append(leaf)

    def fresh(
        self,
        name: str,
        *,
        like: torch.Tensor | None = None,
        device: torch.device | None = None,
        is_beside: bool = False,
    ) -> torch.Tensor | None:
        """Ask for a stored tensor for which nothing stands yet, in its parameter's dtype where that is cast."""
        if not self._chosen.reaches(name.split("/", 1)[0]):
            return None
        first = self.stored.rows[name][0]
        if like is None or first.global_shape != tuple(like.shape):
            return super().fresh(name, like=like, device=device, is_beside=is_beside)
        if self._cast_from.get(id(like)) != dtype_of(first.dtype) or self._is_counter(name):
            return super().fresh(name, like=like, device=device, is_beside=is_beside)
        self._claimed.add(name)
        with torch.no_grad():
            made = torch.empty_like(like, requires_grad=False)
        if self._fits(name, name, pieces_of(made, name), first.scope):
            self._want(name, pieces_of(made, name), is_apart=True)
        self.tensors[name] = made
        return made

    def _is_counter(self, name: str) -> bool:
        """Say whether an optimizer's state without dimensions is no moment of a parameter that has none either.

        "step" is none, as torch has it, nor is what has no dimensions beside a parameter whose other state has some.
        """
        *above, _, key = split(name)
        if self.stored.rows[name][0].global_shape or above[1:] != ["state"]:
            return False
        if key == "step":
            return True
        top = above[0]
        if top not in self._counters:
            shapes: dict[str, dict[str, bool]] = {}
            for each in self.stored.names_below(f"{top}/state"):
                if len(parts := split(each)) == len(above) + 2:
                    shapes.setdefault(parts[-2], {})[parts[-1]] = bool(self.stored.rows[each][0].global_shape)
            self._counters[top] = frozenset(
                found
                for keys in shapes.values()
                if any(keys.values())
                for found, has_any in keys.items()
                if not has_any
            )
        return key in self._counters[top]

    def takes_extra(self, name: str) -> bool:
        """Say whether the extra state called `name` is restored."""
        return super().takes_extra(name) and self._is_chosen(name)

    def is_part(self, name: str) -> bool:
        """Say whether a part of the module tracked as `name` was chosen."""
        return name in self._modules and not self._chosen.takes_whole(name)

    def object(self, name: str) -> None:
        """Ask for an object."""
        if self.is_part(name) and (name not in self.stored.objects or not self._chosen.reaches(name)):
            return  # else its extra state is read, and what is not chosen left out when it was decoded
        before = len(self.objects)
        super().object(name)
        if self._renamed is not None:
            source = self._renamed.object_sources.get(name, name)
            self.objects[before:] = [(source, rank) for _, rank in self.objects[before:]]

    def fresh_own(self, prefix: str) -> None:
        """Ask for every stored rank's own tensors below `prefix`, if that is chosen."""
        if self._is_chosen(prefix):
            super().fresh_own(prefix)

    def names_here(self, name: str) -> tuple[str, ...]:
        """Return what a stored name is called here."""
        if self._renamed is None:
            return (name,)
        found = (self._renamed.tensors_here.get(name), self._renamed.objects_here.get(name))
        return tuple(here for here in found if here is not None)

    def object_here(self, name: str) -> str:
        """Return the name here of a stored object."""
        return name if self._renamed is None else self._renamed.objects_here[name]

    def tensor_here(self, name: str) -> str:
        """Return the name here of a stored tensor."""
        return name if self._renamed is None else self._renamed.tensors_here.get(name, name)

    def value(self, name: str, value: Any) -> Any:
        """Return a decoded object with the names here, without what is not chosen."""
        if self._renamed is not None and name in self._optimizers:
            return self._renamed.optimizer_value(name, value)
        if name in self._modules:
            if self._renamed is not None:
                value = self._renamed.module_value(name, value)
            if isinstance(value, dict):
                return {key: item for key, item in value.items() if self._is_chosen(f"{name}/{component(key)}")}
        return value

    def unexpected(self) -> list[str]:
        """Return what is stored, chosen, and was not asked for, sorted."""
        return [name for name in super().unexpected() if self._is_chosen(name)]

    def left_out(self) -> tuple[str, ...]:
        """Return what is stored and not chosen, sorted."""
        return tuple(name for name in super().unexpected() if not self._is_chosen(name))

    def _converts(self, stored: torch.dtype, here: torch.dtype) -> bool:
        return stored == here or (self._chosen.cast and stored.is_floating_point and here.is_floating_point)

    def _as_stored(self, source: str, pieces: Pieces) -> Pieces:
        stored = dtype_of(self.stored.rows[source][0].dtype)
        if stored == pieces.dtype or not self._converts(stored, pieces.dtype):
            return pieces  # where dtypes differ, it stays a difference
        return Pieces(stored, pieces.global_shape, pieces.boxes, pieces.local)

    def _difference(self, source: str, pieces: Pieces, scope: int) -> str | None:
        return super()._difference(source, self._as_stored(source, pieces), scope)

    def _want(self, source: str, pieces: Pieces, *, is_apart: bool = False) -> None:
        asked = self._as_stored(source, pieces)
        if asked is not pieces:
            made = torch.empty(pieces.local.shape, dtype=asked.dtype, device=pieces.local.device)
            asked = Pieces(asked.dtype, asked.global_shape, asked.boxes, made)
            casts = self._casts_apart if is_apart else self._casts
            casts += zip(pieces.views(), asked.views(), strict=True)
        super()._want(source, asked, is_apart=is_apart)

    def complete(self) -> None:
        """See `Targets.complete`: what is cast for it goes into memory that is not live."""
        _cast(self._casts_apart)
        super().complete()

    def finish(self) -> None:
        """Cast what was fetched into its place. Everything has been verified."""
        super().finish()
        _cast(self._casts)


def _cast(casts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for into, fetched in casts:
        with writing(into):
            into.copy_(fetched)
    casts.clear()


def _check_pattern(pattern: str, modules: frozenset[str], wholes: frozenset[str]) -> None:
    head, _, rest = pattern.partition("/")
    if is_pattern(head):
        return
    top = next((name for name in (pattern, head) if name in modules | wholes), None)
    if top is None:
        raise InvalidRequest(
            f"only: nothing is tracked as {head!r}",
            hint=f"tracked are {', '.join(sorted(modules | wholes))}",
            key=pattern,
            phase="restore",
        )
    if top in wholes and rest not in ("", "*"):
        raise InvalidRequest(
            f"only: {pattern!r} is a part of {top!r}, which is restored as a whole or not at all",
            hint=f"choose {top!r}; tensors of modules can be chosen singly",
            key=pattern,
            phase="restore",
        )
