"""Live tensors whose elements share memory: expanded ones, windows that overlap, and views of one another.

Owns: telling them, and giving one its restored value. Does not own: anything else that is filled (`restoring`).
Invariant: what is restored has the stored value in every element. Memory stays shared where the values allow it, so
that other views of it see the value too; else the tensor, as the same object, gets memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch

from .copying import copyable, writing
from .sharding import PerRank, Sharded
from .staging import plain_bytes


def overlaps(tensor: torch.Tensor) -> bool:
    """Say whether two elements stand at one place, so that nothing can be copied into them."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    if dims[0][0] == 0:
        return True
    # Strides that interleave need not meet: only the places themselves tell.
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, size in dims:
        places = places.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    return int(torch.bincount(places.reshape(-1)).max()) > 1


def sharing(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Return the names of tensors whose memory reaches into that of another, and the number of their group.

    Columns of one matrix are among them, though no element stands at one place: it costs memory, and is right.
    """
    spans: list[tuple[str, int, int, str]] = []
    for name, tensor in tensors:
        if tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            reach = sum((size - 1) * stride for size, stride in steps) + 1
            begin = tensor.data_ptr()
            spans.append((str(tensor.device), begin, begin + reach * tensor.element_size(), name))
    spans.sort()
    found: dict[str, int] = {}
    group, reached, device, first = 0, 0, "", ""
    for where, begin, end, name in spans:
        if where == device and begin < reached:
            found[first] = found[name] = group
            reached = max(reached, end)
        else:
            group, reached, device, first = group + 1, end, where, name
    return found


def held(leaf: object) -> torch.Tensor:
    """Return the plain tensor object in a leaf."""
    if isinstance(leaf, PerRank):
        leaf = leaf.value
    if isinstance(leaf, Sharded):
        return leaf.tensor
    assert isinstance(leaf, torch.Tensor)
    with torch.no_grad():
        local: torch.Tensor = leaf.to_local() if hasattr(leaf, "to_local") else leaf
    return local


Settled: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A live tensor and its value."""


def settle(live: torch.Tensor, value: torch.Tensor, beside: list[Settled]) -> None:
    """Give an overlapping tensor its value, and add it to those that may share its memory and have theirs."""
    _settle(live, value)
    if any(plain_bytes(other) != plain_bytes(its) for other, its in beside):
        for other, its in beside:
            _settle(other, its)
        live.data = value
    beside.append((live, value))


def _settle(live: torch.Tensor, value: torch.Tensor) -> None:
    with writing(live):
        one, once = live, value
        for dim, stride in enumerate(live.stride()):
            if not stride:
                one, once = one.narrow(dim, 0, 1), once.narrow(dim, 0, 1)
        if not overlaps(one) and plain_bytes(once.expand_as(value)) == plain_bytes(value):
            copyable(one).copy_(copyable(once))
        else:
            live.data = value
