"""How a rank's bytes stand in its stream, and where the stream is cut into chunks. Pure.

Owns: the order and offsets of the shards a rank writes, and the cuts. Does not own: who writes a shard (the
plan), and the bytes. The stream is the tensor part, then the object blob; a chunk never spans the two, nor
two groups (trained, frozen): what did not change keeps its chunk.

Invariant: every shard starts at a multiple of 64, no two overlap, the chunks cover the stream exactly and
in order, none is longer than MAX_CHUNK_BYTES, and all follows from (rank, rows, writer) alone. At most one
chunk per group and one per large shard is shorter than half the maximum, so objects stay few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ckptd.protos import shard_table
from ckptd.protos.snapshot_pb2 import ShardTable

MAX_CHUNK_BYTES = 64 << 20
"""Longest chunk: one PUT each, and the unit a restore reads."""
LARGE_SHARD_BYTES = 32 << 20
"""From here on a shard has chunks of its own. Half the maximum: then packed chunks but the last are over half full."""
ALIGNMENT = 64
"""Of shards in the stream: covers every dtype, and cache lines."""

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class ChunkSpan:
    """A chunk's place in the stream. Both in bytes."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """First byte behind the chunk."""
        return self.offset + self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamLayout:
    """Where one rank's shards stand in its stream.

    Attributes:
        offsets: Per row, bytes; 0 and meaningless where another rank writes the row.
        data_bytes: Length of the tensor part, a multiple of 64 (the padding behind the last shard is stored).
        chunks: The cuts of the tensor part, in order.
        padding_starts: Where unused bytes between shards begin; they must be zero when the stream is hashed.
        padding_lengths: How many there are, 1 to 63 each.
    """

    offsets: list[int]
    data_bytes: int
    chunks: list[ChunkSpan]
    padding_starts: I64 = field(compare=False, repr=False)
    padding_lengths: I64 = field(compare=False, repr=False)


def aligned(nbytes: int) -> int:
    """Return the next multiple of 64."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def stream_layout(rank: int, rows: ShardTable, writer: Sequence[int]) -> StreamLayout:
    """Lay out the rows that `rank` writes; the same arguments always give the same layout.

    Groups follow one another in ascending order. Within a group the large shards come first, each in equal
    chunks of its own; the others are packed behind them in the order of the rows.

    Args:
        rank: Global rank whose stream it is.
        rows: The rank's layout.
        writer: Per row, the rank that writes it.

    Raises:
        ValueError: `writer` has not one entry per row.
    """
    count = shard_table.row_count(rows)
    if len(writer) != count:
        raise ValueError(f"rank {rank}: {len(writer)} writers for {count} rows")
    own = np.flatnonzero(np.asarray(writer, dtype=np.int64) == rank)
    nbytes = np.asarray(rows.nbytes, dtype=np.int64)[own]
    group = np.asarray(rows.group, dtype=np.int64)[own]
    order = np.lexsort((nbytes < LARGE_SHARD_BYTES, group))  # stable: ties keep the order of the rows
    own, nbytes, group = own[order], nbytes[order], group[order]
    ends = np.cumsum(-(-nbytes // ALIGNMENT) * ALIGNMENT)
    starts = np.concatenate((np.zeros(1, dtype=np.int64), ends[:-1])) if len(ends) else ends
    offsets = np.zeros(count, dtype=np.int64)
    offsets[own] = starts
    gaps = ends - starts - nbytes
    padded = np.flatnonzero(gaps)
    return StreamLayout(
        offsets=offsets.tolist(),
        data_bytes=int(ends[-1]) if len(ends) else 0,
        chunks=_cuts(starts, ends, nbytes >= LARGE_SHARD_BYTES, group),
        padding_starts=(starts + nbytes)[padded],
        padding_lengths=gaps[padded],
    )


def object_chunks(data_bytes: int, objects_bytes: int) -> list[ChunkSpan]:
    """Cut the object blob, which follows the tensor part at the next multiple of 64."""
    start = aligned(data_bytes)
    return _equal_cuts(start, start + objects_bytes)


def _cuts(starts: I64, ends: I64, large: npt.NDArray[np.bool_], group: I64) -> list[ChunkSpan]:
    cuts: list[ChunkSpan] = []
    if not len(starts):
        return cuts
    # A run of rows that may share chunks: same group, none of them large. A large row is a run of its own.
    breaks = np.flatnonzero((group[1:] != group[:-1]) | large[1:] | large[:-1]) + 1
    bounds = [0, *breaks.tolist(), len(starts)]
    for first, behind in pairwise(bounds):
        if large[first]:
            cuts.extend(_equal_cuts(int(starts[first]), int(ends[first])))
        else:
            cuts.extend(_packed_cuts(int(starts[first]), ends[first:behind]))
    return cuts


def _equal_cuts(start: int, end: int) -> list[ChunkSpan]:
    """Cut one long range evenly: a cut at each full 64 MiB could leave a last chunk of a few bytes."""
    if end == start:
        return []
    number = -(-(end - start) // MAX_CHUNK_BYTES)
    part = aligned(-(-(end - start) // number))
    return [ChunkSpan(offset=at, length=min(part, end - at)) for at in range(start, end, part)]


def _packed_cuts(start: int, ends: I64) -> list[ChunkSpan]:
    """Fill chunks with whole rows, first fit in order; one step of the loop per chunk, not per row."""
    cuts: list[ChunkSpan] = []
    at = start
    while at < int(ends[-1]):
        fit = int(np.searchsorted(ends, at + MAX_CHUNK_BYTES, side="right"))
        end = int(ends[fit - 1])
        cuts.append(ChunkSpan(offset=at, length=end - at))
        at = end
    return cuts
