"""What the entries of a record say: the steps it lists and those it quarantines.

Pure. Owns: their order, whether a step is listed, and filling in the digest that a record cannot hold of itself. Does not
own: what a record lists (`history`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptd.protos import error_pb2
from ckptd.protos.snapshot_pb2 import Quarantined, Record, StepRef

from .errors import DaemonError
from .keys import StepId
from .records import digest_hex, is_abort


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


def quarantined_with_digest(record: Record, key: str, data: bytes) -> list[Quarantined]:
    """Return a record's quarantined steps with its own digest filled in, as `with_digest` does for listed ones.

    A posthumous step that was found bad is decided and quarantined by one and the same start record.

    Args:
        record: The record.
        key: Its key.
        data: Its stored bytes.
    """
    filled = with_digest([entry.step for entry in record.quarantined], key, data)
    return [Quarantined(step=step, why=entry.why) for step, entry in zip(filled, record.quarantined, strict=True)]


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
