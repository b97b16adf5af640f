"""Errors of the daemon.

    DaemonError            carries an `Error` message, so that it crosses process boundaries whole
    ├── FormatError        bytes at rest do not follow the format (CORRUPT) or are too new (FORMAT_UNSUPPORTED)
    ├── CorruptError       bytes do not have their digest, or an object that is listed is gone
    ├── PlanError          ranks' layouts do not make one snapshot (LAYOUT_MISMATCH, COVERAGE)
    ├── NoSpaceError       shared memory or disk is full
    ├── TooLargeError      an object would be larger than what readers take (NOT_ALLOWED)
    ├── FencedError        a newer timeline has taken over
    └── NotFoundError      no such step, or no step at all

Errors of the store are `ckptd.storage_backends.errors`; `from_storage` turns one into an `Error`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error, Reason


def make_error(
    reason: Reason.ValueType,
    message: str,
    *,
    hint: str = "",
    step: int | None = None,
    rank: int | None = None,
    ranks: Iterable[int] = (),
    node: str = "",
    object: str = "",  # noqa: A002 - the field's name on the wire
    phase: str = "",
) -> Error:
    """Return an `Error` message; `message` is one sentence that says what and where."""
    made = Error(reason=reason, message=message, hint=hint, node=node, object=object, phase=phase, ranks=sorted(ranks))
    if step is not None:
        made.step = step
    if rank is not None:
        made.rank = rank
    return made


class DaemonError(Exception):
    """An error with a stable reason. `error` is what crosses the wire."""

    reason: Reason.ValueType = error_pb2.REASON_INTERNAL

    def __init__(self, error: Error) -> None:
        super().__init__(error.message + (f" ({error.hint})" if error.hint else ""))
        self.error = error

    @classmethod
    def of(
        cls,
        message: str,
        *,
        reason: Reason.ValueType | None = None,
        hint: str = "",
        step: int | None = None,
        rank: int | None = None,
        ranks: Iterable[int] = (),
        node: str = "",
        object: str = "",  # noqa: A002 - the field's name on the wire
        phase: str = "",
    ) -> Self:
        """Return an error of this class with its own reason, or the one given."""
        return cls(
            make_error(
                cls.reason if reason is None else reason,
                message,
                hint=hint,
                step=step,
                rank=rank,
                ranks=ranks,
                node=node,
                object=object,
                phase=phase,
            )
        )


class FormatError(DaemonError):
    """Bytes at rest do not follow the format, or come from a newer program."""

    reason = error_pb2.REASON_CORRUPT


class CorruptError(DaemonError):
    """Bytes do not have the digest they were listed with, or a listed object is gone."""

    reason = error_pb2.REASON_CORRUPT


class PlanError(DaemonError):
    """The ranks' layouts do not make one snapshot."""

    reason = error_pb2.REASON_LAYOUT_MISMATCH


class NoSpaceError(DaemonError):
    """Shared memory or disk is full."""

    reason = error_pb2.REASON_NO_SPACE


class TooLargeError(DaemonError):
    """An object would be larger than what readers take: it is not written."""

    reason = error_pb2.REASON_NOT_ALLOWED


class FencedError(DaemonError):
    """A newer timeline has taken the job over: this process must not write any more."""

    reason = error_pb2.REASON_FENCED


class NotFoundError(DaemonError):
    """There is no such step, or no step at all."""

    reason = error_pb2.REASON_NOT_FOUND
