"""What this node holds of one job: slots and staged snapshots. Outlives runs and trainers.

Owns: the life of a snapshot's local part (writing, staged, sealed, committed or dropped), and when a restarted agent can finish
it. Does not own: files beside the slots (`held_files`), uploads (`upload_queue`), deciding (the coordinator), sessions
(`run_link`). Invariant: a slot is freed only when its step was aborted, when its timeline was resolved without it, when a
committed one is needed for a newer step, or when a restarted agent finds its step torn or not described as it was begun;
never while its bytes are being read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor
from pathlib import Path

import blake3

from ckptd.daemon.arena import Arena
from ckptd.daemon.chunks import stream_layout
from ckptd.daemon.errors import DaemonError, FormatError
from ckptd.daemon.fetcher import Fetcher
from ckptd.daemon.held_files import HeldFiles
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
        self._files = HeldFiles(shm_dir, job_digest(root, job))
        self._plans: dict[tuple[int, bytes], RankPlan] = {}
        """By rank and digest of the plan, as last learned: a snapshot's own may have other ties."""
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
        loop = asyncio.get_running_loop()
        layout = await loop.run_in_executor(self._threads, stream_layout, held.rank, held.rows, list(held.writer))
        failpoint("held.before_plan_file")
        digest = await loop.run_in_executor(self._threads, self._files.write_plan, held)
        plan = RankPlan(held=held, layout=layout, digest=digest)
        async with self._slots_changing:  # a step that is being begun may need the one before
            self._plans[held.rank, held.plan_digest] = plan
            self._forget_plans(held.rank)
        return plan

    def _forget_plans(self, rank: int) -> None:
        """Drop a rank's oldest plans, and all files, but for those that a snapshot needs."""
        needed = {snapshot.about.plan_digest for snapshot in self.snapshots.values()}
        mine = [key for key in self._plans if key[0] == rank and key[1] not in needed]
        for key in mine[:-PLANS_KEPT]:
            del self._plans[key]
        self._keep_plan_files()

    def _keep_plan_files(self) -> None:
        """Delete the files of plans that nothing was begun with, and nothing will be."""
        known = {(rank, plan.digest) for (rank, _), plan in self._plans.items()}
        self._files.keep_plans(known | self._begun_with())

    def _begun_with(self) -> set[tuple[int, bytes]]:
        """Return rank and digest of every plan that a snapshot was begun with."""
        return {(rank, plan.digest) for one in self.snapshots.values() for rank, plan in one.plans.items()}

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
        # A rank that is away has none, and nobody will finish the step.
        about.plans.extend(plans[rank].digest if rank in plans else b"" for rank in about.ranks)
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
            self._files.write_snapshot(about)
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
            self._files.forget_snapshot(snapshot.key)
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
        self._files.free_cut_off()
        found: dict[tuple[str, int], dict[int, SlotFile]] = {}
        for slot in self.pool.adopt():
            found.setdefault((slot.header.timeline, slot.header.step), {})[slot.rank] = slot
        adopted = []
        for key in sorted(found):
            try:
                snapshot = self._readopt(key, found[key])
            except (DaemonError, ValueError) as failure:
                self._give_up(key, found[key].values(), failure)
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
        self._files.renew(adopted)
        for snapshot in adopted:
            for rank, plan in snapshot.plans.items():
                if plan.digest:  # else no step can be begun with it: an agent after this one would not find it
                    self._plans[rank, snapshot.about.plan_digest] = plan
        self._keep_plan_files()
        return adopted

    def _readopt(self, key: tuple[str, int], slots: dict[int, SlotFile]) -> Snapshot:
        """Put a step together from what an agent before wrote of it.

        Raises:
            DaemonError: as `HeldFiles.read`.
            ValueError: rows and writers make no stream.
        """
        about, found = self._files.read(key, slots)
        digests = dict(zip(about.ranks, about.plans, strict=False))  # an older agent wrote none
        plans = {
            rank: RankPlan(
                held=held,
                layout=stream_layout(rank, held.rows, list(held.writer)),
                digest=digests.get(rank, b""),
            )
            for rank, held in found.items()
        }
        return Snapshot(about=about, plans=plans, slots=slots, staged=set(slots), stage=Stage.STAGED, resumed=True)

    def _give_up(self, key: tuple[str, int], slots: Collection[SlotFile], why: Exception) -> None:
        """Free the slots of a step that cannot be described as it was begun, and say so."""
        self._log.emit(
            "slots_given_up",
            job=self.job,
            timeline=key[0],
            step=key[1],
            ranks=sorted(slot.rank for slot in slots),
            node=self._node,
            error=str(why),
        )
        for slot in slots:
            slot.free()

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
        needed = self._begun_with()
        self._plans = {key: plan for key, plan in self._plans.items() if (key[0], plan.digest) in needed}
        useless = self._files.keep_only(self.snapshots.values())
        self._keep_plan_files()
        return len(empty) + useless, nbytes

    def forget(self) -> None:
        """Delete every slot and file of the job on this node."""
        for snapshot in list(self.snapshots.values()):
            self.drop(snapshot)
        self.pool.release_dead(keep=())
        self._files.keep_only(())


def job_digest(root: str, job: str) -> str:
    """Return the hex digest that names a job's files on a node."""
    return blake3.blake3(f"{root}\0{job}".encode()).hexdigest()
