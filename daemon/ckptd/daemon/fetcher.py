"""From refs to verified bytes in shared memory: own slots first, else the store.

Owns: that each chunk is read once per node, its digest, and the bounds of reading. Does not own: which chunks
are needed (`reshard`), where they stand (`fetched`), retries (the store's wrapper), and what a corrupt step
means (the coordinator). What a slot of that very step holds is not copied: the trainer reads it there.

Invariant: nothing is handed out that was not hashed where it stands, or copied from bytes that were.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from ckptd.protos.error_pb2 import REASON_ABORTED, REASON_DEADLINE_EXCEEDED
from ckptd.protos.failpoints import failpoint
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import NotFound, Truncated

from .arena import Arena
from .chunks import ChunkSpan
from .errors import CorruptError, DaemonError
from .fetched import Extent, Fetched, Run, places, runs
from .hashing import chunk_digest
from .index import ChunkRef
from .shared_files import SharedFile
from .slots import SlotFile, SlotState
from .telemetry import EventLog

__all__ = ["Fetched", "Fetcher"]

HASH_THREADS = 2
_READS = 2
"""A digest that does not fit may be the network's fault once; twice it is the object's."""


class _HangingReadError(Exception):
    """The fetch failed with `cause`, and a thread still writes to the arena."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Fetcher:
    """Fetches chunks of one root. Thread-safe; of fetches that overlap in one arena, only the last one's bytes can be read.

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
        needs: Mapping[int, Sequence[ChunkRef]],
        held: Mapping[int, SlotFile],
        arena: Arena,
        *,
        deadline: float | None = None,
    ) -> Fetched:
        """Bring every needed chunk into shared memory and verify it; blocks until done.

        Args:
            needs: Per stored rank, the chunks of its stream that somebody on this node wants.
            held: Per stored rank, a slot that holds that very step and timeline; it must stay staged until all ranks
                have copied. A slot whose bytes do not have their digests is passed over.
            arena: Gets what slots do not hold; what it held before is overwritten.
            deadline: In seconds of time.monotonic().

        Raises:
            CorruptError: An object is gone, cut, or has other bytes than listed, also when read again; names it.
            NoSpaceError: No room for the arena.
            DaemonError: DEADLINE_EXCEEDED; names the object that was waited for.
            StorageError: As the store raised it; names the object.
        """
        wanted = {rank: runs(rank, needs[rank]) for rank in sorted(needs)}
        good = self._good_slots(wanted, held)
        extents = {rank: [each for run in wanted[rank] for each in _in_slot(run, slot)] for rank, slot in good.items()}
        by_tier = {"memory": sum(run.nbytes for rank in good for run in wanted[rank]), "store": 0}
        missing = [run for rank, each in wanted.items() if rank not in good for run in each]
        if missing:
            placed, nbytes = places(missing)
            in_slots = {
                ref.digest: slot.stream(_span(ref))
                for rank, slot in good.items()
                for run in wanted[rank]
                for ref in run.refs
            }
            with arena.writing(nbytes) as file:
                try:
                    by_tier["store"] = self._fill(placed, file, in_slots, deadline)
                except _HangingReadError as hanging:
                    # It cannot be taken back, and may write to these pages whenever it likes.
                    arena.release()
                    raise hanging.cause from None
            by_tier["memory"] += sum(run.nbytes for run in missing) - by_tier["store"]
            for run, at in placed:
                extents.setdefault(run.rank, []).append(
                    Extent(stream_offset=run.stream_offset, nbytes=run.nbytes, path=file.path, file_offset=at)
                )
        return Fetched(extents=extents, bytes_by_tier=by_tier)

    def close(self) -> None:
        """Wait for what runs, and end the threads; idempotent."""
        self._hashers.shutdown()
        self._getters.shutdown()

    def _good_slots(self, wanted: Mapping[int, Sequence[Run]], held: Mapping[int, SlotFile]) -> dict[int, SlotFile]:
        """Hash what the slots hold of the needed chunks; a slot counts whole or not at all, to stay contiguous."""
        checks = {
            rank: [self._hashers.submit(self._slot_has, rank, ref, held[rank]) for run in each for ref in run.refs]
            for rank, each in wanted.items()
            if rank in held
        }
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

    def _fill(
        self,
        placed: Sequence[tuple[Run, int]],
        file: SharedFile,
        in_slots: Mapping[bytes, memoryview],
        deadline: float | None,
    ) -> int:
        """Read each object once into its first place, and copy it to the others; return the bytes read."""
        stop = threading.Event()
        tasks: dict[Future[None], ChunkRef] = {}
        copies: list[tuple[memoryview, memoryview]] = []
        sources = dict(in_slots)
        for run, run_at in placed:
            for ref in run.refs:
                at = run_at + ref.stream_offset - run.stream_offset
                target = file.view[at : at + ref.length]
                if ref.digest in sources:
                    copies.append((target, sources[ref.digest]))
                else:
                    sources[ref.digest] = target
                    tasks[self._getters.submit(self._read, file, at, ref, stop)] = ref
        try:
            _await(tasks, deadline)
        except BaseException as error:
            stop.set()
            if _is_hanging(tasks, deadline):
                raise _HangingReadError(error) from error
            raise
        for target, source in copies:
            target[:] = source
        return sum(ref.length for ref in tasks.values())

    def _read(self, file: SharedFile, at: int, ref: ChunkRef, stop: threading.Event) -> None:
        found = "nothing"
        target = file.view[at : at + ref.length]
        for _ in range(_READS):
            if stop.is_set():
                raise DaemonError.of("the fetch was stopped", reason=REASON_ABORTED, object=ref.key, phase="restore")
            failpoint("fetcher.before_get")
            file.touch(begin=at, end=at + ref.length)
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


def _in_slot(run: Run, slot: SlotFile) -> list[Extent]:
    """Say where a run stands in a slot: in one piece, or in two where it goes from tensors on to objects."""
    found: list[Extent] = []
    for ref in run.refs:
        at, _ = slot.file_range(_span(ref))
        last = found[-1] if found else None
        if last is not None and last.file_offset + last.nbytes == at:
            found[-1] = replace(last, nbytes=last.nbytes + ref.length)
        else:
            found.append(Extent(stream_offset=ref.stream_offset, nbytes=ref.length, path=slot.path, file_offset=at))
    return found


def _span(ref: ChunkRef) -> ChunkSpan:
    return ChunkSpan(offset=ref.stream_offset, length=ref.length)
