"""From boxes wanted to byte ranges stored: any layout out of any other. Pure.

Owns: matching wanted rows with what the ranks wrote, cutting both to what they share, and finding the chunks that
hold it. Does not own: fetching, and copying pieces into tensors (the client). Of replicas the writer's row counts.

Invariant: the pieces of a wanted row together hold each of its elements, and each piece is one contiguous range
of one stored stream, itself a box of the global tensor (C-contiguous).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckptd.protos import shard_table
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK, RankSection, ShardTable

from .errors import PlanError
from .index import ChunkRef
from .tiling import Box, box_text

_NAMES_SHOWN = 5
_MANY_BOXES = 8
"""From here on a row's partners are found with numpy; below, setting it up costs more than it saves."""

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a wanted row: where it is stored, and which box of the global tensor stands there.

    Attributes:
        want_row: Position in the table of wanted rows.
        rank: Stored rank whose stream holds it.
        stream_offset: In bytes.
        nbytes: Of the whole box `source`, which may reach beyond what is wanted.
        source: Box of the global tensor, in elements.
    """

    want_row: int
    rank: int
    stream_offset: int
    nbytes: int
    source: Box


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredRow:
    rank: int
    stream_offset: int
    row: ShardRow


@dataclass(kw_only=True, slots=True)
class _StoredName:
    """All written boxes of one name."""

    rows: list[_StoredRow] = field(default_factory=list)
    by_box: dict[Box, _StoredRow] = field(default_factory=dict)
    lows: I64 | None = None
    highs: I64 | None = None

    def meeting(self, box: Box) -> Sequence[_StoredRow]:
        """Return the rows that may share elements with a box."""
        if len(self.rows) <= _MANY_BOXES or not box[0]:
            return self.rows
        if self.lows is None or self.highs is None:
            self.lows = np.array([each.row.offset for each in self.rows], dtype=np.int64)
            self.highs = self.lows + np.array([each.row.length for each in self.rows], dtype=np.int64)
        low = np.array(box[0], dtype=np.int64)
        high = low + np.array(box[1], dtype=np.int64)
        return [self.rows[at] for at in np.flatnonzero(((self.lows < high) & (self.highs > low)).all(axis=1)).tolist()]


class StoredRows:
    """What the ranks of a step wrote, ready to be matched; made once per step, used for every rank.

    Args:
        sections: Of all ranks whose streams may be needed, by rank; checked as `index` does.
    """

    def __init__(self, sections: Mapping[int, RankSection]) -> None:
        self._global: dict[str, _StoredName] = {}
        self._per_rank: dict[tuple[int, str], _StoredName] = {}
        for rank in sorted(sections):
            section = sections[rank]
            columns = zip(shard_table.iter_rows(section.shards), section.writer, section.stream_offset, strict=True)
            for row, writer, stream_offset in columns:
                if writer != rank:
                    continue
                stored = _StoredRow(rank=rank, stream_offset=stream_offset, row=row)
                if row.scope == SCOPE_PER_RANK:
                    name = self._per_rank.setdefault((rank, row.name), _StoredName())
                else:
                    name = self._global.setdefault(row.name, _StoredName())
                name.rows.append(stored)
                name.by_box.setdefault(row.box, stored)

    def pieces(self, wants: ShardTable, own: int | None, owners: Sequence[int] = ()) -> list[Piece]:
        """Return what to read for the wanted rows, in their order.

        Args:
            wants: Rows wanted by one rank.
            own: Stored rank at this rank's coordinate, for rows of scope PER_RANK; None where there is none.
            owners: Row of wants: the stored rank meant instead of `own`; empty: `own` for all.

        Raises:
            PlanError: LAYOUT_MISMATCH; one error that counts all rows that do not fit, and shows the first five: not
                in the snapshot, another dtype or global shape, elements that nobody stored.
        """
        found: list[Piece] = []
        wrong: list[str] = []
        for at, want in enumerate(shard_table.iter_rows(wants)):
            owner = owners[at] if owners else own
            stored = self._stored(want, owner)
            if stored is None:
                wrong.append(self._missing_text(want, owner))
                continue
            there = stored.rows[0].row
            if (there.dtype, there.global_shape) != (want.dtype, want.global_shape):
                wrong.append(
                    f"{want.name!r}: {want.dtype} {list(want.global_shape)} expected, "
                    f"{there.dtype} {list(there.global_shape)} found"
                )
                continue
            size = math.prod(want.length)
            exact = stored.by_box.get(want.box)
            if exact is not None or not size:
                if exact is not None and want.nbytes:
                    found.append(_whole(at, exact))
                continue
            covered = 0
            for each in stored.meeting(want.box):
                piece, shared = _cut(at, want, each)
                if piece is not None:
                    covered += shared
                    found.append(piece)
            if covered != size:
                wrong.append(f"{want.name!r}: {size - covered} elements of {box_text(want.box)} are not stored")
        if wrong:
            shown = "; ".join(wrong[:_NAMES_SHOWN])
            more = f"; and {len(wrong) - _NAMES_SHOWN} more" if len(wrong) > _NAMES_SHOWN else ""
            raise PlanError.of(
                f"{len(wrong)} of {shard_table.row_count(wants)} tensors do not fit the snapshot: {shown}{more}",
                hint="build the model and the optimizer as they were when the snapshot was saved",
                rank=own,
                phase="restore",
            )
        return found

    def _stored(self, want: ShardRow, own: int | None) -> _StoredName | None:
        if want.scope == SCOPE_PER_RANK:
            return None if own is None else self._per_rank.get((own, want.name))
        return self._global.get(want.name)

    def _missing_text(self, want: ShardRow, own: int | None) -> str:
        if want.scope == SCOPE_PER_RANK and want.name in self._global:
            return f"{want.name!r}: expected as the rank's own, found as a part of a global tensor"
        if want.scope == SCOPE_GLOBAL and own is not None and (own, want.name) in self._per_rank:
            return f"{want.name!r}: expected as a part of a global tensor, found as the rank's own"
        return f"{want.name!r}: not in the snapshot"


def chunks_of(refs: Sequence[ChunkRef], ranges: Iterable[tuple[int, int]]) -> list[ChunkRef]:
    """Return the chunks of a stream, in order, that hold any byte of the ranges (offset, nbytes)."""
    wanted = np.array([each for each in ranges if each[1]], dtype=np.int64).reshape(-1, 2)
    if not refs or not len(wanted):
        return []
    starts = np.array([ref.stream_offset for ref in refs], dtype=np.int64)
    first = np.searchsorted(starts, wanted[:, 0], side="right") - 1
    last = np.searchsorted(starts, wanted[:, 0] + wanted[:, 1] - 1, side="right") - 1
    # Each range opens at its first chunk and closes behind its last; what is open anywhere is needed.
    opened = np.zeros(len(refs) + 1, dtype=np.int64)
    np.add.at(opened, first, 1)
    np.add.at(opened, last + 1, -1)
    return [refs[at] for at in np.flatnonzero(np.cumsum(opened)[:-1] > 0).tolist()]


def ranges_by_rank(pieces: Iterable[Piece]) -> dict[int, list[tuple[int, int]]]:
    """Return, per stored rank, the (offset, nbytes) of its stream that pieces need."""
    found: dict[int, list[tuple[int, int]]] = {}
    for piece in pieces:
        found.setdefault(piece.rank, []).append((piece.stream_offset, piece.nbytes))
    return found


def _whole(at: int, stored: _StoredRow) -> Piece:
    row = stored.row
    return Piece(want_row=at, rank=stored.rank, stream_offset=stored.stream_offset, nbytes=row.nbytes, source=row.box)


def _cut(at: int, want: ShardRow, stored: _StoredRow) -> tuple[Piece | None, int]:
    """Cut a stored box down to the contiguous range that holds all it shares with the wanted one.

    Returns:
        The piece, or None where nothing is shared; and the number of elements shared.
    """
    row = stored.row
    low = tuple(map(max, want.offset, row.offset))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(want.offset, want.length, row.offset, row.length, strict=True))
    shared = [end - begin for begin, end in zip(low, high, strict=True)]
    if any(length <= 0 for length in shared):
        return None, 0
    offset, length = list(row.offset), list(row.length)
    stride = row.nbytes
    skipped = 0
    for dim, size in _strides(row):
        stride = size
        skipped += (low[dim] - offset[dim]) * stride
        offset[dim], length[dim] = low[dim], shared[dim]
        if shared[dim] > 1:
            # A range of this dimension is contiguous only while the dimensions behind it are whole.
            break
    nbytes = length[dim] * stride if row.length else row.nbytes
    piece = Piece(
        want_row=at,
        rank=stored.rank,
        stream_offset=stored.stream_offset + skipped,
        nbytes=nbytes,
        source=(tuple(offset), tuple(length)),
    )
    return piece, math.prod(shared)


def _strides(row: ShardRow) -> Iterator[tuple[int, int]]:
    """Yield each dimension with the bytes that one step along it takes."""
    size = row.nbytes
    for dim, length in enumerate(row.length):
        size //= length
        yield dim, size
