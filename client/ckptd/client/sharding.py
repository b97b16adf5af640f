"""Tensors as a rank holds them: boxes of global tensors, with the views that hold them.

Owns: plain tensors, `DTensor` and `Sharded` as pieces, and refusing tensors whose bytes are not their value. Does not
own: the arithmetic of placements (`placements`), who writes a box, or its name. No communication. Invariant: each
view has its box's shape.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined] # torch does not list it

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


def per_rank_value(value: object) -> object:
    """Return what `PerRank` holds, or the value itself."""
    return value.value if isinstance(value, PerRank) else value


def held_in(leaf: object, local: torch.Tensor) -> object:
    """Return a leaf as `leaf` is whose local tensor is `local`, of the same shape."""
    inner = per_rank_value(leaf)
    made: object = local
    if isinstance(inner, Sharded):
        made = Sharded(local, inner.global_shape, inner.offsets)
    elif isinstance(inner, DTensor):
        with torch.no_grad():
            made = DTensor.from_local(
                local,
                inner.device_mesh,
                inner.placements,
                run_check=False,
                shape=inner.shape,
                stride=inner.stride(),
            )
    return PerRank(made) if isinstance(leaf, PerRank) else made


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what is equal for two tensors exactly when they are the same memory seen in the same way."""
    local, place = tensor, None
    if type(tensor) is DTensor:
        # The same memory as a shard and as a replica, or as a plain tensor, is not the same value.
        local, place = tensor.to_local(), (tensor.shape, tensor.placements, tensor.device_mesh)
    if refusal(local) is not None or not local.numel():
        return (id(tensor),)
    # A conjugate or negated view has its base's address, and other values.
    view = (local.data_ptr(), local.dtype, local.shape, local.stride(), local.is_conj(), local.is_neg())
    return (local.device, *view, place)


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
    if type(leaf) is DTensor:
        return _pieces_of_dtensor(leaf, name)
    if not isinstance(leaf, torch.Tensor):
        raise InvalidRequest(f"{name}: {type(leaf).__qualname__} is no tensor", key=name)
    local = checked(leaf, name)
    shape = tuple(local.shape)
    return Pieces(local.dtype, shape, _whole(shape), local)


def _pieces_of_sharded(leaf: Sharded, name: str) -> Pieces:
    local = checked(leaf.tensor, name)
    try:
        # Numpy's integers too; 2.0 would else be found in caches as 2, and the other way round.
        shape, offsets = tuple(map(operator.index, leaf.global_shape)), tuple(map(operator.index, leaf.offsets))
    except TypeError as error:
        raise InvalidRequest(
            f"{name}: global_shape and offsets of a Sharded must be integers: {error}", key=name
        ) from None
    lengths = tuple(local.shape)
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


_DENSE = "store dense strided tensors on a real device"
_INITIALISE = "run a batch through lazy modules before anything is saved or restored"
_QUANTIZED: frozenset[torch.dtype] = frozenset(
    {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
)


def refusal(tensor: torch.Tensor) -> str | None:
    """Return why the tensor's bytes are not its value; None where they are."""
    kind = type(tensor)
    found = None
    if kind not in PLAIN_TYPES:
        found = f"of the subclass {kind.__module__}.{kind.__qualname__}"
    elif is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):  # noqa: SLF001 - nothing public says it
        found = "inside a transform (torch.func, functionalization)"
    elif tensor.is_nested:
        found = "nested"
    elif tensor.layout is not torch.strided:
        found = f"of layout {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.is_quantized or tensor.dtype in _QUANTIZED:
        found = f"quantized ({str(tensor.dtype).removeprefix('torch.')})"
    elif tensor.is_meta:
        found = "on the meta device and has no bytes"
    elif tensor._is_zerotensor():  # noqa: SLF001 - as above
        found = "of zeros that has no memory"
    elif not _has_memory(tensor):
        found = "whose memory was freed or made smaller"
    return found


def is_out_of_reach(tensor: torch.Tensor) -> bool:
    """Say whether torch itself does nothing with the tensor here: it is of a lazy module, or of a transform that ended."""
    return isinstance(tensor, UninitializedTensorMixin) or is_functorch_wrapped_tensor(tensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Say whether the storage reaches as far as the elements do: FSDP1 and the like resize storages to nothing."""
    if not tensor.numel():
        return True
    last = tensor.storage_offset()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def checked(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the tensor detached, if its bytes are its value.

    Raises:
        InvalidRequest: meta, sparse, nested, quantized, without memory, inside a transform, or of a subclass with a
            meaning of its own.
    """
    found = refusal(tensor)
    if found is not None:
        raise InvalidRequest(
            f"{name}: a tensor {found} cannot be stored",
            hint=_INITIALISE if isinstance(tensor, UninitializedTensorMixin) else _DENSE,
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
