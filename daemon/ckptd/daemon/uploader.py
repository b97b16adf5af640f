"""From staged slots to a sealed node: hash, leave out what the base has, put, look again, put the index.

Owns: the order of an upload and its bounds: threads that hash, puts in flight, no buffer at all (chunks are put
from the slots' own memory). Does not own: retries (the store's wrapper), and whether the step counts.

Invariants: each chunk is hashed once, over the bytes that are put; the index is put after every chunk it names
was put and seen by HEAD; the same call over the same slots makes the same objects, so an agent that restarted
just calls again. Names carry digest, step and timeline, so whatever already bears one is our own bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckptd.protos.error_pb2 import REASON_ABORTED, REASON_STORE_FAILED
from ckptd.protos.failpoints import failpoint
from ckptd.protos.snapshot_pb2 import IndexRef
from ckptd.storage_backends.base import ObjectStore, PutMode
from ckptd.storage_backends.errors import AlreadyExists, NotFound

from .errors import DaemonError
from .hashing import chunk_digest
from .index import build_index
from .keys import chunk_key, index_key
from .node_snapshot import (
    NodeSnapshot,
    RankSnapshot,
    StagedRank,
    base_sources,
    check_slot,
    index_header,
    rank_section,
    staged_rank,
    stream_fingerprints,
)
from .telemetry import EventLog

__all__ = ["NodeSnapshot", "RankSnapshot", "UploadCancelledError", "Uploader"]

HASH_THREADS = 2
"""4.4 GB/s each: two outrun any network, and leave the node's other cores to training."""


class UploadCancelledError(DaemonError):
    """The upload was told to stop: its step was aborted or the agent is going."""

    reason = REASON_ABORTED


class Uploader:
    """Uploads snapshots to one store. Thread-safe: uploads may overlap, and share the bounds.

    Args:
        store: Retries and resolves uncertain puts by itself.
        events: Gets hashed, put and sealed-local.
        hash_threads: Chunks hashed at once.
        put_threads: Puts in flight; None takes the store's own figure.
        verify_puts: HEAD every chunk after its put, before the index.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        events: EventLog | None = None,
        hash_threads: int = HASH_THREADS,
        put_threads: int | None = None,
        verify_puts: bool = True,
    ) -> None:
        self._store = store
        self._events = events or EventLog(None)
        self._verify = verify_puts
        self._hashers = ThreadPoolExecutor(hash_threads, "hash")
        self._putters = ThreadPoolExecutor(put_threads or store.capabilities.concurrency, "put")

    def upload(
        self, snapshot: NodeSnapshot, *, cancel: threading.Event | None = None, resumed: bool = False
    ) -> IndexRef:
        """Put everything the node stages for the step; blocks until the index is durable.

        Idempotent: after a crash, the same slots, layout and base make the same objects and the same answer. On
        error nothing that is put counts, and no thread still reads the slots.

        Args:
            snapshot: Its slots stay STAGED until this returns.
            cancel: Stops between chunks when set.
            resumed: Ask for each chunk before putting it: an earlier process may have put most of them.

        Raises:
            UploadCancelledError: `cancel` was set.
            FormatError: A trailer cannot be read.
            DaemonError: STORE_FAILED, the store does not show what was put; LAYOUT_MISMATCH or INTERNAL, slot and
                plan do not fit.
            StorageError: As the store raised it; names the object.
        """
        begun = time.monotonic()
        staged = [staged_rank(snapshot, rank) for rank in sorted(snapshot.ranks)]
        run = _Run(snapshot=snapshot, base=base_sources(snapshot.base_sections), cancel=cancel, resumed=resumed)
        hashes: list[list[Future[bytes]]] = []
        failpoint("uploader.before_hash")
        try:
            hashes.extend(
                [self._hashers.submit(self._hash, run, each, at) for at in range(len(each.spans))] for each in staged
            )
            fingerprints = [stream_fingerprints(each, snapshot.segmented_algorithm) for each in staged]
            for each, futures in zip(staged, hashes, strict=True):
                wait(futures)
                seconds = round(run.hash_seconds.get(each.rank, 0.0), 6)
                self._emit(run, "hashed", rank=each.rank, bytes=each.nbytes, seconds=seconds)
        except BaseException:
            run.failed.set()
            raise
        finally:
            for futures in hashes:
                wait(futures)
            wait(run.puts)
        _raise_first([*(future for futures in hashes for future in futures), *run.puts])
        sections = [
            rank_section(each, prints, [future.result() for future in futures], snapshot.id, run.base)
            for each, prints, futures in zip(staged, fingerprints, hashes, strict=True)
        ]
        for each in staged:
            check_slot(snapshot, each.rank)
        data = build_index(index_header(snapshot, staged[0], run.new_bytes), sections)
        ref = self._put_index(run, data)
        self._emit(
            run,
            "sealed-local",
            ranks=sorted(snapshot.ranks),
            bytes=sum(each.nbytes for each in staged),
            new_bytes=run.new_bytes,
            index=ref.key,
            seconds=round(time.monotonic() - begun, 6),
        )
        return ref

    def close(self) -> None:
        """Wait for what runs, and end the threads; idempotent."""
        self._hashers.shutdown()
        self._putters.shutdown()

    def _hash(self, run: _Run, staged: StagedRank, at: int) -> bytes:
        """Hash one chunk, and have it put unless the base or this step has it already."""
        with run.failing():
            view = staged.source.slot.stream(staged.spans[at])
            begun = time.monotonic()
            digest = chunk_digest(view)
            run.note_hash(staged.rank, time.monotonic() - begun)
            if digest not in run.base:
                run.put_once(digest, len(view), lambda: self._putters.submit(self._put_chunk, run, digest, view))
            return digest

    def _put_chunk(self, run: _Run, digest: bytes, view: memoryview) -> None:
        with run.failing():
            key = chunk_key(digest.hex(), run.snapshot.step, run.snapshot.timeline)
            failpoint("uploader.before_put")
            begun = time.monotonic()
            if run.resumed and self._size(key) == len(view):
                return
            self._put(run, key, view, verify=self._verify)
            failpoint("uploader.after_put")
            self._emit(run, "put", key=key, bytes=len(view), seconds=round(time.monotonic() - begun, 6))

    def _put_index(self, run: _Run, data: bytes) -> IndexRef:
        digest = chunk_digest(data).hex()
        key = index_key(run.snapshot.step, run.snapshot.timeline, run.snapshot.node, digest)
        run.check()
        failpoint("uploader.before_index")
        self._put(run, key, memoryview(data), verify=self._verify)
        failpoint("uploader.after_index")
        return IndexRef(node=run.snapshot.node, key=key, blake3=digest, bytes=len(data))

    def _put(self, run: _Run, key: str, view: memoryview, *, verify: bool) -> None:
        try:
            self._store.put(key, view, mode=PutMode.CREATE)
        except AlreadyExists:
            # Our own earlier attempt, or another node's equal bytes: the name says so. Only its length can be wrong.
            verify = True
        failpoint("uploader.before_head")
        if not verify or self._size(key) == len(view):
            return
        # A store that lost or cut an object. The name fixes the bytes, so writing them again harms nobody.
        self._store.put(key, view, mode=PutMode.OVERWRITE)
        found = self._size(key)
        if found != len(view):
            what = "nothing" if found is None else f"{found} bytes"
            raise DaemonError.of(
                f"{self._store.url} shows {what} under {key!r} after {len(view)} bytes were put there twice",
                reason=REASON_STORE_FAILED,
                hint="the store loses or cuts objects; check its health and its lifecycle rules",
                step=run.snapshot.step,
                node=run.snapshot.node,
                object=key,
                phase="upload",
            )

    def _size(self, key: str) -> int | None:
        try:
            return self._store.head(key).size
        except NotFound:
            return None

    def _emit(self, run: _Run, kind: str, **fields: object) -> None:
        snapshot = run.snapshot
        self._events.emit(kind, step=snapshot.step, timeline=str(snapshot.timeline), node=snapshot.node, **fields)


@dataclass(kw_only=True, slots=True)
class _Run:
    """What the threads of one upload share. `lock` guards all that changes."""

    snapshot: NodeSnapshot
    base: dict[bytes, str]
    cancel: threading.Event | None
    resumed: bool
    failed: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    puts: list[Future[None]] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)
    new_bytes: int = 0
    hash_seconds: dict[int, float] = field(default_factory=dict)

    def check(self) -> None:
        """Stop here when the upload was cancelled or another of its threads failed."""
        if self.failed.is_set() or (self.cancel is not None and self.cancel.is_set()):
            raise UploadCancelledError.of(
                f"the upload of step {self.snapshot.step} was stopped",
                step=self.snapshot.step,
                node=self.snapshot.node,
                phase="upload",
            )

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Do one chunk's work unless the upload was stopped; its failure stops all other work."""
        self.check()
        try:
            yield
        except BaseException:
            self.failed.set()
            raise

    def put_once(self, digest: bytes, nbytes: int, submit: Callable[[], Future[None]]) -> None:
        """Have one of several equal chunks put; counts as new what is not in the base, put before or not."""
        with self.lock:
            if digest not in self.seen:
                self.seen.add(digest)
                self.new_bytes += nbytes
                self.puts.append(submit())

    def note_hash(self, rank: int, seconds: float) -> None:
        """Add up the time spent hashing, per rank."""
        with self.lock:
            self.hash_seconds[rank] = self.hash_seconds.get(rank, 0.0) + seconds


def _raise_first(futures: Sequence[Future[bytes] | Future[None]]) -> None:
    """Raise the first error that is not a consequence of another; all futures are done."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, UploadCancelledError)), errors[0])
