"""Fingerprints: xxh3-128 over the plain bytes of one box, 16 bytes in big-endian canonical form.

Owns: computing them over a staged slot, and joining in those of replicas that the trainer computed at the same
cut. Does not own: comparing them (`coverage`). Invariant: a row's fingerprint depends on the box's bytes alone,
never on padding, chunks or who writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from ckptd.protos.snapshot_pb2 import ShardTable, SlotTrailer

FINGERPRINT_BYTES = 16


def fingerprint(data: bytes | memoryview) -> bytes:
    """Return xxh3-128 of plain bytes: C-contiguous, little-endian."""
    return xxhash.xxh3_128_digest(data)


def row_fingerprints(
    *,
    rank: int,
    rows: ShardTable,
    writer: Sequence[int],
    offsets: Sequence[int],
    data: memoryview,
    trailer: SlotTrailer,
) -> bytes:
    """Return the fingerprints of all rows, concatenated.

    Args:
        rank: Global rank whose slot it is.
        rows: Its layout.
        writer: Per row, the rank that writes it.
        offsets: Per row this rank writes, where it stands in `data`.
        data: The tensor part of the staged slot.
        trailer: Holds the fingerprints of the rows that other ranks write, or says that they were left uncompared:
            theirs are zeros then.

    Raises:
        ValueError: The trailer's rows are not those that other ranks write.
    """
    column = np.zeros((len(writer), FINGERPRINT_BYTES), dtype=np.uint8)
    is_own = np.asarray(writer, dtype=np.int64) == rank
    expected = np.empty(0, dtype=np.int64) if trailer.uncompared else np.flatnonzero(~is_own)
    if not np.array_equal(expected, np.asarray(trailer.replica_row, dtype=np.int64)):
        raise ValueError(f"the trainer gave {len(trailer.replica_row)} fingerprints, of other rows than the plan says")
    replicas = np.frombuffer(trailer.replica_fingerprints, dtype=np.uint8).reshape(-1, FINGERPRINT_BYTES)
    if not trailer.uncompared:
        column[~is_own] = replicas
    own = np.flatnonzero(is_own).tolist()
    sizes = rows.nbytes
    digests = b"".join(xxhash.xxh3_128_digest(data[(at := offsets[row]) : at + sizes[row]]) for row in own)
    column[is_own] = np.frombuffer(digests, dtype=np.uint8).reshape(-1, FINGERPRINT_BYTES)
    return column.tobytes()
