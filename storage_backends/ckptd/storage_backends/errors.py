"""What can go wrong between the caller and the store, cut by condition.

    StorageError(key, url, hint, retryable)
    ├── NotFound           no object of that name
    ├── AlreadyExists      a CREATE put met an object of that name
    ├── InvalidUrl         the root's URL cannot be opened; the hint says what would
    ├── InvalidKey         the key breaks the rules of ``base.checked_key``
    ├── PermissionDenied   the credentials, the file mode or a read-only mount forbid it
    ├── BucketMissing      the bucket or container of the root does not exist
    ├── Truncated          fewer bytes than asked for: the object is shorter, or the answer was cut
    ├── NoSpace            disk or quota is full (``free_bytes``, ``needed_bytes`` where known)
    ├── ClockSkew          the store refuses the signature because this node's clock is wrong (or the request waited too
    │                      long after it was signed: tried again twice)
    ├── Throttled          asked to slow down; nothing was written          (retryable)
    ├── Unavailable        timeout, 5xx, reset: try again later             (retryable)
    └── OutcomeUnknown     a CREATE put whose answer was lost: it may have landed (retryable,
                           but only by who reads back first: ``retrying`` does)
        └── NotDurable     it has landed, and a loss of power may undo that: put it again

Owns the conditions and their texts. Does not decide when to try again: that is ``retrying``,
which asks `is_retryable` and nothing else. Every driver raises these and only these.
"""

# The names are conditions, read as words in `except NotFound:`; a suffix would add nothing.
# ruff: noqa: N818

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AlreadyExists",
    "BucketMissing",
    "ClockSkew",
    "InvalidKey",
    "InvalidUrl",
    "NoSpace",
    "NotDurable",
    "NotFound",
    "OutcomeUnknown",
    "PermissionDenied",
    "StorageError",
    "Throttled",
    "Truncated",
    "Unavailable",
    "is_retryable",
]


class StorageError(Exception):
    """A store operation that did not do what was asked.

    Attributes:
        message: What happened, without key, URL and hint.
        key: The object concerned, relative to the root; None when it is the root itself.
        url: The root, redacted.
        hint: The way out, a sentence; None where there is none to give.
        retryable: Whether the same call may succeed later without anybody's doing.
    """

    default_hint: ClassVar[str | None] = None
    default_retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        url: str | None = None,
        hint: str | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.key = key
        self.url = url
        self.hint = hint if hint is not None else self.default_hint
        self.retryable = self.default_retryable if retryable is None else retryable

    def __str__(self) -> str:
        where = " in ".join(part for part in (self.key and repr(self.key), self.url) if part)
        text = f"{self.message}: {where}" if where else self.message
        return f"{text} ({self.hint})" if self.hint else text


class NotFound(StorageError):
    """There is no object of that name."""


class AlreadyExists(StorageError):
    """A CREATE put met an object of that name; it was left as it is."""


class InvalidUrl(StorageError):
    """The URL names no root that can be opened."""


class InvalidKey(StorageError):
    """The key breaks the naming rules, or collides with a folder of a file store."""


class PermissionDenied(StorageError):
    """The store refuses this caller."""

    default_hint = "check the credentials, the policy or the file modes of the root"


class BucketMissing(StorageError):
    """The bucket or container of the root does not exist; ckptd never makes one."""

    default_hint = "make the bucket first, or correct its name, region or endpoint"


class Truncated(StorageError):
    """The store gave fewer bytes than asked for; retryable when it is known to have more."""


class NoSpace(StorageError):
    """The disk or quota behind the store is full.

    Attributes:
        free_bytes: What is left for this user, where known.
        needed_bytes: What the refused put needed, where known.
    """

    default_hint = "free space under the root, raise the quota, or keep fewer steps"

    def __init__(
        self,
        message: str,
        *,
        free_bytes: int | None = None,
        needed_bytes: int | None = None,
        key: str | None = None,
        url: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, key=key, url=url, hint=hint)
        self.free_bytes = free_bytes
        self.needed_bytes = needed_bytes


class ClockSkew(StorageError):
    """The store refuses signed requests because this node's clock is too far off."""

    default_hint = "set this node's clock (chronyc tracking, timedatectl); S3 allows 15 minutes"


class Throttled(StorageError):
    """The store asks to slow down; nothing was written."""

    default_retryable = True


class Unavailable(StorageError):
    """The store cannot be reached or failed for now: timeout, 5xx, connection reset."""

    default_retryable = True


class OutcomeUnknown(StorageError):
    """A CREATE put's answer was lost: the object may or may not have been written.

    Never repeat such a put blindly: its AlreadyExists could be one's own first attempt. Read
    back and compare, as ``retrying`` does.
    """

    default_retryable = True


class NotDurable(OutcomeUnknown):
    """A CREATE put gave the object its name, and a folder above it could not be synced; the same put again syncs again."""


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed later without anybody's doing."""
    return isinstance(error, StorageError) and error.retryable
