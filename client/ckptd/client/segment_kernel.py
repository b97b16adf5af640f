"""xxh3-128 of many segments at once, where they lie: integer operations of torch, the same on every device.

Owns: the arithmetic for segments of exactly `SEGMENT_BYTES`. Does not own: cutting tensors into segments (`hash_in_place`), or
the fingerprint made of the digests (`segmented`). Invariant: bit for bit what the library computes of each segment.

A segment is 32 blocks of 16 stripes of 8 lanes, 64 bits each. Within a block stripes are only added up; from block to block the
lanes are scrambled, one block after the other. So block sums of all segments are made first, window by window, then every
segment takes its 31 scrambles at the same time, and its lanes are folded into two words. Numbers are unsigned and wrap in
xxh3; int64 wraps alike, and only shifts to the right need a mask.
"""

from __future__ import annotations

import functools

import torch

from ckptd.protos.segmented import SEGMENT_BYTES

LANES, STRIPES = 8, 16
BLOCKS = SEGMENT_BYTES // (8 * LANES * STRIPES)
WORDS = SEGMENT_BYTES // 8

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""The default secret of XXH3, as its specification gives it."""
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_AVALANCHE = 0x165667919E3779F9
_LOW = 0xFFFFFFFF
# Where in the secret each use of it begins, in bytes.
_SCRAMBLE_AT, _LAST_STRIPE_AT, _LOW_AT, _HIGH_AT = 128, 121, 11, 117


def block_sums(words: torch.Tensor, into: torch.Tensor) -> None:
    """Add up the stripes of each block.

    Takes about twice the bytes of `words` beside them.

    Args:
        words: (segments, WORDS) int64, contiguous: the bytes of the segments.
        into: (segments, BLOCKS, LANES) int64, on the same device: gets the sums.
    """
    lanes = words.view(-1, BLOCKS, STRIPES, LANES)
    high = lanes ^ _constants(words.device)["stripes"]
    product = high & _LOW
    high >>= 32
    high &= _LOW
    product *= high
    product[..., 0::2] += lanes[..., 1::2]
    product[..., 1::2] += lanes[..., 0::2]
    torch.sum(product, dim=2, out=into)


def digests(sums: torch.Tensor) -> torch.Tensor:
    """Return the xxh3-128 of each segment, in canonical form.

    Args:
        sums: (segments, BLOCKS, LANES) int64, as `block_sums` made them.

    Returns:
        (segments, 16) uint8, on the same device.
    """
    constant = _constants(sums.device)
    lanes = constant["start"].repeat(len(sums), 1)
    for block in range(BLOCKS - 1):
        lanes += sums[:, block]
        lanes ^= _shifted(lanes, 47)
        lanes ^= constant["scramble"]
        lanes *= _PRIME32[0]
    lanes += sums[:, BLOCKS - 1]
    pairs = lanes[:, None, :] ^ constant["fold"]
    words = constant["length"] + _folded_product(pairs[..., 0::2], pairs[..., 1::2]).sum(dim=2)
    words ^= _shifted(words, 37)
    words *= _AVALANCHE
    words ^= _shifted(words, 32)
    # Big-endian, the high word first.
    return words.view(torch.uint8).view(-1, 2, 8).flip(2).reshape(-1, 16)


def _folded_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the high half of each 128-bit product, xor its low half."""
    a_low, a_high, b_low, b_high = a & _LOW, _shifted(a, 32), b & _LOW, _shifted(b, 32)
    cross, other = a_low * b_high, a_high * b_low
    carry = _shifted(a_low * b_low, 32) + (cross & _LOW) + (other & _LOW)
    return (a_high * b_high + _shifted(cross, 32) + _shifted(other, 32) + _shifted(carry, 32)) ^ (a * b)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return unsigned words shifted to the right."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


@functools.cache
def _constants(device: torch.device) -> dict[str, torch.Tensor]:
    stripe = [_secret(8 * number, LANES) for number in range(STRIPES)]
    stripes = [stripe] * (BLOCKS - 1) + [[*stripe[:-1], _secret(_LAST_STRIPE_AT, LANES)]]
    start = [_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0]]
    # The high word comes first, as in canonical form.
    length = [~(SEGMENT_BYTES * _PRIME64[1]), SEGMENT_BYTES * _PRIME64[0]]
    made: dict[str, list[object]] = {
        "stripes": [stripes],
        "start": [_signed(word) for word in start],
        "scramble": list(_secret(_SCRAMBLE_AT, LANES)),
        "fold": [[_secret(_HIGH_AT, LANES), _secret(_LOW_AT, LANES)]],
        "length": [_signed(word) for word in length],
    }
    with torch.inference_mode(mode=False):  # kept for calls in any mode
        return {name: torch.tensor(words, dtype=torch.int64, device=device) for name, words in made.items()}


def _secret(at: int, words: int) -> list[int]:
    return [int.from_bytes(_SECRET[at + 8 * n : at + 8 * n + 8], "little", signed=True) for n in range(words)]


def _signed(word: int) -> int:
    """Return the number below 2^63 that has the same 64 bits."""
    return (word & (1 << 64) - 1) - ((word & 1 << 63) << 1)
