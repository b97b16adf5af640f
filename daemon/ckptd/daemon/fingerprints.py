"""Fingerprints: xxh3-128 over the plain bytes of one box, 16 bytes in big-endian canonical form; and the segmented ones.

Owns: computing them over a staged slot, and joining in those of replicas that the trainer computed at the same
cut. Does not own: comparing them (`coverage`), or the segmented function (`segmented`). Invariant: a row's fingerprint
depends on the box's bytes alone, never on padding, chunks or who writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from ckptd.protos import segmented
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
    algorithm: str = "",
) -> tuple[bytes, bytes]:
    """Return the fingerprints of all rows, concatenated, and their segmented fingerprints.

    Args:
        rank: Global rank whose slot it is.
        rows: Its layout.
        writer: Per row, the rank that writes it.
        offsets: Per row this rank writes, where it stands in `data`.
        data: The tensor part of the staged slot.
        trailer: Holds the fingerprints of the rows that other ranks write, or says that they were left uncompared:
            theirs are zeros then.
        algorithm: What the step's replicas are compared by. "": xxh3-128, and there are no segmented fingerprints. Else
            the trailer's are segmented ones, and the xxh3-128 of rows that other ranks write are zeros.

    Raises:
        ValueError: The trailer's rows are not those that other ranks write, or it has not exactly the fingerprints that
            were asked for.
    """
    is_own = np.asarray(writer, dtype=np.int64) == rank
    expected = np.empty(0, dtype=np.int64) if trailer.uncompared else np.flatnonzero(~is_own)
    if not np.array_equal(expected, np.asarray(trailer.replica_row, dtype=np.int64)):
        raise ValueError(f"the trainer gave {len(trailer.replica_row)} fingerprints, of other rows than the plan says")
    given, other = trailer.replica_fingerprints, trailer.segmented_fingerprints
    if algorithm:
        given, other = other, given
    wanted = algorithm if len(expected) else trailer.segmented_algorithm
    if other or len(given) != FINGERPRINT_BYTES * len(expected) or trailer.segmented_algorithm != wanted:
        made = trailer.segmented_algorithm or "xxh3-128"
        raise ValueError(
            f"the trainer gave fingerprints by {made}, not those by {algorithm or 'xxh3-128'} of its replicas"
        )
    own, sizes = np.flatnonzero(is_own).tolist(), rows.nbytes

    def column(function: Callable[[memoryview], bytes], replicas: bytes) -> bytes:
        made = np.zeros((len(writer), FINGERPRINT_BYTES), dtype=np.uint8)
        if replicas:
            made[~is_own] = np.frombuffer(replicas, dtype=np.uint8).reshape(-1, FINGERPRINT_BYTES)
        digests = b"".join(function(data[(at := offsets[row]) : at + sizes[row]]) for row in own)
        made[is_own] = np.frombuffer(digests, dtype=np.uint8).reshape(-1, FINGERPRINT_BYTES)
        return made.tobytes()

    if not algorithm:
        return column(xxhash.xxh3_128_digest, given), b""
    return column(xxhash.xxh3_128_digest, b""), column(segmented.digest, given)
