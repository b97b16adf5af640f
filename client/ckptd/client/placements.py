"""Which boxes of a global tensor the placements of a `DTensor` give to a rank.

Owns: the arithmetic of Shard, Replicate and _StridedShard, even and uneven. Does not own: tensors (`sharding`). Pure.
Invariant: the boxes of one tensor on one rank are disjoint, and over all ranks they tile the tensor, once per
replica.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Placement, Replicate, Shard

from .errors import InvalidRequest

Run = tuple[int, int]
"""Start and length of consecutive indices of one dimension."""


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


def beside(
    placements: Sequence[Placement], mesh_shape: Sequence[int], parameter: Sequence[int], shape: Sequence[int]
) -> tuple[Placement, ...]:
    """Return the placements of a tensor that one rank holds whole, or nothing of, beside a parameter of another shape.

    A rank that holds all of one row cannot tell a shard from a replica, and all must say the same: it is sharded where its
    parameter has one row too, as a reduction along another dimension leaves it, else a replica.

    Args:
        placements: Of the parameter.
        mesh_shape: Of their mesh.
        parameter: Global shape of the parameter.
        shape: Global shape of the tensor.
    """

    def stays(placement: Placement, size: int) -> bool:
        if type(placement) is not Shard or not placement.dim < min(len(parameter), len(shape)):
            return False
        return size == 1 or parameter[placement.dim] == shape[placement.dim] == 1

    pairs = zip(placements, mesh_shape, strict=True)
    return tuple(placement if stays(placement, size) else Replicate() for placement, size in pairs)


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
