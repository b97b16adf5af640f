"""A node's index of a step: what stands where, as bytes at rest.

Owns: the file's frame (magic, header, one section a rank), its digests, and every check a single index can be put
to. Does not own: whether the indexes of all nodes make a whole step (`coverage`). Invariants: `build_index` is
deterministic in its arguments, so that an agent that does its work twice makes the same name; nothing that breaks the
format is returned by a `parse_*` function; a reader of one rank needs the header and that rank's section only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import blake3
from google.protobuf.message import DecodeError

from ckptd.protos.snapshot_pb2 import IndexHeader, IndexRef, RankSection, SectionEntry
from ckptd.storage_backends.base import ObjectStore

from .errors import CorruptError
from .index_checks import DIGEST_ALGORITHM, DIGEST_BYTES, FINGERPRINT_ALGORITHM, check_header, check_section
from .keys import IndexKey, StepId, chunk_key, parse_key
from .record_checks import FORMAT_VERSION, RANK_ORDER, SEGMENTED_FINGERPRINTS, UNCOMPARED_REPLICAS, corrupt

MAGIC = b"CKPTDIX1"
FRAME_BYTES = 16
"""Magic and the header's length stand before the header."""
MAX_HEADER_BYTES = 64 << 20
_FIRST_READ = 64 << 10
"""A header is read with one request when it fits here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkRef:
    """A chunk as an index refers to it.

    Attributes:
        digest: BLAKE3 of the stored bytes, 32 bytes.
        length: Stored bytes.
        key: Where it lies, relative to the root.
        stream_offset: Where its bytes begin in the rank's stream.
    """

    digest: bytes
    length: int
    key: str
    stream_offset: int


def build_index(header: IndexHeader, sections: Sequence[RankSection]) -> bytes:
    """Return the bytes of an index: the same for the same arguments, always.

    `header.sections` is ignored and made anew; format version, algorithms, encodings and the features that the sections
    need are filled in where unset.

    Raises:
        FormatError: a reader would refuse it.
    """
    made = IndexHeader()
    made.CopyFrom(header)
    made.format_version = made.format_version or FORMAT_VERSION
    made.digest_algorithm = made.digest_algorithm or DIGEST_ALGORITHM
    made.fingerprint_algorithm = made.fingerprint_algorithm or FINGERPRINT_ALGORITHM
    if not made.encodings:
        made.encodings.append("none")
    ordered = sorted(sections, key=lambda section: section.rank)
    if any(section.uncompared for section in ordered) and UNCOMPARED_REPLICAS not in made.required_features:
        made.required_features.append(UNCOMPARED_REPLICAS)
    if made.segmented_algorithm and SEGMENTED_FINGERPRINTS not in made.required_features:
        made.required_features.append(SEGMENTED_FINGERPRINTS)
    if made.mesh.rank_order and RANK_ORDER not in made.required_features:
        made.required_features.append(RANK_ORDER)
    blobs = [section.SerializeToString(deterministic=True) for section in ordered]
    digests = [blake3.blake3(blob).digest() for blob in blobs]
    header_bytes = _header_with_offsets(made, [section.rank for section in ordered], blobs, digests)
    data = b"".join([MAGIC, len(header_bytes).to_bytes(8, "little"), header_bytes, *blobs])
    parse_index(data)
    return data


def parse_header(data: bytes | memoryview, *, where: str = "index") -> IndexHeader:
    """Return the header at the start of `data`, which may end behind it.

    Raises:
        FormatError: CORRUPT, or FORMAT_UNSUPPORTED for a newer format.
    """
    view = memoryview(data)
    length = _header_length(view, where)
    if len(view) < FRAME_BYTES + length:
        raise corrupt(where, f"it ends after {len(view)} bytes, its header needs {FRAME_BYTES + length}")
    header = IndexHeader()
    try:
        header.ParseFromString(bytes(view[FRAME_BYTES : FRAME_BYTES + length]))
    except DecodeError:
        raise corrupt(where, "its header is not protobuf") from None
    check_header(header, FRAME_BYTES + length, where)
    return header


def parse_section(
    data: bytes | memoryview, entry: SectionEntry, header: IndexHeader, *, where: str = "index"
) -> RankSection:
    """Return one rank's section from exactly its bytes.

    Args:
        data: The section's bytes, `entry.length` of them.
        entry: Its entry in the header.
        header: The header the entry stands in.
        where: Key, for messages.

    Raises:
        FormatError: CORRUPT when the bytes do not have the entry's digest or break the format.
    """
    what = f"{where}, section of rank {entry.rank}"
    if len(data) != entry.length or blake3.blake3(data).digest() != entry.blake3:
        raise corrupt(what, "its bytes do not have the digest the header says")
    section = RankSection()
    try:
        section.ParseFromString(bytes(data))
    except DecodeError:
        raise corrupt(what, "it is not protobuf") from None
    if section.rank != entry.rank:
        raise corrupt(what, f"it says rank {section.rank}")
    check_section(section, header, what)
    return section


def parse_index(data: bytes | memoryview, *, where: str = "index") -> tuple[IndexHeader, dict[int, RankSection]]:
    """Return the header and all sections by rank.

    Raises:
        FormatError: CORRUPT, or FORMAT_UNSUPPORTED for a newer format.
    """
    view = memoryview(data)
    header = parse_header(view, where=where)
    _check_end(header, len(view), where)
    sections = {
        entry.rank: parse_section(view[entry.offset : entry.offset + entry.length], entry, header, where=where)
        for entry in header.sections
    }
    return header, sections


def check_ref(ref: IndexRef, data: bytes | None) -> bytes:
    """Return the bytes of an index after comparing them with how it is named.

    Args:
        ref: As a decision or a listing names it; `bytes` 0 is unknown.
        data: What lies under its key; None where there is nothing.

    Raises:
        CorruptError: it is gone, or has another length or digest.
    """
    if data is None:
        raise CorruptError.of(f"index {ref.key} is gone", node=ref.node, object=ref.key)
    if ref.bytes not in {0, len(data)}:
        text = f"index {ref.key} has {len(data)} bytes, it was listed with {ref.bytes}"
        raise CorruptError.of(text, node=ref.node, object=ref.key)
    if blake3.blake3(data).hexdigest() != ref.blake3:
        text = f"index {ref.key} does not have the digest in its name"
        raise CorruptError.of(text, node=ref.node, object=ref.key)
    return data


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenIndex:
    """An index whose bytes have their digest and whose header was checked; sections are decoded when they are asked for.

    Attributes:
        ref: As it is named, with its bytes.
        header: Its header.
        data: All of it.
    """

    ref: IndexRef
    header: IndexHeader
    data: bytes

    def section(self, rank: int) -> RankSection:
        """Return one rank's section, decoded and checked.

        Raises:
            FormatError: no such rank, or the bytes break the format.
        """
        for entry in self.header.sections:
            if entry.rank == rank:
                part = memoryview(self.data)[entry.offset : entry.offset + entry.length]
                return parse_section(part, entry, self.header, where=self.ref.key)
        raise corrupt(self.ref.key, f"it has no section of rank {rank}")


def open_index(ref: IndexRef, data: bytes | None) -> OpenIndex:
    """Return a checked index whose sections were not decoded yet.

    Raises:
        CorruptError: see `check_ref`.
        FormatError: the bytes break the format, or belong under another name.
    """
    whole = check_ref(ref, data)
    header = parse_header(whole, where=ref.key)
    _check_end(header, len(whole), ref.key)
    key = parse_key(ref.key)
    if not isinstance(key, IndexKey) or (key.node, key.digest) != (ref.node, ref.blake3):
        raise corrupt(ref.key, "it is not named as an index")
    _check_place(header, key)
    named = IndexRef(node=ref.node, key=ref.key, blake3=ref.blake3, bytes=len(whole))
    return OpenIndex(ref=named, header=header, data=whole)


def load_index(ref: IndexRef, data: bytes | None) -> tuple[IndexRef, IndexHeader, dict[int, RankSection]]:
    """Return a checked index with its reference, whose `bytes` are filled in.

    Raises:
        CorruptError: see `check_ref`.
        FormatError: the bytes break the format, or belong under another name.
    """
    found = open_index(ref, data)
    return found.ref, found.header, {entry.rank: found.section(entry.rank) for entry in found.header.sections}


def read_index(store: ObjectStore, key: IndexKey) -> tuple[IndexHeader, dict[int, RankSection]]:
    """Read a whole index and check it against its name.

    Raises:
        CorruptError: the bytes do not have the digest in the key.
        FormatError: they do, but break the format.
        StorageError: NotFound and the other conditions of the store.
    """
    ref = IndexRef(node=key.node, key=str(key), blake3=key.digest)
    _, header, sections = load_index(ref, store.get(str(key)))
    return header, sections


def read_header(store: ObjectStore, key: IndexKey, size: int) -> IndexHeader:
    """Read the header alone, with one or two ranged requests; `size` is the object's, from a record or a listing.

    The header's own bytes are covered by the digest in the name only when the whole is read; a section that is read
    through this header is checked by the digest in it.

    Raises:
        FormatError: the bytes break the format.
        StorageError: NotFound, Truncated and the other conditions of the store.
    """
    where = str(key)
    buffer = bytearray(min(size, _FIRST_READ))
    store.get_into(where, memoryview(buffer))
    needed = FRAME_BYTES + _header_length(memoryview(buffer), where)
    if needed > size:
        raise corrupt(where, f"it has {size} bytes, its header needs {needed}")
    if needed > len(buffer):
        rest = bytearray(needed - len(buffer))
        store.get_into(where, memoryview(rest), offset=len(buffer))
        buffer += rest
    header = parse_header(bytes(buffer), where=where)
    _check_place(header, key)
    return header


def read_section(store: ObjectStore, key: IndexKey, header: IndexHeader, rank: int) -> RankSection:
    """Read one rank's section with one ranged request.

    Raises:
        FormatError: no such rank, or the bytes break the format.
        StorageError: NotFound, Truncated and the other conditions of the store.
    """
    for entry in header.sections:
        if entry.rank == rank:
            buffer = bytearray(entry.length)
            store.get_into(str(key), memoryview(buffer), offset=entry.offset)
            return parse_section(bytes(buffer), entry, header, where=str(key))
    raise corrupt(str(key), f"it has no section of rank {rank}")


def chunk_refs(section: RankSection) -> list[ChunkRef]:
    """Return the chunks of a rank's stream in order."""
    sources = [StepId.parse(source) for source in section.sources]
    refs: list[ChunkRef] = []
    at = 0
    for row, (length, source) in enumerate(zip(section.chunk_length, section.chunk_source, strict=True)):
        digest = section.chunk_digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
        step = sources[source]
        key = chunk_key(digest.hex(), step.step, step.timeline)
        refs.append(ChunkRef(digest=digest, length=length, key=key, stream_offset=at))
        at += length
    return refs


def chunk_keys(sections: Sequence[RankSection]) -> set[str]:
    """Return the keys of all chunks these sections refer to."""
    return {ref.key for section in sections for ref in chunk_refs(section)}


def _header_with_offsets(header: IndexHeader, ranks: list[int], blobs: list[bytes], digests: list[bytes]) -> bytes:
    # Offsets are varints in the very header whose length they depend on. The length grows with the offsets, so
    # starting from none and repeating until it stands still ends at the smallest that fits.
    guess = 0
    while True:
        del header.sections[:]
        at = FRAME_BYTES + guess
        for rank, blob, digest in zip(ranks, blobs, digests, strict=True):
            header.sections.add(rank=rank, offset=at, length=len(blob), blake3=digest)
            at += len(blob)
        encoded = header.SerializeToString(deterministic=True)
        if len(encoded) == guess:
            return encoded
        guess = len(encoded)


def _check_end(header: IndexHeader, nbytes: int, where: str) -> None:
    end = header.sections[-1].offset + header.sections[-1].length
    if nbytes != end:
        raise corrupt(where, f"it has {nbytes} bytes, its sections end at {end}")


def _check_place(header: IndexHeader, key: IndexKey) -> None:
    if (header.step, header.timeline, header.node) != (key.id.step, str(key.id.timeline), key.node):
        raise corrupt(str(key), f"it is of step {header.step} of {header.timeline!r}, node {header.node!r}")


def _header_length(view: memoryview, where: str) -> int:
    if len(view) < FRAME_BYTES or bytes(view[:8]) != MAGIC:
        raise corrupt(where, f"it does not begin with {MAGIC.decode()}")
    length = int.from_bytes(view[8:FRAME_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise corrupt(where, f"its header would have {length} bytes, more than {MAX_HEADER_BYTES}")
    return length
