"""Whether tensors still are what the last save saw, so that what followed from them need not be worked out again.

Owns: the comparison. Does not own: what followed (`modules` and `optimizers` remember their segments of a cut). No
tensor is kept, only how it looked: memory is freed as before, and what is copied is always the tensor found now.
Invariant: True means that taking the tensors apart again would give equal rows; a doubt is False.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from .sharding import PLAIN_TYPES

Look: TypeAlias = tuple[type, tuple[int, ...], torch.dtype, torch.device]
"""Type, shape, dtype and device of a plain tensor: its rows follow from these and its name."""
Place: TypeAlias = tuple[int, tuple[int, ...], bool, bool, bool]
"""Address, strides, whether conjugated and negated, and requires_grad: ties and groups follow from these."""


def is_plain(value: object) -> bool:
    """Say whether `value` is a tensor whose rows follow from its look."""
    return type(value) in PLAIN_TYPES


def looks_of(tensors: Sequence[torch.Tensor]) -> list[Look]:
    """Return how plain tensors look that were collected, so are dense, strided and real."""
    return [(type(tensor), tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors]


def places_of(tensors: Sequence[torch.Tensor]) -> list[Place]:
    """Return where plain tensors lie that were collected."""
    return [
        (tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)
        for tensor in tensors
    ]


def same_looks(tensors: Sequence[object], looks: Sequence[Look]) -> bool:
    """Say whether each tensor looks as it did. Costs about half a microsecond a tensor."""
    if len(tensors) != len(looks):
        return False
    strided = torch.strided
    try:
        for tensor, (kind, shape, dtype, device) in zip(tensors, looks, strict=True):
            if (
                type(tensor) is not kind
                or tensor.layout is not strided  # type: ignore[attr-defined]  # its type is `kind`, a tensor's
                or tensor.shape != shape  # type: ignore[attr-defined]
                or tensor.dtype is not dtype  # type: ignore[attr-defined]
                or tensor.device != device  # type: ignore[attr-defined]
            ):
                return False
    except RuntimeError:  # a nested tensor has no shape
        return False
    return True


def have_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether no tensor's memory was freed; where places are compared, they say it."""
    return all(tensor.data_ptr() or not tensor.numel() for tensor in tensors)


def same_places(tensors: Sequence[torch.Tensor], places: Sequence[Place]) -> bool:
    """Say whether each tensor, which looks as it did, lies where it did."""
    for tensor, (address, stride, is_conj, is_neg, requires_grad) in zip(tensors, places, strict=True):
        if (
            tensor.data_ptr() != address
            or tensor.stride() != stride
            or tensor.is_conj() is not is_conj
            or tensor.is_neg() is not is_neg
            or tensor.requires_grad is not requires_grad
        ):
            return False
    return True
