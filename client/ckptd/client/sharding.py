"""Which boxes of a global tensor a rank holds, and the views of its local tensor that hold them.

Owns: plain tensors, `DTensor` placements (Shard, Replicate, _StridedShard, uneven ones) and `Sharded`, each as
pieces: a box of the global tensor with the view of the local tensor that holds it. Does not own: who writes a box, or
its name. Pure arithmetic but for the views; no communication. Invariant: the boxes of one tensor on one rank are
disjoint, and each view has its box's shape.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .errors import InvalidRequest

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and length per dimension, in elements of the global tensor."""
Run = tuple[int, int]
"""Start and length of consecutive indices of one dimension."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One split of a dimension.

    Into `parts`, of which this rank holds `index`; `stride` earlier pieces are each
    split so.
    """

    parts: int
    index: int
    stride: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalBox:
    """A box of the global tensor, and where it begins in the local one."""

    offset: tuple[int, ...]
    length: tuple[int, ...]
    local_offset: tuple[int, ...]


def chunk(size: int, parts: int, index: int) -> Run:
    """Return what `torch.chunk` gives: pieces of ceil(size / parts), the last ones shorter or empty."""
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(step, size - start)


def _taken(runs: Sequence[Run], start: int, length: int) -> list[Run]:
    """Return the indices at positions [start, start + length) of `runs`."""
    found: list[Run] = []
    for first, count in runs:
        if length <= 0:
            break
        if start >= count:
            start -= count
            continue
        part = min(count - start, length)
        found.append((first + start, part))
        start, length = 0, length - part
    return found


def _merged(runs: Sequence[Run]) -> list[Run]:
    found: list[Run] = []
    for first, count in runs:
        if found and found[-1][0] + found[-1][1] == first:
            found[-1] = (found[-1][0], found[-1][1] + count)
        elif count:
            found.append((first, count))
    return found


def held_runs(size: int, cuts: Sequence[Cut]) -> list[Run]:
    """Return the indices of a dimension of `size` left after `cuts`, in the order the local tensor holds them."""
    runs: list[Run] = [(0, size)] if size else []
    for cut in cuts:
        total = sum(count for _, count in runs)
        kept: list[Run] = []
        for piece in range(cut.stride):
            start, count = chunk(total, cut.stride, piece)
            inner, length = chunk(count, cut.parts, cut.index)
            kept += _taken(runs, start + inner, length)
        runs = _merged(kept)
    return runs


def local_boxes(runs: Sequence[Sequence[Run]]) -> list[LocalBox]:
    """Return the boxes that the runs of all dimensions span: one per combination, in row-major order."""
    placed: list[list[tuple[int, int, int]]] = []
    for dimension in runs:
        at = 0
        spans = []
        for start, count in dimension:
            spans.append((start, count, at))
            at += count
        placed.append(spans)
    return [
        LocalBox(
            offset=tuple(start for start, _, _ in spans),
            length=tuple(count for _, count, _ in spans),
            local_offset=tuple(at for _, _, at in spans),
        )
        for spans in itertools.product(*placed)
    ]


def _size(runs: Sequence[Run]) -> int:
    return sum(count for _, count in runs)


@functools.lru_cache(maxsize=65536)
def boxes_of_placements(
    global_shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    local_shape: tuple[int, ...],
) -> tuple[LocalBox, ...]:
    """Return the boxes that the rank at `coordinate` holds of a `DTensor`.

    Placements are read left to right, as torch defines them, but for one case: FSDP2 writes _StridedShard for its split
    of a shard that tensor parallelism made before, so there the bytes were cut right to left. For even tensors both are
    the same; for uneven ones torch's own reading (`full_tensor`) is wrong. The other order is tried where one does not
    give the local shape.

    Raises:
        InvalidRequest: a placement that is no shard or replica, or none of both orders gives the local shape.
    """
    by_fsdp = _is_by_fsdp(mesh_shape, placements)
    for strided_last in (by_fsdp, not by_fsdp):
        cuts = _cuts(len(global_shape), mesh_shape, coordinate, placements, strided_last=strided_last)
        runs = [held_runs(size, cuts[dim]) for dim, size in enumerate(global_shape)]
        if tuple(_size(dimension) for dimension in runs) == local_shape:
            return tuple(local_boxes(runs))
    raise InvalidRequest(
        f"a DTensor of shape {global_shape} with placements {placements} on a mesh {mesh_shape} holds a local tensor "
        f"of shape {local_shape} at {coordinate}, which these placements do not give",
        hint="pass Sharded(local_tensor, global_shape, offsets) instead",
    )


def _is_by_fsdp(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> bool:
    """Say whether every stride is the number of shards that the axes to its right make of the same dimension."""
    for axis, placement in enumerate(placements):
        stride = getattr(placement, "split_factor", None)
        if stride is not None:
            dim = getattr(placement, "dim", None)
            right = [size for size, other in _later(axis, mesh_shape, placements) if getattr(other, "dim", None) == dim]
            if stride != math.prod(right):
                return False
    return True


def _later(axis: int, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> list[tuple[int, Placement]]:
    return list(zip(mesh_shape[axis + 1 :], placements[axis + 1 :], strict=True))


def _cuts(
    dims: int,
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    *,
    strided_last: bool,
) -> list[list[Cut]]:
    plain: list[list[Cut]] = [[] for _ in range(dims)]
    late: list[list[Cut]] = [[] for _ in range(dims)]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        stride = getattr(placement, "split_factor", None)
        if not isinstance(placement, Shard) and stride is None:
            raise InvalidRequest(
                f"a DTensor with placement {placement!r} holds no final values",
                hint="redistribute it to Shard or Replicate first",
            )
        dim = int(getattr(placement, "dim", 0)) % dims if dims else 0
        cut = Cut(parts=mesh_shape[axis], index=coordinate[axis], stride=int(stride or 1))
        if strided_last and stride is not None:
            late[dim].append(Cut(parts=cut.parts, index=cut.index))
        else:
            plain[dim].append(cut)
    # Right to left: the last strided shard was made first.
    return [now + later[::-1] for now, later in zip(plain, late, strict=True)]


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


_PLAIN_TYPES: frozenset[type] = frozenset(
    {torch.Tensor, torch.nn.Parameter, *([torch.nn.Buffer] if hasattr(torch.nn, "Buffer") else [])}
)


def checked(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the tensor detached, if its bytes are its value.

    Raises:
        InvalidRequest: meta, sparse, nested, quantized, or of a subclass with a meaning of its own.
    """
    kind = type(tensor)
    refusal = None
    if kind not in _PLAIN_TYPES:
        refusal = f"of the subclass {kind.__module__}.{kind.__qualname__}"
    elif tensor.is_nested:
        refusal = "nested"
    elif tensor.layout is not torch.strided:
        refusal = f"of layout {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.is_quantized:
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
