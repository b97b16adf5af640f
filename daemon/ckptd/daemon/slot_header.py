"""The header page of a slot: what its bytes are, and whether they are whole.

Owns: the page's form. Does not own: the mapping it stands in, and who may change it. The page is 4096
bytes: "CKPTDSL1", u32 version, u32 length of the body, the body (JSON, sorted keys), zeros, and in the last
32 bytes the BLAKE3 of everything before.

Invariant: a page that was not written to its end decodes to None, never to another header: a process that
dies inside `write` leaves a torn slot, which is thrown away.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from enum import StrEnum

import blake3

HEADER_BYTES = 4096
MAGIC = b"CKPTDSL1"
VERSION = 1

_PREFIX = struct.Struct("<8sII")
_DIGEST_BYTES = 32
_BODY_BYTES = HEADER_BYTES - _PREFIX.size - _DIGEST_BYTES


class SlotState(StrEnum):
    """What may happen to the slot's bytes."""

    FREE = "free"
    """Nobody's: the bytes mean nothing."""
    WRITING = "writing"
    """The trainer's, until it says Staged. After a crash: torn."""
    STAGED = "staged"
    """The agent's: complete, and nobody writes to them until the slot is free again."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlotHeader:
    """What a slot holds. Offsets from the start of the file and lengths, in bytes.

    Attributes:
        state: See SlotState.
        job: Digest (hex) of root and job name.
        run_id: Run whose rank fills the slot.
        rank: Global rank.
        timeline: Timeline's id; empty when free.
        step: Step number.
        layout_digest: Of the rank's layout; empty when nothing was laid out here yet.
        plan_digest: Of the plan the stream is laid out by.
        data_bytes: Tensor part, a multiple of 64.
        tail_offset: Where the object blob begins.
        objects_bytes: Length of the object blob; the trailer follows at the next multiple of 8.
        trailer_bytes: Length of the SlotTrailer.
        staged_at: Seconds since 1970, information only.
        process: The trainer process that may write to the slot, or that may still do so although the slot was taken
            from it; "?" where it is not known. Empty when there is none: never begun, or staged.
    """

    state: SlotState
    job: str
    run_id: str = ""
    rank: int
    timeline: str = ""
    step: int = 0
    layout_digest: bytes = b""
    plan_digest: bytes = b""
    data_bytes: int
    tail_offset: int
    objects_bytes: int = 0
    trailer_bytes: int = 0
    staged_at: float = 0.0
    process: str = ""

    @property
    def trailer_offset(self) -> int:
        """Where the SlotTrailer begins."""
        return self.tail_offset + -(-self.objects_bytes // 8) * 8

    @property
    def end(self) -> int:
        """First byte behind the trailer."""
        return self.trailer_offset + self.trailer_bytes


def encode(header: SlotHeader) -> bytes:
    """Return the page of 4096 bytes.

    Raises:
        ValueError: A text of the header is too long for a page.
    """
    page = stem(header).ljust(_PREFIX.size + _BODY_BYTES, b"\0")
    return page + blake3.blake3(page).digest()


def stem(header: SlotHeader) -> bytes:
    """Return the page without its zeros and digest: no two headers have the same.

    Raises:
        ValueError: A text of the header is too long for a page.
    """
    fields = dataclasses.asdict(header)
    fields["layout_digest"] = header.layout_digest.hex()
    fields["plan_digest"] = header.plan_digest.hex()
    body = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    if len(body) > _BODY_BYTES:
        raise ValueError(f"slot header of rank {header.rank}: {len(body)} bytes do not fit {_BODY_BYTES}")
    return _PREFIX.pack(MAGIC, VERSION, len(body)) + body


def decode(page: bytes | memoryview) -> SlotHeader | None:
    """Return the header, or None when the page is torn, foreign or of an unknown version."""
    page = bytes(page[:HEADER_BYTES])
    if len(page) != HEADER_BYTES or blake3.blake3(page[:-_DIGEST_BYTES]).digest() != page[-_DIGEST_BYTES:]:
        return None
    magic, version, length = _PREFIX.unpack_from(page)
    if magic != MAGIC or version != VERSION or length > _BODY_BYTES:
        return None
    try:
        fields = json.loads(page[_PREFIX.size : _PREFIX.size + length])
        fields["state"] = SlotState(fields["state"])
        fields["layout_digest"] = bytes.fromhex(fields["layout_digest"])
        fields["plan_digest"] = bytes.fromhex(fields["plan_digest"])
        return SlotHeader(**fields)
    except (ValueError, TypeError, KeyError):
        return None
