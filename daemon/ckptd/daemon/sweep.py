"""Deletes what no step needs any more (R7). May run anywhere, at any time, beside a living job and beside itself.

Owns: what is garbage, and deleting it. Does not own: which steps stay; that was chosen when the newest record was
written (R8), and a sweep only follows it. Invariants: nothing newer than the newest record is touched, no claim, no start
record, nothing foreign, nothing outside the root; and no chunk that a listed step refers to. No clock and no grace
time is needed for that: names are never used twice, and what is older than the newest record and not listed is dead for
ever, whoever looks, however late. Besides, probes that were killed a day ago go: these belong to no step.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from ckptd.protos import error_pb2
from ckptd.protos.failpoints import failpoint
from ckptd.storage_backends.base import ObjectInfo, ObjectStore
from ckptd.storage_backends.probe import PROBE_PREFIX, is_abandoned

from .errors import DaemonError
from .history import order
from .keys import CHUNKS_PREFIX, INDEX_PREFIX, LOG_PREFIX, ChunkKey, DecisionKey, IndexKey, StepId, Timeline, parse_key
from .log_reader import NewestRecord, list_log, read_newest
from .log_view import LogView
from .parallel import in_parallel
from .roots import needed_chunks


class SweepStoppedError(DaemonError):
    """A newer timeline was claimed: what the newest record lists may not be the last word."""

    reason = error_pb2.REASON_UNAVAILABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """What a sweep deletes.

    Attributes:
        delete: Objects, chunks first.
        kept: Objects of this root that were looked at and stay.
        dead_steps: Steps that some of the objects belong to and that are gone for ever, ascending.
    """

    delete: list[ObjectInfo]
    kept: int
    dead_steps: list[StepId]

    @property
    def nbytes(self) -> int:
        """Bytes that the deletes set free."""
        return sum(info.size for info in self.delete)


def sweep(store: ObjectStore, *, dry_run: bool = False, workers: int | None = None) -> SweepPlan:
    """Delete what no step needs any more; blocks until all of it is deleted.

    Safe to cut off at any point, to repeat, and to run beside any other process of the job.

    Args:
        store: The root.
        dry_run: Only say what would be deleted.
        workers: Requests at once; None takes the store's own figure.

    Returns:
        What was deleted, or would be.

    Raises:
        SweepStoppedError: a newer timeline was claimed and has no record yet; nothing was deleted.
        RootGoneError: a record or an index of a listed step is gone or damaged; nothing was deleted.
        FormatError: the newest record is damaged, or from a newer program; nothing was deleted.
        DaemonError: STORE_FAILED, LIST shows the past; nothing was deleted.
        StorageError: as the store raised it; some objects may be deleted.
    """
    threads = store.capabilities.concurrency if workers is None else workers
    failpoint("sweep.before_record")
    _, newest = read_newest(store)
    if newest is None:
        return SweepPlan(delete=[], kept=0, dead_steps=[])
    # In this order (R7): first the record, then the claims. A record of a timeline that was superseded when it was
    # read may drop what the next timeline goes on from.
    failpoint("sweep.before_claims")
    require_settled(newest, list_log(store, after=newest.key))
    failpoint("sweep.before_indexes")
    needed = needed_chunks(store, newest, workers=threads)
    failpoint("sweep.before_list")
    plan = plan_sweep(newest, _listing(store), needed)
    now = time.time()
    left = [info for info in store.list(PROBE_PREFIX) if is_abandoned(info.key, now)]
    plan = replace(plan, delete=[*plan.delete, *left])
    if not dry_run:
        for _ in in_parallel(lambda key: _delete(store, key), [info.key for info in plan.delete], workers=threads):
            pass
    return plan


def require_settled(newest: NewestRecord, view: LogView) -> None:
    """Stop when a newer timeline than the newest record's was claimed (R7).

    Raises:
        SweepStoppedError: says which.
    """
    highest = view.highest_claim()
    if highest is not None and highest > newest.timeline:
        raise SweepStoppedError.of(
            f"timeline {highest} was claimed after the newest record, {newest.key}, and has written no record yet: "
            "the job is restarting, or died while it did",
            hint="run it again when the job has started; if it never will, say --claim",
        )


def plan_sweep(newest: NewestRecord, objects: Iterable[ObjectInfo], needed: Collection[str]) -> SweepPlan:
    """Say what is garbage. Pure.

    Args:
        newest: The newest record, found settled (`require_settled`).
        objects: A listing of the root, or of any part of it.
        needed: Keys of the chunks that listed and readable quarantined steps refer to.
    """
    listed = {order(ref) for ref in newest.listed}
    quarantined = {order(entry.step) for entry in newest.record.quarantined}
    delete: list[ObjectInfo] = []
    dead: set[StepId] = set()
    kept = 0
    for info in objects:
        key = parse_key(info.key)
        if key is None:
            continue  # foreign
        if not isinstance(key, ChunkKey | IndexKey | DecisionKey):
            kept += 1  # job, claims, start records and pins stay for ever
            continue
        is_garbage = is_dead(key.id, newest.position, listed, quarantined)
        if isinstance(key, ChunkKey):
            # Under a listed step too: left by an agent that restarted and did not find them in its base again.
            is_garbage = (is_garbage or key.id in listed) and info.key not in needed
        if not is_garbage:
            kept += 1
            continue
        delete.append(info)
        if key.id not in listed:
            dead.add(key.id)
    delete.sort(key=lambda info: (not info.key.startswith(CHUNKS_PREFIX), info.key))
    return SweepPlan(delete=delete, kept=kept, dead_steps=sorted(dead))


def is_dead(
    step: StepId, position: tuple[Timeline, int], listed: Collection[StepId], quarantined: Collection[StepId]
) -> bool:
    """Whether a step is gone for ever: older than the newest record, not listed by it, not quarantined (R7).

    Nothing else is: an undecided step of the newest record's timeline may still be adopted, however old it is, and even the
    marker of an aborted one must stay until a newer record makes it old, lest the step be found undecided again (R5).
    """
    return (step.timeline, step.step) < position and step not in listed and step not in quarantined


def _delete(store: ObjectStore, key: str) -> None:
    failpoint("sweep.before_delete")
    store.delete(key)
    failpoint("sweep.after_delete")


def _listing(store: ObjectStore) -> Iterator[ObjectInfo]:
    for prefix in (LOG_PREFIX, INDEX_PREFIX, CHUNKS_PREFIX):
        yield from store.list(prefix)
