"""Reads the newest record of a root, and what it names, from a store.

Owns: the order of requests that makes the answer true (R2, R6). Does not own: what the objects mean (`history`). Writes
nothing. Invariant: the record returned was the newest one at some moment after the call began; a record that vanishes
between LIST and GET was swept because a newer one is there, so the log is listed again. A damaged record is an error and
never skipped: the one before it would bring back what was dropped since. A listing that must be newer than an object is
believed only when it shows that: a store that answers from a cache is found out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ckptd.protos import error_pb2
from ckptd.protos.snapshot_pb2 import Aborted, Claim, Committed, Record, StepRef
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import NotFound

from .errors import DaemonError
from .history import is_record, order, with_digest
from .keys import LOG_PREFIX, StepId, Timeline, claim_key, parse_record_key
from .log_view import MAX_LOOKS, LogView, parse_log, stale_listing
from .record_checks import corrupt
from .records import MAX_RECORD_BYTES, committed_of, digest_hex, parse_claim, parse_record

MAX_TRIES = 64
"""Listings in a row in which the newest record vanished before it was read; each needs a commit and a sweep."""
LOOK_PAUSE_S = 0.5
"""Seconds between two of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestRecord:
    """The newest record: the whole truth about what is restorable.

    Attributes:
        key: Its key.
        record: Its content.
        digest: BLAKE3 (hex) of its stored bytes.
        listed: The steps it lists, ascending, digests filled in.
        aborted: Abort markers newer than it, by step.
    """

    key: str
    record: Record
    digest: str
    listed: list[StepRef]
    aborted: dict[StepId, Aborted]

    @property
    def timeline(self) -> Timeline:
        """Timeline that wrote it."""
        return Timeline.parse(self.record.timeline)

    @property
    def position(self) -> tuple[Timeline, int]:
        """Place in history: what stands before it and is not listed is dead for ever."""
        key = parse_record_key(self.key)
        assert key is not None
        return key.position

    @property
    def latest(self) -> StepRef | None:
        """Return the step a restart goes on from: its own step, or its `from`; never the highest number."""
        if self.record.WhichOneof("kind") == "start" and self.record.start.HasField("from"):
            origin = order(getattr(self.record.start, "from"))
            return next(ref for ref in self.listed if order(ref) == origin)
        return self.listed[-1] if self.listed else None


def list_log(store: ObjectStore, *, after: str | None = None) -> LogView:
    """List the log.

    Args:
        store: The root.
        after: Key of an object of the log that was seen or put before. A listing that is older than that is not believed.

    Raises:
        DaemonError: STORE_FAILED, LIST goes on to show the past.
        StorageError: as the store raised it.
    """
    return _listed_log(store, after)[0]


def _listed_log(store: ObjectStore, after: str | None) -> tuple[LogView, dict[str, int]]:
    for number in range(MAX_LOOKS):
        if number:
            time.sleep(LOOK_PAUSE_S)
        sizes = {info.key: info.size for info in store.list(LOG_PREFIX)}
        view = parse_log(sizes)
        if after is None or view.is_as_new_as(after):
            return view, sizes
    raise DaemonError(stale_listing(after or "", store.url))


def read_newest(
    store: ObjectStore, *, before: Timeline | None = None, after: str | None = None
) -> tuple[LogView, NewestRecord | None]:
    """Return the listing and the newest record, or None where there is no record.

    Args:
        store: The root.
        before: Only records of older timelines, as a resolver needs (R2).
        after: As in `list_log`.

    Raises:
        FormatError: the newest record is damaged, or from a newer program.
        DaemonError: UNAVAILABLE, the store lists records that it does not give; STORE_FAILED as in `list_log`.
        StorageError: as the store raised it.
    """
    for _ in range(MAX_TRIES):
        view, sizes = _listed_log(store, after)
        try:
            return view, _first_record(store, view.record_keys(before), sizes)
        except NotFound:
            continue
    raise DaemonError.of(
        f"{store.url}: the newest record vanished {MAX_TRIES} times between LIST and GET",
        reason=error_pb2.REASON_UNAVAILABLE,
        hint="the store must be strongly consistent; check that nothing else deletes under the root",
    )


def read_committed(store: ObjectStore, newest: NewestRecord, ref: StepRef) -> Committed:
    """Return the commit of a listed or quarantined step, checked against the digest it is listed with.

    Raises:
        CorruptError: the record that holds it is gone or changed.
        FormatError: that record is damaged.
        StorageError: as the store raised it.
    """
    try:
        data: bytes | None = store.get(ref.record_key)
    except NotFound:
        data = None
    return committed_of(ref, data, in_own=ref.record_key == newest.key)


def read_claim(store: ObjectStore, timeline: Timeline) -> Claim | None:
    """Return a timeline's claim, or None where it is gone.

    Raises:
        FormatError: it is damaged.
        StorageError: as the store raised it.
    """
    key = claim_key(timeline)
    try:
        return parse_claim(store.get(key), key)
    except NotFound:
        return None


def _first_record(store: ObjectStore, keys: list[str], sizes: dict[str, int]) -> NewestRecord | None:
    aborted: dict[StepId, Aborted] = {}
    for key in keys:
        if sizes[key] > MAX_RECORD_BYTES:
            raise corrupt(key, f"it has {sizes[key]} bytes, more than {MAX_RECORD_BYTES}")
        data = store.get(key)
        record = parse_record(data, key)
        if is_record(record):
            listed = with_digest(record.keeps, key, data)
            return NewestRecord(key=key, record=record, digest=digest_hex(data), listed=listed, aborted=aborted)
        step = StepId(Timeline.parse(record.timeline), record.decision.step)
        aborted[step] = record.decision.aborted
    return None
