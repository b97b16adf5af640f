"""Which stored bytes a node's ranks want, and where they stand once fetched.

Owns: reading the index sections a node needs, and the answer to Want. Does not own: matching rows (`reshard`), when
(`restores`), the bytes (`fetcher`). Blocking; runs in a thread. Invariant: every element wanted is stored, or nothing is
fetched and the error names the first rows that do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ckptd.daemon import keys, records
from ckptd.daemon.any_mesh import Wanted, objects_of
from ckptd.daemon.arena import Arena
from ckptd.daemon.errors import CorruptError
from ckptd.daemon.fetched import Fetched
from ckptd.daemon.fetcher import Fetcher
from ckptd.daemon.index import chunk_refs, load_index
from ckptd.daemon.keys import Timeline
from ckptd.daemon.parallel import in_parallel
from ckptd.daemon.reshard import Piece, StoredRows, chunks_of, ranges_by_rank
from ckptd.daemon.slots import SlotFile
from ckptd.protos.agent_pb2 import FetchedPart
from ckptd.protos.coordinator_pb2 import CoordinatorMessage
from ckptd.protos.snapshot_pb2 import IndexRef, Mesh, RankSection
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import NotFound

PART_PIECES = 8192
INDEX_READERS = 8
"""Indexes read at once: they are small, and latency is all that counts."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The sections of a step that this node needs: its own ranks' and those of the ranks that wrote for them.

    All of them where the step was saved on another mesh.
    """

    sections: Mapping[int, RankSection]
    other_mesh: bool = False

    @cached_property
    def rows(self) -> StoredRows:
        """What the ranks wrote, ready to be matched."""
        return StoredRows(self.sections)

    def needed_ranks(self, ranks: Sequence[int]) -> set[int]:
        """Return the ranks whose streams hold what `ranks` stored; on another mesh all."""
        if self.other_mesh:
            return set(self.sections)
        return {writer for rank in ranks for writer in self.sections[rank].writer} | set(ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """The fetched answer for every rank of the node."""

    answers: Mapping[int, list[FetchedPart]]
    files: frozenset[Path]
    bytes_by_tier: Mapping[str, int]

    def parts(self, rank: int) -> list[FetchedPart]:
        """Return the answer to a rank's Want."""
        return self.answers[rank]


# ---------------------------------------------------------------- load


def load(
    store: ObjectStore, chosen: CoordinatorMessage.RestoreChosen, mesh: Mesh, world: int, ranks: Sequence[int]
) -> Stored:
    """Read the sections that the ranks of this node need.

    Raises:
        CorruptError: an index or the claim is gone or damaged.
        StorageError: the store failed.
    """
    committed = chosen.committed
    nodes = _nodes_by_rank(store, chosen.step.timeline)
    refs = {ref.node: ref for ref in committed.indexes}
    sections: dict[int, RankSection] = {}
    if committed.world != world or committed.mesh != mesh:
        # Which boxes live here is not known yet, and any rank may hold a part of them.
        _load_nodes(store, refs, set(nodes.values()), sections)
        return Stored(sections=sections, other_mesh=True)
    _load_nodes(store, refs, {nodes[rank] for rank in ranks}, sections)
    writers = {writer for rank in ranks for writer in sections[rank].writer} - set(sections)
    _load_nodes(store, refs, {nodes[rank] for rank in writers}, sections)
    return Stored(sections=sections)


def _nodes_by_rank(store: ObjectStore, timeline: str) -> dict[int, str]:
    key = keys.claim_key(Timeline.parse(timeline))
    try:
        claim = records.parse_claim(store.get(key), key)
    except NotFound:
        raise CorruptError.of(f"claim {key} is gone", object=key, phase="restore") from None
    return {rank: node.node for node in claim.nodes for rank in node.ranks}


def _load_nodes(
    store: ObjectStore, refs: Mapping[str, IndexRef], nodes: set[str], sections: dict[int, RankSection]
) -> None:
    def read(node: str) -> dict[int, RankSection]:
        try:
            blob: bytes | None = store.get(refs[node].key)
        except NotFound:
            blob = None
        _, _, found = load_index(refs[node], blob)
        return found

    for found in in_parallel(read, sorted(nodes), workers=min(len(nodes), INDEX_READERS)):
        sections.update(found)


# ---------------------------------------------------------------- fetch


def fetch(
    stored: Stored,
    wants: Mapping[int, Wanted],
    *,
    fetcher: Fetcher,
    arena: Arena,
    held: Mapping[int, SlotFile],
    deadline: float,
) -> NodePlan:
    """Bring everything the node's ranks want into shared memory, verified.

    Args:
        stored: from `load`.
        wants: per rank of this node.
        fetcher: of the job's store.
        arena: memory for what slots do not hold.
        held: per stored rank, a slot that holds this very step.
        deadline: in seconds of time.monotonic().

    Raises:
        DaemonError: LAYOUT_MISMATCH, a row or object is not stored so; INVALID_ARGUMENT, columns do not fit together.
        CorruptError, NoSpaceError, StorageError: as `Fetcher.fetch`.
    """
    pieces: dict[int, list[Piece]] = {}
    objects: dict[int, list[tuple[int, int, int, int]]] = {}
    ranges: dict[int, list[tuple[int, int]]] = {}
    for rank, wanted in wants.items():
        own = None if stored.other_mesh else rank
        pieces[rank] = stored.rows.pieces(wanted.rows(), own, wanted.row_ranks)
        objects[rank] = objects_of(stored.sections, rank, wanted)
        for source, found in ranges_by_rank(pieces[rank]).items():
            ranges.setdefault(source, []).extend(found)
        for _, source, offset, length in objects[rank]:
            ranges.setdefault(source, []).append((offset, length))
    needs = {rank: chunks_of(chunk_refs(stored.sections[rank]), found) for rank, found in ranges.items()}
    fetched = fetcher.fetch(needs, held, arena, deadline=deadline)
    files: set[Path] = set()
    answers = {rank: list(_answer(fetched, pieces[rank], objects[rank], files)) for rank in wants}
    return NodePlan(answers=answers, files=frozenset(files), bytes_by_tier=dict(fetched.bytes_by_tier))


def _answer(
    fetched: Fetched, pieces: Sequence[Piece], objects: Sequence[tuple[int, int, int, int]], files: set[Path]
) -> list[FetchedPart]:
    parts: list[FetchedPart] = []
    for begin in range(0, max(1, len(pieces)), PART_PIECES):
        part = FetchedPart()
        table: dict[Path, int] = {}
        for piece in pieces[begin : begin + PART_PIECES]:
            path, offset = _located(fetched, piece.rank, piece.stream_offset, piece.nbytes)
            part.want_row.append(piece.want_row)
            part.file.append(table.setdefault(path, len(table)))
            part.file_offset.append(offset)
            part.nbytes.append(piece.nbytes)
            part.source_offset.extend(piece.source[0])
            part.source_length.extend(piece.source[1])
        if begin == 0:
            for at, source, stream_offset, length in objects:
                path, offset = _located(fetched, source, stream_offset, length)
                part.object.append(at)
                part.object_file.append(table.setdefault(path, len(table)))
                part.object_offset.append(offset)
                part.object_bytes.append(length)
            for tier, nbytes in fetched.bytes_by_tier.items():
                part.bytes_by_tier[tier] = nbytes
        part.files.extend(str(path) for path in table)
        files.update(path for path in table if path != NOWHERE)
        parts.append(part)
    return parts


NOWHERE = Path("/dev/null")
"""The file of pieces without bytes: nothing is read from it."""


def _located(fetched: Fetched, rank: int, offset: int, nbytes: int) -> tuple[Path, int]:
    return fetched.locate(rank, offset, nbytes) if nbytes else (NOWHERE, 0)
