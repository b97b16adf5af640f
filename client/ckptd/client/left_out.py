"""Parameters and buffers that the `state_dict()` of a tracked module leaves out: nothing of them is saved with it.

Owns: finding them, and telling whether something else that is tracked saves them. Does not own: what is said of those that are
frozen (`audit`). Invariant: what is trained is saved, or the save is refused; a frozen base that is made again may be left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from .errors import InvalidRequest
from .generators import Generator
from .nested import Stateful, live_leaves
from .sharding import dtype_name, is_out_of_reach, memory_of, per_rank_value, pieces_of
from .state import Collected
from .tree import component


def trained_left_out(modules: Sequence[nn.Module], given: Iterable[object]) -> list[tuple[str, torch.Tensor]]:
    """Return name and value of each parameter that requires gradients and is none of `given`.

    Args:
        modules: What is tracked under one name.
        given: The live values that their `state_dict()` gave.
    """
    known = set(map(id, given))
    if not _has_other(modules, known):
        return []
    return [
        (path, parameter)
        for root in modules
        for path, parameter in root.named_parameters()
        if parameter.requires_grad and id(parameter) not in known
    ]


def _has_other(modules: Sequence[nn.Module], known: set[int]) -> bool:
    """Say whether any parameter is trained and not known. Every save asks; torch's own walks take several times as long."""
    left, seen = list(modules), set(map(id, modules))
    while left:
        module = left.pop()
        for parameter in module._parameters.values():  # noqa: SLF001 - as said
            if id(parameter) not in known and parameter is not None and parameter.requires_grad:
                return True
        for child in module._modules.values():  # noqa: SLF001 - as said
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                left.append(child)
    return False


def check_left_out(
    left: Iterable[tuple[str, str, torch.Tensor]], collected: Collected, others: Collection[str]
) -> None:
    """Refuse a save that would lose what is trained.

    Args:
        left: Name of the tracked module, path and value of each trained parameter that it leaves out.
        collected: What is saved.
        others: Names of tracked things that are neither modules nor optimizers: these may save a copy.

    Raises:
        InvalidRequest: nothing saves one of them; `key` names it.
    """
    pairs = list(zip(collected.layout.rows, collected.views, strict=True))
    saved = {memory_of(view) for _, view in pairs}
    # Their state_dict() may give copies, on other devices: what looks like it is taken for it.
    copies = {(row.dtype, tuple(row.global_shape)) for row, _ in pairs if row.name.partition("/")[0] in others}
    for name, path, parameter in left:
        full = f"{name}/{component(path)}"
        pieces = pieces_of(parameter, full) if not is_out_of_reach(parameter) else None
        if pieces is not None:
            looks = dtype_name(pieces.dtype), tuple(pieces.global_shape)
            if not pieces.local.numel() or not pieces.boxes or looks in copies:
                continue
            if saved.issuperset(map(memory_of, pieces.views())):
                continue
        raise InvalidRequest(
            f"{full}: a trained parameter that its module's state_dict() leaves out, and nothing else that is tracked saves it",
            hint="let state_dict() give it, or track what holds it by a name of its own; if it can be made again, freeze it: "
            "requires_grad_(False)",
            key=full,
        )


def left_out(
    modules: Mapping[str, Sequence[nn.Module]], things: Mapping[str, object]
) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each parameter and persistent buffer that no tracked thing gives: name of the module, root, path.

    Args:
        modules: Tracked modules by name.
        things: Everything that is tracked.
    """
    known: set[int] = set()
    with torch.no_grad():
        for root in (root for held in modules.values() for root in held):
            known.update(map(id, root.state_dict(keep_vars=True).values()))
    found = [
        (name, root, path, tensor)
        for name, held in modules.items()
        for root in held
        for path, tensor in _persistent(root)
        if id(tensor) not in known
    ]
    if not found:
        return
    for name, thing in things.items():
        if name not in modules and not isinstance(thing, Optimizer | Generator | type):
            value = thing.state_dict() if isinstance(thing, Stateful) else thing
            known.update(id(per_rank_value(each.leaf)) for each in live_leaves(name, value).values())
    yield from ((name, root, path) for name, root, path, tensor in found if id(tensor) not in known)


def _persistent(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from root.named_parameters()
    for path, module in root.named_modules():
        for key, buffer in module._buffers.items():  # noqa: SLF001 - nothing public says which are persistent
            if key not in module._non_persistent_buffers_set and buffer is not None:  # noqa: SLF001 - as above
                yield f"{path}.{key}" if path else key, buffer
