"""Where fetched bytes stand: from a range of a rank's stream to a range of a file. Pure.

Owns: joining neighbouring chunks into runs, giving runs their places in the arena, and finding a shard there.
Does not own: reading and verifying (`fetcher`). Invariant: chunks that follow one another in a stream and are
both needed stand next to one another, so whatever lies in needed chunks is one contiguous range of one file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .chunks import aligned
from .index import ChunkRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Chunks of one rank's stream that follow one another without gap."""

    rank: int
    refs: tuple[ChunkRef, ...]

    @property
    def stream_offset(self) -> int:
        """Where the run begins in the stream, in bytes."""
        return self.refs[0].stream_offset

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.refs[-1].stream_offset + self.refs[-1].length - self.stream_offset


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """A range of a rank's stream and the range of a file that holds it. In bytes."""

    stream_offset: int
    nbytes: int
    path: Path
    file_offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """What a fetch brought, all of it verified.

    Attributes:
        extents: Per stored rank, ascending in the stream.
        bytes_by_tier: Bytes that came from "memory" and from "store".
    """

    extents: Mapping[int, Sequence[Extent]]
    bytes_by_tier: Mapping[str, int]

    def locate(self, rank: int, stream_offset: int, nbytes: int) -> tuple[Path, int]:
        """Return the file, and the offset in it, where so many bytes of a rank's stream stand.

        Raises:
            KeyError: They were not among the needed chunks.
        """
        extents = self.extents.get(rank, ())
        at = bisect_right(extents, stream_offset, key=lambda extent: extent.stream_offset) - 1
        if at >= 0:
            found = extents[at]
            within = stream_offset - found.stream_offset
            if within + nbytes <= found.nbytes:
                return found.path, found.file_offset + within
        raise KeyError(f"bytes {stream_offset}..{stream_offset + nbytes} of rank {rank}'s stream were not fetched")


def runs(rank: int, refs: Iterable[ChunkRef]) -> list[Run]:
    """Join a rank's needed chunks, in any order and each maybe several times, into runs."""
    found: list[list[ChunkRef]] = []
    for ref in sorted(set(refs), key=lambda ref: ref.stream_offset):
        if found and found[-1][-1].stream_offset + found[-1][-1].length == ref.stream_offset:
            found[-1].append(ref)
        else:
            found.append([ref])
    return [Run(rank=rank, refs=tuple(each)) for each in found]


def places(missing: Iterable[Run]) -> tuple[list[tuple[Run, int]], int]:
    """Give every run a place in the arena; return each with its offset, and the bytes needed in all."""
    placed = []
    at = 0
    for run in missing:
        placed.append((run, at))
        at = aligned(at + run.nbytes)
    return placed, at
