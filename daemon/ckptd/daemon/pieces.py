"""What wanted boxes share with stored ones, as columns of numbers. Pure.

Owns: the arithmetic from a shared box to bytes of a stored stream: contiguous ranges that hold it, or runs with gaps.
Does not own: which boxes meet (`reshard`), and where their bytes go (`arrangement`). Invariant: every byte that a range or
a run names lies in the stored box's own bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from .columns import Flags, Ints
from .tiling import Box


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
class Ranges:
    """Contiguous ranges of streams, each a box of a global tensor, C-contiguous; one entry a piece.

    Attributes:
        offset: In the rank's stream, in bytes.
        nbytes: Of the box.
        low: One row a dimension: where the box begins, in elements of the global tensor.
        size: As low: how long it is.
    """

    offset: Ints
    nbytes: Ints
    low: Ints
    size: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """The bytes of shared boxes and no others: nested repetitions of a contiguous run; one entry a piece.

    Attributes:
        first: First byte, in the rank's stream.
        nbytes: Length of a run.
        counts: One row a dimension, outermost first: how often what is inside is repeated; 1 where the run goes through.
        strides: As counts: bytes from one repetition to the next.
    """

    first: Ints
    nbytes: Ints
    counts: Ints
    strides: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """Shared boxes; one entry a piece, in the order of the wanted rows.

    Attributes:
        want_row: Position in the table of wanted rows.
        rank: Stored rank whose stream holds it.
        row_offset: Where the stored box begins in that stream, in bytes.
        item: Bytes of one element.
        ndim: Number of dimensions.
        box: One row a dimension, ones beyond the piece's own: lengths of the stored box.
        begin: As box, zeros beyond: where the shared box begins in the stored one.
        size: As box: lengths of the shared box.
        low: As begin: where the shared box begins in the global tensor.
    """

    want_row: Ints
    rank: Ints
    row_offset: Ints
    item: Ints
    ndim: Ints
    box: Ints
    begin: Ints
    size: Ints
    low: Ints

    def __len__(self) -> int:
        return len(self.want_row)

    @classmethod
    def none(cls, dims: int) -> Pieces:
        """Return no pieces, of tensors of up to so many dimensions."""
        one, wide = np.zeros(0, dtype=np.int64), np.zeros((dims, 0), dtype=np.int64)
        columns = {each.name: one for each in fields(cls)}
        return cls(**{**columns, "box": wide, "begin": wide, "size": wide, "low": wide})

    @classmethod
    def joined(cls, parts: Sequence[Pieces]) -> Pieces:
        """Return the entries of parts that have equally many dimensions, one after the other; at least one part."""
        return cls(
            **{each.name: np.concatenate([getattr(part, each.name) for part in parts], axis=-1) for each in fields(cls)}
        )

    def taken(self, which: Flags) -> Pieces:
        """Return the entries that are marked."""
        return Pieces(**{each.name: getattr(self, each.name)[..., which] for each in fields(self)})

    @property
    def nbytes(self) -> Ints:
        """Bytes of each shared box."""
        made: Ints = self.item * np.prod(self.size, axis=0, dtype=np.int64)
        return made

    def ranges(self) -> Ranges:
        """Return the ranges that hold the shared boxes: cut along the first dimensions, whole behind them."""
        low, size = self.low - self.begin, self.box.copy()
        offset, nbytes = self.row_offset.copy(), self.item.copy()
        is_cut = np.ones(len(self), dtype=np.bool_)
        for dim, stride in enumerate(self._strides()):
            low[dim] = np.where(is_cut, self.low[dim], low[dim])
            size[dim] = np.where(is_cut, self.size[dim], size[dim])
            offset += np.where(is_cut, self.begin[dim] * stride, 0)
            nbytes = np.where(is_cut, self.size[dim] * stride, nbytes)
            # A range of this dimension is contiguous only while the dimensions behind it are whole.
            is_cut &= self.size[dim] == 1
        return Ranges(offset=offset, nbytes=nbytes, low=low, size=size)

    def runs(self) -> Runs:
        """Return the very bytes of the shared boxes."""
        first, nbytes = self.row_offset.copy(), self.item.copy()
        counts, strides = np.ones_like(self.box), self._strides()
        is_whole = np.ones(len(self), dtype=np.bool_)
        for dim in reversed(range(len(strides))):
            first += self.begin[dim] * strides[dim]
            nbytes = np.where(is_whole, self.size[dim] * strides[dim], nbytes)
            counts[dim] = np.where(is_whole, 1, self.size[dim])
            is_whole &= self.size[dim] == self.box[dim]
        return Runs(first=first, nbytes=nbytes, counts=counts, strides=strides)

    def __iter__(self) -> Iterator[Piece]:
        """Yield each piece as the contiguous range that holds it."""
        ranges = self.ranges()
        columns = (self.want_row, self.rank, ranges.offset, ranges.nbytes, self.ndim)
        boxes = zip(ranges.low.T.tolist(), ranges.size.T.tolist(), strict=True)
        for (low, size), *entry in zip(boxes, *(column.tolist() for column in columns), strict=True):
            want_row, rank, offset, nbytes, ndim = entry
            source = (tuple(low[:ndim]), tuple(size[:ndim]))
            yield Piece(want_row=want_row, rank=rank, stream_offset=offset, nbytes=nbytes, source=source)

    def _strides(self) -> Ints:
        """Return, one row a dimension, the bytes that one step along it takes in the stored box."""
        made = np.empty_like(self.box)
        step = self.item.copy()
        for dim in reversed(range(len(made))):
            made[dim] = step
            step = step * self.box[dim]
        return made
