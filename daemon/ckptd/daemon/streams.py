"""A rank's stream cut into runs that can be proved independently of each other.

Owns: which chunks must be read one after the other because a shard or object spans them, and the fingerprints of what
stands in them. Does not own: reading (`verify`). Pure. Invariant: every chunk is in exactly one run, every stored shard
and object with bytes is checked in exactly one run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import blake3
import xxhash

from ckptd.protos import segmented
from ckptd.protos.snapshot_pb2 import RankSection

from .index import ChunkRef, chunk_refs
from .index_checks import FINGERPRINT_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRow:
    """A shard or an object as it stands in a stream: name, place and bytes, xxh3-128, and segmented fingerprint or b""."""

    name: str
    offset: int
    nbytes: int
    fingerprint: bytes
    segmented: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRun:
    """Consecutive chunks, and the rows in them, ascending by offset."""

    chunks: list[ChunkRef]
    rows: list[StoredRow]

    @property
    def nbytes(self) -> int:
        """Stored bytes of its chunks."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def digest(self) -> bytes:
        """BLAKE3 over what would be proved: the same chunks with the same rows in them, wherever they stand."""
        hasher = blake3.blake3()
        start = self.chunks[0].stream_offset
        for chunk in self.chunks:
            hasher.update(f"{chunk.key} {chunk.length}\n".encode())
        for row in self.rows:
            hasher.update(f"{row.offset - start} {row.nbytes} {row.fingerprint.hex()} {row.segmented.hex()}\n".encode())
        return hasher.digest()

    def fingerprints(self) -> RunFingerprints:
        """Return a fresh check of this run's rows."""
        return RunFingerprints(self.rows)


class RunFingerprints:
    """Computes the rows' fingerprints while the run's bytes pass by in order. For one thread."""

    def __init__(self, rows: list[StoredRow]) -> None:
        self._rows = rows
        self._at = 0
        self._hasher = xxhash.xxh3_128()
        self._by_segments = segmented.Hasher()
        self._wrong: list[str] = []

    def feed(self, offset: int, piece: memoryview) -> None:
        """Take the next bytes of the stream; `offset` is where they begin in it."""
        end = offset + len(piece)
        while self._at < len(self._rows):
            row = self._rows[self._at]
            begin = max(row.offset, offset)
            if begin >= end:
                return
            part = piece[begin - offset : min(row.offset + row.nbytes, end) - offset]
            self._hasher.update(part)
            if row.segmented:
                self._by_segments.update(part)
            if row.offset + row.nbytes > end:
                return
            fits = self._hasher.digest() == row.fingerprint
            if not fits or (row.segmented and self._by_segments.digest() != row.segmented):
                self._wrong.append(row.name)
            self._hasher, self._by_segments = xxhash.xxh3_128(), segmented.Hasher()
            self._at += 1

    def wrong(self) -> list[str]:
        """Return the names of rows that have another fingerprint, or that did not pass by whole."""
        return [*self._wrong, *(row.name for row in self._rows[self._at :])]


def stored_rows(section: RankSection) -> list[StoredRow]:
    """Return what stands in a rank's stream, ascending by offset; rows without bytes are left out."""
    table = section.shards
    found = [
        StoredRow(
            name=table.names[table.name[row]],
            offset=section.stream_offset[row],
            nbytes=table.nbytes[row],
            fingerprint=section.fingerprints[row * FINGERPRINT_BYTES : (row + 1) * FINGERPRINT_BYTES],
            segmented=section.segmented_fingerprints[row * FINGERPRINT_BYTES : (row + 1) * FINGERPRINT_BYTES],
        )
        for row, writer in enumerate(section.writer)
        if writer == section.rank and table.nbytes[row]
    ]
    found += [
        StoredRow(
            name=name,
            offset=section.object_offset[row],
            nbytes=section.object_length[row],
            fingerprint=section.object_fingerprints[row * FINGERPRINT_BYTES : (row + 1) * FINGERPRINT_BYTES],
        )
        for row, name in enumerate(section.object_names)
        if section.object_length[row]
    ]
    return sorted(found, key=lambda row: row.offset)


def runs_of(section: RankSection) -> Iterator[StreamRun]:
    """Yield the runs of a rank's stream in order."""
    rows = stored_rows(section)
    at = 0
    chunks: list[ChunkRef] = []
    mine: list[StoredRow] = []
    for chunk in chunk_refs(section):
        chunks.append(chunk)
        end = chunk.stream_offset + chunk.length
        while at < len(rows) and rows[at].offset < end:
            mine.append(rows[at])
            at += 1
        if not mine or mine[-1].offset + mine[-1].nbytes <= end:
            yield StreamRun(chunks=chunks, rows=mine)
            chunks, mine = [], []
    if chunks:
        yield StreamRun(chunks=chunks, rows=mine)
