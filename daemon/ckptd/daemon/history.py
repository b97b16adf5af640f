"""History as a log of records: what may be added to it (rules R2, R4, R5, R8).

Pure. Owns: what every record must say. Does not own: the order of the log (`log_view`), what may be adopted
(`adoption`), reading and writing objects (`log_reader`, the coordinator), what a record must not contradict
(`record_checks`), or what is whole (`coverage`). All of these that a coordinator needs can be had from here. Invariant:
a record that this module builds lists nothing that the record before it did not list, but for the steps it decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import (
    Aborted,
    Committed,
    Decision,
    Quarantined,
    Record,
    Retention,
    StartRecord,
    StepRef,
)

from .adoption import adoption, candidates, index_nodes
from .coverage import committed
from .entries import is_listed, is_record, order, quarantined_with_digest, require_base_listed, step_of, with_digest
from .errors import DaemonError
from .keys import PinKey, StepId, Timeline, decision_key, parse_key, start_key
from .log_view import LogView, parse_log
from .record_checks import FORMAT_VERSION, check_record
from .records import record_key, to_bytes
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
    "quarantined_with_digest",
    "require_base_listed",
    "start_record",
    "step_of",
    "to_bytes",
    "with_digest",
]


def pinned_steps(pins: Iterable[str]) -> set[StepId]:
    """Return the steps that these keys pin."""
    return {key.id for key in map(parse_key, pins) if isinstance(key, PinKey)}


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
