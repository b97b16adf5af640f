"""Errors of the client, cut by what the caller does next.

    CkptdError              has reason, message, hint, step, rank, key; itself only for a bug in ckptd
    ├── InvalidRequest      fix the call: repeating it will not help
    ├── Unavailable         this snapshot is lost or late; training may go on
    ├── Aborted             the step did not commit; training may go on
    ├── Fenced              a newer run has taken the job over: exit, do not restart
    ├── SnapshotNotFound    there is no such step, or no step at all
    ├── SnapshotCorrupt     its bytes are not what was saved: choose an older step
    └── OutcomeUnknown      ask what happened before repeating

Owns: the classes and how they map to and from the wire's `Error`. Invariant: a reason always gives the same class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error, Reason

__all__ = [
    "Aborted",
    "CkptdError",
    "Fenced",
    "InvalidRequest",
    "OutcomeUnknown",
    "SnapshotCorrupt",
    "SnapshotNotFound",
    "Unavailable",
    "from_wire",
]


class CkptdError(Exception):
    """What every error of the client is.

    Attributes:
        reason: Stable number of `error.proto`; `reason_name` is its name.
        message: One sentence: what, where. Free text.
        hint: The way out, or "".
        step: Step concerned, or None.
        rank: Rank concerned, or None.
        ranks: Ranks concerned where several are, ascending.
        key: Tensor or object name, store key or file concerned, or "".
        node: Node concerned (its agent's uuid), or "".
        phase: Phase of the work ("begin", "stage", "upload", "commit", "restore", ...), or "".
    """

    default_reason: Reason.ValueType = error_pb2.REASON_INTERNAL

    def __init__(
        self,
        message: str,
        *,
        reason: Reason.ValueType | None = None,
        hint: str = "",
        step: int | None = None,
        rank: int | None = None,
        ranks: Iterable[int] = (),
        key: str = "",
        node: str = "",
        phase: str = "",
    ) -> None:
        super().__init__(message)
        self.reason: Reason.ValueType = self.default_reason if reason is None else reason
        self.message = message
        self.hint = hint
        self.step = step
        self.rank = rank
        self.ranks = tuple(sorted(ranks))
        self.key = key
        self.node = node
        self.phase = phase

    @property
    def reason_name(self) -> str:
        """The reason's name without "REASON_", e.g. "RANKS_MISSING"."""
        try:
            return Reason.Name(self.reason).removeprefix("REASON_")
        except ValueError:  # a newer agent knows a reason that this client does not
            return f"REASON_{int(self.reason)}"

    def __str__(self) -> str:
        where = [f"step {self.step}"] if self.step is not None else []
        where += [f"rank {self.rank}"] if self.rank is not None else []
        where += [f"phase {self.phase}"] if self.phase else []
        text = f"{self.message} [{', '.join([self.reason_name, *where])}]"
        return f"{text}\n  hint: {self.hint}" if self.hint else text

    @classmethod
    def like(cls, error: CkptdError, message: str | None = None) -> Self:
        """Return an error of this class with everything that `error` says, or another message."""
        return cls(
            error.message if message is None else message,
            reason=error.reason,
            hint=error.hint,
            step=error.step,
            rank=error.rank,
            ranks=error.ranks,
            key=error.key,
            node=error.node,
            phase=error.phase,
        )

    def to_wire(self) -> Error:
        """Return the message that carries this error to an agent."""
        made = Error(
            reason=self.reason,
            message=_writable(self.message),
            hint=_writable(self.hint),
            node=self.node,
            object=_writable(self.key),
            phase=self.phase,
            ranks=self.ranks,
        )
        if self.step is not None:
            made.step = self.step
        if self.rank is not None:
            made.rank = self.rank
        return made


def _writable(text: str) -> str:
    """Return the text as UTF-8 can hold it: names of things may be what no message can say."""
    return text.encode("utf-8", "backslashreplace").decode()


class InvalidRequest(CkptdError):  # noqa: N818 - named by the reaction
    """The call is wrong: fix it, repeating it will not help."""

    default_reason = error_pb2.REASON_INVALID_ARGUMENT


class Unavailable(CkptdError):  # noqa: N818 - named by the reaction
    """This snapshot is lost or late; training may go on."""

    default_reason = error_pb2.REASON_UNAVAILABLE


class Aborted(CkptdError):  # noqa: N818 - named by the reaction
    """The step did not commit; training may go on."""

    default_reason = error_pb2.REASON_ABORTED


class Fenced(CkptdError):  # noqa: N818 - named by the reaction
    """A newer timeline has taken the job over: this process must exit and not be restarted.

    Source: docs/cli.md; scripts that end with `sys.exit(Fenced.exit_code)` tell their launcher so.
    """

    default_reason = error_pb2.REASON_FENCED
    exit_code = 7


class SnapshotNotFound(CkptdError):  # noqa: N818 - named by the reaction
    """There is no such step, or no step at all."""

    default_reason = error_pb2.REASON_NOT_FOUND


class SnapshotCorrupt(CkptdError):  # noqa: N818 - named by the reaction
    """Bytes of the step are not what was saved: choose an older step."""

    default_reason = error_pb2.REASON_CORRUPT


class OutcomeUnknown(CkptdError):  # noqa: N818 - named by the reaction
    """It is not known whether it happened: ask before repeating."""

    default_reason = error_pb2.REASON_OUTCOME_UNKNOWN


_CLASSES: dict[int, type[CkptdError]] = {
    error_pb2.REASON_INVALID_ARGUMENT: InvalidRequest,
    error_pb2.REASON_INVALID_ROOT: InvalidRequest,
    error_pb2.REASON_JOB_MISMATCH: InvalidRequest,
    error_pb2.REASON_JOB_ALIVE: InvalidRequest,
    error_pb2.REASON_INVALID_STEP: InvalidRequest,
    error_pb2.REASON_RANKS_DISAGREE: InvalidRequest,
    error_pb2.REASON_LAYOUT_MISMATCH: InvalidRequest,
    error_pb2.REASON_VERSION_MISMATCH: InvalidRequest,
    error_pb2.REASON_FORMAT_UNSUPPORTED: InvalidRequest,
    error_pb2.REASON_NOT_ALLOWED: InvalidRequest,
    error_pb2.REASON_PERMISSION_DENIED: InvalidRequest,
    error_pb2.REASON_UNAVAILABLE: Unavailable,
    error_pb2.REASON_DEADLINE_EXCEEDED: Unavailable,
    error_pb2.REASON_RANKS_MISSING: Unavailable,
    error_pb2.REASON_RANK_FAILED: Aborted,
    error_pb2.REASON_NODE_LOST: Aborted,
    error_pb2.REASON_NO_SPACE: Unavailable,
    error_pb2.REASON_BASE_DROPPED: Aborted,
    error_pb2.REASON_STORE_FAILED: Aborted,
    error_pb2.REASON_REPLICAS_DIFFER: Aborted,
    # Every later save would fail alike, and only the caller can say what is a piece of what.
    error_pb2.REASON_COVERAGE: InvalidRequest,
    error_pb2.REASON_BUSY: Aborted,
    error_pb2.REASON_ABORTED: Aborted,
    error_pb2.REASON_NOT_COMPARED: Aborted,
    error_pb2.REASON_FENCED: Fenced,
    error_pb2.REASON_NOT_FOUND: SnapshotNotFound,
    error_pb2.REASON_CORRUPT: SnapshotCorrupt,
    error_pb2.REASON_OUTCOME_UNKNOWN: OutcomeUnknown,
}


def from_wire(error: Error) -> CkptdError:
    """Return the error that a message from an agent stands for; an unknown reason gives the base class."""
    return _CLASSES.get(error.reason, CkptdError)(
        error.message or "the agent reported an error without a message",
        reason=error.reason or error_pb2.REASON_INTERNAL,
        hint=error.hint,
        step=error.step if error.HasField("step") else None,
        rank=error.rank if error.HasField("rank") else None,
        ranks=error.ranks,
        key=error.object,
        node=error.node,
        phase=error.phase,
    )
