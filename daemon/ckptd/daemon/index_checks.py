"""Rules that one index can be checked by alone.

Owns: limits of the format and what a header and a section must not contradict. Does not own: the file's frame
(`index`), or whether the indexes of all nodes fit together (`coverage`). Invariant: after these checks every position,
offset and length in a section is inside its table or its stream, so that later code may index without asking.
"""

from __future__ import annotations

import numpy as np

from ckptd.protos import segmented, shard_table
from ckptd.protos.snapshot_pb2 import IndexHeader, RankSection

from .keys import StepId, Timeline, is_node
from .record_checks import SEGMENTED_FINGERPRINTS, UNCOMPARED_REPLICAS, check_mesh, check_version, corrupt, unsupported

MAX_INDEX_BYTES = 2**31 - 1
"""Protobuf's own limit for a message."""
MAX_CHUNK_BYTES = 64 << 20
"""Largest chunk of the format: one put, and the unit of memory of every reader."""
DIGEST_ALGORITHM = "blake3"
FINGERPRINT_ALGORITHM = "xxh3-128"
FINGERPRINT_BYTES = 16
DIGEST_BYTES = 32


def check_header(header: IndexHeader, start: int, where: str) -> None:
    """Refuse a header that contradicts itself; `start` is where the first section must begin, in bytes.

    Raises:
        FormatError: CORRUPT or FORMAT_UNSUPPORTED.
    """
    check_version(header.format_version, header.required_features, where)
    for name, found, known in (
        ("digest", header.digest_algorithm, DIGEST_ALGORITHM),
        ("fingerprint", header.fingerprint_algorithm, FINGERPRINT_ALGORITHM),
    ):
        if found != known:
            raise unsupported(where, f"its {name} algorithm is {found!r}; this program knows {known!r}")
    if list(header.encodings[:1]) != ["none"]:
        raise corrupt(where, "its first encoding is not 'none'")
    try:
        step = StepId(Timeline.parse(header.timeline), header.step)
        base = StepId.of(header.base) if header.HasField("base") else None
    except ValueError as error:
        raise corrupt(where, str(error)) from None
    if base is not None and not base < step:
        raise corrupt(where, f"its base {base} is not older than {step}")
    if header.HasField("compared_in") and not (
        header.compared_in.timeline == header.timeline and header.compared_in.step < header.step
    ):
        named = f"step {header.compared_in.step} of {header.compared_in.timeline!r}"
        raise corrupt(where, f"it would have been compared in {named}, which is no step before {step}")
    _check_segmented_header(header, where)
    if not is_node(header.node):
        raise corrupt(where, f"{header.node!r} is no name of a node")
    check_mesh(header.mesh, header.world, where)
    if not header.sections:
        raise corrupt(where, "it has no section")
    at, last = start, -1
    for entry in header.sections:
        if entry.offset != at or entry.rank <= last or entry.rank >= header.world:
            raise corrupt(where, f"its sections are not one after the other (rank {entry.rank})")
        at, last = at + entry.length, entry.rank
    if at > MAX_INDEX_BYTES:
        raise corrupt(where, f"its sections would end at byte {at}")


def check_section(section: RankSection, header: IndexHeader, what: str) -> None:
    """Refuse a section whose columns do not fit together, leave its stream, or break the header's word.

    Raises:
        FormatError: CORRUPT or FORMAT_UNSUPPORTED.
    """
    try:
        shard_table.check(section.shards)
        sources = [StepId.parse(source) for source in section.sources]
    except ValueError as error:
        raise corrupt(what, str(error)) from None
    rows, objects, chunks = len(section.shards.name), len(section.object_names), len(section.chunk_length)
    for column, found, expected in (
        ("writer", len(section.writer), rows),
        ("stream_offset", len(section.stream_offset), rows),
        ("fingerprints", len(section.fingerprints), rows * FINGERPRINT_BYTES),
        (
            "segmented_fingerprints",
            len(section.segmented_fingerprints),
            rows * FINGERPRINT_BYTES if header.segmented_algorithm else 0,
        ),
        ("object_offset", len(section.object_offset), objects),
        ("object_length", len(section.object_length), objects),
        ("object_fingerprints", len(section.object_fingerprints), objects * FINGERPRINT_BYTES),
        ("chunk_digests", len(section.chunk_digests), chunks * DIGEST_BYTES),
        ("chunk_source", len(section.chunk_source), chunks),
        ("chunk_encoding", len(section.chunk_encoding) or chunks, chunks),
        ("chunk_plain_length", len(section.chunk_plain_length) or chunks, chunks),
        ("aliases", len(section.aliases.alias), len(section.aliases.target)),
        ("coordinate", len(section.coordinate), len(header.mesh.sizes)),
    ):
        if found != expected:
            raise corrupt(what, f"{expected} entries or bytes expected in {column}, {found} found")
    _check_chunks(section, header, sources, what)
    _check_uncompared(section, header, what)
    _check_segmented(section, header, what)
    stream = sum(section.chunk_length)
    _check_rows(section, header, stream, what)
    for name, offset, length in zip(section.object_names, section.object_offset, section.object_length, strict=True):
        if length and offset + length > stream:
            raise corrupt(what, f"object {name!r} ends at byte {offset + length} of a stream of {stream}")
    _check_disjoint(section, what)
    if len(set(section.object_names)) != objects:
        raise corrupt(what, "two objects have one name")
    if any(at >= size for at, size in zip(section.coordinate, header.mesh.sizes, strict=True)):
        raise corrupt(what, f"coordinate {list(section.coordinate)} is not on a mesh of {list(header.mesh.sizes)}")


def _check_rows(section: RankSection, header: IndexHeader, stream: int, what: str) -> None:
    writer, offset, nbytes = (
        np.asarray(column, dtype=np.uint64) for column in (section.writer, section.stream_offset, section.shards.nbytes)
    )
    foreign = np.flatnonzero(writer >= header.world).tolist()
    for row in foreign[:1]:
        raise corrupt(what, f"row {row} is written by rank {writer[row]} of a world of {header.world}")
    # Compared without a sum, which might not fit 64 bits.
    room = np.uint64(stream) - np.minimum(offset, np.uint64(stream))
    beyond = (writer == section.rank) & (nbytes > room) & (nbytes > 0)
    for row in np.flatnonzero(beyond).tolist()[:1]:
        end = int(offset[row]) + int(nbytes[row])
        raise corrupt(what, f"row {row} ends at byte {end} of a stream of {stream}")


def _check_chunks(section: RankSection, header: IndexHeader, sources: list[StepId], what: str) -> None:
    if section.chunk_source and max(section.chunk_source) >= len(sources):
        raise corrupt(what, "a chunk refers beyond the table of sources")
    if any(not 0 < length <= MAX_CHUNK_BYTES for length in section.chunk_length):
        raise corrupt(what, f"a chunk does not have 1 to {MAX_CHUNK_BYTES} bytes")
    if any(section.chunk_encoding):
        if max(section.chunk_encoding) >= len(header.encodings):
            raise corrupt(what, "a chunk refers beyond the table of encodings")
        names = sorted({header.encodings[at] for at in section.chunk_encoding if at})
        raise unsupported(what, f"its chunks are encoded with {', '.join(names)}; this program knows none")
    if section.chunk_plain_length and list(section.chunk_plain_length) != list(section.chunk_length):
        raise corrupt(what, "a chunk without encoding has another plain length than its stored one")
    own = StepId(Timeline.parse(header.timeline), header.step)
    foreign = [source for source in sources if source != own]
    if foreign and not header.HasField("base"):
        raise corrupt(what, f"it refers to chunks of {foreign[0]}, but names no base")
    if any(source > StepId.of(header.base) for source in foreign):
        raise corrupt(what, "it refers to chunks of a step that is newer than its base")


def _check_uncompared(section: RankSection, header: IndexHeader, what: str) -> None:
    """Refuse a mark that nothing in the header goes with, that marks nothing, or beside fingerprints that are there."""
    if not section.uncompared:
        return
    if not header.HasField("compared_in") or UNCOMPARED_REPLICAS not in header.required_features:
        raise corrupt(what, "it says that replicas were not compared, and its header does not")
    fingerprints = np.frombuffer(section.fingerprints, dtype=np.uint8).reshape(-1, FINGERPRINT_BYTES)
    left = np.asarray(section.writer, dtype=np.int64) != section.rank
    if not left.any() or fingerprints[left].any():
        raise corrupt(what, "it says that replicas were not compared, and has none, or has their fingerprints")


def _check_segmented_header(header: IndexHeader, where: str) -> None:
    """Refuse an unknown function, and a header that contradicts itself on whether there is a second column."""
    name = header.segmented_algorithm
    if name and name not in segmented.KNOWN:
        known = ", ".join(map(repr, segmented.KNOWN))
        raise unsupported(where, f"its replicas are compared by {name!r}; this program knows {known}")
    if bool(name) != (SEGMENTED_FINGERPRINTS in header.required_features):
        raise corrupt(
            where, f"it names {name or 'no algorithm'!r} for {SEGMENTED_FINGERPRINTS}, and its features do not"
        )
    if name and header.HasField("compared_in"):
        raise corrupt(where, f"its replicas would be compared by {name!r}, and left uncompared")


def _check_segmented(section: RankSection, header: IndexHeader, what: str) -> None:
    """Refuse fingerprints of replicas in the first column where they stand in the second, and a second one that has gaps."""
    if not header.segmented_algorithm:
        return
    fingerprints = np.frombuffer(section.fingerprints, dtype=np.uint8).reshape(-1, FINGERPRINT_BYTES)
    if section.uncompared or fingerprints[np.asarray(section.writer, dtype=np.int64) != section.rank].any():
        raise corrupt(what, "its replicas have fingerprints in two columns, or are marked as having none")
    column = np.frombuffer(section.segmented_fingerprints, dtype=np.uint8).reshape(-1, FINGERPRINT_BYTES)
    if not column.any(axis=1).all():
        raise corrupt(what, "its second column of fingerprints has zeros: replicas would be equal that nobody compared")


def _check_disjoint(section: RankSection, what: str) -> None:
    """Refuse two rows or objects that claim the same bytes of the stream: one of them would be restored wrong."""
    own = np.asarray(section.writer, dtype=np.int64) == section.rank
    starts = np.concatenate(
        [np.asarray(section.stream_offset, dtype=np.uint64)[own], np.asarray(section.object_offset, dtype=np.uint64)]
    )
    lengths = np.concatenate(
        [np.asarray(section.shards.nbytes, dtype=np.uint64)[own], np.asarray(section.object_length, dtype=np.uint64)]
    )
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    order = np.argsort(starts)
    if (starts[order][:-1] + lengths[order][:-1] > starts[order][1:]).any():
        raise corrupt(what, "two of its rows or objects share bytes of the stream")
