"""Spoils bytes that pass by: slower, fewer, one bit wrong.

Owns the places of wrong bits, decided by seed, key and range: a fault that always strikes shows the same wrong bit each time,
as a rotten object would. Holds one piece at a time, whatever the object's size.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator

_PIECES_PER_S = 20


async def dripping(pieces: AsyncIterator[bytes], bytes_per_s: float) -> AsyncIterator[bytes]:
    """Pass bytes on at a rate, in pieces of a twentieth of a second, and never sooner than their turn."""
    begun, passed = time.monotonic(), 0
    most = max(1, int(bytes_per_s / _PIECES_PER_S))
    async for piece in pieces:
        for start in range(0, len(piece), most):
            part = piece[start : start + most]
            passed += len(part)
            await asyncio.sleep(max(0.0, begun + passed / bytes_per_s - time.monotonic()))
            yield part


async def cut(pieces: AsyncIterator[bytes], length: int) -> AsyncIterator[bytes]:
    """Pass the first bytes on, and end."""
    left = length
    async for piece in pieces:
        if left <= 0:
            return
        yield piece[:left]
        left -= len(piece)


async def flipped(pieces: AsyncIterator[bytes], place: int, bit: int) -> AsyncIterator[bytes]:
    """Pass all bytes on, one bit of the byte at `place` wrong."""
    at = 0
    async for piece in pieces:
        if at <= place < at + len(piece):
            wrong = bytearray(piece)
            wrong[place - at] ^= 1 << bit
            yield bytes(wrong)
        else:
            yield piece
        at += len(piece)


def wrong_bit(seed: int, what: str, length: int) -> tuple[int, int]:
    """Return place and bit to spoil in an answer of so many bytes (more than 0); the same for the same question."""
    number = int.from_bytes(hashlib.sha256(f"{seed}/{what}".encode()).digest()[:8])
    return number // 8 % length, number % 8
