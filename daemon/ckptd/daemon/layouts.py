"""What follows from the layouts of all ranks of a step, whatever the values are.

Owns: which row holds the bytes for which other rows, whether every global tensor is tiled, and the order rows take in
the state digest. Does not own: fingerprints (`coverage`), or who should write what (`plan`). Pure, but for a small
cache: layouts are the same at every save, and 400,000 rows take seconds to go through. Thread-safe.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import blake3
import numpy as np
import numpy.typing as npt

from ckptd.protos import error_pb2
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK, RankSection

from .errors import PlanError
from .tiling import Box, box_text, is_inside, tiling

_CACHED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Layouts:
    """Rows are counted over all ranks, ascending, each rank's in the order of its section.

    Attributes:
        holder: Row: the row whose bytes stand for it; itself where its own rank wrote it.
        order: The held rows, once each, in the order of the state digest.
        text_digest: BLAKE3 over the rows of `order` without their values, 32 bytes.
        tensors: Global tensors.
        nbytes: Plain bytes of the held rows.
    """

    holder: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    text_digest: bytes
    tensors: int
    nbytes: int


class _Row(NamedTuple):
    """A row of one rank; a named tuple, because 400,000 of them are made for a large job."""

    at: int
    rank: int
    name: str
    dtype: str
    scope: int
    shape: tuple[int, ...]
    box: Box
    writer: int
    nbytes: int


@dataclass(kw_only=True, slots=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    scope: int
    item_bytes: int
    rank: int
    boxes: dict[Box, list[_Row]]


_cache: OrderedDict[bytes, Layouts] = OrderedDict()
_lock = threading.Lock()


def layouts_of(sections: Mapping[int, RankSection]) -> Layouts:
    """Return what follows from the layouts in these sections, which passed `index_checks`.

    Raises:
        PlanError: LAYOUT_MISMATCH or COVERAGE, names tensor, box and ranks.
    """
    key = _key(sections)
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    made = _layouts(sections)
    with _lock:
        _cache[key] = made
        while len(_cache) > _CACHED:
            _cache.popitem(last=False)
    return made


def row_at(sections: Mapping[int, RankSection], at: int) -> tuple[int, str, Box]:
    """Return rank, name and box of a row; slow, for messages."""
    for row in _rows(sections):
        if row.at == at:
            return row.rank, row.name, row.box
    raise IndexError(at)


def _key(sections: Mapping[int, RankSection]) -> bytes:
    hasher = blake3.blake3()
    for rank in sorted(sections):
        section = sections[rank]
        parts = (
            section.shards.SerializeToString(deterministic=True),
            section.aliases.SerializeToString(deterministic=True),
            np.asarray(section.writer, dtype="<u4").tobytes(),
            np.asarray(section.coordinate, dtype="<u4").tobytes(),
        )
        hasher.update(np.asarray([rank, *map(len, parts)], dtype="<u8").tobytes())
        for part in parts:
            hasher.update(part)
    return hasher.digest()


def _rows(sections: Mapping[int, RankSection]) -> Iterator[_Row]:
    at = 0
    for rank in sorted(sections):
        section = sections[rank]
        table = section.shards
        names, dtypes, shapes = list(table.names), list(table.dtypes), list(table.global_shape)
        offsets, lengths = list(table.box_offset), list(table.box_length)
        columns = zip(table.name, table.dtype, table.ndim, table.scope, section.writer, table.nbytes, strict=True)
        begin = 0
        for name, dtype, ndim, scope, writer, nbytes in columns:
            end = begin + ndim
            box = (tuple(offsets[begin:end]), tuple(lengths[begin:end]))
            shape = tuple(shapes[begin:end])
            yield _Row(at, rank, names[name], dtypes[dtype], scope, shape, box, writer, nbytes)
            at, begin = at + 1, end


def _layouts(sections: Mapping[int, RankSection]) -> Layouts:
    tensors: dict[str, _Tensor] = {}
    count = 0
    for row in _rows(sections):
        count += 1
        _add(tensors, row)
    _check_aliases(sections, tensors)
    holder = np.empty(count, dtype=np.int64)
    lines: list[tuple[str, str, tuple[int, ...], Box, tuple[int, ...] | None, int]] = []
    total = 0
    for name, tensor in tensors.items():
        for box, rows in tensor.boxes.items():
            for held, group in _groups(name, tensor, box, rows):
                for row_of_group in group:
                    holder[row_of_group.at] = held.at
                coordinate = None if tensor.scope == SCOPE_GLOBAL else tuple(sections[held.rank].coordinate)
                lines.append((name, held.dtype, held.shape, box, coordinate, held.at))
                total += held.nbytes
        if tensor.scope == SCOPE_GLOBAL:
            ranks = {box: [row.rank for row in rows] for box, rows in tensor.boxes.items()}
            if error := tiling(name, tensor.shape, ranks):
                raise PlanError(error)
    lines.sort(key=lambda line: (line[0], line[3], line[4] or ()))
    text = json.dumps([[n, d, s, *b, c] for n, d, s, b, c, _ in lines], separators=(",", ":"), ensure_ascii=False)
    return Layouts(
        holder=holder,
        order=np.array([line[5] for line in lines], dtype=np.int64),
        text_digest=blake3.blake3(text.encode()).digest(),
        tensors=sum(tensor.scope == SCOPE_GLOBAL for tensor in tensors.values()),
        nbytes=total,
    )


def _add(tensors: dict[str, _Tensor], row: _Row) -> None:
    name, rank, box = row.name, row.rank, row.box
    elements = math.prod(box[1])
    if row.nbytes % elements if elements else row.nbytes:
        _mismatch(name, f"{row.nbytes} bytes do not make {elements} elements in box {box_text(box)}", rank)
    if row.scope not in {SCOPE_GLOBAL, SCOPE_PER_RANK}:
        _mismatch(name, f"its scope {row.scope} is unknown", rank)
    item_bytes = row.nbytes // elements if elements else 0
    tensor = tensors.get(name)
    if tensor is None:
        tensor = _Tensor(dtype=row.dtype, shape=row.shape, scope=row.scope, item_bytes=item_bytes, rank=rank, boxes={})
        tensors[name] = tensor
    if row.scope != tensor.scope:
        _mismatch(name, "one rank declares it PerRank, the other does not", rank, tensor.rank)
    if row.scope == SCOPE_GLOBAL:
        if (row.dtype, row.shape) != (tensor.dtype, tensor.shape):
            sides = f"{row.dtype} {list(row.shape)} on rank {rank}, {tensor.dtype} {list(tensor.shape)}"
            _mismatch(name, f"{sides} on rank {tensor.rank}", rank, tensor.rank)
        if item_bytes and tensor.item_bytes and item_bytes != tensor.item_bytes:
            _mismatch(name, f"elements of {item_bytes} and {tensor.item_bytes} bytes", rank, tensor.rank)
        tensor.item_bytes = tensor.item_bytes or item_bytes
    rows = tensor.boxes.setdefault(box, [])
    if rows and rows[-1].rank == rank:
        _mismatch(name, f"rank {rank} holds box {box_text(box)} twice", rank)
    rows.append(row)


def _groups(name: str, tensor: _Tensor, box: Box, rows: list[_Row]) -> Iterator[tuple[_Row, list[_Row]]]:
    """Yield (the row that holds the bytes, all rows it stands for)."""
    if tensor.scope == SCOPE_PER_RANK:
        for row in rows:
            if row.writer != row.rank:
                _mismatch(name, f"rank {row.writer} would write what is rank {row.rank}'s own", row.rank, row.writer)
            if not is_inside(box, row.shape):
                _mismatch(name, f"box {box_text(box)} is not inside its shape {list(row.shape)}", row.rank)
            yield row, [row]
        return
    writers = {row.writer for row in rows}
    if len(writers) > 1:
        _mismatch(name, f"box {box_text(box)} has several writers {sorted(writers)}", *(row.rank for row in rows))
    for row in rows:
        if row.rank == row.writer:
            yield row, rows
            return
    text = f"tensor {name!r}: rank {rows[0].writer} should hold box {box_text(box)} and does not"
    raise PlanError.of(text, reason=error_pb2.REASON_COVERAGE, object=name, ranks={*writers, *(r.rank for r in rows)})


def _check_aliases(sections: Mapping[int, RankSection], tensors: Mapping[str, _Tensor]) -> None:
    for rank, section in sections.items():
        names = set(section.shards.names)
        for alias, target in zip(section.aliases.alias, section.aliases.target, strict=True):
            if target not in names or alias in names or alias in tensors:
                _mismatch(
                    alias, f"it is tied to {target!r}, which must be stored on the same rank, and itself not", rank
                )


def _mismatch(name: str, what: str, *ranks: int) -> None:
    raise PlanError.of(f"tensor {name!r}: {what}", object=name, ranks=set(ranks))
