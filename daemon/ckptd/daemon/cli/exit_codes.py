"""Exit codes of every verb, and which error ends in which.

Owns: the table of docs/cli.md. Numbers are stable: scripts and schedulers act on them.
"""

from __future__ import annotations

from enum import IntEnum

from ckptd.daemon.errors import DaemonError
from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Reason
from ckptd.storage_backends import errors as storage


class ExitCode(IntEnum):
    """What a verb's exit says."""

    GOOD = 0
    UNEXPECTED = 1
    """A bug, or something nobody foresaw; a traceback is on stderr."""
    USAGE = 2
    INCOMPLETE = 3
    """The step is there in part, or whole but not committed."""
    CORRUPT = 4
    """Bytes are not what they were when they were written, or an object that is listed is gone."""
    NOT_FOUND = 5
    """No such root, job or step."""
    UNAVAILABLE = 6
    """The store or an agent cannot be reached, or refuses; try again, or see to credentials."""
    FENCED = 7
    """A newer run has taken over: do not start this one again."""
    UNKNOWN_OUTCOME = 8
    """It may have happened or not: ask before repeating."""
    DIFFERENT = 9
    """Two steps were compared and are not equal."""


_BY_REASON: dict[Reason.ValueType, ExitCode] = {
    error_pb2.REASON_INVALID_ARGUMENT: ExitCode.USAGE,
    error_pb2.REASON_INVALID_ROOT: ExitCode.USAGE,
    error_pb2.REASON_INVALID_STEP: ExitCode.USAGE,
    error_pb2.REASON_NOT_ALLOWED: ExitCode.USAGE,
    error_pb2.REASON_JOB_MISMATCH: ExitCode.USAGE,
    error_pb2.REASON_RANKS_MISSING: ExitCode.INCOMPLETE,
    error_pb2.REASON_ABORTED: ExitCode.INCOMPLETE,
    error_pb2.REASON_CORRUPT: ExitCode.CORRUPT,
    error_pb2.REASON_FORMAT_UNSUPPORTED: ExitCode.CORRUPT,
    error_pb2.REASON_NOT_FOUND: ExitCode.NOT_FOUND,
    error_pb2.REASON_UNAVAILABLE: ExitCode.UNAVAILABLE,
    error_pb2.REASON_DEADLINE_EXCEEDED: ExitCode.UNAVAILABLE,
    error_pb2.REASON_PERMISSION_DENIED: ExitCode.UNAVAILABLE,
    error_pb2.REASON_STORE_FAILED: ExitCode.UNAVAILABLE,
    error_pb2.REASON_NO_SPACE: ExitCode.UNAVAILABLE,
    error_pb2.REASON_JOB_ALIVE: ExitCode.UNAVAILABLE,
    error_pb2.REASON_FENCED: ExitCode.FENCED,
    error_pb2.REASON_OUTCOME_UNKNOWN: ExitCode.UNKNOWN_OUTCOME,
}


def code_of(error: DaemonError | storage.StorageError) -> ExitCode:
    """Return the exit code an error ends in."""
    if isinstance(error, DaemonError):
        return _BY_REASON.get(error.error.reason, ExitCode.UNEXPECTED)
    if isinstance(error, storage.InvalidUrl | storage.InvalidKey):
        return ExitCode.USAGE
    if isinstance(error, storage.NotFound | storage.BucketMissing):
        return ExitCode.NOT_FOUND
    if isinstance(error, storage.Truncated):
        return ExitCode.CORRUPT
    if isinstance(error, storage.OutcomeUnknown):
        return ExitCode.UNKNOWN_OUTCOME
    return ExitCode.UNAVAILABLE
