"""Where wanted bytes go in the arena: ranges of streams as they are, and boxes with gaps without them. Pure.

Owns: which of the two each piece becomes, and the places. Does not own: reading (`fetcher`), and what is wanted (`reshard`).

Invariants: a range of a stream that is wanted is one contiguous range of the arena, so a chunk that is wanted whole is read
where it stays; the arena is what the node's ranks want, each stored byte once where they want it as it stands, and what is
beside that is no more than the slack.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .chunks import ALIGNMENT
from .columns import Flags, Ints
from .line import Line, covered, union
from .pieces import Pieces, Runs
from .scatter import Box

_MOST = 10
"""What is not wanted of a row or a chunk is kept when it is at most one part in so many: one copy less."""
_FAR = 1 << 20
"""Runs that begin so far apart may leave a chunk between them that is not needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """Places in the arena. In bytes.

    Attributes:
        run_begins: On the line: ranges that are wanted as they stand, ascending.
        run_ends: See run_begins.
        run_at: Run: where it begins in the arena.
        box_of: Piece: the box that it became, or -1.
        boxes: Box: its runs, on the line.
        box_at: Box: where it begins in the arena, gathered.
        box_nbytes: Box: its bytes, gathered.
        needed: Chunks that hold a wanted byte, ascending.
        box_chunk: Chunks that hold a part of a box, ascending; a chunk stands here once for each.
        chunk_box: Which box.
        nbytes: Of the arena.
    """

    run_begins: Ints
    run_ends: Ints
    run_at: Ints
    box_of: Ints
    boxes: Runs
    box_at: Ints
    box_nbytes: Ints
    needed: Ints
    box_chunk: Ints
    chunk_box: Ints
    nbytes: int

    def boxes_in(self, chunk: int) -> list[int]:
        """Return the boxes that a chunk holds a part of."""
        low, high = np.searchsorted(self.box_chunk, [chunk, chunk + 1])
        found: list[int] = self.chunk_box[low:high].tolist()
        return found

    def box(self, number: int) -> Box:
        """Return a box."""
        boxes = self.boxes
        return Box(
            first=int(boxes.first[number]),
            run=int(boxes.nbytes[number]),
            counts=boxes.counts[:, number].tolist(),
            strides=boxes.strides[:, number].tolist(),
        )


def arranged(line: Line, pieces: Pieces, begins: Ints, ends: Ints, *, slack: int) -> Arrangement:
    """Give everything wanted a place.

    Args:
        line: Chunks of all streams that pieces are of.
        pieces: Shared boxes that are wanted.
        begins: Other ranges that are wanted, on the line; none empty.
        ends: See begins.
        slack: Most bytes the arena may hold beside what is wanted.

    Raises:
        CorruptError: Wanted bytes are in no chunk.
    """
    ranges, runs, nbytes = pieces.ranges(), pieces.runs(), pieces.nbytes
    low, first = line.at(pieces.rank, ranges.offset), line.at(pieces.rank, runs.first)
    high = low + ranges.nbytes
    is_plain = ranges.nbytes == nbytes
    has_gaps = np.flatnonzero(~is_plain & (nbytes > 0))
    is_plain &= nbytes > 0
    heads, same = _distinct(
        np.vstack([first[has_gaps], runs.nbytes[has_gaps], runs.counts[:, has_gaps], runs.strides[:, has_gaps]])
    )
    heads = has_gaps[heads]
    rows = line.at(pieces.rank, pieces.row_offset)[heads]
    row_low, row_high, row_of, spare = _dense_rows(rows, low[heads], high[heads], nbytes[heads], slack)
    all_begins = np.concatenate([begins, low[is_plain], row_low])
    all_ends = np.concatenate([ends, high[is_plain], row_high])
    run_begins, run_ends = union(*line.padded(all_begins, all_ends))
    run_begins, run_ends = _filled(line, run_begins, run_ends, slack - spare)
    # A box whose bytes stand in a run anyhow stays there.
    at = np.searchsorted(run_begins, low[heads], side="right") - 1
    stays = row_of >= 0
    inside = at >= 0
    stays[inside] |= high[heads][inside] <= run_ends[at[inside]]
    number = np.where(stays, -1, np.cumsum(~stays) - 1)
    box_of = np.full(len(pieces), -1, dtype=np.int64)
    box_of[has_gaps] = number[same]
    heads = heads[~stays]
    boxes = Runs(
        first=first[heads], nbytes=runs.nbytes[heads], counts=runs.counts[:, heads], strides=runs.strides[:, heads]
    )
    places, total = _places(np.concatenate([run_ends - run_begins, nbytes[heads]]))
    part_box, part_low, part_high = _parts(boxes)
    box_chunk, chunk_box = _box_chunks(line, part_box, part_low, part_high)
    needed = line.touched(np.concatenate([run_begins, part_low]), np.concatenate([run_ends, part_high]))
    return Arrangement(
        run_begins=run_begins,
        run_ends=run_ends,
        run_at=places[: len(run_begins)],
        box_of=box_of,
        boxes=boxes,
        box_at=places[len(run_begins) :],
        box_nbytes=nbytes[heads],
        needed=needed,
        box_chunk=box_chunk,
        chunk_box=chunk_box,
        nbytes=total,
    )


def _distinct(columns: Ints) -> tuple[Ints, Ints]:
    """Return one position of each distinct column, and for every column which of those it equals."""
    count = columns.shape[1]
    order = np.lexsort(columns)
    opens = np.ones(count, dtype=np.bool_)
    opens[1:] = (columns[:, order[1:]] != columns[:, order[:-1]]).any(axis=0)
    same = np.empty(count, dtype=np.int64)
    same[order] = np.cumsum(opens) - 1
    return order[opens], same


def _dense_rows(rows: Ints, low: Ints, high: Ints, nbytes: Ints, slack: int) -> tuple[Ints, Ints, Ints, int]:
    """Find stored rows whose boxes together are nearly all of the range they span.

    Returns:
        Begin and end of each such range; for every box its range, or -1; and the bytes beside what is wanted.
    """
    names, row = np.unique(rows, return_inverse=True)
    begin, end = np.full(len(names), np.iinfo(np.int64).max), np.zeros(len(names), dtype=np.int64)
    wanted = np.zeros(len(names), dtype=np.int64)
    np.minimum.at(begin, row, low)
    np.maximum.at(end, row, high)
    np.add.at(wanted, row, nbytes)
    beside = np.maximum(end - begin - wanted, 0)
    is_dense = beside * _MOST <= end - begin
    is_dense &= np.cumsum(np.where(is_dense, beside, 0)) <= slack
    range_of = np.where(is_dense, np.cumsum(is_dense) - 1, -1)
    return begin[is_dense], end[is_dense], range_of[row], int(beside[is_dense].sum())


def _filled(line: Line, begins: Ints, ends: Ints, slack: int) -> tuple[Ints, Ints]:
    """Extend runs to whole chunks where little is missing."""
    length = line.ends - line.begins
    held = covered(begins, ends, line.begins, line.ends)
    missing: Ints = length - held
    nearly: Flags = (held > 0) & (missing > 0) & (missing * _MOST <= length)
    nearly &= np.cumsum(np.where(nearly, missing, 0)) <= slack
    if not nearly.any():
        return begins, ends
    return union(np.concatenate([begins, line.begins[nearly]]), np.concatenate([ends, line.ends[nearly]]))


def _places(sizes: Ints) -> tuple[Ints, int]:
    ends = np.cumsum(-(-sizes // ALIGNMENT) * ALIGNMENT)
    return np.concatenate([[0], ends[:-1]]) if len(ends) else ends, int(ends[-1]) if len(ends) else 0


def _parts(boxes: Runs) -> tuple[Ints, Ints, Ints]:
    """Return ranges that hold the boxes, cut where there is much between two repetitions: box, begin and end of each."""
    box = np.arange(len(boxes.first))
    begin, span = boxes.first.copy(), boxes.nbytes.copy()
    for counts, strides in zip(boxes.counts, boxes.strides, strict=True):
        is_far = (counts > 1) & (strides >= _FAR)
        span += np.where(is_far, 0, (counts - 1) * strides)
        repeats = np.where(is_far, counts, 1)[box]
        within = np.arange(int(repeats.sum())) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        box, begin = np.repeat(box, repeats), np.repeat(begin, repeats)
        begin = begin + within * strides[box]
    return box, begin, begin + span[box]


def _box_chunks(line: Line, box: Ints, begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return the pairs of chunk and box that share bytes, by chunk."""
    first, last = line.chunks(begins, ends)
    counts = last - first + 1
    chunk = np.repeat(first, counts) + np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    # One box may reach a chunk with several of its parts.
    heads, _ = _distinct(np.vstack([np.repeat(box, counts), chunk]))
    chunk, box = chunk[heads], np.repeat(box, counts)[heads]
    return chunk, box
