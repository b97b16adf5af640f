"""A node's part of one snapshot: what is staged, and the index sections that describe it. Pure.

Owns: joining layout, slot, trailer and chunk digests into sections, and finding chunks in the base. Does not
own: hashing and putting (`uploader`), the index file (`index`). Invariant: sections depend on (slots, layout,
plan, base) alone; an agent that restarts in the midst makes the same ones again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptd.protos.error_pb2 import REASON_INTERNAL, REASON_LAYOUT_MISMATCH, REASON_NOT_COMPARED
from ckptd.protos.snapshot_pb2 import AliasTable, IndexHeader, Mesh, RankSection, ShardTable, SlotTrailer, StepRef

from .chunks import ChunkSpan, StreamLayout, aligned, object_chunks, stream_layout
from .errors import DaemonError
from .fingerprints import fingerprint, row_fingerprints
from .hashing import DIGEST_BYTES
from .keys import StepId, Timeline
from .slot_header import SlotState
from .slots import SlotFile


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSnapshot:
    """One rank's staged slot, and what its bytes mean.

    Attributes:
        slot: STAGED, and not to be freed before the upload returned.
        rows: The rank's layout.
        writer: Per row, the rank that writes it.
        aliases: Tied names.
        coordinate: On the mesh, one entry per axis.
    """

    slot: SlotFile
    rows: ShardTable
    writer: Sequence[int]
    aliases: AliasTable = field(default_factory=AliasTable)
    coordinate: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSnapshot:
    """Everything an upload depends on.

    Attributes:
        step: Step number.
        timeline: Timeline the step is saved in.
        node: This agent's uuid.
        world: Ranks of the run.
        mesh: Of the run.
        plan_digest: Of the plan all slots are laid out by.
        base: Step whose chunks may be referred to, named by the coordinator.
        base_sections: The base's sections of this node's ranks (or of any others), by rank.
        compared_in: The coordinator's word that replicas need not be compared; None: they must be.
        segmented_algorithm: The coordinator's word on what they are compared by; "": xxh3-128.
        ranks: All ranks of this node.
    """

    step: int
    timeline: Timeline
    node: str
    world: int
    mesh: Mesh
    plan_digest: bytes
    base: StepRef | None = None
    base_sections: Mapping[int, RankSection] = field(default_factory=dict)
    compared_in: StepRef | None = None
    segmented_algorithm: str = ""
    ranks: Mapping[int, RankSnapshot]

    @property
    def id(self) -> StepId:
        """The step as keys name it."""
        return StepId(self.timeline, self.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedRank:
    """A rank's stream, ready to be hashed: its layout, trailer and cuts."""

    rank: int
    source: RankSnapshot
    layout: StreamLayout
    trailer: SlotTrailer
    spans: list[ChunkSpan]

    @property
    def nbytes(self) -> int:
        """Stored bytes of the stream."""
        return self.spans[-1].end if self.spans else 0


def staged_rank(snapshot: NodeSnapshot, rank: int) -> StagedRank:
    """Check that the rank's slot holds this step, and cut its stream.

    Raises:
        DaemonError: INTERNAL, the slot holds something else; NOT_COMPARED, the trainer left fingerprints out that the
            coordinator wants.
        FormatError: The trainer's trailer cannot be read.
    """
    source = snapshot.ranks[rank]
    check_slot(snapshot, rank)
    header = source.slot.header
    layout = stream_layout(rank, source.rows, source.writer)
    if header.data_bytes != layout.data_bytes:
        raise DaemonError.of(
            f"rank {rank}: the slot has {header.data_bytes} bytes of tensors, the plan {layout.data_bytes}",
            step=snapshot.step,
            rank=rank,
            object=str(source.slot.path),
            phase="upload",
        )
    trailer = source.slot.trailer()
    if trailer.uncompared and snapshot.compared_in is None:
        raise DaemonError.of(
            f"rank {rank}: the trainer gave no fingerprints of replicas, and step {snapshot.step} must be compared",
            reason=REASON_NOT_COMPARED,
            step=snapshot.step,
            rank=rank,
            phase="upload",
        )
    return StagedRank(
        rank=rank,
        source=source,
        layout=layout,
        trailer=trailer,
        spans=[*layout.chunks, *object_chunks(layout.data_bytes, header.objects_bytes)],
    )


def check_slot(snapshot: NodeSnapshot, rank: int) -> None:
    """Refuse a slot that does not hold this step, staged: asked before and after its bytes are read.

    Raises:
        DaemonError: INTERNAL.
    """
    header = snapshot.ranks[rank].slot.header
    found = (header.state, header.rank, header.step, header.timeline, header.plan_digest)
    if found != (SlotState.STAGED, rank, snapshot.step, str(snapshot.timeline), snapshot.plan_digest):
        raise DaemonError.of(
            f"rank {rank}: the slot is {header.state}, with step {header.step} of {header.timeline or 'no timeline'} "
            f"and rank {header.rank}, and not with step {snapshot.step} of {snapshot.timeline}, laid out by this plan",
            reason=REASON_INTERNAL,
            step=snapshot.step,
            rank=rank,
            object=str(snapshot.ranks[rank].slot.path),
            phase="upload",
        )


def base_sources(sections: Mapping[int, RankSection]) -> dict[bytes, str]:
    """Return, per chunk digest of the base, the step whose name the stored chunk bears; the lowest rank's counts."""
    found: dict[bytes, str] = {}
    for rank in sorted(sections):
        section = sections[rank]
        encodings = section.chunk_encoding or [0] * len(section.chunk_source)
        for row, (source, encoding) in enumerate(zip(section.chunk_source, encodings, strict=True)):
            if encoding == 0:
                digest = section.chunk_digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
                found.setdefault(digest, section.sources[source])
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamFingerprints:
    """The columns of fingerprints of one rank's section: of rows, of rows by the segmented function, of objects."""

    rows: bytes
    segmented: bytes
    objects: bytes


def stream_fingerprints(staged: StagedRank, algorithm: str = "") -> StreamFingerprints:
    """Return the fingerprints of all rows and of all objects; reads the whole slot, twice where there is an algorithm.

    Args:
        staged: The rank's stream.
        algorithm: See `NodeSnapshot.segmented_algorithm`.

    Raises:
        DaemonError: LAYOUT_MISMATCH, the trainer's fingerprints of replicas do not fit the plan.
    """
    source, trailer = staged.source, staged.trailer
    try:
        rows, by_segments = row_fingerprints(
            rank=staged.rank,
            rows=source.rows,
            writer=source.writer,
            offsets=staged.layout.offsets,
            data=source.slot.data,
            trailer=trailer,
            algorithm=algorithm,
        )
    except ValueError as error:
        raise DaemonError.of(
            f"rank {staged.rank}: {error}",
            reason=REASON_LAYOUT_MISMATCH,
            step=source.slot.header.step,
            rank=staged.rank,
            phase="upload",
        ) from error
    objects = source.slot.objects
    places = zip(trailer.object_offset, trailer.object_length, strict=True)
    return StreamFingerprints(
        rows=rows,
        segmented=by_segments,
        objects=b"".join(fingerprint(objects[offset : offset + length]) for offset, length in places),
    )


def rank_section(
    staged: StagedRank,
    fingerprints: StreamFingerprints,
    digests: Sequence[bytes],
    own: StepId,
    base: Mapping[bytes, str],
) -> RankSection:
    """Describe one rank's stream.

    Args:
        staged: The rank's stream.
        fingerprints: See `stream_fingerprints`.
        digests: Of its chunks, in order.
        own: The step being saved.
        base: See `base_sources`.
    """
    source, trailer, layout = staged.source, staged.trailer, staged.layout
    objects_at = aligned(layout.data_bytes)
    sources: dict[str, int] = {}
    chunk_source = [sources.setdefault(base.get(digest, str(own)), len(sources)) for digest in digests]
    return RankSection(
        rank=staged.rank,
        coordinate=source.coordinate,
        shards=source.rows,
        writer=source.writer,
        stream_offset=layout.offsets,
        fingerprints=fingerprints.rows,
        segmented_fingerprints=fingerprints.segmented,
        aliases=source.aliases,
        object_names=trailer.object_names,
        object_offset=[objects_at + offset for offset in trailer.object_offset],
        object_length=trailer.object_length,
        object_fingerprints=fingerprints.objects,
        chunk_digests=b"".join(digests),
        chunk_length=[span.length for span in staged.spans],
        chunk_source=chunk_source,
        sources=list(sources),
        uncompared=trailer.uncompared and any(writer != staged.rank for writer in source.writer),
    )


def index_header(snapshot: NodeSnapshot, lowest: StagedRank, new_bytes: int) -> IndexHeader:
    """Return the index's header; metrics, tags and versions are those of the node's lowest rank."""
    return IndexHeader(
        step=snapshot.step,
        timeline=str(snapshot.timeline),
        node=snapshot.node,
        world=snapshot.world,
        mesh=snapshot.mesh,
        base=snapshot.base,
        plan_digest=snapshot.plan_digest,
        compared_in=snapshot.compared_in,
        segmented_algorithm=snapshot.segmented_algorithm,
        new_bytes=new_bytes,
        metrics=lowest.trailer.metrics,
        tags=lowest.trailer.tags,
        versions=lowest.trailer.versions,
    )
