"""The JSON objects of a root: job.json, claims and records; written, read and checked.

Owns: protobuf's JSON mapping of them and their digests. Does not own: the rules they are checked by
(`record_checks`), which record is the newest, or what follows from it (`history`). Invariant: what `dump_*` wrote
passes `parse_*`, and nothing that fails a check is returned; unknown fields are ignored, unknown features and newer
formats are refused.
"""

from __future__ import annotations

import json
from typing import TypeVar

import blake3
from google.protobuf import json_format

from ckptd.protos.snapshot_pb2 import Claim, Decision, Job, Record

from .keys import JOB, ClaimKey, DecisionKey, RecordKey, StartKey, StepId, parse_key, parse_record_key
from .record_checks import FORMAT_VERSION, check_claim, check_record, check_version, corrupt, parsed_timeline

MAX_RECORD_BYTES = 64 << 20
"""Larger JSON objects are refused before they are parsed; 64 MiB list some 200,000 steps."""

M = TypeVar("M", Job, Claim, Record)


def digest_hex(data: bytes | bytearray | memoryview) -> str:
    """Return BLAKE3 of stored bytes, 64 lowercase hex digits, as keys and records carry it."""
    return blake3.blake3(data).hexdigest()


def dump_job(job: Job) -> bytes:
    """Return the bytes to store as job.json.

    Raises:
        FormatError: a reader would refuse it.
    """
    _check_job(job)
    return _dump(job)


def dump_claim(claim: Claim) -> bytes:
    """Return the bytes to store under the claim's key.

    Raises:
        FormatError: a reader would refuse it.
    """
    check_claim(claim, ClaimKey(parsed_timeline(claim.timeline, "claim")))
    return _dump(claim)


def dump_record(record: Record) -> bytes:
    """Return the bytes to store under the record's key (`record_key`).

    Raises:
        FormatError: a reader would refuse it.
    """
    check_record(record, record_key(record))
    return _dump(record)


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


def is_abort(record: Record) -> bool:
    """Whether this is an abort marker: stored like a decision, but no record of history."""
    return record.WhichOneof("kind") == "decision" and record.decision.WhichOneof("outcome") == "aborted"


def _check_job(job: Job) -> None:
    check_version(job.format_version, job.required_features, JOB)
    if not job.job:
        raise corrupt(JOB, "the job has no name")


def _dump(message: Job | Claim | Record) -> bytes:
    mapping = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return (json.dumps(mapping, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


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
