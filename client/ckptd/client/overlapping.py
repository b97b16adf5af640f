"""Live tensors whose elements share memory: expanded ones, and windows that overlap.

Owns: telling them, and giving one its restored value. Does not own: anything else that is filled (`restoring`).
Invariant: what is restored has the stored value in every element. Memory stays shared where the value allows it, so
that other views of it see the value too; else the tensor, as the same object, gets memory of its own.
"""

from __future__ import annotations

import torch

from .copying import copyable
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


def settle(live: torch.Tensor, value: torch.Tensor) -> None:
    """Give an overlapping tensor its value."""
    with torch.no_grad():
        one, once = live, value
        for dim, stride in enumerate(live.stride()):
            if not stride:
                one, once = one.narrow(dim, 0, 1), once.narrow(dim, 0, 1)
        if not overlaps(one) and plain_bytes(once.expand_as(value)) == plain_bytes(value):
            copyable(one).copy_(copyable(once))
        else:
            live.data = value
