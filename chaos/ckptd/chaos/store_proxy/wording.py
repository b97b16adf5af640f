"""What S3 calls things: which call a request is, of which key, and the words of an error. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote
from xml.sax.saxutils import escape

from multidict import MultiMapping

from ckptd.storage_backends.fault_script import FaultKind, Op

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_ERRORS = {
    FaultKind.ERROR: (500, "InternalError", "We encountered an internal error. Please try again."),
    FaultKind.SLOW_DOWN: (503, "SlowDown", "Please reduce your request rate."),
    FaultKind.LIMIT: (503, "SlowDown", "Please reduce your request rate."),
    FaultKind.EXPIRED: (403, "ExpiredToken", "The provided token has expired."),
    FaultKind.SKEWED: (
        403,
        "RequestTimeTooSkewed",
        "The difference between the request time and the current time is too large.",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A request as a call of the store.

    Attributes:
        op: Which method; None for what ckptd never sends (no fault strikes it).
        key: In the bucket, with the root's prefix; of a LIST its prefix; of a deletion of many objects empty.
    """

    op: Op | None
    key: str


def call_of(method: str, raw_path: str, query: MultiMapping[str]) -> Call:
    """Say what a request in path style (`/bucket/key`) asks for."""
    _, _, rest = raw_path.partition("?")[0].removeprefix("/").partition("/")
    key = unquote(rest)
    if method == "POST" and "delete" in query:
        return Call(op=Op.DELETE, key="")
    if method == "GET" and not key:
        # Other questions about the bucket have a query too: location, versioning, uploads.
        return Call(op=Op.LIST if "list-type" in query else None, key=query.get("prefix", ""))
    ops = {"PUT": Op.PUT, "GET": Op.GET, "HEAD": Op.HEAD, "DELETE": Op.DELETE}
    return Call(op=ops.get(method) if key else None, key=key)


def refusal(kind: FaultKind, raw_path: str) -> tuple[int, bytes] | None:
    """Return status and XML body of the error that a fault stands for; None if it is none of those."""
    if kind not in _ERRORS:
        return None
    status, code, message = _ERRORS[kind]
    resource = escape(unquote(raw_path.partition("?")[0]))
    text = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message><Resource>{resource}</Resource></Error>"
    )
    return status, text.encode()


def empty_listing(bucket: str, prefix: str) -> bytes:
    """Return the XML of a LIST that found nothing."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<ListBucketResult xmlns="{_NAMESPACE}"><Name>{escape(bucket)}</Name><Prefix>{escape(prefix)}</Prefix>'
        "<KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated></ListBucketResult>"
    ).encode()
