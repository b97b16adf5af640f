"""From the URL an operator writes to an open store.

Owns which URLs there are, what is wrong with the others, and which driver serves which. Reads
no configuration: driver, retry policy and options are arguments. Invariant: a URL that is
accepted names exactly one root, on every node the same, and nothing outside it is reachable.
"""

from __future__ import annotations

import difflib
import os
import re
from typing import TYPE_CHECKING, Literal, TypeAlias
from urllib.parse import unquote

from .base import ALLOWED_NAMES, MAX_SEGMENT_BYTES, checked_key
from .errors import InvalidKey, InvalidUrl
from .local import LocalStore
from .memory import MemoryStore
from .probe import probe
from .retrying import RetryingStore, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .base import ObjectStore

__all__ = ["Driver", "open_store", "probe", "redacted"]

Driver: TypeAlias = Literal["auto", "obstore", "fsspec"]

_BUCKET_SCHEMES = {"s3", "gs", "az"}
_OWN_SCHEMES = ("memory", "file", "s3", "gs", "az")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,254}")
_DEFAULT_RETRY = RetryPolicy()


def open_store(
    url: str,
    *,
    driver: Driver = "auto",
    retry: RetryPolicy | None = _DEFAULT_RETRY,
    options: Mapping[str, str] | None = None,
) -> ObjectStore:
    """Open the store of a root; sends no request (call `probe` to find out whether it works).

    - ``memory://name``: this process's memory, shared by name;
    - ``file:///abs/path`` (percent-encoded as in any URL) or a plain absolute path (as it is);
    - ``s3://bucket/prefix``, ``gs://…``, ``az://container/prefix``: through obstore;
    - any other protocol that fsspec knows, and these three with ``driver="fsspec"``.

    Args:
        url: The root.
        driver: "auto" chooses as above.
        retry: How passing failures are hidden; None shows them all.
        options: For the driver, see `open_obstore` and `open_fsspec`. Never put secrets into
            the URL.

    Returns:
        A store that may be used from many threads; close it when done.

    Raises:
        InvalidUrl: The URL, driver or options make no sense; the hint says what would.
    """
    store = _opened(url, driver, dict(options or {}))
    if retry is None or isinstance(store, MemoryStore):
        return store
    return RetryingStore(store, retry)


def _opened(url: str, driver: Driver, options: dict[str, str]) -> ObjectStore:
    if not url or any(ord(character) < 0x20 for character in url):
        raise InvalidUrl(f"{url!r} is no URL", hint="say file:///abs/path or s3://bucket/prefix")
    match = _SCHEME.fullmatch(url)
    if match is None:
        return _local(_absolute(url), driver, options)
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        return _local(_file_path(url, rest), driver, options)
    if scheme == "memory" and driver == "auto":
        if not rest.strip("/"):
            raise InvalidUrl(f"{url!r} has no name", hint="say memory://some-name")
        _refuse_options(url, options)
        return MemoryStore.shared(rest.strip("/"))
    if scheme in _BUCKET_SCHEMES:
        bucket, prefix = _bucket_and_prefix(scheme, rest)
        if driver != "fsspec":
            from .obstore_driver import open_obstore  # noqa: PLC0415 - loads a large library

            return open_obstore(scheme, bucket, prefix, options)
        url = f"{scheme}://{bucket}/{prefix}".rstrip("/")
    if driver == "obstore":
        raise InvalidUrl(f"obstore does not serve {scheme}://", hint='use driver="auto"')
    return _fsspec(scheme, url, rest, options)


def _fsspec(scheme: str, url: str, rest: str, options: dict[str, str]) -> ObjectStore:
    from fsspec.registry import available_protocols  # noqa: PLC0415 - only for other protocols

    known = sorted({*_OWN_SCHEMES, *available_protocols()})
    if scheme not in known:
        near = difflib.get_close_matches(scheme, known, n=1, cutoff=0.5)
        raise InvalidUrl(
            f"unknown scheme {scheme + '://'!r}",
            hint=f"did you mean {near[0]}://?" if near else "use file://, s3://, gs://, az:// or memory://",
        )
    _refuse_dots(rest.split("/"), url)
    from .fsspec_driver import open_fsspec  # noqa: PLC0415 - loads a large library

    return open_fsspec(scheme, url, redacted(url), options)


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        hint = f"say {os.path.abspath(path)}, or a URL such as s3://bucket/prefix"  # noqa: PTH100
        raise InvalidUrl(f"{path!r} is a relative path", hint=hint)
    return path


def _file_path(url: str, rest: str) -> str:
    if not rest.startswith("/"):
        raise InvalidUrl(f"{url!r} names a host or a relative path", hint=f"say file:///{rest}")
    try:
        return unquote(rest, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidUrl(
            f"{url!r} holds percent-encoded bytes that are no UTF-8", hint="encode the path as UTF-8"
        ) from error


def _local(path: str, driver: Driver, options: dict[str, str]) -> LocalStore:
    if driver != "auto":
        raise InvalidUrl(f"driver {driver!r} cannot keep local files durable", url=path, hint='use driver="auto"')
    _refuse_options(path, options)
    _refuse_dots(path.split("/"), path)
    if not path.strip("/"):
        raise InvalidUrl("the root of the file system is no root for objects", hint="name a folder")
    if any(len(os.fsencode(segment)) > MAX_SEGMENT_BYTES for segment in path.split("/")):
        raise InvalidUrl(
            f"a segment of the path has more than {MAX_SEGMENT_BYTES} bytes", url=_short(path), hint=ALLOWED_NAMES
        )
    return LocalStore("/" + path.strip("/"))


def _bucket_and_prefix(scheme: str, rest: str) -> tuple[str, str]:
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket or ":" in bucket:
        raise InvalidUrl(
            "the URL has credentials or a port in it",
            hint="use environment variables or a profile, and AWS_ENDPOINT_URL for the endpoint",
        )
    if not bucket:
        raise InvalidUrl(f"{scheme}:// has no bucket", hint=f"say {scheme}://bucket/prefix")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidUrl(
            f"{bucket!r} is no bucket name",
            hint="3 or more letters, digits, dots and hyphens; percent-encoding is not undone",
        )
    prefix = prefix.removesuffix("/")
    if prefix:
        try:
            checked_key(prefix)
        except InvalidKey as error:
            raise InvalidUrl(
                f"the prefix {_short(prefix)!r} is not allowed: {error.message}", hint=ALLOWED_NAMES
            ) from error
    return bucket, prefix


def _short(name: str) -> str:
    return name if len(name) <= 80 else name[:80] + "…"


def _refuse_dots(segments: list[str], url: str) -> None:
    if ".." in segments:
        raise InvalidUrl("the URL has a '..' segment", url=redacted(url), hint=f"write the path out; {ALLOWED_NAMES}")


def _refuse_options(url: str, options: dict[str, str]) -> None:
    if options:
        raise InvalidUrl(f"unknown options {sorted(options)}", url=url, hint="this store takes none")


def redacted(url: str) -> str:
    """Return the URL without the password or secret that somebody put into it all the same."""
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", url)
