"""Optimizers in optimizers: state that `.state` and `.param_groups` of the outer one do not show.

Owns: finding the inner ones, and refusing to save or restore where their state would be lost. Does not own: what one
optimizer holds itself (`optimizers`), or the warning of what may be lost (`audit`). Invariant: an outer one whose `.state`
is that of the inner one is left alone (Accelerate's, Lightning's and `PostLocalSGDOptimizer` are such); a save runs no
method of either.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .errors import InvalidRequest
from .reachable import OPAQUE, children

log = logging.getLogger("ckptd.client")

_OWN = frozenset({"state", "param_groups", "defaults"})
"""What is saved of an optimizer, and what it was made with."""
_DEPTH = 4
_LIMIT = 2_000
"""Objects looked at in one walk; each save makes one for each optimizer."""


def inner_optimizers(optimizer: Optimizer, *, through_objects: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield what `optimizer` holds that is an optimizer too, with its path, e.g. ``.optim`` or ``.parts[0]``.

    Attributes, lists, tuples and dicts are looked through, a few levels deep. torch's functional optimizers
    (`ZeroRedundancyOptimizer` with `overlap_with_ddp`) are known by their form. What an inner one holds comes too.

    Args:
        optimizer: The outer one.
        through_objects: Whether attributes of other objects are looked at too, which may refer to anything of the job.
    """
    seen = {id(optimizer)}
    level: list[tuple[str, object]] = [("", optimizer)]
    for _ in range(_DEPTH):
        below: list[tuple[str, object]] = []
        for path, value in level:
            for child_path, child in _held(path, value):
                if id(child) in seen or isinstance(child, (*OPAQUE, nn.Module)):
                    continue
                seen.add(id(child))
                if len(seen) > _LIMIT:
                    return
                is_inner = is_like_an_optimizer(child)
                if is_inner:
                    yield child_path, child
                if is_inner or through_objects or isinstance(child, dict | list | tuple):
                    below.append((child_path, child))
        level = below


def _held(path: str, value: object) -> Iterator[tuple[str, object]]:
    if is_like_an_optimizer(value):
        return ((f"{path}{attribute}", item) for attribute, item in attributes(value))
    return children(path, value)


def attributes(optimizer: Any) -> Iterator[tuple[str, object]]:
    """Yield what an optimizer holds beside what is saved of it, and hooks; with paths such as ``.optim``."""
    for key, item in vars(optimizer).items():
        if key not in _OWN and not key.startswith("_optimizer_"):
            yield f".{key}", item


def is_like_an_optimizer(value: object) -> bool:
    """Say whether `value` is an optimizer, or has the form of one: state by parameter, and groups."""
    if isinstance(value, Optimizer):
        return True
    held = getattr(value, "__dict__", {})
    state = held.get("state")
    return (
        isinstance(state, dict)
        and ("param_groups" in held or "param_group" in held)
        and all(isinstance(key, torch.Tensor) for key in state)
    )


def shares_state(outer: Optimizer, inner: Any) -> bool:
    """Say whether all that `inner` knows of its parameters stands in `outer.state` too, as the same objects."""
    shown = outer.state
    if shown is inner.state:
        return True
    return all(shown.get(key) is entries for key, entries in inner.state.items() if _says_anything(entries))


def shares_all(outer: Optimizer, inner: Any) -> bool:
    """Say whether `outer` shows state and groups of `inner`: whatever is restored to one is restored to the other."""
    groups = {id(group) for group in outer.param_groups}
    return shares_state(outer, inner) and all(id(group) in groups for group in getattr(inner, "param_groups", [None]))


def _says_anything(entries: object) -> bool:
    """Say whether losing it loses anything; of a momentum that is not used torch keeps a None."""
    if isinstance(entries, Mapping):
        return any(value is not None for value in entries.values())
    return entries is not None


def check_collected(optimizers: Mapping[str, Optimizer], views: Sequence[torch.Tensor]) -> None:
    """Refuse a save that would lose the state of an optimizer in an optimizer.

    Args:
        optimizers: All that are tracked, by name.
        views: The tensors that were collected: an inner state that some other tracked thing gives is not lost.

    Raises:
        InvalidRequest: it would; the message names the inner one and the way out.
    """
    known = {id(optimizer) for optimizer in optimizers.values()}
    for name, outer in optimizers.items():
        for path, inner in inner_optimizers(outer):
            if id(inner) not in known and not shares_state(outer, inner) and not _is_collected(inner, views):
                raise _refusal(name, path, inner, f"{name}{path} in it has state of its own, which would not be saved")


def _is_collected(inner: Any, views: Sequence[torch.Tensor]) -> bool:
    held = [
        value
        for entries in inner.state.values()
        if isinstance(entries, Mapping)
        for value in entries.values()
        if isinstance(value, torch.Tensor) and value.numel()
    ]
    places = {view.data_ptr() for view in views}
    return bool(held) and all(getattr(tensor, "_local_tensor", tensor).data_ptr() in places for tensor in held)


def check_restored(restored: Mapping[str, Optimizer], tracked: Mapping[str, Optimizer]) -> None:
    """Refuse a restore of state that would stand where nothing looks.

    torch's `ZeroRedundancyOptimizer` steps with the optimizer in it and reads nothing of its own `.state`. Of classes that
    are not known so well there is a warning.

    Args:
        restored: Optimizers that the step has state for, by name.
        tracked: All that are tracked.

    Raises:
        InvalidRequest: it would; the message names the inner one and the way out.
    """
    known = {id(optimizer) for optimizer in tracked.values()}
    for name, outer in restored.items():
        for path, inner in inner_optimizers(outer):
            if (
                id(inner) in known
                or outer.state is inner.state
                or any(shares_all(one, inner) for one in restored.values())
            ):
                continue
            if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(outer).__mro__):
                text = f"it steps with {name}{path}, and would never look at the state that is stored for it"
                raise _refusal(name, path, inner, text)
            log.warning("%s: %s%s in it is not tracked: it keeps the state it has here", name, name, path)


def check_keeps(name: str, optimizer: Optimizer, parameter: torch.Tensor) -> None:
    """Refuse to make state for a parameter in a `.state` that is put together anew whenever it is asked for.

    State that stands there already is the inner optimizers' own, and can be filled.

    Raises:
        InvalidRequest: what would be put there is lost at once.
    """
    state, again = optimizer.state, optimizer.state
    if state is not again and parameter not in state:
        raise InvalidRequest(
            f"{name}: its .state is made anew each time, so that stored state cannot be put there",
            hint="track the optimizers in it instead of it, when saving and when restoring; or make its state before the restore",
            key=name,
            phase="restore",
        )


def _refusal(name: str, path: str, inner: object, text: str) -> InvalidRequest:
    way = (
        f"track it too, under a name of its own: track({name}=optimizer, {name}_inner=optimizer{path})"
        if isinstance(inner, Optimizer)
        else "track, instead of the optimizer, an object whose state_dict() and load_state_dict() take care of both"
    )
    return InvalidRequest(f"{name}: {text}", hint=way, key=name)
