"""From boxes wanted to the stored boxes that hold them: any layout out of any other. Pure.

Owns: matching wanted rows with what the ranks wrote, and what is said of rows that do not fit. Does not own: the bytes of
what they share (`pieces`), fetching, and copying into tensors (the client). Of replicas the writer's row counts.

Invariant: the pieces of a wanted row together hold each of its elements. Rows are columns of numbers throughout: a step of
a thousand tensors on a thousand ranks has a million of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckptd.protos import error_pb2, shard_table
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK, RankSection, ShardTable

from .columns import Columns, Flags, Ints, columns_of
from .errors import CorruptError, DaemonError, PlanError
from .pieces import Pieces
from .tiling import box_text

_NAMES_SHOWN = 5
_PAIRS = 1 << 18
"""Wanted and stored rows that are compared at once: bounds the memory of planning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """Wanted rows against what is stored; one entry a row.

    Attributes:
        group: Position of the tensor among the stored ones; meaningless where it is not there.
        is_there: Whether a tensor of that name and scope is stored.
        fits: Whether it also has that dtype and global shape.
        offset: One row a dimension of the stored tensors: where the box begins.
        length: As offset, ones beyond the row's own dimensions: how long it is.
    """

    group: Ints
    is_there: Flags
    fits: Flags
    offset: Ints
    length: Ints


class StoredRows:
    """What the ranks of a step wrote, ready to be matched; made once per step, used for every rank.

    Args:
        sections: Of all ranks whose streams may be needed, by rank; checked as `index` does.

    Raises:
        CorruptError: A number that no tensor has.
    """

    def __init__(self, sections: Mapping[int, RankSection]) -> None:
        ordered = sorted(sections)
        self._position = {rank: at for at, rank in enumerate(ordered)}
        rows = columns_of({rank: sections[rank].shards for rank in ordered})
        if rows is None and any(section.shards.name for section in sections.values()):
            raise CorruptError.of("a stored shape, offset or length is beyond 2^53", phase="restore")
        rows = _no_rows() if rows is None else rows
        self._dims = len(rows.shape)
        self._names = {name: at for at, name in enumerate(rows.names)}
        self._dtypes = rows.dtypes
        ranks = np.array(ordered, dtype=np.int64)
        no_row = np.zeros(0, dtype=np.uint64)
        writer, stream_offset = (
            np.concatenate(
                [no_row, *(np.asarray(getattr(sections[rank], name), dtype=np.uint64) for rank in ordered)]
            ).astype(np.int64)
            for name in ("writer", "stream_offset")
        )
        written = np.flatnonzero(writer == ranks[rows.rank])
        keys = self._keys_of(rows.scope[written], rows.name[written], rows.rank[written])
        order = np.argsort(keys, kind="stable")
        written, keys = written[order], keys[order]
        # Per tensor, ascending: the first of its rows says what it is, and what differs from that is no part of it.
        self._keys, first, counts = np.unique(keys, return_index=True, return_counts=True)
        heads = written[first]
        self._dtype, self._ndim, self._shape = rows.dtype[heads], rows.ndim[heads], rows.shape[:, heads]
        like = np.repeat(heads, counts)
        same = (rows.dtype[written] == rows.dtype[like]) & (rows.ndim[written] == rows.ndim[like])
        same &= (rows.shape[:, written] == rows.shape[:, like]).all(axis=0)
        written, keys = written[same], keys[same]
        self._begins, self._ends = (np.searchsorted(keys, self._keys, side=side) for side in ("left", "right"))
        # From here on per written row, those of one tensor together.
        self._rank, self._stream_offset = ranks[rows.rank[written]], stream_offset[written]
        self._offset, self._length = rows.offset[:, written], _ones_beyond(rows.length, rows.ndim)[:, written]
        elements = np.prod(self._length, axis=0, dtype=np.int64)
        self._item = rows.nbytes[written] // np.maximum(elements, 1)

    def pieces(self, wants: ShardTable, own: int | None, owners: Sequence[int] = ()) -> Pieces:
        """Return what to read for the wanted rows, in their order.

        Args:
            wants: Rows wanted by one rank.
            own: Stored rank at this rank's coordinate, for rows of scope PER_RANK; None where there is none.
            owners: Row of wants: the stored rank meant instead of `own`; empty: `own` for all.

        Raises:
            PlanError: LAYOUT_MISMATCH; one error that counts all rows that do not fit, and shows the first five: not
                in the snapshot, another dtype or global shape, elements that nobody stored.
            DaemonError: INVALID_ARGUMENT, a number that no tensor has.
        """
        wanted = columns_of({0: wants})
        if wanted is None and wants.name:
            raise DaemonError.of(
                "a wanted shape, offset or length is beyond 2^53",
                reason=error_pb2.REASON_INVALID_ARGUMENT,
                phase="restore",
            )
        if wanted is None:
            return Pieces.none(self._dims)
        asked = self._asked(wanted, own, owners)
        size = np.prod(asked.length, axis=0, dtype=np.int64)
        rows = np.flatnonzero(asked.fits & (size > 0))
        found = Pieces.joined(
            [Pieces.none(self._dims), *(self._shared(asked, block) for block in self._blocks(rows, asked.group))]
        )
        left = np.where(asked.fits, size, 0)
        np.subtract.at(left, found.want_row, np.prod(found.size, axis=0, dtype=np.int64))
        wrong = np.flatnonzero(~asked.fits | (left != 0)).tolist()
        if wrong:
            rows_wanted = list(shard_table.iter_rows(wants))
            texts = [
                self._misfit(rows_wanted[at], owners[at] if owners else own, asked, at, int(left[at]))
                for at in wrong[:_NAMES_SHOWN]
            ]
            more = f"; and {len(wrong) - _NAMES_SHOWN} more" if len(wrong) > _NAMES_SHOWN else ""
            raise PlanError.of(
                f"{len(wrong)} of {len(rows_wanted)} tensors do not fit the snapshot: {'; '.join(texts)}{more}",
                hint="build the model and the optimizer as they were when the snapshot was saved",
                rank=own,
                phase="restore",
            )
        return found

    def _asked(self, wanted: Columns, own: int | None, owners: Sequence[int]) -> _Asked:
        known = np.array([self._names.get(name, -1) for name in wanted.names], dtype=np.int64)
        named = owners or [-1 if own is None else own] * len(wanted.name)
        rank = np.array([self._position.get(owner, -1) for owner in named], dtype=np.int64)
        keys = self._keys_of(wanted.scope, known[wanted.name], rank)
        group = np.searchsorted(self._keys, keys)
        is_there = np.zeros(len(keys), dtype=np.bool_)
        inside = group < len(self._keys)
        is_there[inside] = self._keys[group[inside]] == keys[inside]
        fits = is_there.copy()
        at = group[is_there]
        kinds = {dtype: number for number, dtype in enumerate(self._dtypes)}
        dtype = np.array([kinds.get(text, -1) for text in wanted.dtypes], dtype=np.int64)[wanted.dtype]
        shape = _with_dims(wanted.shape, self._dims)
        fits[is_there] = (dtype[is_there] == self._dtype[at]) & (wanted.ndim[is_there] == self._ndim[at])
        fits[is_there] &= (shape[:, is_there] == self._shape[:, at]).all(axis=0)
        length = _ones_beyond(_with_dims(wanted.length, self._dims), wanted.ndim)
        offset = _with_dims(wanted.offset, self._dims)
        return _Asked(group=group, is_there=is_there, fits=fits, offset=offset, length=length)

    def _keys_of(self, scope: Ints, name: Ints, rank: Ints) -> Ints:
        """Return the numbers of the tensors that rows belong to; -1 in `name` or `rank` is none that is stored."""
        is_own = scope == SCOPE_PER_RANK
        own = len(self._names) + name * len(self._position) + rank
        made: Ints = np.where((name < 0) | is_own & (rank < 0), -1, np.where(is_own, own, name))
        return made

    def _blocks(self, rows: Ints, group: Ints) -> Iterator[Ints]:
        """Cut wanted rows into blocks that have not too many stored ones to be compared with."""
        before = np.cumsum((self._ends - self._begins)[group[rows]])
        at = 0
        while at < len(rows):
            done = int(before[at - 1]) if at else 0
            end = max(at + 1, int(np.searchsorted(before, done + _PAIRS, side="right")))
            yield rows[at:end]
            at = end

    def _shared(self, asked: _Asked, rows: Ints) -> Pieces:
        """Compare wanted rows with all stored ones of their tensors, and return what they share."""
        begins = self._begins[asked.group[rows]]
        counts = self._ends[asked.group[rows]] - begins
        want = np.repeat(rows, counts)
        stored = np.arange(len(want)) - np.repeat(np.cumsum(counts) - counts - begins, counts)
        for dim in range(self._dims):  # one after the other: few are left behind the first
            low, high = _shared_range(
                asked.offset[dim, want], asked.length[dim, want], self._offset[dim, stored], self._length[dim, stored]
            )
            want, stored = want[low < high], stored[low < high]
        exact = (asked.offset[:, want] == self._offset[:, stored]) & (asked.length[:, want] == self._length[:, stored])
        is_exact = exact.all(axis=0)
        has_exact = np.zeros(len(asked.group), dtype=np.bool_)
        has_exact[want[is_exact]] = True
        kept = is_exact | ~has_exact[want]
        want, stored = want[kept], stored[kept]
        low, high = _shared_range(
            asked.offset[:, want], asked.length[:, want], self._offset[:, stored], self._length[:, stored]
        )
        return Pieces(
            want_row=want,
            rank=self._rank[stored],
            row_offset=self._stream_offset[stored],
            item=self._item[stored],
            ndim=self._ndim[asked.group[want]],
            box=self._length[:, stored],
            begin=low - self._offset[:, stored],
            size=high - low,
            low=low,
        )

    def _misfit(self, row: ShardRow, owner: int | None, asked: _Asked, at: int, left: int) -> str:
        """Say what is wrong with a wanted row."""
        group = int(asked.group[at])
        if asked.fits[at]:
            return f"{row.name!r}: {left} elements of {box_text(row.box)} are not stored"
        if asked.is_there[at]:
            shape = self._shape[: int(self._ndim[group]), group].tolist()
            dtype = self._dtypes[int(self._dtype[group])]
            return f"{row.name!r}: {row.dtype} {list(row.global_shape)} expected, {dtype} {shape} found"
        if row.scope == SCOPE_PER_RANK and self._is_stored(SCOPE_GLOBAL, row.name, None):
            return f"{row.name!r}: expected as the rank's own, found as a part of a global tensor"
        if row.scope == SCOPE_GLOBAL and self._is_stored(SCOPE_PER_RANK, row.name, owner):
            return f"{row.name!r}: expected as a part of a global tensor, found as the rank's own"
        return f"{row.name!r}: not in the snapshot"

    def _is_stored(self, scope: int, name: str, owner: int | None) -> bool:
        number, rank = self._names.get(name, -1), -1 if owner is None else self._position.get(owner, -1)
        key = self._keys_of(*(np.array([value], dtype=np.int64) for value in (scope, number, rank)))
        return bool(key[0] >= 0 and np.isin(key, self._keys)[0])


def _shared_range(at: Ints, length: Ints, other: Ints, other_length: Ints) -> tuple[Ints, Ints]:
    """Return where what two ranges share begins and ends; it ends before it begins where they share nothing."""
    return np.maximum(at, other), np.minimum(at + length, other + other_length)


def _with_dims(wide: Ints, dims: int) -> Ints:
    """Return the columns with so many dimensions: more are left out, missing ones are 0."""
    made = np.zeros((dims, wide.shape[1]), dtype=np.int64)
    both = min(dims, len(wide))
    made[:both] = wide[:both]
    return made


def _ones_beyond(length: Ints, ndim: Ints) -> Ints:
    """Return the lengths with 1 in dimensions that a row does not have."""
    made: Ints = np.where(np.arange(len(length))[:, None] < ndim[None, :], length, 1)
    return made


def _no_rows() -> Columns:
    none, wide = np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.int64)
    per_row = dict.fromkeys(("rank", "name", "dtype", "ndim", "scope", "nbytes"), none)
    return Columns(names=[], dtypes=[], begins=none, **per_row, shape=wide, offset=wide, length=wide)
