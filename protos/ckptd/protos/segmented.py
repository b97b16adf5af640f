"""The segmented fingerprint `xxh3-128/32k`: xxh3-128 that can be computed where the bytes lie, all segments side by side.

Owns: the function on the host, and its name. Does not own: computing it on a device (the client's `segment_kernel`), or who
compares what by it. Invariants: up to one segment it is xxh3-128 itself; above, it is xxh3-128 over the digests of all segments
and the length; it depends on the bytes alone, never on the pieces they came in.
"""

from __future__ import annotations

import time

import xxhash

ALGORITHM = "xxh3-128/32k"
KNOWN = (ALGORITHM,)
"""Functions that this program knows, best first."""
SEGMENT_BYTES = 32 << 10
DIGEST_BYTES = 16
_LENGTH_BYTES = 8
_TURN_SEGMENTS = 128
"""The library keeps the interpreter's lock for pieces as short as a segment: after so many, other threads get a turn."""


def digest(data: bytes | memoryview) -> bytes:
    """Return the fingerprint of plain bytes, 16 bytes. Other threads get a turn all the while."""
    if len(data) <= SEGMENT_BYTES:
        return xxhash.xxh3_128_digest(data)
    hasher = Hasher()
    hasher.update(memoryview(data))
    return hasher.digest()


def joined(digests: bytes | bytearray, nbytes: int) -> bytes:
    """Return the fingerprint of bytes by the xxh3-128 of their segments.

    Args:
        digests: Of each segment in order, 16 bytes each, one after the other; one also of no bytes at all.
        nbytes: Length of all segments together, in bytes.

    Raises:
        ValueError: they are not as many as so many bytes have segments.
    """
    if len(digests) != DIGEST_BYTES * max(1, -(-nbytes // SEGMENT_BYTES)):
        raise ValueError(f"{len(digests)} bytes of digests are not those of the segments of {nbytes} bytes")
    if nbytes <= SEGMENT_BYTES:
        return bytes(digests)
    return xxhash.xxh3_128_digest(b"".join([digests, nbytes.to_bytes(_LENGTH_BYTES, "little")]))


class Hasher:
    """Computes one fingerprint while the bytes pass by in order. For one thread."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._open = xxhash.xxh3_128()
        self._open_bytes = 0
        self._nbytes = 0

    def update(self, piece: memoryview) -> None:
        """Take the next bytes."""
        self._nbytes += len(piece)
        at = 0
        if self._open_bytes:
            at = min(SEGMENT_BYTES - self._open_bytes, len(piece))
            self._feed(piece[:at])
        whole = at + (len(piece) - at) // SEGMENT_BYTES * SEGMENT_BYTES
        turn = _TURN_SEGMENTS * SEGMENT_BYTES
        for begin in range(at, whole, turn):
            end = min(begin + turn, whole)
            self._digests += b"".join(
                [xxhash.xxh3_128_digest(piece[one : one + SEGMENT_BYTES]) for one in range(begin, end, SEGMENT_BYTES)]
            )
            time.sleep(0)
        self._feed(piece[whole:])

    def digest(self) -> bytes:
        """Return the fingerprint of all bytes so far."""
        last = self._open.digest() if self._open_bytes or not self._nbytes else b""
        return joined(self._digests + last, self._nbytes)

    def _feed(self, piece: memoryview) -> None:
        """Take bytes of the open segment, at most what it lacks."""
        self._open.update(piece)
        self._open_bytes += len(piece)
        if self._open_bytes == SEGMENT_BYTES:
            self._digests += self._open.digest()
            self._open, self._open_bytes = xxhash.xxh3_128(), 0
