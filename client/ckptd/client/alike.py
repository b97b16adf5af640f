"""Whether two restored values are one: types, order, floats and tensors bit by bit.

Pure. Owns: that comparison. Does not own: what follows from it (`resharding`, `tree`, `putting_back`). Invariant: what cannot be
stored is like nothing but itself.
"""

from __future__ import annotations

import hashlib

from torch.distributed.tensor import DTensor

from .errors import InvalidRequest
from .overlapping import held
from .sharding import PerRank, Sharded, is_tensor_leaf
from .staging import plain_bytes
from .values import encode


def bits(value: object) -> bytes:
    """Return bytes that are equal exactly for equal values; of a tensor with its place, where it is a piece.

    Raises:
        InvalidRequest: it holds what cannot be stored.
    """
    return encode(value, "", is_tensor=is_tensor_leaf, tensor=lambda _name, leaf: tensor_text(leaf)).SerializeToString(
        deterministic=True
    )


def tensor_text(leaf: object) -> str:
    """Return a text that is equal exactly for tensors held alike, with equal bytes."""
    local = held(leaf)
    inner = leaf.value if isinstance(leaf, PerRank) else leaf
    place = ""
    if isinstance(inner, Sharded):
        place = f" of {tuple(inner.global_shape)} at {tuple(inner.offsets)}"
    elif isinstance(inner, DTensor):
        place = f" of {tuple(inner.shape)} {inner.placements}"
    digest = hashlib.sha256(plain_bytes(local)).hexdigest()
    return f"{local.dtype} {tuple(local.shape)}{place} {digest}"


def alike(one: object, other: object) -> bool:
    """Say whether two values are one."""
    if one is other:
        return True
    try:
        return bits(one) == bits(other)
    except InvalidRequest:
        return False
