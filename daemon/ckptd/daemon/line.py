"""Streams of several ranks, laid end to end: one line of bytes, so that any place is one number. Pure.

Owns: where a rank's stream begins on the line, which chunk holds a place, and unions of ranges. Does not own: which ranges
are wanted, and where they go (`arrangement`). Invariant: ranges of two streams never touch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .chunks import ALIGNMENT, aligned
from .columns import Ints
from .errors import CorruptError
from .index import ChunkRef


class Line:
    """Chunks of several streams in order.

    Args:
        refs: Per stored rank, chunks of its stream in order; what lies in none of them is not on the line.

    Attributes:
        refs: All of them.
        ranks: Chunk: whose stream it is of.
        begins: Chunk: where it begins on the line.
        ends: Chunk: where it ends.
    """

    def __init__(self, refs: Mapping[int, Sequence[ChunkRef]]) -> None:
        ordered = sorted(refs)
        self._ranks = np.array(ordered, dtype=np.int64)
        self.refs = [ref for rank in ordered for ref in refs[rank]]
        counts = np.array([len(refs[rank]) for rank in ordered], dtype=np.int64)
        streams = [
            aligned(refs[rank][-1].stream_offset + refs[rank][-1].length) if refs[rank] else 0 for rank in ordered
        ]
        self._bases = np.cumsum([0, *(nbytes + ALIGNMENT for nbytes in streams)], dtype=np.int64)[:-1]
        self.ranks = np.repeat(self._ranks, counts)
        offsets = np.array([ref.stream_offset for ref in self.refs], dtype=np.int64)
        self.begins = np.repeat(self._bases, counts) + offsets
        self.ends = self.begins + np.array([ref.length for ref in self.refs], dtype=np.int64)
        self._is_aligned = not (offsets % ALIGNMENT).any()

    def has(self, rank: int) -> bool:
        """Whether a rank's stream is on the line."""
        return bool((self._ranks == rank).any())

    def at(self, ranks: Ints, offsets: Ints) -> Ints:
        """Return the places of bytes of streams that are on the line."""
        made: Ints = self._bases[np.searchsorted(self._ranks, ranks)] + offsets
        return made

    def chunks(self, begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
        """Return the first and the last chunk of ranges, none of them empty.

        Raises:
            CorruptError: A range is not all in chunks.
        """
        first = np.searchsorted(self.begins, begins, side="right") - 1
        last = np.searchsorted(self.begins, ends - 1, side="right") - 1
        # Chunks follow one another, so what lies between two of one stream is in chunks.
        wrong = (first < 0) | (ends > self.ends[last]) | (begins >= self.ends[first])
        if wrong.any():
            raise CorruptError.of("the index names bytes that are in no chunk", phase="restore")
        return first, last

    def touched(self, begins: Ints, ends: Ints) -> Ints:
        """Return the chunks that hold a byte of any of the ranges, ascending."""
        first, last = self.chunks(begins, ends)
        # Each range opens at its first chunk and closes behind its last; what is open anywhere is touched.
        opened = np.zeros(len(self.refs) + 1, dtype=np.int64)
        np.add.at(opened, first, 1)
        np.add.at(opened, last + 1, -1)
        return np.flatnonzero(np.cumsum(opened)[:-1] > 0)

    def padded(self, begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
        """Return the ranges with the padding around them, as far as their own chunks go."""
        if not self._is_aligned:
            return begins, ends
        _, last = self.chunks(begins, ends)
        return begins // ALIGNMENT * ALIGNMENT, np.minimum(-(-ends // ALIGNMENT) * ALIGNMENT, self.ends[last])


def union(begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return the ranges that hold what any of these holds, ascending, no two of them touching."""
    order = np.argsort(begins, kind="stable")
    begins, reach = begins[order], np.maximum.accumulate(ends[order]) if len(order) else ends
    opens = np.ones(len(begins), dtype=np.bool_)
    opens[1:] = begins[1:] > reach[:-1]
    closes = np.concatenate([np.flatnonzero(opens)[1:] - 1, [len(begins) - 1]]) if len(begins) else order
    return begins[opens], reach[closes]


def covered(begins: Ints, ends: Ints, low: Ints, high: Ints) -> Ints:
    """Return how many bytes of [low, high) lie in a union of ranges."""
    sums: Ints = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(ends - begins)])

    def below(place: Ints) -> Ints:
        count = np.searchsorted(begins, place)
        last = np.maximum(count - 1, 0)
        beyond = np.where(count > 0, np.maximum(ends[last] - place, 0), 0) if len(ends) else 0
        made: Ints = sums[count] - beyond
        return made

    return below(high) - below(low)
