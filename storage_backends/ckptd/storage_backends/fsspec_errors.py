"""What the exceptions of fsspec's file systems mean for a store.

Owns the reading of Python's built-in OSErrors, and of the botocore error that s3fs keeps as
their cause: s3fs itself folds "exists already", "bad range" and "expired" into one EINVAL.
Invariant: only a StorageError leaves the fsspec driver.
"""

from __future__ import annotations

import errno
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .errors import (
    AlreadyExists,
    NoSpace,
    NotFound,
    OutcomeUnknown,
    PermissionDenied,
    StorageError,
    Unavailable,
)
from .http_conditions import Answer, condition

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["is_missing", "translated"]

# Class names, so that neither botocore nor aiohttp is imported for a protocol without them.
# An SSLError is one of the handshake: no request was sent.
_NOT_REACHED = {"ConnectTimeoutError", "ClientConnectorError", "ProxyConnectionError", "gaierror", "SSLError"}
# Of these no repeat mends what the text says; any other failed handshake may be this connection's alone.
_TLS = {"SSLError", "ClientConnectorCertificateError"}
_NO_LANGUAGE = re.compile(r"certificate|WRONG_VERSION_NUMBER", re.IGNORECASE)
_URL = re.compile(r"https?://\S+")
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "SSOTokenLoadError"}
_BROKEN_OFF = {
    "EndpointConnectionError",
    "ConnectionClosedError",
    "ReadTimeoutError",
    "HTTPClientError",
    "IncompleteReadError",
    "ResponseStreamingError",
    "ClientPayloadError",
    "ServerDisconnectedError",
    "ClientOSError",
    "FSTimeoutError",
}
_MISSING = {errno.ENOENT, errno.ENOTDIR}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def translated(key: str | None, url: str, *, creating: bool = False) -> Iterator[None]:
    """Turn any error of the block into a StorageError.

    Args:
        key: The object concerned.
        url: The store, for the message.
        creating: Whether the block is a CREATE put, whose outcome matters.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        raise _condition(error, key, url, creating=creating) from error


def is_missing(error: Exception) -> bool:
    """Whether the file system says that there is no such file or folder, as opposed to that it cannot say."""
    # By number, too: a library's own class of OSError is not turned into Python's.
    is_it = isinstance(error, FileNotFoundError | NotADirectoryError)
    return is_it or (isinstance(error, OSError) and error.errno in _MISSING)


def _condition(error: Exception, key: str | None, url: str, *, creating: bool) -> StorageError:
    response = _service_response(error)
    if response is not None:
        return condition(_answer(response), key=key, url=url, creating=creating)
    names = {kind.__name__ for kind in type(error).__mro__}
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    if names & _NO_CREDENTIALS:
        return PermissionDenied(text, key=key, url=url)
    if names & (_NOT_REACHED | _TLS | _BROKEN_OFF):
        answer = Answer(
            status=None,
            code=None,
            text=text,
            reached=not (names | _cause_of_no_endpoint(error)) & _NOT_REACHED,
            passing=not (names & _TLS and _NO_LANGUAGE.search(_URL.sub("", text))),
        )
        return condition(answer, key=key, url=url, creating=creating)
    if is_missing(error) or isinstance(error, IsADirectoryError):
        return NotFound("no such object", key=key, url=url)
    if isinstance(error, FileExistsError):
        return AlreadyExists("an object of that name is there", key=key, url=url)
    if isinstance(error, NotImplementedError) or (isinstance(error, ValueError) and "read only" in text.lower()):
        return PermissionDenied(text or "not supported", key=key, url=url, hint="the protocol cannot do that")
    if isinstance(error, TimeoutError | ConnectionError):
        return OutcomeUnknown(text, key=key, url=url) if creating else Unavailable(text, key=key, url=url)
    if isinstance(error, OSError) and error.errno in _FULL:
        return NoSpace(text, key=key, url=url)
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno in _FORBIDDEN):
        return PermissionDenied(text, key=key, url=url)
    return StorageError(text, key=key, url=url)


def _cause_of_no_endpoint(error: Exception) -> set[str]:
    """Return the class names of what is behind an EndpointConnectionError, nothing for other errors.

    aiobotocore raises it for a connection that never came about and for one that was reset with the request on its way.
    """
    cause = error.__cause__ or error.__context__
    if type(error).__name__ != "EndpointConnectionError" or cause is None:
        return set()
    return {kind.__name__ for kind in type(cause).__mro__}


def _service_response(error: BaseException | None) -> dict[str, Any] | None:
    """Find the answer that botocore keeps on its ClientError, however deep s3fs wrapped it."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict) and "Error" in response:
            return response
        error = error.__cause__ or error.__context__
    return None


def _answer(response: dict[str, Any]) -> Answer:
    code = response["Error"].get("Code")
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    # botocore puts the bare status there when the answer had no body, as for HEAD.
    is_bare = code is None or code.isdigit()
    return Answer(
        status=status if status is not None else int(code) if is_bare and code else None,
        code=None if is_bare else code,
        text=response["Error"].get("Message", ""),
    )
