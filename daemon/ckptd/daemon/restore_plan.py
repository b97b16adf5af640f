"""Which stored bytes a node's ranks want, and where they stand once fetched.

Owns: reading the index sections a node needs, and the answer to Want. Does not own: matching rows (`reshard`), when
(`restores`), the bytes (`fetcher`). Blocking; runs in a thread. Invariant: every element wanted is stored, or nothing is
fetched and the error names the first rows that do not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ckptd.daemon import keys, records
from ckptd.daemon.any_mesh import Wanted, objects_of, offer
from ckptd.daemon.arena import Arena
from ckptd.daemon.errors import CorruptError
from ckptd.daemon.fetched import Fetched, Needs
from ckptd.daemon.fetcher import Fetcher
from ckptd.daemon.index import OpenIndex, chunk_refs, open_index
from ckptd.daemon.keys import Timeline
from ckptd.daemon.parallel import in_parallel
from ckptd.daemon.pieces import Pieces
from ckptd.daemon.reshard import StoredRows
from ckptd.daemon.slots import SlotFile
from ckptd.protos.agent_pb2 import FetchedPart, StoredPart
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

    All of them where the step was saved on another mesh; `offered` is then what every rank hears of them.
    """

    sections: Mapping[int, RankSection]
    other_mesh: bool = False
    offered: Sequence[StoredPart] = ()

    @cached_property
    def rows(self) -> StoredRows:
        """What the ranks wrote, ready to be matched."""
        return StoredRows(self.sections)

    def needed_ranks(self, ranks: Sequence[int]) -> set[int]:
        """Return the ranks whose streams hold what `ranks` stored; on another mesh all."""
        if self.other_mesh:
            return set(self.sections)
        return set(ranks).union(*(_writers(self.sections[rank]) for rank in ranks))


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """The fetched answer for every rank of the node.

    `arena_file` is what was fetched from the store, None if nothing was; whoever has the plan releases it.
    """

    answers: Mapping[int, list[FetchedPart]]
    files: frozenset[Path]
    arena_file: Path | None
    bytes_by_tier: Mapping[str, int]
    arena_bytes: int
    window_bytes: int

    def parts(self, rank: int) -> list[FetchedPart]:
        """Return the answer to a rank's Want."""
        return self.answers[rank]


# ---------------------------------------------------------------- load


def load(
    store: ObjectStore,
    chosen: CoordinatorMessage.RestoreChosen,
    mesh: Mesh,
    world: int,
    ranks: Sequence[int],
    *,
    reading: set[str] | None = None,
) -> Stored:
    """Read the sections that the ranks of this node need.

    Args:
        store: The root.
        chosen: The step.
        mesh: Of this run.
        world: Of this run.
        ranks: Of this node.
        reading: Holds the keys that are being read at any moment, for whoever gives up waiting.

    Raises:
        CorruptError: an index or the claim is gone or damaged.
        StorageError: the store failed.
    """
    committed = chosen.committed
    reading = set() if reading is None else reading
    nodes = _nodes_by_rank(store, chosen.step.timeline, reading)
    indexes = _Indexes(store, {ref.node: ref for ref in committed.indexes}, reading)
    if committed.world != world or committed.mesh != mesh:
        # Which boxes live here is not known yet, and any rank may hold a part of them.
        indexes.read(set(nodes.values()))
        sections = {rank: indexes.section(nodes[rank], rank) for rank in sorted(nodes)}
        return Stored(sections=sections, other_mesh=True, offered=list(offer(sections)))
    indexes.read({nodes[rank] for rank in ranks})
    sections = {rank: indexes.section(nodes[rank], rank) for rank in ranks}
    writers = set().union(*(_writers(section) for section in sections.values())) - set(sections)
    indexes.read({nodes[rank] for rank in writers})
    sections |= {rank: indexes.section(nodes[rank], rank) for rank in sorted(writers)}
    return Stored(sections=sections)


def _writers(section: RankSection) -> set[int]:
    return set(np.unique(np.asarray(section.writer, dtype=np.int64)).tolist())


@contextmanager
def _noted(reading: set[str], key: str) -> Iterator[None]:
    reading.add(key)
    try:
        yield
    finally:
        reading.discard(key)


def _nodes_by_rank(store: ObjectStore, timeline: str, reading: set[str]) -> dict[int, str]:
    key = keys.claim_key(Timeline.parse(timeline))
    try:
        with _noted(reading, key):
            claim = records.parse_claim(store.get(key), key)
    except NotFound:
        raise CorruptError.of(f"claim {key} is gone", object=key, phase="restore") from None
    return {rank: node.node for node in claim.nodes for rank in node.ranks}


class _Indexes:
    """Indexes of nodes, each read once, whole: only its own digest proves the header that the sections are found by."""

    def __init__(self, store: ObjectStore, refs: Mapping[str, IndexRef], reading: set[str]) -> None:
        self._store = store
        self._reading = reading
        self._refs = refs
        self._read: dict[str, OpenIndex] = {}

    def read(self, nodes: set[str]) -> None:
        """Read the indexes of nodes that were not read yet, several at once."""
        missing = sorted(nodes - set(self._read))
        found = in_parallel(self._open, missing, workers=min(len(missing), INDEX_READERS))
        self._read.update(zip(missing, found, strict=True))

    def section(self, node: str, rank: int) -> RankSection:
        """Return a rank's section of an index that was read; no other is decoded."""
        return self._read[node].section(rank)

    def _open(self, node: str) -> OpenIndex:
        ref = self._refs.get(node)
        if ref is None:
            raise CorruptError.of(
                f"the step's decision names no index of node {node}, whose ranks its claim has",
                hint="the step is not whole; see `ckptd verify`",
                node=node,
                phase="restore",
            )
        try:
            with _noted(self._reading, ref.key):
                blob: bytes | None = self._store.get(ref.key)
        except NotFound:
            blob = None
        return open_index(ref, blob)


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
    pieces: dict[int, Pieces] = {}
    objects: dict[int, list[tuple[int, int, int, int]]] = {}
    for rank, wanted in wants.items():
        own = None if stored.other_mesh else rank
        pieces[rank] = stored.rows.pieces(wanted.rows(), own, wanted.row_ranks)
        objects[rank] = objects_of(stored.sections, rank, wanted)
    all_objects = np.array([place[1:] for each in objects.values() for place in each], dtype=np.int64).reshape(-1, 3)
    joined = Pieces.joined(list(pieces.values()))
    sources = sorted({*joined.rank.tolist(), *all_objects[:, 0].tolist()})
    needs = Needs(
        refs={rank: chunk_refs(stored.sections[rank]) for rank in sources},
        pieces=joined,
        ranks=all_objects[:, 0],
        offsets=all_objects[:, 1],
        lengths=all_objects[:, 2],
    )
    heads = {slot.path: slot.head for slot in held.values()}
    fetched = fetcher.fetch(needs, held, arena, deadline=deadline)
    answers: dict[int, list[FetchedPart]] = {}
    begin = 0
    for rank, found in pieces.items():
        answers[rank] = _answer(fetched, found, begin, objects[rank], heads)
        begin += len(found)
    return NodePlan(
        answers=answers,
        files=frozenset(fetched.files),
        arena_file=fetched.arena_file,
        bytes_by_tier=dict(fetched.bytes_by_tier),
        arena_bytes=fetched.arena_bytes,
        window_bytes=fetched.window_bytes,
    )


def _answer(
    fetched: Fetched,
    pieces: Pieces,
    first: int,
    objects: Sequence[tuple[int, int, int, int]],
    heads: Mapping[Path, bytes],
) -> list[FetchedPart]:
    """Return the parts of the answer to one rank, whose pieces are those from `first` on of the fetch."""
    files = [str(path) for path in (*fetched.files, NOWHERE)]
    parts: list[FetchedPart] = []
    for begin in range(0, max(1, len(pieces)), PART_PIECES):
        which = slice(begin, begin + PART_PIECES)
        there = slice(first + begin, first + min(begin + PART_PIECES, len(pieces)))
        placed, ndim = fetched.placed, pieces.ndim[which]
        part = FetchedPart(
            files=files,
            want_row=pieces.want_row[which].tolist(),
            file=placed.file[there].tolist(),
            file_offset=placed.at[there].tolist(),
            nbytes=placed.nbytes[there].tolist(),
        )
        # A piece after the other, each with as many dimensions as it has.
        has = np.arange(len(placed.low)) < ndim[:, None]
        part.source_offset.extend(placed.low[:, there].T[has].tolist())
        part.source_length.extend(placed.size[:, there].T[has].tolist())
        if begin == 0:
            part.file_heads.extend(heads.get(path, b"") for path in fetched.files)
            for at, source, stream_offset, length in objects:
                path, offset = fetched.locate(source, stream_offset, length) if length else (NOWHERE, 0)
                part.object.append(at)
                part.object_file.append(files.index(str(path)))
                part.object_offset.append(offset)
                part.object_bytes.append(length)
            for tier, nbytes in fetched.bytes_by_tier.items():
                part.bytes_by_tier[tier] = nbytes
        parts.append(part)
    return parts


NOWHERE = Path("/dev/null")
"""The file of pieces without bytes: nothing is read from it."""
