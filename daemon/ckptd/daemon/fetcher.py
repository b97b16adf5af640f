"""From needed bytes to verified ones in shared memory: own slots first, else the store.

Owns: that each chunk is read once per node, its digest, and the bounds of reading. Does not own: what is needed (`reshard`),
which place it gets (`arrangement`), retries (the store's wrapper), and what a corrupt step means (the coordinator). What a slot
of that very step holds is not copied: the trainer reads it there.

Invariants: nothing is handed out that was not hashed where it stands, or copied from bytes that were; a chunk is copied from
only after its digest fitted, and a fetch returns only after all did.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from ckptd.protos.error_pb2 import REASON_ABORTED, REASON_DEADLINE_EXCEEDED
from ckptd.protos.failpoints import failpoint
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import NotFound, Truncated

from .arena import Arena, HangingWriterError
from .arrangement import arranged
from .chunks import ChunkSpan
from .columns import Ints
from .errors import CorruptError, DaemonError
from .fetched import Fetched, Needs, Standing
from .hashing import chunk_digest
from .index import ChunkRef
from .landing import Landing
from .line import Line
from .shared_files import SharedFile
from .slots import SlotFile, SlotState
from .telemetry import EventLog
from .window import Window

__all__ = ["Fetched", "Fetcher", "Needs"]

HASH_THREADS = 2
_READS = 2
"""A digest that does not fit may be the network's fault once; twice it is the object's."""


class Fetcher:
    """Fetches chunks of one root. Thread-safe.

    Args:
        store: Retries by itself.
        events: Gets rejected, for every copy whose digest did not fit.
        get_threads: Reads in flight; None takes the store's own figure.
        hash_threads: Slot chunks hashed at once.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        events: EventLog | None = None,
        get_threads: int | None = None,
        hash_threads: int = HASH_THREADS,
    ) -> None:
        self._store = store
        self._events = events or EventLog(None)
        self._getters = ThreadPoolExecutor(get_threads or store.capabilities.concurrency, "get")
        self._hashers = ThreadPoolExecutor(hash_threads, "verify")

    def fetch(
        self,
        needs: Needs,
        held: Mapping[int, SlotFile],
        arena: Arena,
        *,
        deadline: float | None = None,
    ) -> Fetched:
        """Bring everything needed into shared memory and verify it; blocks until done.

        Args:
            needs: What somebody on this node wants.
            held: Per stored rank, a slot that holds that very step and timeline; it must stay staged until all ranks
                have copied. A slot whose bytes do not have their digests is passed over.
            arena: Gives a file for what slots do not hold; it is the caller's to release.
            deadline: In seconds of time.monotonic().

        Raises:
            CorruptError: An object is gone, cut, or has other bytes than listed, also when read again; names it.
            NoSpaceError: No room for the arena.
            DaemonError: DEADLINE_EXCEEDED; names the object that was waited for.
            StorageError: As the store raised it; names the object.
        """
        line = Line(needs.refs)
        begins, ends = needs.on(line)
        touched = line.touched(begins, ends)
        good = self._good_slots(line, touched, held)
        rest = needs.without(list(good))
        others = line.at(rest.ranks, rest.offsets)
        arrangement = arranged(line, rest.pieces, others, others + rest.lengths, slack=arena.slack_bytes)
        held_chunks = touched[np.isin(line.ranks[touched], list(good))].tolist()
        stand = Standing()
        for chunk in held_chunks:
            slot, ref = good[int(line.ranks[chunk])], line.refs[chunk]
            stand.add(slot.path, int(line.begins[chunk]), ref.length, slot.file_range(_span(ref))[0])
        read = 0
        if len(arrangement.needed):
            sources = {
                line.refs[at].digest: good[int(line.ranks[at])].stream(_span(line.refs[at])) for at in held_chunks
            }
            with arena.writing(arrangement.nbytes) as file:
                landing = Landing(line, arrangement, file.view)
                read = self._fill(_Bringing(file=file, window=arena.window, landing=landing), sources, deadline)
            stand.add_runs(file.path, arrangement)
        needed = sum(line.refs[chunk].length for chunk in (*held_chunks, *arrangement.needed.tolist()))
        return stand.fetched(
            line,
            needs.pieces,
            arrangement,
            is_arranged=~np.isin(needs.pieces.rank, list(good)),
            bytes_by_tier={"memory": needed - read, "store": read},
            window_bytes=arena.window.peak_bytes,
        )

    def close(self) -> None:
        """Wait for what runs, and end the threads; idempotent."""
        self._hashers.shutdown()
        self._getters.shutdown()

    def _good_slots(self, line: Line, touched: Ints, held: Mapping[int, SlotFile]) -> dict[int, SlotFile]:
        """Hash what the slots hold of the needed chunks; a slot counts whole or not at all, to stay contiguous."""
        checks: dict[int, list[Future[bool]]] = {}
        for chunk in touched.tolist():
            rank = int(line.ranks[chunk])
            if rank in held:
                check = self._hashers.submit(self._slot_has, rank, line.refs[chunk], held[rank])
                checks.setdefault(rank, []).append(check)
        results = {rank: [future.result() for future in futures] for rank, futures in checks.items()}
        return {rank: held[rank] for rank, found in results.items() if all(found)}

    def _slot_has(self, rank: int, ref: ChunkRef, slot: SlotFile) -> bool:
        try:
            good = slot.header.state is SlotState.STAGED and chunk_digest(slot.stream(_span(ref))) == ref.digest
        except ValueError:
            good = False
        if not good:
            self._events.emit("rejected", tier="memory", rank=rank, key=ref.key, path=str(slot.path), bytes=ref.length)
        return good

    def _fill(self, bringing: _Bringing, in_slots: Mapping[bytes, memoryview], deadline: float | None) -> int:
        """Bring each needed object once, and copy it to every place where it is wanted; return the bytes read."""
        refs = bringing.landing.refs
        equal: dict[bytes, list[int]] = {}
        for chunk in bringing.landing.needed:
            equal.setdefault(refs[chunk].digest, []).append(chunk)
        tasks: dict[Future[None], ChunkRef] = {}
        read = 0
        for digest, chunks in equal.items():
            ref = refs[chunks[0]]
            if digest in in_slots:
                task = self._getters.submit(bringing.copy, chunks, in_slots[digest])
            else:
                task = self._getters.submit(self._bring, ref, chunks, bringing)
                read += ref.length
            tasks[task] = ref
        try:
            _await(tasks, deadline)
        except BaseException as error:
            bringing.stop.set()
            bringing.window.wake()
            if _is_hanging(tasks, deadline):
                raise HangingWriterError(error) from error
            raise
        return read

    def _bring(self, ref: ChunkRef, chunks: Sequence[int], bringing: _Bringing) -> None:
        """Read one object, straight to where it stays whole if there is such a place, and copy it to the others."""
        file, home = bringing.file, bringing.landing.home_of(chunks)
        if home is None:
            with bringing.window.room(ref.length, bringing.stop) as room:
                self._read(ref, room, bringing.stop)
                bringing.copy(chunks, room)
        else:
            chunk, at = home
            file.touch(begin=at, end=at + ref.length)
            target = file.view[at : at + ref.length]
            self._read(ref, target, bringing.stop)
            bringing.copy([other for other in chunks if other != chunk], target)
            bringing.landing.land_boxes(chunk, target)

    def _read(self, ref: ChunkRef, target: memoryview, stop: threading.Event) -> None:
        """Read an object until its bytes have its digest; `target` is filled when this returns."""
        found = "nothing"
        for _ in range(_READS):
            _go_on(stop, ref.key)
            failpoint("fetcher.before_get")
            try:
                self._store.get_into(ref.key, target)
                failpoint("fetcher.after_get")
            except NotFound:
                found = "nothing"
            except Truncated as error:
                found = error.message
            else:
                digest = chunk_digest(target)
                if digest == ref.digest:
                    return
                found = digest.hex()
            self._events.emit("rejected", tier="store", key=ref.key, found=found, bytes=ref.length)
        raise CorruptError.of(
            f"{ref.key} in {self._store.url}: {ref.length} bytes with BLAKE3 {ref.digest.hex()} expected, {found} found",
            hint="the step is left for an older one; `ckptd verify` lists all bad objects",
            object=ref.key,
            phase="restore",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bringing:
    """What the threads of one fetch share; `stop` is set when it has failed."""

    file: SharedFile
    window: Window
    landing: Landing
    stop: threading.Event = field(default_factory=threading.Event)

    def copy(self, chunks: Sequence[int], verified: memoryview) -> None:
        """Copy equal chunks to where they are wanted."""
        for chunk in chunks:
            _go_on(self.stop, "")
            self.landing.land(chunk, verified)


def _go_on(stop: threading.Event, key: str) -> None:
    if stop.is_set():
        raise DaemonError.of("the fetch was stopped", reason=REASON_ABORTED, object=key, phase="restore")


def _await(tasks: Mapping[Future[None], ChunkRef], deadline: float | None) -> None:
    """Wait for all reads, until the first error; what is corrupt counts before what is merely unreachable."""
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    done, pending = wait(tasks, timeout=left, return_when="FIRST_EXCEPTION")
    errors = [error for future in done if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if isinstance(error, CorruptError)), errors[0])
    if pending:
        waiting = sorted(tasks[future].key for future in pending)
        raise DaemonError.of(
            f"{len(waiting)} of {len(tasks)} chunks were not read within the deadline, among them {waiting[0]}",
            reason=REASON_DEADLINE_EXCEEDED,
            hint="raise restore_timeout_s, or check the store",
            object=waiting[0],
            phase="restore",
        )


def _is_hanging(tasks: Mapping[Future[None], ChunkRef], deadline: float | None) -> bool:
    """Take back what has not begun, wait for the rest for as long as the deadline lets, and say if some still runs."""
    running = [future for future in tasks if not future.cancel()]
    return bool(wait(running, timeout=None if deadline is None else max(0.0, deadline - time.monotonic())).not_done)


def _span(ref: ChunkRef) -> ChunkSpan:
    return ChunkSpan(offset=ref.stream_offset, length=ref.length)
