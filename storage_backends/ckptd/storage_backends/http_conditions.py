"""What an object service's status and error code mean.

Owns the one table from HTTP status and service code (S3, GCS, Azure) to the conditions of
``errors``; the drivers only find the two in what their library raised. Invariant: an error that
is not known to have left the store untouched never says so of a CREATE put: it becomes
OutcomeUnknown.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import (
    AlreadyExists,
    BucketMissing,
    ClockSkew,
    InvalidKey,
    InvalidUrl,
    NoSpace,
    NotFound,
    OutcomeUnknown,
    PermissionDenied,
    StorageError,
    Throttled,
    Truncated,
    Unavailable,
)

__all__ = ["Answer", "condition"]

_CODES: dict[str, type[StorageError]] = {
    "NoSuchBucket": BucketMissing,
    "ContainerNotFound": BucketMissing,
    "ContainerBeingDeleted": BucketMissing,
    "NoSuchKey": NotFound,
    "BlobNotFound": NotFound,
    "PreconditionFailed": AlreadyExists,
    "ConditionNotMet": AlreadyExists,
    "BlobAlreadyExists": AlreadyExists,
    "RequestTimeTooSkewed": ClockSkew,
    "SlowDown": Throttled,
    "Throttling": Throttled,
    "ThrottlingException": Throttled,
    "RequestLimitExceeded": Throttled,
    "TooManyRequests": Throttled,
    "ServerBusy": Throttled,
    "InvalidRange": Truncated,
    "QuotaExceeded": NoSpace,
    "InsufficientStorage": NoSpace,
    "XMinioStorageFull": NoSpace,
    "KeyTooLongError": InvalidKey,
    "InvalidBucketName": InvalidUrl,
}
_PERMISSION_CODES = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthenticationFailed"}
# Temporary credentials ran out between two renewals: the next ones are fetched within a minute.
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_REGION_CODES = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
# Refused because another request on the key is under way; S3 asks to repeat it.
_CONFLICT_CODES = {"ConditionalRequestConflict", "OperationAborted"}
_STATUSES: dict[int, type[StorageError]] = {
    401: PermissionDenied,
    403: PermissionDenied,
    404: NotFound,
    409: AlreadyExists,
    412: AlreadyExists,
    416: Truncated,
    429: Throttled,
    507: NoSpace,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What is known of a failed request.

    Attributes:
        status: HTTP status; None when there was no answer.
        code: The service's error code, e.g. "NoSuchKey"; None when there was none.
        text: The service's or library's words, without URLs.
        reached: False when no connection came about, so that nothing can have been written.
        passing: False when a repeat cannot help: no common language with what answers there.
    """

    status: int | None
    code: str | None
    text: str
    reached: bool = True
    passing: bool = True


def condition(answer: Answer, *, key: str | None, url: str, creating: bool) -> StorageError:
    """Return the error that a failed request stands for.

    Args:
        answer: What is known of it.
        key: The object concerned.
        url: The store, redacted.
        creating: Whether it was a CREATE put, whose outcome matters.
    """
    code, status = answer.code, answer.status
    words = " ".join(str(part) for part in (status, code) if part is not None)
    message = f"{words}: {answer.text}" if words and answer.text else words or answer.text
    if code in _CONFLICT_CODES:
        return Unavailable(message, key=key, url=url, hint="another request on the object is under way")
    if code in _EXPIRED_CODES:
        return PermissionDenied(
            message, key=key, url=url, hint="the credentials expired: renew the login", retryable=True
        )
    if code in _PERMISSION_CODES:
        return PermissionDenied(message, key=key, url=url)
    if code in _REGION_CODES:
        return InvalidUrl(message, key=key, url=url, hint="set AWS_REGION to the bucket's region")
    known = _CODES.get(code or "") or _STATUSES.get(status or 0)
    if known is not None:
        return known(message, key=key, url=url)
    if status == 501:
        hint = 'if the server does not know If-None-Match, set the option "conditional_put" to "disabled"'
        return StorageError(message, key=key, url=url, hint=hint if creating else None)
    if status is not None and (300 <= status < 500 and status != 408):
        return StorageError(message, key=key, url=url)
    if not answer.passing:
        hint = "check the endpoint's scheme (http or https) and its certificate (AWS_CA_BUNDLE)"
        return StorageError(message, key=key, url=url, hint=hint)
    if not answer.reached:
        return Unavailable(message, key=key, url=url, hint="check the endpoint's address and the network")
    if creating:
        return OutcomeUnknown(message, key=key, url=url)
    return Unavailable(message, key=key, url=url)
