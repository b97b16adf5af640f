"""Writes a start record for a job that is not running: to drop steps by hand, or to settle a start that died (R1, R2, R8).

Owns: claiming a timeline, resolving, and the one record, as a coordinator would write it that starts and ends at once. Does not
own: which steps the operator wants gone, or deleting their objects (`sweep`). Invariants: all that a start must do is done, so
that the next start, readers and sweeps find nothing special: claim before anything is read, whole undecided steps adopted, the
claims looked at after the record. A run that is alive all the same is fenced by the claim and can do no harm.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error
from ckptd.protos.failpoints import failpoint
from ckptd.protos.snapshot_pb2 import Claim, Committed, Quarantined, Record, Retention, StepRef
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import NotFound

from .catalog import StepState, read_catalog
from .comparisons import Comparisons
from .errors import CorruptError, DaemonError, FencedError, NotFoundError
from .history import adoption, candidates, order, pinned_steps, start_record, to_bytes
from .keys import INDEX_PREFIX, PINS_PREFIX, StepId, Timeline, claim_key, new_nonce, start_key
from .liveness import living_ranks
from .log_reader import NewestRecord, list_log, read_claim, read_newest
from .log_view import LogView
from .log_writer import put_once
from .records import FORMAT_VERSION
from .records import to_bytes as claim_bytes

MAX_TRIES = 16
"""Claims, and resolves, in a row that another process overtook."""

Adopted = list[tuple[StepRef, Committed]]


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineStart:
    """What was written.

    Attributes:
        timeline: The timeline that was claimed.
        adopted: Steps that were whole and undecided, and count now.
        dropped: Steps that were listed and no longer are.
        kept: Steps that are listed now.
    """

    timeline: Timeline
    adopted: list[StepId]
    dropped: list[StepId]
    kept: list[StepId]


def write_start(
    store: ObjectStore,
    *,
    created_at: str,
    drop: Collection[StepId] = (),
    retention: Retention | None = None,
    give_up: bool = False,
    nonce: Callable[[], str] = new_nonce,
) -> OfflineStart:
    """Claim a timeline of a job that is not running, and write its start record; durable on return.

    Args:
        store: The root.
        created_at: RFC 3339, UTC; information only.
        drop: Steps to list no longer.
        retention: Rules that choose what stays besides; None keeps all the rest.
        give_up: Go on where a step is there in part: its agents can no longer finish it.
        nonce: Makes the timeline's nonce.

    Raises:
        NotFoundError: the root holds no job, or no record; or a step to drop is not listed.
        DaemonError: JOB_ALIVE, the job's run answers; NOT_ALLOWED, a step to drop is the latest or pinned, or a step that is
            there in part would be given up.
        FencedError: another process claimed a newer timeline meanwhile; nothing may be taken for done.
        CorruptError: the claim of the newest record's timeline is gone.
        FormatError: the newest record is damaged, or from a newer program.
        StorageError: as the store raised it.
    """
    _refuse(store, drop, give_up=give_up)
    timeline, claim = _claim(store, created_at, nonce)
    newest, adopted = _resolve(store, timeline, created_at)
    pins = [info.key for info in store.list(PINS_PREFIX)]
    origin = adopted[-1][0] if adopted else newest.latest
    _check_drops(drop, newest, pins, order(origin) if origin is not None else None)
    record = start_record(
        timeline=timeline,
        run_id=claim.run_id,
        listed=[ref for ref in newest.listed if order(ref) not in drop],
        adopted=adopted,
        origin=origin,
        rollback=False,
        quarantined=_quarantined(newest),
        retention=retention if retention is not None else Retention(),
        created_at=created_at,
        pins=pins,
    )
    failpoint("offline.before_start_record")
    put_once(store, start_key(timeline), to_bytes(record))
    failpoint("offline.after_start_record")
    _require_highest(list_log(store, after=start_key(timeline)), timeline)
    return _written(timeline, record, newest, adopted)


def _written(timeline: Timeline, record: Record, newest: NewestRecord, adopted: Adopted) -> OfflineStart:
    kept = [order(ref) for ref in record.keeps]
    before = [*map(order, newest.listed), *(order(ref) for ref, _ in adopted)]
    return OfflineStart(
        timeline=timeline,
        adopted=[order(ref) for ref, _ in adopted],
        dropped=[step for step in before if step not in set(kept)],
        kept=kept,
    )


def _refuse(store: ObjectStore, drop: Collection[StepId], *, give_up: bool) -> None:
    """Refuse what can be seen to be wrong before anything is claimed: a claim alone already fences."""
    catalog = read_catalog(store)
    if catalog.newest is None:
        raise NotFoundError.of(f"{store.url} holds no record", hint="the job has never started to the end")
    if catalog.highest is not None and (claim := read_claim(store, catalog.highest)) is not None:
        ranks = living_ranks(claim)
        if ranks:
            raise DaemonError.of(
                f"the job is alive: its coordinator at {claim.endpoint} has {ranks} ranks",
                reason=error_pb2.REASON_JOB_ALIVE,
                hint="end it first; a running job drops steps by its own keep_last and keep_every",
            )
    halves = [step for step in catalog.steps if step.state is StepState.INCOMPLETE]
    if halves and not give_up:
        why = halves[0].why.message if halves[0].why is not None else ""
        raise DaemonError.of(
            why,
            reason=error_pb2.REASON_NOT_ALLOWED,
            hint="its agents may still finish it: wait, start the job, or say --give-up",
            step=halves[0].id.step,
        )
    pins = [info.key for info in store.list(PINS_PREFIX)] if drop else []
    whole = [step.id for step in catalog.steps if step.state is StepState.UNCOMMITTED]
    _check_drops(drop, catalog.newest, pins, None if whole else catalog.latest)


def _check_drops(drop: Collection[StepId], newest: NewestRecord, pins: Sequence[str], latest: StepId | None) -> None:
    listed = {order(ref) for ref in newest.listed}
    pinned = pinned_steps(pins)
    for step in sorted(drop):
        if step not in listed:
            raise NotFoundError.of(f"step {step.step} of {step.timeline} is not listed", step=step.step)
        if step == latest:
            raise DaemonError.of(
                f"step {step.step} is the latest: the one the next start goes on from",
                reason=error_pb2.REASON_NOT_ALLOWED,
                step=step.step,
            )
        if step in pinned:
            raise DaemonError.of(
                f"step {step.step} is pinned",
                reason=error_pb2.REASON_NOT_ALLOWED,
                hint="delete its pin",
                step=step.step,
            )


def _claim(store: ObjectStore, created_at: str, nonce: Callable[[], str]) -> tuple[Timeline, Claim]:
    """R1: take a higher number than any there is, in an object of our own, before history is read."""
    run_id = f"offline-{secrets.token_hex(8)}"
    for _ in range(MAX_TRIES):
        view, newest = read_newest(store)
        if newest is None:
            break
        before = _claim_of(store, newest)
        claim = Claim()
        claim.CopyFrom(before)
        timeline = Timeline(view.next_number(), nonce())
        claim.format_version, claim.timeline, claim.run_id = FORMAT_VERSION, str(timeline), run_id
        claim.created_at = created_at
        claim.ClearField("endpoint")
        claim.ClearField("certificate_sha256")
        failpoint("offline.before_claim")
        put_once(store, claim_key(timeline), claim_bytes(claim))
        failpoint("offline.after_claim")
        if not list_log(store, after=claim_key(timeline)).is_fenced(timeline):
            return timeline, claim
    raise FencedError.of(f"{store.url}: other processes claim timelines without end", hint="is the job being started?")


def _resolve(store: ObjectStore, timeline: Timeline, created_at: str) -> tuple[NewestRecord, Adopted]:
    """R2: the newest record of older timelines, and the whole undecided steps of its timeline."""
    for _ in range(MAX_TRIES):
        failpoint("offline.before_resolve")
        view, newest = read_newest(store, before=timeline, after=claim_key(timeline))
        _require_highest(view, timeline)
        if newest is None:
            break
        found = _adopt(store, view, newest, created_at)
        if found is not None:
            return newest, found
    raise DaemonError.of(
        f"{store.url}: records or indexes vanish while they are read",
        reason=error_pb2.REASON_UNAVAILABLE,
        hint="run it again when no sweep is at work",
    )


def _adopt(store: ObjectStore, view: LogView, newest: NewestRecord, created_at: str) -> Adopted | None:
    """Return the steps to adopt; None when something vanished meanwhile."""
    claim = _claim_of(store, newest)
    last = newest.position[1]
    decided = {step for step, _ in view.decision_keys(newest.timeline) if step > last}
    failpoint("offline.before_candidates")
    indexes = [info.key for info in store.list(INDEX_PREFIX)]
    adopted: Adopted = []
    comparisons = Comparisons.of_history(newest.record, newest.aborted)
    for step, refs in candidates(claim=claim, record=newest.record, index_keys=indexes, aborted=decided):
        try:
            blobs = [store.get(ref.key) for ref in refs]
        except NotFound:
            return None
        listed = [*newest.listed, *(ref for ref, _ in adopted)]
        verdict = adoption(claim, step, refs, blobs, listed, created_at, comparisons)
        if isinstance(verdict, Error):
            comparisons.note_refused(step, verdict)
        else:
            comparisons.note_committed(step, verdict)
            adopted.append((StepRef(step=step, timeline=str(newest.timeline)), verdict))
    return adopted


def _claim_of(store: ObjectStore, newest: NewestRecord) -> Claim:
    claim = read_claim(store, newest.timeline)
    if claim is None:
        key = claim_key(newest.timeline)
        raise CorruptError.of(
            f"{key} is gone, but its timeline has records",
            hint="claims are never deleted by ckptd: restore the object",
            object=key,
        )
    return claim


def _quarantined(newest: NewestRecord) -> list[Quarantined]:
    filled = []
    for entry in newest.record.quarantined:
        made = Quarantined()
        made.CopyFrom(entry)
        if made.step.record_key == newest.key:
            made.step.record_blake3 = newest.digest
        filled.append(made)
    return filled


def _require_highest(view: LogView, timeline: Timeline) -> None:
    if view.is_fenced(timeline):
        raise FencedError.of(
            f"timeline {view.highest_claim()} was claimed after {timeline}",
            hint="the job was started meanwhile: what it lists counts",
        )
