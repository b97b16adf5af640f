"""The JSON objects of a root: job.json, claims and records; written, read and checked.

Owns: protobuf's JSON mapping of them and their digests. Does not own: the rules they are checked by
(`record_checks`), which record is the newest, or what follows from it (`history`). Invariant: what `to_bytes` made
passes `parse_*`, and nothing that fails a check is returned; unknown fields are ignored, unknown features and newer
formats are refused.
"""

from __future__ import annotations

import json
from typing import TypeVar

import blake3
from google.protobuf import json_format

from ckptd.protos.limits import MAX_RECORD_BYTES
from ckptd.protos.snapshot_pb2 import Claim, Committed, Decision, Job, Record, StepRef

from .errors import CorruptError, TooLargeError
from .keys import JOB, ClaimKey, DecisionKey, RecordKey, StartKey, StepId, parse_key, parse_record_key
from .record_checks import FORMAT_VERSION, check_claim, check_record, check_version, corrupt, parsed_timeline

__all__ = [
    "FORMAT_VERSION",
    "MAX_RECORD_BYTES",
    "committed_of",
    "decision_of",
    "decisions_of",
    "digest_hex",
    "is_abort",
    "job_bytes",
    "parse_claim",
    "parse_job",
    "parse_record",
    "record_key",
    "to_bytes",
]

M = TypeVar("M", Job, Claim, Record)


def digest_hex(data: bytes | bytearray | memoryview) -> str:
    """Return BLAKE3 of stored bytes, 64 lowercase hex digits, as keys and records carry it."""
    return blake3.blake3(data).hexdigest()


def to_bytes(message: Job | Claim | Record) -> bytes:
    """Return the bytes to store under the object's key, which follows from its content.

    Raises:
        FormatError: a reader would refuse it.
        TooLargeError: a reader would refuse it for its size.
    """
    if isinstance(message, Job):
        _check_job(message)
    elif isinstance(message, Claim):
        check_claim(message, ClaimKey(parsed_timeline(message.timeline, "claim")))
    else:
        check_record(message, record_key(message))
    mapping = json_format.MessageToDict(message, preserving_proto_field_name=True)
    data = (json.dumps(mapping, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
    if len(data) > MAX_RECORD_BYTES:
        raise _too_large(message, len(data))
    return data


def _too_large(message: Job | Claim | Record, nbytes: int) -> TooLargeError:
    what = f"the {type(message).__name__.lower()} to write has {nbytes} bytes, more than the {MAX_RECORD_BYTES} that are read"
    if not isinstance(message, Record):
        return TooLargeError.of(what)
    return TooLargeError.of(
        f"{what}: it lists {len(message.keeps)} steps and {len(message.quarantined)} quarantined ones",
        hint="keep fewer steps: keep_last or keep_every in the retention, or `ckptd retain` while the job does not run",
        object=str(record_key(message)),
        phase="commit",
    )


def job_bytes(name: str, *, created_at: str, version: str) -> bytes:
    """Return job.json of a new root.

    Args:
        name: The user's name of the job.
        created_at: RFC 3339, UTC; information only.
        version: Of ckptd; information only.

    Raises:
        FormatError: the name is empty.
    """
    return to_bytes(Job(format_version=FORMAT_VERSION, job=name, created_at=created_at, ckptd_version=version))


def record_key(record: Record) -> RecordKey:
    """Return the key a record is stored under: it follows from its content."""
    timeline = parsed_timeline(record.timeline, "record")
    if record.WhichOneof("kind") == "decision":
        return DecisionKey(StepId(timeline, record.decision.step))
    return StartKey(timeline)


def parse_job(data: bytes) -> Job:
    """Return job.json.

    Raises:
        FormatError: CORRUPT when it is no such object, FORMAT_UNSUPPORTED when it is of a newer program.
    """
    job = _parse(data, Job, JOB)
    _check_job(job)
    return job


def parse_claim(data: bytes, key: str) -> Claim:
    """Return the claim stored under `key`.

    Raises:
        FormatError: CORRUPT or FORMAT_UNSUPPORTED, see `parse_job`.
    """
    parsed = parse_key(key)
    if not isinstance(parsed, ClaimKey):
        raise corrupt(key, "the key names no claim")
    claim = _parse(data, Claim, key)
    check_claim(claim, parsed)
    return claim


def parse_record(data: bytes, key: str) -> Record:
    """Return the start record, commit decision or abort marker stored under `key`.

    Raises:
        FormatError: CORRUPT or FORMAT_UNSUPPORTED, see `parse_job`.
    """
    parsed = parse_record_key(key)
    if parsed is None:
        raise corrupt(key, "the key names no record")
    record = _parse(data, Record, key)
    check_record(record, parsed)
    return record


def decisions_of(record: Record) -> list[Decision]:
    """Return the decisions a record holds: its own, or those a start record adopted."""
    if record.WhichOneof("kind") == "decision":
        return [record.decision]
    return list(record.start.adopted)


def decision_of(record: Record, step: StepId) -> Decision | None:
    """Return the decision of a step that a record holds, or None."""
    for decision in decisions_of(record):
        if decision.step == step.step and decision.timeline == str(step.timeline):
            return decision
    return None


def committed_of(ref: StepRef, data: bytes | None, *, in_own: bool = False) -> Committed:
    """Return the commit of a listed step from the record that holds it.

    Args:
        ref: The entry, as the newest record lists it.
        data: Bytes under `ref.record_key`; None where there is no such object.
        in_own: The entry stands in that very record, so it can carry no digest of it.

    Raises:
        CorruptError: the record is gone, or its bytes do not have the digest they are listed with.
        FormatError: it holds no commit of this step, or breaks the format.
    """
    step = StepId.of(ref)
    if data is None:
        raise CorruptError.of(
            f"step {step.step}: its record {ref.record_key} is gone", step=step.step, object=ref.record_key
        )
    if not (in_own and ref.record_blake3 == "") and digest_hex(data) != ref.record_blake3:
        raise CorruptError.of(
            f"step {step.step}: {ref.record_key} does not have the digest it is listed with",
            step=step.step,
            object=ref.record_key,
        )
    decision = decision_of(parse_record(data, ref.record_key), step)
    if decision is None or decision.WhichOneof("outcome") != "committed":
        raise corrupt(ref.record_key, f"it does not commit {step}")
    return decision.committed


def is_abort(record: Record) -> bool:
    """Whether this is an abort marker: stored like a decision, but no record of history."""
    return record.WhichOneof("kind") == "decision" and record.decision.WhichOneof("outcome") == "aborted"


def _check_job(job: Job) -> None:
    check_version(job.format_version, job.required_features, JOB)
    if not job.job:
        raise corrupt(JOB, "the job has no name")


def _parse(data: bytes, kind: type[M], where: str) -> M:
    if len(data) > MAX_RECORD_BYTES:
        raise corrupt(where, f"it has {len(data)} bytes, more than {MAX_RECORD_BYTES}")
    try:
        mapping = json.loads(data)
    except (ValueError, RecursionError):
        raise corrupt(where, f"its {len(data)} bytes are not JSON") from None
    if not isinstance(mapping, dict):
        raise corrupt(where, "it is not a JSON object")
    # The version comes first: a newer format may hold what this program cannot even parse.
    version = mapping.get("format_version", mapping.get("formatVersion"))
    if isinstance(version, int) and version > FORMAT_VERSION:
        check_version(version, [], where)
    try:
        return json_format.ParseDict(mapping, kind(), ignore_unknown_fields=True)
    except (json_format.ParseError, RecursionError) as error:
        raise corrupt(where, str(error)) from None
