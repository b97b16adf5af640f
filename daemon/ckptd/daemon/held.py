"""What this node holds of one job: slots, staged snapshots, and their uploads. Outlives runs and trainers.

Owns: the life of a snapshot's local part (writing → staged → sealed → committed or dropped), the files that let a
restarted agent finish it, and the queue of uploads: one at a time, oldest first. Does not own: deciding (the coordinator),
sessions (`run_link`). Invariant: a slot is freed only when its step was aborted, when its timeline was resolved without it, or
when a committed one is needed for a newer step; never while its bytes are being read.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import blake3

from ckptd.daemon import index, keys, rpc
from ckptd.daemon.arena import Arena
from ckptd.daemon.chunks import StreamLayout, stream_layout
from ckptd.daemon.errors import DaemonError, FormatError, make_error
from ckptd.daemon.fetcher import Fetcher
from ckptd.daemon.slots import SlotFile, SlotHeader, SlotPool, SlotState
from ckptd.daemon.telemetry import EventLog
from ckptd.daemon.uploader import NodeSnapshot, RankSnapshot, Uploader
from ckptd.protos import error_pb2
from ckptd.protos.coordinator_pb2 import Held
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import HeldPlan, HeldSnapshot, IndexRef, RankSection
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import StorageError, is_retryable

UPLOAD_RETRY_S = (1.0, 15.0)
"""Pauses between tries of an upload that failed for a passing reason: first and longest. It ends with the step's abort."""


PLANS_KEPT = 4
"""Plans of a rank that are remembered beside those in use: a layout may come back."""


class Stage(Enum):
    """Where the node's part of a snapshot stands."""

    WRITING = "writing"
    STAGED = "staged"
    SEALED = "sealed"
    COMMITTED = "committed"


@dataclass(kw_only=True, slots=True)
class RankPlan:
    """How one rank's slot is laid out under one plan."""

    held: HeldPlan
    layout: StreamLayout


@dataclass(kw_only=True, slots=True)
class Snapshot:
    """The node's part of one step."""

    about: HeldSnapshot
    plans: dict[int, RankPlan]
    slots: dict[int, SlotFile] = field(default_factory=dict)
    staged: set[int] = field(default_factory=set)
    stage: Stage = Stage.WRITING
    index: IndexRef | None = None
    failed: Error | None = None
    cancel: threading.Event = field(default_factory=threading.Event)
    readers: int = 0
    resumed: bool = False
    dropped: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """Timeline and step."""
        return self.about.timeline, self.about.step

    def wire(self) -> Held:
        """Return what the coordinator is told."""
        held = Held(timeline=self.about.timeline, step=self.about.step, ranks=sorted(self.staged))
        if self.index is not None:
            held.index.CopyFrom(self.index)
        if self.failed is not None:
            held.failed.CopyFrom(self.failed)
        return held


class HeldJob:
    """One job on this node. All methods on the event loop; uploads run in threads."""

    def __init__(
        self,
        *,
        root: str,
        job: str,
        node: str,
        store: ObjectStore,
        shm_dir: Path,
        threads: Executor,
        log: EventLog,
        uploader: Uploader,
        on_change: Callable[[Snapshot], None],
    ) -> None:
        self.root = root
        self.job = job
        self.store = store
        self.uploader = uploader
        self.fetcher = Fetcher(store, events=log)
        self._node = node
        self._folder = shm_dir
        self._threads = threads
        self._log = log
        self._on_change = on_change
        self.pool = SlotPool(shm_dir, job_digest(root, job))
        self.arena = Arena(shm_dir, job_digest(root, job))
        self.snapshots: dict[tuple[str, int], Snapshot] = {}
        self._plans: dict[tuple[int, bytes], RankPlan] = {}
        self._bases: dict[str, dict[int, RankSection]] = {}
        self._queue: asyncio.Queue[Snapshot] = asyncio.Queue()
        self._uploading: Snapshot | None = None
        self._worker: asyncio.Task[None] | None = None
        self._slots_changing = asyncio.Lock()

    # ------------------------------------------------------------ plans

    def plan_of(self, rank: int, plan_digest: bytes) -> RankPlan | None:
        """Return a plan that is known."""
        return self._plans.get((rank, plan_digest))

    async def learn_plan(self, held: HeldPlan) -> RankPlan:
        """Lay the rank's stream out by a plan, and keep the plan for a restart."""
        layout = await asyncio.get_running_loop().run_in_executor(
            self._threads, stream_layout, held.rank, held.rows, list(held.writer)
        )
        plan = RankPlan(held=held, layout=layout)
        self._plans[(held.rank, held.plan_digest)] = plan
        self._forget_plans(held.rank)
        path = self._plan_path(held.rank, held.plan_digest)
        await asyncio.get_running_loop().run_in_executor(self._threads, _write, path, held.SerializeToString())
        return plan

    def _forget_plans(self, rank: int) -> None:
        """Drop a rank's oldest plans, and their files, but for those that a snapshot needs."""
        needed = {snapshot.about.plan_digest for snapshot in self.snapshots.values()}
        mine = [key for key in self._plans if key[0] == rank and key[1] not in needed]
        for key in mine[:-PLANS_KEPT]:
            del self._plans[key]
            self._plan_path(*key).unlink(missing_ok=True)

    # ------------------------------------------------------------ slots

    async def begin(
        self, about: HeldSnapshot, tails: dict[int, int], processes: dict[int, str], slots: int
    ) -> Snapshot:
        """Give every rank of the node a slot for a step.

        Making a slot reserves its memory, which takes seconds where it is large: that runs in a thread.

        Args:
            about: the step.
            tails: per rank, bytes of objects and trailer.
            processes: per rank, which process fills the slot: one given up in the midst goes to no other, which could
                still be writing.
            slots: slots a rank may have.

        Raises:
            NoSpaceError: shared memory is full; nothing is kept.
            DaemonError: BUSY, every slot holds a step in flight.
        """
        async with self._slots_changing:
            numbers = {rank: self._free_number(rank, slots) for rank in tails}
            snapshot = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._begun, about, tails, numbers, processes
            )
            self.snapshots[snapshot.key] = snapshot
            return snapshot

    def _begun(
        self, about: HeldSnapshot, tails: dict[int, int], numbers: dict[int, int], processes: dict[int, str]
    ) -> Snapshot:
        plans = {rank: self._plans[(rank, about.plan_digest)] for rank in tails}
        snapshot = Snapshot(about=about, plans=plans)
        try:
            for rank, tail_bytes in tails.items():
                slot = self.pool.acquire(
                    rank, numbers[rank], plans[rank].layout.data_bytes, tail_bytes, process=processes[rank]
                )
                slot.begin(
                    SlotHeader(
                        state=SlotState.WRITING,
                        job=slot.header.job,
                        run_id=about.run_id,
                        process=processes[rank],
                        rank=rank,
                        timeline=about.timeline,
                        step=about.step,
                        layout_digest=plans[rank].held.layout_digest,
                        plan_digest=about.plan_digest,
                        data_bytes=plans[rank].layout.data_bytes,
                        tail_offset=slot.header.tail_offset,
                    ),
                    plans[rank].layout,
                )
                snapshot.slots[rank] = slot
            _write(self._snapshot_path(snapshot), about.SerializeToString())
        except BaseException:
            for slot in snapshot.slots.values():
                slot.free()
            raise
        return snapshot

    def _free_number(self, rank: int, slots: int) -> int:
        """Return the number of a free slot of the rank, giving up its oldest committed step where none is free."""
        taken = {slot.number: slot for slot in self.pool.slots if slot.rank == rank}
        number = next((n for n in range(slots) if n not in taken or taken[n].header.state is SlotState.FREE), None)
        if number is None:
            for snapshot in sorted(self.snapshots.values(), key=lambda one: one.key):
                mine = snapshot.slots.get(rank)
                if (
                    snapshot.stage is Stage.COMMITTED
                    and mine is not None
                    and not snapshot.readers
                    and mine.number < slots
                ):
                    number = mine.number
                    self.drop(snapshot)
                    break
        if number is None:
            raise DaemonError.of(
                f"rank {rank}: every slot holds a step in flight",
                reason=error_pb2.REASON_BUSY,
                rank=rank,
                phase="begin",
            )
        return number

    def stage(self, snapshot: Snapshot, rank: int, *, objects_bytes: int, trailer_bytes: int) -> None:
        """Take a rank's slot over; the upload begins when all ranks of the node are staged.

        Raises:
            DaemonError: INVALID_ARGUMENT, the trailer is not what it says.
        """
        if rank in snapshot.staged:
            return
        slot = snapshot.slots[rank]
        try:
            slot.stage(objects_bytes=objects_bytes, trailer_bytes=trailer_bytes, staged_at=time.time())
            slot.trailer()
        except (ValueError, FormatError) as wrong:  # the trainer's doing, and no damage to anything stored
            raise DaemonError.of(
                str(wrong), reason=error_pb2.REASON_INVALID_ARGUMENT, rank=rank, phase="stage"
            ) from wrong
        snapshot.staged.add(rank)
        if snapshot.staged == set(snapshot.about.ranks):
            snapshot.stage = Stage.STAGED
            self._enqueue(snapshot)

    def drop(self, snapshot: Snapshot) -> None:
        """Give a snapshot's slots up: it does not count, or its memory is needed. Running reads and uploads end first."""
        snapshot.cancel.set()
        snapshot.dropped = True
        self._release(snapshot)

    def _release(self, snapshot: Snapshot) -> None:
        if not snapshot.dropped or snapshot.readers or self._uploading is snapshot:
            return
        if self.snapshots.get(snapshot.key) is snapshot:
            del self.snapshots[snapshot.key]
        self._snapshot_path(snapshot).unlink(missing_ok=True)
        for slot in snapshot.slots.values():
            slot.free()
        snapshot.slots = {}

    def read_lease(self, snapshot: Snapshot) -> Callable[[], None]:
        """Keep the slots as they are until the returned function is called."""
        snapshot.readers += 1
        done = False

        def release() -> None:
            nonlocal done
            if not done:
                done = True
                snapshot.readers -= 1
                self._release(snapshot)

        return release

    # ------------------------------------------------------------ restart

    def adopt(self) -> list[Snapshot]:
        """Take over what an agent before left staged, and go on uploading it."""
        found: dict[tuple[str, int], dict[int, SlotFile]] = {}
        for slot in self.pool.adopt():
            found.setdefault((slot.header.timeline, slot.header.step), {})[slot.rank] = slot
        adopted = []
        for key in sorted(found):
            snapshot = self._readopt(key, found[key])
            if snapshot is None:
                for slot in found[key].values():
                    slot.free()
                continue
            self.snapshots[key] = snapshot
            adopted.append(snapshot)
            self._log.emit(
                "slots_adopted",
                job=self.job,
                timeline=key[0],
                step=key[1],
                ranks=sorted(snapshot.staged),
                node=self._node,
            )
            if snapshot.stage is Stage.STAGED:
                self._enqueue(snapshot)
        return adopted

    def _readopt(self, key: tuple[str, int], slots: dict[int, SlotFile]) -> Snapshot | None:
        path = self._folder / _snapshot_name(self.pool_digest, *key)
        try:
            about = HeldSnapshot.FromString(path.read_bytes())
            plans = {}
            for rank in slots:
                held = HeldPlan.FromString(self._plan_path(rank, about.plan_digest).read_bytes())
                plans[rank] = RankPlan(held=held, layout=stream_layout(rank, held.rows, list(held.writer)))
                self._plans[(rank, held.plan_digest)] = plans[rank]
        except (OSError, ValueError):
            return None
        if set(slots) != set(about.ranks):
            return None  # a rank had not staged: the node's part is torn
        return Snapshot(about=about, plans=plans, slots=slots, staged=set(slots), stage=Stage.STAGED, resumed=True)

    @property
    def pool_digest(self) -> str:
        """The digest that names this job's files."""
        return job_digest(self.root, self.job)

    # ------------------------------------------------------------ uploads

    def _enqueue(self, snapshot: Snapshot) -> None:
        self._queue.put_nowait(snapshot)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._upload_all())

    @property
    def is_uploading(self) -> bool:
        """Whether an upload runs or waits."""
        return self._uploading is not None or not self._queue.empty()

    async def _upload_all(self) -> None:
        while not self._queue.empty():
            snapshot = self._queue.get_nowait()
            if snapshot.cancel.is_set() or snapshot.dropped:
                continue
            self._uploading = snapshot
            try:
                await self._upload(snapshot)
            finally:
                self._uploading = None
                self._release(snapshot)

    async def _upload(self, snapshot: Snapshot) -> None:
        """Upload until it is sealed, fails for good, or is given up. Repeating is safe: all names follow from the bytes."""
        loop = asyncio.get_running_loop()
        pause = UPLOAD_RETRY_S[0]
        while not snapshot.cancel.is_set():
            try:
                snapshot.index = await loop.run_in_executor(self._threads, self._upload_once, snapshot)
            except Exception as failure:
                if snapshot.cancel.is_set():
                    return
                about = snapshot.about
                self._log.emit(
                    "upload_failed",
                    job=self.job,
                    timeline=about.timeline,
                    step=about.step,
                    node=self._node,
                    error=str(failure),
                )
                if is_retryable(failure):
                    await loop.run_in_executor(self._threads, snapshot.cancel.wait, pause)
                    pause = min(2 * pause, UPLOAD_RETRY_S[1])
                    continue
                snapshot.failed = wire_error(failure, phase="upload", step=about.step, node=self._node)
            else:
                snapshot.stage = Stage.SEALED
            self._on_change(snapshot)
            return

    def _upload_once(self, snapshot: Snapshot) -> IndexRef:
        about = snapshot.about
        return self.uploader.upload(
            NodeSnapshot(
                step=about.step,
                timeline=keys.Timeline.parse(about.timeline),
                node=self._node,
                mesh=about.mesh,
                world=about.world,
                plan_digest=about.plan_digest,
                base=about.base if about.HasField("base") else None,
                base_sections=self._base_sections(about),
                ranks={
                    rank: RankSnapshot(
                        slot=slot,
                        rows=snapshot.plans[rank].held.rows,
                        writer=list(snapshot.plans[rank].held.writer),
                        aliases=snapshot.plans[rank].held.aliases,
                        coordinate=list(snapshot.plans[rank].held.coordinate),
                    )
                    for rank, slot in snapshot.slots.items()
                },
            ),
            cancel=snapshot.cancel,
            resumed=snapshot.resumed,
        )

    def _base_sections(self, about: HeldSnapshot) -> dict[int, RankSection]:
        """Return the base's sections of the node's ranks, from the indexes the coordinator named; cached for one base."""
        if not about.HasField("base"):
            return {}
        wanted = set(about.ranks)
        found: dict[int, RankSection] = {}
        cached: dict[str, dict[int, RankSection]] = {}
        own_first = sorted(about.base_indexes, key=lambda ref: ref.node != self._node)
        for ref in own_first:
            if wanted <= set(found):
                break
            sections = self._bases.get(ref.key)
            if sections is None:
                parsed = keys.parse_key(ref.key)
                if not isinstance(parsed, keys.IndexKey):
                    raise DaemonError.of(f"{ref.key} is no index", reason=error_pb2.REASON_CORRUPT, object=ref.key)
                _, sections = index.read_index(self.store, parsed)
            cached[ref.key] = sections
            found.update({rank: section for rank, section in sections.items() if rank in wanted})
        self._bases = cached
        return found

    # ------------------------------------------------------------ outcomes

    def committed(self, snapshot: Snapshot) -> None:
        """The step counts: its slots stay as the memory tier until they are needed."""
        snapshot.stage = Stage.COMMITTED

    def close(self) -> None:
        """Stop uploads; slots and files stay for the next agent."""
        for snapshot in self.snapshots.values():
            snapshot.cancel.set()
        if self._worker is not None:
            self._worker.cancel()

    def forget(self) -> None:
        """Delete every slot and file of the job on this node."""
        for snapshot in list(self.snapshots.values()):
            self.drop(snapshot)
        self.pool.release_dead(keep=())
        self.arena.release()
        for path in self._folder.glob(f"{self.pool_digest[:16]}.*.pb"):
            path.unlink(missing_ok=True)

    def _plan_path(self, rank: int, plan_digest: bytes) -> Path:
        return self._folder / f"{self.pool_digest[:16]}.plan.{plan_digest.hex()[:32]}.r{rank}.pb"

    def _snapshot_path(self, snapshot: Snapshot) -> Path:
        return self._folder / _snapshot_name(self.pool_digest, *snapshot.key)


def job_digest(root: str, job: str) -> str:
    """Return the hex digest that names a job's files on a node."""
    return blake3.blake3(f"{root}\0{job}".encode()).hexdigest()


def wire_error(failure: BaseException, *, phase: str, step: int | None = None, node: str = "") -> Error:
    """Return any failure as an `Error`, a store's with its key and hint."""
    if isinstance(failure, StorageError):
        return make_error(
            storage_reason(failure),
            str(failure).removesuffix(f" ({failure.hint})"),
            hint=failure.hint or "",
            step=step,
            node=node,
            object=failure.key or "",
            phase=phase,
        )
    error = Error()
    error.CopyFrom(rpc.error_of(failure))
    error.phase = error.phase or phase
    error.node = error.node or node
    if step is not None and not error.HasField("step"):
        error.step = step
    return error


def storage_reason(failure: StorageError) -> error_pb2.Reason.ValueType:
    """Return the reason of a store's error."""
    by_name = {
        "NotFound": error_pb2.REASON_CORRUPT,
        "InvalidUrl": error_pb2.REASON_INVALID_ROOT,
        "BucketMissing": error_pb2.REASON_INVALID_ROOT,
        "PermissionDenied": error_pb2.REASON_PERMISSION_DENIED,
        "NoSpace": error_pb2.REASON_NO_SPACE,
        "OutcomeUnknown": error_pb2.REASON_OUTCOME_UNKNOWN,
        "Throttled": error_pb2.REASON_UNAVAILABLE,
        "Unavailable": error_pb2.REASON_UNAVAILABLE,
    }
    return by_name.get(type(failure).__name__, error_pb2.REASON_STORE_FAILED)


def _snapshot_name(digest: str, timeline: str, step: int) -> str:
    return f"{digest[:16]}.snapshot.{timeline}.{step:012d}.pb"


def _write(path: Path, data: bytes) -> None:
    """Write a small file whole: a reader sees the old one or the new one."""
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_bytes(data)
    fresh.replace(path)
