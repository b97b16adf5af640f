"""The uploads of one job on this node: one at a time, oldest first, each until it is sealed, failed or given up.

Owns: the order, trying again after passing failures, reading the base's indexes. Does not own: how one upload is done
(`uploader`), the slots (`held`). On the agent's event loop; the uploads themselves run in threads. Invariant: the slots of the
snapshot that is being uploaded are not touched before `on_idle` was called for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from ckptd.daemon import index, keys
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.snapshots import Snapshot, Stage
from ckptd.daemon.telemetry import EventLog
from ckptd.daemon.uploader import NodeSnapshot, RankSnapshot, Uploader
from ckptd.daemon.wire_errors import wire_error
from ckptd.protos import error_pb2
from ckptd.protos.failpoints import failpoint
from ckptd.protos.snapshot_pb2 import HeldSnapshot, IndexRef, RankSection
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import is_retryable

UPLOAD_RETRY_S = (1.0, 15.0)
"""Pauses between tries of an upload that failed for a passing reason: first and longest. It ends with the step's abort."""


class UploadQueue:
    """The uploads of one job.

    Args:
        node: This agent's uuid.
        job: The job's name, for events.
        store: The job's root.
        uploader: Does the work.
        threads: Runs it.
        log: Gets upload_failed.
        on_change: Called when a snapshot was sealed or has failed for good.
        on_idle: Called when a snapshot's slots are no longer read.
    """

    def __init__(
        self,
        *,
        node: str,
        job: str,
        store: ObjectStore,
        uploader: Uploader,
        threads: Executor,
        log: EventLog,
        on_change: Callable[[Snapshot], None],
        on_idle: Callable[[Snapshot], None],
    ) -> None:
        self._node = node
        self._job = job
        self._store = store
        self._uploader = uploader
        self._threads = threads
        self._log = log
        self._on_change = on_change
        self._on_idle = on_idle
        self._bases: dict[str, dict[int, RankSection]] = {}
        self._queue: asyncio.Queue[Snapshot] = asyncio.Queue()
        self._uploading: Snapshot | None = None
        self._worker: asyncio.Task[None] | None = None

    def add(self, snapshot: Snapshot) -> None:
        """Upload a snapshot when those before it are done."""
        self._queue.put_nowait(snapshot)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._upload_all())

    def is_reading(self, snapshot: Snapshot) -> bool:
        """Whether the upload of this snapshot runs: its slots must stay as they are."""
        return self._uploading is snapshot

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
                self._on_idle(snapshot)

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
                    job=self._job,
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
                # What was adopted may have been listed already, and its node be told so in the midst of the upload.
                if snapshot.stage is not Stage.COMMITTED:
                    snapshot.stage = Stage.SEALED
                failpoint("uploader.before_told")
            self._on_change(snapshot)
            return

    def _upload_once(self, snapshot: Snapshot) -> IndexRef:
        failpoint("uploader.before_base")
        about = snapshot.about
        return self._uploader.upload(
            NodeSnapshot(
                step=about.step,
                timeline=keys.Timeline.parse(about.timeline),
                node=self._node,
                mesh=about.mesh,
                world=about.world,
                plan_digest=about.plan_digest,
                base=about.base if about.HasField("base") else None,
                base_sections=self._base_sections(about),
                compared_in=about.compared_in if about.HasField("compared_in") else None,
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
                _, sections = index.read_index(self._store, parsed)
            cached[ref.key] = sections
            found.update({rank: section for rank, section in sections.items() if rank in wanted})
        self._bases = cached
        return found

    def close(self) -> None:
        """Stop; what was not sealed stays staged for the next agent."""
        if self._worker is not None:
            self._worker.cancel()
