"""Where the bytes of a chunk land in the arena: all of them where they stay, or only those that are wanted.

Owns: copying from a verified chunk to the places of an arrangement. Does not own: the places (`arrangement`), reading and
verifying (`fetcher`). Several threads may land different chunks at once: no two chunks have a byte of the arena in common.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .arrangement import Arrangement
from .line import Line
from .scatter import Bytes, copy_ranges, gather


class Landing:
    """The arena of one fetch.

    Args:
        line: Chunks by number.
        arrangement: Of that line.
        arena: At least `arrangement.nbytes`.

    Attributes:
        refs: Chunk by number.
        needed: Numbers of the chunks that hold a wanted byte.
    """

    def __init__(self, line: Line, arrangement: Arrangement, arena: memoryview) -> None:
        self.refs = line.refs
        self.needed: list[int] = arrangement.needed.tolist()
        self._line = line
        self._to = arrangement
        self._arena: Bytes = np.frombuffer(arena, dtype=np.uint8)
        has_boxes = np.unique(arrangement.box_chunk)
        self._has_boxes = set(has_boxes.tolist())
        at = np.searchsorted(arrangement.run_begins, line.begins, side="right") - 1
        inside = np.flatnonzero(at >= 0)
        inside = inside[line.ends[inside] <= arrangement.run_ends[at[inside]]]
        begins = arrangement.run_at[at[inside]] + line.begins[inside] - arrangement.run_begins[at[inside]]
        self._homes = dict(zip(inside.tolist(), begins.tolist(), strict=True))

    def home_of(self, chunks: Sequence[int]) -> tuple[int, int] | None:
        """Return the first of equal chunks that is wanted whole and where it stays in the arena; None if there is none."""
        return next(((chunk, self._homes[chunk]) for chunk in chunks if chunk in self._homes), None)

    def land(self, chunk: int, data: memoryview) -> None:
        """Copy what is wanted of a chunk from its verified bytes; not where it stands at home already."""
        source: Bytes = np.frombuffer(data, dtype=np.uint8)
        begin, end = int(self._line.begins[chunk]), int(self._line.ends[chunk])
        to = self._to
        first = int(np.searchsorted(to.run_ends, begin, side="right"))
        last = int(np.searchsorted(to.run_begins, end, side="left"))
        if first < last:
            begins = np.maximum(to.run_begins[first:last], begin)
            into = to.run_at[first:last] + begins - to.run_begins[first:last]
            copy_ranges(source, begins - begin, np.minimum(to.run_ends[first:last], end) - begin, into, self._arena)
        self.land_boxes(chunk, data)

    def land_boxes(self, chunk: int, data: memoryview) -> None:
        """Copy what a chunk holds of boxes from its verified bytes."""
        if chunk not in self._has_boxes:
            return
        source: Bytes = np.frombuffer(data, dtype=np.uint8)
        begin = int(self._line.begins[chunk])
        for number in self._to.boxes_in(chunk):
            at = int(self._to.box_at[number])
            gather(source, begin, self._to.box(number), self._arena[at : at + int(self._to.box_nbytes[number])])
