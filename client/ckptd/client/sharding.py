"""Tensors as a rank holds them: boxes of global tensors, with the views that hold them.

Owns: plain tensors, `DTensor` and `Sharded` as pieces, and refusing tensors whose bytes are not their value. Does not
own: the arithmetic of placements (`placements`), who writes a box, or its name. No communication. Invariant: each
view has its box's shape.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from .errors import InvalidRequest
from .placements import LocalBox, boxes_of_placements


@dataclass(frozen=True, eq=False, slots=True)
class Sharded:
    """A plain tensor that is a box of a global tensor.

    Args:
        tensor: The local tensor, of the box's shape.
        global_shape: Shape of the global tensor.
        offsets: Where the box begins in it, one entry per dimension. All zero and `global_shape` equal to the tensor's
            own shape declares a replica.
    """

    tensor: torch.Tensor
    global_shape: Sequence[int]
    offsets: Sequence[int]


@dataclass(frozen=True, eq=False, slots=True)
class PerRank:
    """Says that tensors in `value` are this rank's own: equal names on other ranks are no replicas.

    They go back to the same mesh coordinate.
    """

    value: object


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """A tensor as this rank holds it.

    Attributes:
        dtype: Its dtype.
        global_shape: Shape of the global tensor.
        boxes: What this rank holds of it; the same object for equal arguments, so that it may be compared by identity.
        local: The local tensor, detached: any strides, any device.
    """

    dtype: torch.dtype
    global_shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]
    local: torch.Tensor

    def views(self) -> list[torch.Tensor]:
        """Return the view of the local tensor that holds each box, of the box's shape."""
        if len(self.boxes) == 1 and self.boxes[0].length == self.local.shape:
            return [self.local]
        return [self._view(box) for box in self.boxes]

    def _view(self, box: LocalBox) -> torch.Tensor:
        view = self.local
        for dim, (at, length) in enumerate(zip(box.local_offset, box.length, strict=True)):
            view = view.narrow(dim, at, length)
        return view


def is_tensor_leaf(value: object) -> bool:
    """Say whether `value` is stored as shards: a tensor, `Sharded`, or `PerRank` of one of them."""
    if isinstance(value, PerRank):
        value = value.value
    return isinstance(value, torch.Tensor | Sharded)


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what is equal for two tensors exactly when they are the same memory seen in the same way."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.is_nested or local.is_meta or local.layout is not torch.strided or not local.numel():
        return (id(tensor),)
    return (local.device, local.data_ptr(), local.dtype, local.shape, local.stride())


@functools.lru_cache(maxsize=65536)
def _whole(shape: tuple[int, ...]) -> tuple[LocalBox, ...]:
    zero = (0,) * len(shape)
    return (LocalBox(offset=zero, length=shape, local_offset=zero),)


@functools.lru_cache(maxsize=65536)
def _one(offset: tuple[int, ...], length: tuple[int, ...]) -> tuple[LocalBox, ...]:
    return (LocalBox(offset=offset, length=length, local_offset=(0,) * len(length)),)


def pieces_of(leaf: object, name: str) -> Pieces:
    """Return the boxes this rank holds of a tensor, `DTensor` or `Sharded`. Nothing is copied, nobody is asked.

    A rank outside a `DTensor`'s mesh, and an empty local shard, hold no box; a global tensor without elements is held
    by everybody.

    Raises:
        InvalidRequest: no dense strided tensor of final values; `key` is `name`.
    """
    if isinstance(leaf, PerRank):
        leaf = leaf.value
    if isinstance(leaf, Sharded):
        return _pieces_of_sharded(leaf, name)
    if isinstance(leaf, DTensor):
        return _pieces_of_dtensor(leaf, name)
    if not isinstance(leaf, torch.Tensor):
        raise InvalidRequest(f"{name}: {type(leaf).__qualname__} is no tensor", key=name)
    local = checked(leaf, name)
    shape = tuple(local.shape)
    return Pieces(local.dtype, shape, _whole(shape), local)


def _pieces_of_sharded(leaf: Sharded, name: str) -> Pieces:
    local = checked(leaf.tensor, name)
    shape, offsets, lengths = tuple(leaf.global_shape), tuple(leaf.offsets), tuple(local.shape)
    fits = len(shape) == len(offsets) == len(lengths) and all(
        min(offset, length, size - offset - length) >= 0
        for offset, length, size in zip(offsets, lengths, shape, strict=True)
    )
    if not fits:
        raise InvalidRequest(
            f"{name}: a Sharded of shape {lengths} at offsets {offsets} does not lie in the global shape {shape}",
            key=name,
        )
    return Pieces(local.dtype, shape, () if not local.numel() and all(shape) else _one(offsets, lengths), local)


def _pieces_of_dtensor(leaf: DTensor, name: str) -> Pieces:
    with torch.no_grad():
        local = checked(leaf.to_local(), name)
    shape = tuple(leaf.shape)
    coordinate = leaf.device_mesh.get_coordinate()
    if coordinate is None:
        return Pieces(local.dtype, shape, (), local)
    if not all(shape):
        # No elements anywhere: everybody holds the whole of nothing, so that name, dtype and shape are kept.
        return Pieces(local.dtype, shape, _whole(shape), local.new_empty(shape))
    try:
        boxes = boxes_of_placements(
            shape, tuple(leaf.device_mesh.shape), tuple(coordinate), tuple(leaf.placements), tuple(local.shape)
        )
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error.message}", hint=error.hint, key=name) from None
    return Pieces(local.dtype, shape, boxes, local)


PLAIN_TYPES: frozenset[type] = frozenset(
    {torch.Tensor, torch.nn.Parameter, *([torch.nn.Buffer] if hasattr(torch.nn, "Buffer") else [])}
)
"""Types whose tensors mean what their elements say."""


_QUANTIZED: frozenset[torch.dtype] = frozenset(
    {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
)


def checked(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the tensor detached, if its bytes are its value.

    Raises:
        InvalidRequest: meta, sparse, nested, quantized, or of a subclass with a meaning of its own.
    """
    kind = type(tensor)
    refusal = None
    if kind not in PLAIN_TYPES:
        refusal = f"of the subclass {kind.__module__}.{kind.__qualname__}"
    elif tensor.is_nested:
        refusal = "nested"
    elif tensor.layout is not torch.strided:
        refusal = f"of layout {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.is_quantized or tensor.dtype in _QUANTIZED:
        refusal = f"quantized ({str(tensor.dtype).removeprefix('torch.')})"
    elif tensor.is_meta:
        refusal = "on the meta device and has no bytes"
    if refusal is not None:
        raise InvalidRequest(
            f"{name}: a tensor {refusal} cannot be stored",
            hint="store dense strided tensors on a real device",
            key=name,
        )
    return tensor.detach()


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without "torch."."""
    return _dtype_names(dtype)


@functools.lru_cache(maxsize=256)
def _dtype_names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a stored name.

    Raises:
        InvalidRequest: this torch does not know it.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InvalidRequest(
            f"the snapshot holds tensors of dtype {name!r}, which torch {torch.__version__} does not know"
        )
    return found
