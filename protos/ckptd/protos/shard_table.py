"""Pure operations on `ShardTable`, the columnar form shards take on the wire and at rest.

Owns: cutting a table into parts that fit a default gRPC message, joining them again, its digest, and
numpy views of its columns. Does not own: what a row means to a planner. Invariant: `concat(split(t))`
has the same rows and the same digest as `t`; the digest depends on rows alone, never on how the name
tables are arranged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import blake3
import numpy as np
import numpy.typing as npt

from ckptd.protos.snapshot_pb2 import ShardTable

PART_ROWS = 8192
"""Rows a part holds at most; with PART_NAME_BYTES it keeps parts below the 4 MiB of a default gRPC message."""
PART_NAME_BYTES = 1 << 20

_PER_ROW = ("ndim", "scope", "nbytes", "group")
_PER_DIMENSION = ("global_shape", "box_offset", "box_length")

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRow:
    """One shard: a box of a named tensor. Shapes and offsets in elements, `nbytes` in bytes."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    length: tuple[int, ...]
    scope: int
    nbytes: int
    group: int = 0

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and length: what makes two rows of one name replicas of each other."""
        return (self.offset, self.length)


def row_count(table: ShardTable) -> int:
    """Return the number of rows."""
    return len(table.name)


def build(rows: Iterable[ShardRow]) -> ShardTable:
    """Return the table that holds `rows` in their order."""
    table = ShardTable()
    names: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    for row in rows:
        table.name.append(names.setdefault(row.name, len(names)))
        table.dtype.append(dtypes.setdefault(row.dtype, len(dtypes)))
        table.ndim.append(len(row.global_shape))
        table.global_shape.extend(row.global_shape)
        table.box_offset.extend(row.offset)
        table.box_length.extend(row.length)
        table.scope.append(row.scope)
        table.nbytes.append(row.nbytes)
        table.group.append(row.group)
    table.names.extend(names)
    table.dtypes.extend(dtypes)
    return table


def iter_rows(table: ShardTable) -> Iterator[ShardRow]:
    """Yield the rows in order.

    Raises:
        ValueError: the columns do not fit together (a damaged or hostile message).
    """
    return rows_at(table, range(row_count(table)))


def rows_at(table: ShardTable, positions: Iterable[int]) -> Iterator[ShardRow]:
    """Yield the rows at these positions.

    Raises:
        ValueError: the columns do not fit together (a damaged or hostile message).
    """
    check(table)
    positions = list(positions)
    if not positions:
        return
    names, dtypes = list(table.names), list(table.dtypes)
    name, dtype, ndim = list(table.name), list(table.dtype), list(table.ndim)
    scope, nbytes, group = list(table.scope), list(table.nbytes), list(table.group)
    shapes, offsets, lengths = list(table.global_shape), list(table.box_offset), list(table.box_length)
    begins = [0, *accumulate(ndim)]
    for row in positions:
        at = slice(begins[row], begins[row + 1])
        yield ShardRow(
            name=names[name[row]],
            dtype=dtypes[dtype[row]],
            global_shape=tuple(shapes[at]),
            offset=tuple(offsets[at]),
            length=tuple(lengths[at]),
            scope=scope[row],
            nbytes=nbytes[row],
            group=group[row],
        )


def check(table: ShardTable) -> None:
    """Refuse a table whose columns do not fit together.

    Raises:
        ValueError: says which column.
    """
    rows = len(table.name)
    for column in ("dtype", "ndim", "scope", "nbytes", "group"):
        if len(getattr(table, column)) != rows:
            raise ValueError(f"shard table: {rows} rows, but {len(getattr(table, column))} entries in {column}")
    wide = int(np.sum(np.asarray(table.ndim, dtype=np.uint64))) if rows else 0
    for column in ("global_shape", "box_offset", "box_length"):
        if len(getattr(table, column)) != wide:
            raise ValueError(f"shard table: {wide} entries expected in {column}, {len(getattr(table, column))} found")
    if rows and max(table.name) >= len(table.names):
        raise ValueError("shard table: a row refers beyond the name table")
    if rows and max(table.dtype) >= len(table.dtypes):
        raise ValueError("shard table: a row refers beyond the dtype table")


def digest(table: ShardTable) -> bytes:
    """Return BLAKE3 (32 bytes) over the rows: equal for equal rows, however the name tables are arranged."""
    check(table)
    names = list(table.names)
    dtypes = list(table.dtypes)
    hasher = blake3.blake3()
    text = "\0".join(f"{names[n]}\1{dtypes[d]}" for n, d in zip(table.name, table.dtype, strict=True))
    hasher.update(len(table.name).to_bytes(8, "little"))
    hasher.update(text.encode())
    for column in ("ndim", "global_shape", "box_offset", "box_length", "scope", "nbytes", "group"):
        values: U64 = np.asarray(getattr(table, column), dtype="<u8")
        hasher.update(values.tobytes())
    return hasher.digest()


def split(table: ShardTable, *, rows: int = PART_ROWS, name_bytes: int = PART_NAME_BYTES) -> Iterator[ShardTable]:
    """Yield tables of consecutive rows, each small enough for a default gRPC message; one empty table for no rows."""
    if not row_count(table):
        yield ShardTable()
        return
    check(table)
    lengths = np.array([len(name) for name in table.names], dtype=np.int64)
    name = np.asarray(table.name, dtype=np.int64)
    ndim = np.asarray(table.ndim, dtype=np.int64)
    sizes = np.concatenate([[0], np.cumsum(lengths[name] + 24 * ndim)])
    wide = np.concatenate([[0], np.cumsum(ndim)])
    begin = 0
    while begin < len(name):
        full = int(np.searchsorted(sizes, sizes[begin] + name_bytes))
        end = min(max(begin + 1, min(begin + rows, full)), len(name))
        part = ShardTable()
        _take(part, table, slice(begin, end), slice(int(wide[begin]), int(wide[end])))
        yield part
        begin = end


def concat(parts: Iterable[ShardTable]) -> ShardTable:
    """Return one table with the rows of `parts` in their order.

    Raises:
        ValueError: the columns of a part do not fit together.
    """
    whole = ShardTable()
    names: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    for part in parts:
        check(part)
        whole.name.extend(_renumbered(part.name, part.names, names))
        whole.dtype.extend(_renumbered(part.dtype, part.dtypes, dtypes))
        for column in (*_PER_ROW, *_PER_DIMENSION):
            getattr(whole, column).MergeFrom(getattr(part, column))
    whole.names.extend(names)
    whole.dtypes.extend(dtypes)
    return whole


def _take(part: ShardTable, table: ShardTable, rows: slice, wide: slice) -> None:
    """Fill `part` with consecutive rows of `table`, and the names they use in the order of their first use."""
    names: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    part.name.extend(_renumbered(table.name[rows], table.names, names))
    part.dtype.extend(_renumbered(table.dtype[rows], table.dtypes, dtypes))
    for column in _PER_ROW:
        getattr(part, column).extend(getattr(table, column)[rows])
    for column in _PER_DIMENSION:
        getattr(part, column).extend(getattr(table, column)[wide])
    part.names.extend(names)
    part.dtypes.extend(dtypes)


def _renumbered(column: Sequence[int], texts: Sequence[str], known: dict[str, int]) -> list[int]:
    """Return the column with positions in `known`, to which the texts it uses are added in the order of first use."""
    positions = np.asarray(column, dtype=np.int64)
    used, first = np.unique(positions, return_index=True)
    place = np.zeros(len(texts), dtype=np.int64)
    for at in used[np.argsort(first)].tolist():
        place[at] = known.setdefault(texts[at], len(known))
    renumbered: list[int] = place[positions].tolist()
    return renumbered
