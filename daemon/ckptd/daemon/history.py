"""History as a log of records: what it says, and what may be added to it (rules R1, R2, R4, R5, R8).

Pure: functions of the answers of LIST and GET. Owns: which steps a new timeline may adopt, and what every record must
say. Does not own: reading and writing objects (`log_reader`, the coordinator), the order of the log (`log_view`), what
a record must not contradict (`record_checks`), or what is whole (`coverage`). Invariant: a record that this module
builds lists nothing that the record before it did not list, but for the steps it decides itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import (
    Aborted,
    Claim,
    Committed,
    Decision,
    IndexRef,
    Quarantined,
    Record,
    Retention,
    StartRecord,
    StepRef,
)

from .coverage import LoadedIndex, NotWhole, committed, whole
from .errors import DaemonError
from .index import load_index
from .keys import IndexKey, PinKey, StepId, Timeline, decision_key, parse_key, start_key
from .log_view import LogView, parse_log
from .record_checks import FORMAT_VERSION, check_record
from .records import digest_hex, is_abort, record_key, to_bytes
from .retention import kept

__all__ = [
    "LogView",
    "abort_record",
    "adoption",
    "candidates",
    "committed",
    "decision_record",
    "index_nodes",
    "is_listed",
    "is_record",
    "order",
    "parse_log",
    "pinned_steps",
    "require_base_listed",
    "start_record",
    "step_of",
    "to_bytes",
    "with_digest",
]


def order(ref: StepRef) -> StepId:
    """Return what entries are compared by: (timeline, step)."""
    return StepId.of(ref)


def is_record(record: Record) -> bool:
    """Whether this changes what is listed: start records and commits do, abort markers do not."""
    return not is_abort(record)


def step_of(record: Record) -> int:
    """Return the step a record decides, or -1 for a start record, which stands before every step of its timeline."""
    return record.decision.step if record.WhichOneof("kind") == "decision" else -1


def with_digest(keeps: Sequence[StepRef], key: str, data: bytes) -> list[StepRef]:
    """Return a record's entries with its own digest filled in where they refer to the record itself.

    A record cannot hold its own digest, so entries of steps it decides have none; in every later record they do.

    Args:
        keeps: The record's entries.
        key: The record's key.
        data: The record's stored bytes.
    """
    digest = digest_hex(data)
    filled = []
    for entry in keeps:
        made = StepRef()
        made.CopyFrom(entry)
        if made.record_key == key:
            made.record_blake3 = digest
        filled.append(made)
    return filled


def is_listed(keeps: Iterable[StepRef], ref: StepRef) -> bool:
    """Whether a step stands in a list."""
    wanted = order(ref)
    return any(order(entry) == wanted for entry in keeps)


def pinned_steps(pins: Iterable[str]) -> set[StepId]:
    """Return the steps that these keys pin."""
    return {key.id for key in map(parse_key, pins) if isinstance(key, PinKey)}


# ---------------------------------------------------------------- adoption (R2)


def index_nodes(keys: Iterable[str], timeline: str) -> set[tuple[int, str]]:
    """Return (step, node) for every index of a timeline that a listing shows."""
    found = ((key.id, key.node) for key in map(parse_key, keys) if isinstance(key, IndexKey))
    return {(step.step, node) for step, node in found if str(step.timeline) == timeline}


def candidates(
    *, claim: Claim, record: Record, index_keys: Iterable[str], aborted: Collection[int]
) -> list[tuple[int, list[IndexRef]]]:
    """Return the steps that the next timeline may adopt if they turn out whole, ascending (R2).

    They are of the newest record's own timeline, newer than it, not aborted, and every node of the claim has an index
    there by name. Whatever is of another timeline, or older, is dead for ever.

    Args:
        claim: The claim of the newest record's timeline.
        record: The newest record.
        index_keys: A listing of the indexes, taken after the claim of the new timeline was written.
        aborted: Steps of that timeline, newer than the record, that have a decision: those can only be abort markers.

    Returns:
        For each step its indexes as the listing names them (`bytes` unknown, 0); several of one node where its agent
        restarted.
    """
    by_step: dict[int, list[IndexRef]] = {}
    for key in map(parse_key, index_keys):
        if isinstance(key, IndexKey) and str(key.id.timeline) == record.timeline and key.id.step > step_of(record):
            by_step.setdefault(key.id.step, []).append(IndexRef(node=key.node, key=str(key), blake3=key.digest))
    nodes = {node.node for node in claim.nodes}
    return [
        (step, sorted(refs, key=lambda ref: ref.key))
        for step, refs in sorted(by_step.items())
        if step not in aborted and nodes <= {ref.node for ref in refs}
    ]


def adoption(  # noqa: PLR0917 - the coordinator runs it off its loop, with positional arguments
    claim: Claim,
    step: int,
    refs: Sequence[IndexRef],
    blobs: Sequence[bytes | None],
    listed: Sequence[StepRef],
    created_at: str,
) -> Committed | Error:
    """Say whether a candidate is adopted (R2): whole, and its base still listed.

    Args:
        claim: The claim of the step's timeline.
        step: The step.
        refs: Its indexes, as `candidates` named them.
        blobs: Their bytes, in the same order. One that vanished means that history moved: list again instead.
        listed: What the newest record lists, and what was adopted before this step.
        created_at: RFC 3339, UTC; information only.

    Returns:
        The posthumous commit, or why there is none.
    """
    loaded: dict[str, list[LoadedIndex]] = {}
    damaged: list[Error] = []
    for ref, blob in zip(refs, blobs, strict=True):
        try:
            loaded.setdefault(ref.node, []).append(load_index(ref, blob))
        except DaemonError as wrong:
            damaged.append(wrong.error)
    found = whole(claim, step, loaded)
    if isinstance(found, NotWhole):
        return damaged[0] if damaged else found.error
    try:
        require_base_listed(step, found.base, listed)
    except DaemonError as dropped:
        return dropped.error
    return committed(claim=claim, whole=found, created_at=created_at, posthumous=True)


def require_base_listed(step: int, base: StepRef | None, listed: Iterable[StepRef]) -> None:
    """Refuse a step whose base was dropped (R4): a sweep may have deleted chunks it refers to.

    Raises:
        DaemonError: BASE_DROPPED.
    """
    if base is not None and not is_listed(listed, base):
        raise DaemonError.of(
            f"step {step}: its base, step {base.step} of {base.timeline}, is no longer listed",
            reason=error_pb2.REASON_BASE_DROPPED,
            hint="the next save does not refer to it",
            step=step,
            phase="commit",
        )


# ---------------------------------------------------------------- records


def start_record(
    *,
    timeline: Timeline,
    run_id: str,
    listed: Sequence[StepRef],
    adopted: Sequence[tuple[StepRef, Committed]],
    origin: StepRef | None,
    rollback: bool,
    quarantined: Sequence[Quarantined],
    retention: Retention,
    created_at: str,
    pins: Iterable[str] = (),
) -> Record:
    """Return the start record of a timeline (R2): what it goes on from, and all that stays.

    Args:
        timeline: The claimed timeline.
        run_id: The run's.
        listed: What the newest record lists, digests filled in (`with_digest`); adopted steps may stand there too.
        adopted: Steps this record decides, ascending. They are held in full even where one was found bad meanwhile.
        origin: The step training goes on from; None when it begins from nothing.
        rollback: Nothing newer than `origin` stays.
        quarantined: Everything that was found bad so far; it is not listed.
        retention: The rules that choose what stays (R8).
        created_at: RFC 3339, UTC; information only.
        pins: Keys of the pins that a listing showed just now.

    Raises:
        FormatError: the arguments contradict each other, e.g. `origin` is not listed.
    """
    own_key = start_key(timeline)
    every: dict[StepId, StepRef] = {order(ref): ref for ref in listed}
    for ref, _ in adopted:
        every[order(ref)] = StepRef(step=ref.step, timeline=ref.timeline, record_key=own_key)
    bad = {order(entry.step) for entry in quarantined}
    newest = order(origin) if origin is not None else None
    left = [
        ref
        for step, ref in every.items()
        if step not in bad and not (rollback and newest is not None and step > newest)
    ]
    seen = sorted(pins)
    keeps = kept(left, newest, retention, pinned_steps(seen))
    start = StartRecord(rollback=rollback, run_id=run_id)
    for ref, commit in sorted(adopted, key=lambda pair: order(pair[0])):
        start.adopted.append(Decision(step=ref.step, timeline=ref.timeline, committed=commit))
    if origin is not None:
        getattr(start, "from").CopyFrom(every.get(order(origin), origin))
    record = Record(
        format_version=FORMAT_VERSION,
        timeline=str(timeline),
        start=start,
        keeps=keeps,
        quarantined=quarantined,
        retention=retention,
        pins_seen=[pin for pin in seen if pinned_steps([pin])],
        created_at=created_at,
    )
    check_record(record, record_key(record))
    return record


def decision_record(
    *,
    timeline: Timeline,
    step: int,
    committed: Committed,
    listed: Sequence[StepRef],
    quarantined: Sequence[Quarantined],
    retention: Retention,
    created_at: str,
    pins: Iterable[str] = (),
    also_keep: Iterable[StepRef] = (),
) -> Record:
    """Return the record that commits a step (R4): what stays is a part of what was listed, and the step itself.

    Args:
        timeline: The claimed timeline.
        step: The step, newer than all that is listed.
        committed: What `committed` made of the whole step.
        listed: What this timeline's last record lists, digests filled in (`with_digest`).
        quarantined: As in that record.
        retention: The rules that choose what stays (R8).
        created_at: RFC 3339, UTC; information only.
        pins: Keys of the pins that a listing showed just now.
        also_keep: Bases of steps that are still in flight.

    Raises:
        DaemonError: BASE_DROPPED, the step's base is not listed; INTERNAL, the step is not newer than all that is.
    """
    own = StepId(timeline, step)
    require_base_listed(step, committed.base if committed.HasField("base") else None, listed)
    _require_order(own, listed)
    entry = StepRef(step=step, timeline=str(timeline), record_key=decision_key(timeline, step))
    seen = sorted(pins)
    keeps = kept([*listed, entry], own, retention, pinned_steps(seen), {order(ref) for ref in also_keep})
    record = Record(
        format_version=FORMAT_VERSION,
        timeline=str(timeline),
        decision=Decision(step=step, timeline=str(timeline), committed=committed),
        keeps=keeps,
        quarantined=quarantined,
        retention=retention,
        pins_seen=[pin for pin in seen if pinned_steps([pin])],
        created_at=created_at,
    )
    check_record(record, record_key(record))
    return record


def abort_record(*, timeline: Timeline, step: int, why: Error, created_at: str) -> Record:
    """Return the abort marker of a step (R5). It lists nothing and changes nothing that is listed."""
    record = Record(
        format_version=FORMAT_VERSION,
        timeline=str(timeline),
        decision=Decision(step=step, timeline=str(timeline), aborted=Aborted(why=why)),
        created_at=created_at,
    )
    check_record(record, record_key(record))
    return record


def _require_order(own: StepId, listed: Iterable[StepRef]) -> None:
    """Refuse a commit behind what is committed already (R4): it would be no newest record, and dead at birth."""
    if newer := [step for step in map(order, listed) if step >= own]:
        raise DaemonError.of(
            f"step {own.step}: step {newer[0].step} of {newer[0].timeline} is committed already",
            reason=error_pb2.REASON_INTERNAL,
            hint="steps of a timeline are decided in order, each once",
            step=own.step,
            phase="commit",
        )
