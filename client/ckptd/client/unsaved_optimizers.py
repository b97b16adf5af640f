"""Optimizers, and state of optimizers, that no snapshot would hold.

Owns: finding them. Does not own: refusing a save that would lose state for certain (`wrapped_optimizers`). Invariant: nothing
is changed; `state_dict()` of an optimizer is the only code that runs, and only where it is not torch's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from .nested import Stateful
from .wrapped_optimizers import attributes, inner_optimizers, shares_all

_DEPTH = 4


def untracked_optimizers(things: Mapping[str, object], parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
    """Yield paths to optimizers that tracked things are bound to, and that no tracked one stands for.

    Args:
        things: What is tracked, by name.
        parameters: Those of tracked modules, by name.
    """
    tracked = [thing for thing in things.values() if isinstance(thing, Optimizer)]

    def is_saved(one: object) -> bool:
        return any(one is other or shares_all(other, one) for other in tracked)

    for name, thing in things.items():
        inner = inner_optimizers(thing, through_objects=True) if isinstance(thing, Optimizer) else _bound(thing)
        yield from (f"{name}{path}" for path, one in inner if not is_saved(one))
    for name, parameter in parameters:
        # Where torch's apply_optimizer_in_backward puts them.
        for number, one in enumerate(vars(parameter).get("_in_backward_optimizers", ())):
            if not is_saved(one):
                yield f"{name}._in_backward_optimizers[{number}]"


def _bound(thing: object) -> Iterator[tuple[str, Optimizer]]:
    bound = getattr(thing, "__dict__", {}).get("optimizer")
    if isinstance(bound, Optimizer):
        yield ".optimizer", bound


def unsaved_in_optimizer(name: str, optimizer: Optimizer, tracked: set[int]) -> Iterator[tuple[str, str]]:
    """Yield kind and path of what an optimizer keeps beside what is saved of it.

    Args:
        name: Of the optimizer.
        optimizer: A tracked one.
        tracked: Identities of all that is tracked.
    """
    if gives_more(optimizer):
        yield "own_state_dict", name
    groups = [[*group.values()] for group in optimizer.param_groups]
    defaults = getattr(optimizer, "defaults", None)  # a wrapper need not have any
    shown = [*optimizer.state, *tensors_in([groups, [*optimizer.state.values()], defaults])]
    memory = {_memory(tensor) for tensor in shown if isinstance(tensor, torch.Tensor)}
    for path, value in attributes(optimizer):
        scratch = int(path.startswith("._"))  # flags of fused kernels have one element, and nothing is read from them
        if any(tensor.numel() > scratch and _memory(tensor) not in memory for tensor in tensors_in(value)):
            yield "unsaved_tensor", f"{name}{path}"
        elif (
            isinstance(value, Stateful)
            and not isinstance(value, type | Optimizer | nn.Module)
            and id(value) not in tracked
        ):
            yield "unsaved_object", f"{name}{path}"


def gives_more(optimizer: Optimizer) -> bool:
    """Say whether `state_dict()` of the optimizer gives, or may give, more than its `.state` and `.param_groups`.

    It is called only where it is not torch's own, or where hooks of the script may add to what it gives.
    """
    own = type(optimizer).state_dict is Optimizer.state_dict and "state_dict" not in vars(optimizer)
    if own and not vars(optimizer).get("_optimizer_state_dict_post_hooks"):
        return False
    try:
        given = optimizer.state_dict()
        if set(given) - {"state", "param_groups"}:
            return True
        shown = {id(tensor) for tensor in tensors_in([*optimizer.state.values()])}
        return any(id(tensor) not in shown for tensor in tensors_in(given.get("state")))
    except Exception:  # the script's own code: where it raises nothing is known
        return True


def tensors_in(value: object, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dicts, lists and tuples, a few levels deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, depth - 1)


def _memory(tensor: torch.Tensor) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr())
