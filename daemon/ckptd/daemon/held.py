"""What this node holds of one job: slots and staged snapshots. Outlives runs and trainers.

Owns: the life of a snapshot's local part (writing, staged, sealed, committed or dropped), and the files that let a restarted
agent finish it. Does not own: uploads (`upload_queue`), deciding (the coordinator), sessions (`run_link`). Invariant: a slot is
freed only when its step was aborted, when its timeline was resolved without it, or when a committed one is needed for a newer
step; never while its bytes are being read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from pathlib import Path

import blake3

from ckptd.daemon.arena import Arena
from ckptd.daemon.chunks import stream_layout
from ckptd.daemon.errors import DaemonError, FormatError
from ckptd.daemon.fetcher import Fetcher
from ckptd.daemon.shared_files import is_full, no_space
from ckptd.daemon.slots import SlotFile, SlotHeader, SlotPool, SlotState
from ckptd.daemon.snapshots import RankPlan, Snapshot, Stage
from ckptd.daemon.telemetry import EventLog
from ckptd.daemon.upload_queue import UploadQueue
from ckptd.daemon.uploader import Uploader
from ckptd.protos import error_pb2
from ckptd.protos.failpoints import failpoint
from ckptd.protos.snapshot_pb2 import HeldPlan, HeldSnapshot
from ckptd.storage_backends.base import ObjectStore

PLANS_KEPT = 4
"""Plans of a rank that are remembered beside those in use: a layout may come back."""
FREED_WITHIN_S = 5.0
"""How long a begin waits for slots of a step that was given up, and whose upload has not noticed yet; in seconds."""


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
        restore_window_bytes: int,
        threads: Executor,
        log: EventLog,
        uploader: Uploader,
        on_change: Callable[[Snapshot], None],
    ) -> None:
        self.root = root
        self.job = job
        self.store = store
        self.fetcher = Fetcher(store, events=log)
        self._node = node
        self._folder = shm_dir
        self._threads = threads
        self._log = log
        self.pool = SlotPool(shm_dir, job_digest(root, job))
        self.arena = Arena(shm_dir, job_digest(root, job), restore_window_bytes)
        self.snapshots: dict[tuple[str, int], Snapshot] = {}
        self._plans: dict[tuple[int, bytes], RankPlan] = {}
        self.uploads = UploadQueue(
            node=node,
            job=job,
            store=store,
            uploader=uploader,
            threads=threads,
            log=log,
            on_change=on_change,
            on_idle=self._release,
        )
        self._slots_changing = asyncio.Lock()
        self._freed = asyncio.Event()

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
        failpoint("held.before_plan_file")
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
            numbers = await self._free_numbers(tails, slots)
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
        failpoint("held.before_reserve")
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
            failpoint("held.before_snapshot_file")
            _write(self._snapshot_path(snapshot), about.SerializeToString())
        except BaseException:
            for slot in snapshot.slots.values():
                slot.free()
            raise
        return snapshot

    async def _free_numbers(self, ranks: Iterable[int], slots: int) -> dict[int, int]:
        """Return the number of a free slot of each rank; an upload that was given up has a moment to let go of its own."""
        loop = asyncio.get_running_loop()
        end = loop.time() + FREED_WITHIN_S
        while True:
            self._freed.clear()
            try:
                return {rank: self._free_number(rank, slots) for rank in ranks}
            except DaemonError:
                is_ending = any(one.dropped and self.uploads.is_reading(one) for one in self.snapshots.values())
                if not is_ending or loop.time() >= end:
                    raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(end):
                    await self._freed.wait()

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
                    self.drop(snapshot)
                    if mine.header.state is not SlotState.FREE:
                        break  # its upload still reads it, and lets go of it soon
                    number = mine.number
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
        failpoint("held.before_stage")
        try:
            slot.stage(objects_bytes=objects_bytes, trailer_bytes=trailer_bytes, staged_at=time.time())
            slot.trailer()
        except (ValueError, FormatError) as wrong:  # the trainer's doing, and no damage to anything stored
            raise DaemonError.of(
                str(wrong), reason=error_pb2.REASON_INVALID_ARGUMENT, rank=rank, phase="stage"
            ) from wrong
        failpoint("held.after_stage")
        snapshot.staged.add(rank)
        if snapshot.staged == set(snapshot.about.ranks):
            snapshot.stage = Stage.STAGED
            self.uploads.add(snapshot)

    def drop(self, snapshot: Snapshot) -> None:
        """Give a snapshot's slots up: it does not count, or its memory is needed. Running reads and uploads end first."""
        snapshot.cancel.set()
        snapshot.dropped = True
        self._release(snapshot)

    def _release(self, snapshot: Snapshot) -> None:
        if not snapshot.dropped or snapshot.readers or self.uploads.is_reading(snapshot):
            return
        failpoint("held.before_free")
        if self.snapshots.get(snapshot.key) is snapshot:
            del self.snapshots[snapshot.key]
        self._snapshot_path(snapshot).unlink(missing_ok=True)
        for slot in snapshot.slots.values():
            slot.free()
        snapshot.slots = {}
        self._freed.set()

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
                self.uploads.add(snapshot)
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

    # ------------------------------------------------------------ outcomes

    def committed(self, snapshot: Snapshot) -> None:
        """The step counts: its slots stay as the memory tier until they are needed. Nothing of it needs uploading any more."""
        snapshot.stage = Stage.COMMITTED
        snapshot.cancel.set()

    def close(self) -> None:
        """Stop uploads; slots and files stay for the next agent."""
        for snapshot in self.snapshots.values():
            snapshot.cancel.set()
        self.uploads.close()
        self.arena.close()

    def free_empty(self) -> tuple[int, int]:
        """Delete what holds no snapshot, and says of none; for when no run of the job is here. Returns files and bytes."""
        kept = {slot.path for snapshot in self.snapshots.values() for slot in snapshot.slots.values()}
        empty = [slot for slot in self.pool.slots if slot.path not in kept]
        nbytes = sum(slot.nbytes for slot in empty)
        ours = {slot.path for slot in self.pool.slots}
        self.pool.release_dead(keep=self.snapshots)
        if any(path not in ours for path in self._folder.glob(f"{self.pool_digest[:16]}.*.slot")):
            return len(empty), nbytes  # another agent in this folder serves the job: its files tell of its snapshots
        needed = {(rank, one.about.plan_digest) for one in self.snapshots.values() for rank in one.slots}
        self._plans = {key: plan for key, plan in self._plans.items() if key in needed}
        kept = {*map(self._snapshot_path, self.snapshots.values()), *(self._plan_path(*key) for key in needed)}
        useless = [path for path in self._folder.glob(f"{self.pool_digest[:16]}.*.pb") if path not in kept]
        for path in useless:
            path.unlink(missing_ok=True)
        return len(empty) + len(useless), nbytes

    def forget(self) -> None:
        """Delete every slot and file of the job on this node."""
        for snapshot in list(self.snapshots.values()):
            self.drop(snapshot)
        self.pool.release_dead(keep=())
        for path in self._folder.glob(f"{self.pool_digest[:16]}.*.pb"):
            path.unlink(missing_ok=True)

    def _plan_path(self, rank: int, plan_digest: bytes) -> Path:
        return self._folder / f"{self.pool_digest[:16]}.plan.{plan_digest.hex()[:32]}.r{rank}.pb"

    def _snapshot_path(self, snapshot: Snapshot) -> Path:
        return self._folder / _snapshot_name(self.pool_digest, *snapshot.key)


def job_digest(root: str, job: str) -> str:
    """Return the hex digest that names a job's files on a node."""
    return blake3.blake3(f"{root}\0{job}".encode()).hexdigest()


def _snapshot_name(digest: str, timeline: str, step: int) -> str:
    return f"{digest[:16]}.snapshot.{timeline}.{step:012d}.pb"


def _write(path: Path, data: bytes) -> None:
    """Write a small file whole: a reader sees the old one or the new one."""
    fresh = path.with_suffix(".new")
    try:
        fresh.touch(mode=0o600)
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        if is_full(error):
            raise no_space(path.parent, len(data), error) from error
        raise
