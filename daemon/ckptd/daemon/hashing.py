"""Digests of stored bytes.

Owns: BLAKE3 over one chunk, and the form a digest has in messages. Does not own: fingerprints of plain bytes
(`fingerprints`), nor who hashes when. Invariant: the digest is over exactly the bytes that are put, read once
where they lie; both calls give up Python's lock while they hash, so as many threads run as call.
"""

from __future__ import annotations

import blake3

DIGEST_BYTES = 32


def chunk_digest(data: bytes | memoryview) -> bytes:
    """Return BLAKE3 (32 bytes). One thread per call: callers hash several chunks at once instead."""
    return blake3.blake3(data).digest()


def has_digest(data: bytes | memoryview, digest: bytes) -> bool:
    """Whether these bytes are the ones that were listed."""
    return chunk_digest(data) == digest
