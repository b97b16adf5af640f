"""Proves the bytes of a step: record, indexes, coverage, every chunk, every fingerprint.

Owns: reading everything a step names and comparing it. Does not own: what is listed (`catalog`). Reads only, claims nothing,
needs no agent. Invariants: the verdict is good only when every byte the step needs was read and has the digest it was
listed with, the indexes of all nodes are whole together and give the recorded state digest, and every shard and object
has its fingerprint; all that is bad is named, not the first only. Memory is bounded by the readers' buffers and
one step's indexes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import blake3

from ckptd.protos.snapshot_pb2 import Claim, ClaimNode, Committed, RankSection, StepRef
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import NotFound, Truncated

from .comparisons import Comparisons
from .coverage import LoadedIndex, NotWhole, whole
from .errors import CorruptError, FormatError
from .index import ChunkRef, load_index
from .keys import StepId
from .log_reader import NewestRecord, read_committed
from .parallel import in_parallel
from .streams import RunFingerprints, StreamRun, runs_of

PIECE_BYTES = 8 << 20
"""Chunks are read in pieces of this size; a reader holds one."""
READERS = 4


class Verdict(StrEnum):
    """What was found out about a step."""

    GOOD = "good"
    """Every byte was read and proved."""
    INCOMPLETE = "incomplete"
    """No record lists it."""
    CORRUPT = "corrupt"
    """It is listed, and an object it names is missing, cut, altered or damaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadObject:
    """An object that is not what it should be.

    Attributes:
        key: Its key.
        what: Why, in a few words that begin with "missing", "length", "altered" or "damaged".
    """

    key: str
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The verdict on one step.

    Attributes:
        id: The step.
        verdict: See `Verdict`.
        bad: Everything that is bad, by key.
        objects: Objects that were looked at.
        nbytes: Stored bytes that were read and proved.
    """

    id: StepId
    verdict: Verdict
    bad: list[BadObject]
    objects: int
    nbytes: int


@dataclass(kw_only=True, slots=True)
class Proved:
    """Runs of chunks that were proved already, so that steps that share chunks do not read them again."""

    digests: set[bytes] = field(default_factory=set)


def verify_step(
    store: ObjectStore,
    newest: NewestRecord,
    ref: StepRef,
    *,
    readers: int = READERS,
    proved: Proved | None = None,
    progress: Callable[[int], None] | None = None,
) -> StepReport:
    """Prove a listed or quarantined step; blocks until all of it was read.

    Args:
        store: The root.
        newest: The record that lists the step.
        ref: The step's entry there.
        readers: Chunks read at once; each needs 8 MiB.
        proved: Shared between the steps of one run of `verify --all`.
        progress: Told of stored bytes as they are read, from several threads.

    Raises:
        StorageError: the store could not be asked (not: an object is missing or cut, that is a finding).
    """
    step = StepId.of(ref)
    finding = _Finding(step=step)
    commit = _commit(store, newest, ref, finding)
    if commit is None:
        return finding.report()
    loaded = _indexes(store, commit, finding)
    sections: dict[int, RankSection] = {}
    for _, _, of_node in loaded:
        sections.update(of_node)
    _prove_whole(commit, loaded, finding)
    done = proved if proved is not None else Proved()
    runs = [run for rank in sorted(sections) for run in runs_of(sections[rank])]
    buffers = _Buffers(min(PIECE_BYTES, max((chunk.length for run in runs for chunk in run.chunks), default=0)))

    def prove(run: StreamRun) -> None:
        if run.digest in done.digests:
            finding.add_bytes(run.nbytes, len(run.chunks))
        elif _prove_run(store, run, finding, buffers, progress):
            done.digests.add(run.digest)

    for _ in in_parallel(prove, runs, workers=readers):
        pass
    return finding.report()


class _Finding:
    """Collects what is found, from several threads."""

    def __init__(self, *, step: StepId) -> None:
        self._step = step
        self._bad: dict[tuple[str, str], BadObject] = {}
        self._objects = 0
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, key: str, what: str) -> None:
        with self._lock:
            self._bad[key, what] = BadObject(key=key, what=what)

    def add_bytes(self, nbytes: int, objects: int = 1) -> None:
        with self._lock:
            self._bytes += nbytes
            self._objects += objects

    def report(self) -> StepReport:
        bad = [self._bad[key] for key in sorted(self._bad)]
        verdict = Verdict.CORRUPT if bad else Verdict.GOOD
        return StepReport(id=self._step, verdict=verdict, bad=bad, objects=self._objects, nbytes=self._bytes)


class _Buffers:
    """A pool of read buffers: made when a reader first needs one, and never more than there are readers."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self) -> memoryview:
        with self._lock:
            if self._free:
                return self._free.pop()
        return memoryview(bytearray(self._nbytes))

    def give(self, buffer: memoryview) -> None:
        with self._lock:
            self._free.append(buffer)


def _commit(store: ObjectStore, newest: NewestRecord, ref: StepRef, finding: _Finding) -> Committed | None:
    try:
        commit = read_committed(store, newest, ref)
    except (CorruptError, FormatError) as error:
        finding.add(ref.record_key, _text(error))
        return None
    finding.add_bytes(0)
    return commit


def _indexes(store: ObjectStore, commit: Committed, finding: _Finding) -> list[LoadedIndex]:
    loaded: list[LoadedIndex] = []
    for ref in commit.indexes:
        try:
            data: bytes | None = store.get(ref.key)
        except NotFound:
            data = None
        try:
            loaded.append(load_index(ref, data))
            finding.add_bytes(ref.bytes)
        except (CorruptError, FormatError) as error:
            finding.add(ref.key, _text(error))
    return loaded


def _prove_whole(commit: Committed, loaded: list[LoadedIndex], finding: _Finding) -> None:
    """Ask again what the coordinator asked: coverage, replicas, and the state digest the record holds."""
    if len(loaded) != len(commit.indexes):
        return  # an index is bad, and reported: what is whole cannot be told
    # The claim is not asked: a step is restored without it, and a copied root may have lost it.
    nodes = [ClaimNode(node=ref.node, ranks=sorted(sections)) for ref, _, sections in loaded]
    claim = Claim(timeline=loaded[0][1].timeline, world=commit.world, mesh=commit.mesh, nodes=nodes)
    by_node = {one[0].node: [one] for one in loaded}
    found = whole(claim, loaded[0][1].step, by_node, comparisons=_comparisons(claim, commit))
    if isinstance(found, NotWhole):
        finding.add(loaded[0][0].key, f"damaged: {found.error.message}")
    elif found.state_digest != commit.state_digest:
        finding.add(loaded[0][0].key, "damaged: the indexes do not give the state digest that the record holds")


def _comparisons(claim: Claim, commit: Committed) -> Comparisons | None:
    """Return what the record says of the comparison of a step; None: it was compared itself."""
    if not commit.HasField("compared_in"):
        return None
    known = Comparisons(timeline=claim.timeline)
    known.note_committed(commit.compared_in.step, commit)
    return known


def _prove_run(
    store: ObjectStore, run: StreamRun, finding: _Finding, buffers: _Buffers, progress: Callable[[int], None] | None
) -> bool:
    """Read the chunks of a run in order; prove each by its digest and each row in them by its fingerprint."""
    rows = run.fingerprints()
    buffer = buffers.take()
    try:
        whats = [_prove_chunk(store, chunk, rows, buffer, progress) for chunk in run.chunks]
    finally:
        buffers.give(buffer)
    for chunk, what in zip(run.chunks, whats, strict=True):
        if what:
            finding.add(chunk.key, what)
        else:
            finding.add_bytes(chunk.length)
    if any(whats):
        return False  # the rows in it are wrong because the bytes are, and that is said already
    for name in rows.wrong():
        finding.add(run.chunks[0].key, f"damaged: {name!r} does not have the fingerprint its index says")
    return not rows.wrong()


def _prove_chunk(
    store: ObjectStore,
    chunk: ChunkRef,
    rows: RunFingerprints,
    buffer: memoryview,
    progress: Callable[[int], None] | None,
) -> str:
    """Return what is wrong with a chunk, or ""; hands its bytes on to the rows' fingerprints."""
    hasher = blake3.blake3()
    try:
        size = store.head(chunk.key).size
        if size != chunk.length:
            return f"length: {size} bytes instead of {chunk.length}"
        for offset in range(0, chunk.length, len(buffer)):
            piece = buffer[: chunk.length - offset]
            store.get_into(chunk.key, piece, offset=offset)
            hasher.update(piece)
            rows.feed(chunk.stream_offset + offset, piece)
            if progress is not None:
                progress(len(piece))
    except NotFound:
        return "missing"
    except Truncated as error:
        return f"length: {error.message}"
    return "" if hasher.digest() == chunk.digest else "altered: the bytes do not have the digest in the name"


def _text(error: CorruptError | FormatError) -> str:
    """Return a finding that begins with one word for what is wrong."""
    message = error.error.message
    if message.endswith("is gone"):
        return "missing"
    return f"{'altered' if isinstance(error, CorruptError) else 'damaged'}: {message}"
