"""What is needed of a step's streams, and where it stands once fetched: ranges of files. Pure.

Owns: finding any range of a stream, and every wanted piece, in the files that hold them. Does not own: reading and verifying
(`fetcher`), or the places in the arena (`arrangement`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .arrangement import Arrangement
from .columns import Flags, Ints
from .index import ChunkRef
from .line import Line
from .pieces import Pieces


def _none() -> Ints:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What the ranks of a node want of stored streams.

    Attributes:
        refs: Per stored rank that anything is wanted of: all chunks of its stream.
        pieces: Shared boxes.
        ranks: Other ranges: whose stream.
        offsets: Other ranges: in the stream, in bytes.
        lengths: Other ranges: in bytes, may be 0.
    """

    refs: Mapping[int, Sequence[ChunkRef]]
    pieces: Pieces = field(default_factory=lambda: Pieces.none(0))
    ranks: Ints = field(default_factory=_none)
    offsets: Ints = field(default_factory=_none)
    lengths: Ints = field(default_factory=_none)

    def on(self, line: Line) -> tuple[Ints, Ints]:
        """Return begins and ends of everything needed that has bytes, on the line; pieces as the ranges that hold them."""
        ranges = self.pieces.ranges()
        begins = np.concatenate([line.at(self.pieces.rank, ranges.offset), line.at(self.ranks, self.offsets)])
        ends = begins + np.concatenate([ranges.nbytes, self.lengths])
        return begins[begins < ends], ends[begins < ends]

    def without(self, ranks: Sequence[int]) -> Needs:
        """Return what has bytes and is not of these stored ranks."""
        is_piece = ~np.isin(self.pieces.rank, ranks)
        is_other = ~np.isin(self.ranks, ranks) & (self.lengths > 0)
        return Needs(
            refs=self.refs,
            pieces=self.pieces.taken(is_piece),
            ranks=self.ranks[is_other],
            offsets=self.offsets[is_other],
            lengths=self.lengths[is_other],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Extents:
    """Ranges of the line and the ranges of files that hold them, ascending; one entry a range.

    Attributes:
        begins: On the line.
        ends: On the line.
        file: Position in the list of files.
        at: Offset in the file.
    """

    begins: Ints
    ends: Ints
    file: Ints
    at: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Where pieces stand; one entry a piece.

    Attributes:
        file: Position in the list of files; the number of files where there are no bytes.
        at: Offset in the file, in bytes.
        nbytes: Of the box that stands there, C-contiguous.
        low: One row a dimension: where that box begins, in elements of the global tensor.
        size: As low: how long it is. It holds the shared box, and may reach beyond it.
    """

    file: Ints
    at: Ints
    nbytes: Ints
    low: Ints
    size: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """What a fetch brought, all of it verified.

    Attributes:
        files: That hold it.
        arena_file: The one of them that the fetch made; None where slots hold everything.
        placed: The needed pieces, in their order.
        bytes_by_tier: Bytes of chunks that came from "memory" and from "store".
        arena_bytes: That the fetch took of the arena.
        window_bytes: Most that it had in the window at once.
    """

    line: Line
    extents: Extents
    files: Sequence[Path]
    arena_file: Path | None
    placed: Placed
    bytes_by_tier: Mapping[str, int]
    arena_bytes: int
    window_bytes: int

    def locate(self, rank: int, stream_offset: int, nbytes: int) -> tuple[Path, int]:
        """Return the file, and the offset in it, where so many bytes of a rank's stream stand.

        Raises:
            KeyError: They were not needed.
        """
        if self.line.has(rank):
            begin = self.line.at(np.array([rank]), np.array([stream_offset]))
            file, at = located(self.extents, begin, begin + nbytes)
            if file[0] >= 0:
                return self.files[int(file[0])], int(at[0])
        raise KeyError(f"bytes {stream_offset}..{stream_offset + nbytes} of rank {rank}'s stream were not fetched")


class Standing:
    """Gathers where the bytes of a fetch stand, from range to range of ascending places in a file."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._ranges: list[tuple[int, int, int, int]] = []
        self._arena = -1

    def add(self, path: Path, begin: int, nbytes: int, at: int) -> None:
        """Add a range of the line; it joins the last one where it goes on in the line and in the file."""
        file = self._files.setdefault(path, len(self._files))
        if self._ranges:
            last_begin, last_end, last_file, last_at = self._ranges[-1]
            if (last_file, last_end, last_at + last_end - last_begin) == (file, begin, at):
                self._ranges[-1] = (last_begin, begin + nbytes, file, last_at)
                return
        self._ranges.append((begin, begin + nbytes, file, at))

    def add_runs(self, path: Path, arrangement: Arrangement) -> None:
        """Add what stands in the arena."""
        self._arena = self._files.setdefault(path, len(self._files))
        ends = arrangement.run_ends.tolist()
        for begin, end, at in zip(arrangement.run_begins.tolist(), ends, arrangement.run_at.tolist(), strict=True):
            self._ranges.append((begin, end, self._arena, at))

    def fetched(
        self,
        line: Line,
        pieces: Pieces,
        arrangement: Arrangement,
        *,
        is_arranged: Flags,
        bytes_by_tier: Mapping[str, int],
        window_bytes: int,
    ) -> Fetched:
        """Return what was fetched.

        Args:
            line: That ranges are on.
            pieces: All that were needed.
            arrangement: Of those that stand in the arena.
            is_arranged: Piece: whether it is one of these.
            bytes_by_tier: See Fetched.
            window_bytes: See Fetched.
        """
        begins, ends, file, at = np.array(sorted(self._ranges), dtype=np.int64).reshape(-1, 4).T
        extents = Extents(begins=begins, ends=ends, file=file, at=at)
        box = np.full(len(pieces), -1, dtype=np.int64)
        box[is_arranged] = arrangement.box_of
        ranges = pieces.ranges()
        on_line = line.at(pieces.rank, ranges.offset)
        stands_in, stands_at = located(extents, on_line, on_line + ranges.nbytes)
        is_box = box >= 0
        if (~is_box & (stands_in < 0) & (ranges.nbytes > 0)).any():
            raise KeyError("a wanted piece was not fetched")
        box_at = np.concatenate([arrangement.box_at, [0]])[box]
        nbytes = np.where(is_box, pieces.nbytes, ranges.nbytes)
        placed = Placed(
            file=np.where(nbytes == 0, len(self._files), np.where(is_box, self._arena, stands_in)),
            at=np.where(nbytes == 0, 0, np.where(is_box, box_at, stands_at)),
            nbytes=nbytes,
            low=np.where(is_box, pieces.low, ranges.low),
            size=np.where(is_box, pieces.size, ranges.size),
        )
        return Fetched(
            line=line,
            extents=extents,
            files=list(self._files),
            arena_file=list(self._files)[self._arena] if self._arena >= 0 else None,
            placed=placed,
            bytes_by_tier=bytes_by_tier,
            arena_bytes=arrangement.nbytes,
            window_bytes=window_bytes,
        )


def located(extents: Extents, begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return file and offset of ranges of the line; file -1 where a range is not all in one extent."""
    if not len(extents.begins):
        return np.full(len(begins), -1, dtype=np.int64), np.zeros(len(begins), dtype=np.int64)
    found = np.maximum(np.searchsorted(extents.begins, begins, side="right") - 1, 0)
    inside = (extents.begins[found] <= begins) & (ends <= extents.ends[found])
    return np.where(inside, extents.file[found], -1), extents.at[found] + begins - extents.begins[found]
