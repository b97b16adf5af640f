"""Objects in S3, Google Cloud Storage or Azure Blob Storage, through obstore.

Owns the building of the client and the translation of its errors. Leaves trying again to
``retrying``: obstore's own retries are off, because one of its repeats after a lost answer would
turn our own object into AlreadyExists. Invariant: an object is one PUT of the caller's buffer,
never a multipart upload, so nobody ever sees or pays for a part of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import obstore
import obstore.exceptions
import obstore.store

from .base import Buffer, Capabilities, ObjectInfo, ObjectStore, PutMode, checked_key, checked_prefix, flat
from .errors import InvalidKey, InvalidUrl, NotFound, PermissionDenied, StorageError, Truncated, is_retryable
from .http_conditions import Answer, condition
from .s3_settings import S3Credentials, s3_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["ObstoreStore", "open_obstore"]

_Client: TypeAlias = "obstore.store.S3Store | obstore.store.GCSStore | obstore.store.AzureStore"

# Ranged reads of this size ran at 2.2-2.6 GB/s, of 64 MiB at 1.4: the answer lands in fresh memory.
_PIECE_BYTES = 16 << 20
_CONCURRENCY = 8
# A request up to this size is control traffic and gets the short deadline.
_SMALL_BYTES = 1 << 20
_CONNECT_TIMEOUT = timedelta(seconds=10)
_SMALL_TIMEOUT = timedelta(seconds=30)
_BULK_TIMEOUT = timedelta(seconds=120)
_LIST_PAGE = 1000

_MAX_PUT_BYTES = {"s3": 5 << 30, "gs": 5 << 40, "az": 5000 << 20}
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_WHERE = re.compile(r"(Error performing \w+) \S+ in \S+ - |\?\S+")
# Not "kind: ConnectionReset": that ends a connection which stood, and the request may have been served on it.
_NEVER_CONNECTED = re.compile(r"kind: Connect\b")
# What no repeat mends; a record that cannot be opened, or an alert, may be this connection's alone.
_NO_LANGUAGE = re.compile(r"certificate|InvalidContentType", re.IGNORECASE)
_URL = re.compile(r"https?://\S+")
_OWN_OPTIONS = {"endpoint_url", "profile", "small_timeout_s", "bulk_timeout_s", "conditional_put"}


def open_obstore(scheme: str, bucket: str, prefix: str, options: Mapping[str, str]) -> ObstoreStore:
    """Build the driver of one root; sends no request.

    Args:
        scheme: "s3", "gs" or "az".
        bucket: Bucket or container.
        prefix: Folder of the root in it, "" for the whole bucket.
        options: For S3 "endpoint_url", "region" and "profile"; for all "small_timeout_s",
            "bulk_timeout_s" and "conditional_put" ("disabled" where the server knows no
            If-None-Match); anything else is a configuration key of obstore.

    Raises:
        InvalidUrl: An option is unknown or makes no sense.
    """
    url = f"{scheme}://{bucket}/{prefix}".rstrip("/")
    try:
        small = _timeout(options, "small_timeout_s", _SMALL_TIMEOUT)
        bulk = _timeout(options, "bulk_timeout_s", _BULK_TIMEOUT)
        build = _builder(scheme, bucket, prefix, options)
        return ObstoreStore(
            url,
            small=build(small),
            bulk=build(bulk),
            max_put_bytes=_MAX_PUT_BYTES[scheme],
            put_if_absent=options.get("conditional_put") != "disabled",
        )
    except obstore.exceptions.UnknownConfigurationKeyError as error:
        raise InvalidUrl(f"unknown option: {_plain(error)}", url=url, hint="correct the options") from error
    except (obstore.exceptions.BaseError, ValueError, TypeError) as error:
        raise InvalidUrl(f"the store cannot be set up: {_plain(error)}", url=url) from error


class ObstoreStore(ObjectStore):
    """A root in a bucket; made by `open_obstore`.

    Args:
        url: For messages, redacted.
        small: Client with the short deadline.
        bulk: Client with the long deadline.
        max_put_bytes: Largest object of one PUT.
        put_if_absent: False sends a CREATE put without its condition.
    """

    def __init__(
        self, url: str, *, small: _Client, bulk: _Client, max_put_bytes: int, put_if_absent: bool = True
    ) -> None:
        self.url = url
        self.capabilities = Capabilities(
            put_if_absent=put_if_absent, remote=True, max_put_bytes=max_put_bytes, concurrency=_CONCURRENCY
        )
        self._small = small
        self._bulk = bulk
        self._max_put_bytes = max_put_bytes
        self._pool = ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="ckptd-get")

    def put(self, key: str, data: Buffer, *, mode: PutMode = PutMode.CREATE) -> None:
        """Write one object with one PUT straight from the buffer."""
        checked_key(key)
        view = flat(data)
        if len(view) > self._max_put_bytes:
            raise StorageError(
                f"{len(view)} bytes are more than one PUT may carry ({self._max_put_bytes})",
                key=key,
                url=self.url,
                hint="use smaller chunks",
            )
        creating = mode is PutMode.CREATE and self.capabilities.put_if_absent
        client = self._small if len(view) <= _SMALL_BYTES else self._bulk
        with self._translated(key, creating=creating):
            obstore.put(client, key, view, mode="create" if creating else "overwrite", use_multipart=False)

    def get(self, key: str) -> bytes:
        """Read a whole object."""
        checked_key(key)
        with self._translated(key):
            result = obstore.get(self._bulk, key)
            size = result.meta["size"]
            data = bytes(result.bytes())
        if len(data) != size:
            raise Truncated(f"{len(data)} of {size} bytes came", key=key, url=self.url, retryable=True)
        return data

    def get_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        """Fill the buffer with ranged reads, several at once when it is large."""
        checked_key(key)
        view = flat(buffer)
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        if not view:
            size = self.head(key).size
            if offset > size:
                raise Truncated(f"the object has only {size} bytes", key=key, url=self.url)
            return
        starts = range(0, len(view), _PIECE_BYTES)
        if len(starts) == 1:
            self._get_piece(key, view, offset)
            return
        pieces = [
            self._pool.submit(self._get_piece, key, view[start : start + _PIECE_BYTES], offset + start)
            for start in starts
        ]
        # Waits for all, also after a failure: none may write into a buffer already given back.
        failures = [failure for piece in pieces if (failure := piece.exception()) is not None]
        if failures:
            # A permanent failure says more than a passing one of its neighbour.
            raise min(failures, key=is_retryable)

    def head(self, key: str) -> ObjectInfo:
        """Ask for the size."""
        checked_key(key)
        with self._translated(key):
            return ObjectInfo(key=key, size=obstore.head(self._small, key)["size"])

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List the folder of the prefix, page by page, and keep what starts with it.

        A prefix that ends with '/' costs least: obstore lists whole folders only. Sorted here,
        since not every service does (S3 Express, SeaweedFS).
        """
        folder = checked_prefix(prefix).rpartition("/")[0]
        with self._translated(prefix or None):
            found = [
                ObjectInfo(key=entry["path"], size=entry["size"])
                for page in obstore.list(self._small, folder or None, chunk_size=_LIST_PAGE)
                for entry in page
                if entry["path"].startswith(prefix)
            ]
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Delete one object."""
        checked_key(key)
        try:
            with self._translated(key):
                obstore.delete(self._small, key)
        except NotFound:
            return  # GCS and Azure say so

    def close(self) -> None:
        """End the reading threads; connections go with the clients."""
        self._pool.shutdown()

    def _get_piece(self, key: str, view: memoryview, start: int) -> None:
        with self._translated(key):
            piece = obstore.get_range(self._bulk, key, start=start, end=start + len(view))
        if len(piece) != len(view):
            raise Truncated(f"{len(piece)} of {len(view)} bytes came from offset {start}", key=key, url=self.url)
        view[:] = memoryview(piece)

    @contextmanager
    def _translated(self, key: str | None, *, creating: bool = False) -> Iterator[None]:
        try:
            yield
        except obstore.exceptions.InvalidPathError as error:
            raise InvalidKey(_plain(error), key=key, url=self.url) from error
        except obstore.exceptions.UnauthenticatedError as error:
            raise PermissionDenied(_plain(error), key=key, url=self.url) from error
        except (obstore.exceptions.BaseError, FileNotFoundError) as error:
            raise condition(_answer(error), key=key, url=self.url, creating=creating) from error


def _builder(scheme: str, bucket: str, prefix: str, options: Mapping[str, str]) -> Callable[[timedelta], _Client]:
    further: dict[str, Any] = {name: value for name, value in options.items() if name not in _OWN_OPTIONS}
    common: dict[str, Any] = {"prefix": prefix or None, "retry_config": {"max_retries": 0}}
    client: dict[str, Any] = {"connect_timeout": _CONNECT_TIMEOUT}

    def within(timeout: timedelta) -> Any:
        return {**client, "timeout": timeout}

    if scheme == "gs":
        return lambda timeout: obstore.store.GCSStore(bucket, client_options=within(timeout), **common, **further)
    if scheme == "az":
        return lambda timeout: obstore.store.AzureStore(bucket, client_options=within(timeout), **common, **further)
    settings = s3_settings(options)
    if settings.endpoint is not None:
        further["endpoint"] = settings.endpoint
        client["allow_http"] = settings.endpoint.startswith("http://")
    if settings.ca_bundle is not None:
        client["root_certificate"] = Path(settings.ca_bundle).read_bytes()
    further.setdefault("region", settings.region)
    # The bytes are digest-checked by whoever reads them, and signing them costs 0.6 CPU s/GB.
    further.setdefault("unsigned_payload", True)
    further.setdefault("disable_bulk_delete", True)
    if "access_key_id" not in further and "skip_signature" not in further:
        further["credential_provider"] = S3Credentials(settings.profile)
    return lambda timeout: obstore.store.S3Store(bucket, client_options=within(timeout), **common, **further)


def _timeout(options: Mapping[str, str], name: str, default: timedelta) -> timedelta:
    if name not in options:
        return default
    seconds = float(options[name])
    if not 0 < seconds <= 3600:
        raise ValueError(f"{name} is {options[name]}, not between 0 and 3600 seconds")
    return timedelta(seconds=seconds)


def _answer(error: Exception) -> Answer:
    """Find status, code and kind in obstore's text: it keeps them nowhere else."""
    text, _, detail = str(error).partition("\n\nDebug source")
    detail = _URL.sub("", detail)  # names of buckets and objects are no words of an error
    status = _STATUS.search(text)
    code = _CODE.search(text)
    message = _MESSAGE.search(text)
    if status is not None:
        return Answer(status=int(status[1]), code=code[1] if code else None, text=message[1] if message else "")
    if "BareRedirect" in detail:
        return Answer(status=None, code="PermanentRedirect", text=_plain(error))
    reason = "timed out" if "kind: Timeout" in detail else _reason(detail) or _plain(error)
    return Answer(
        status=None,
        code=None,
        text=reason,
        reached=_NEVER_CONNECTED.search(detail) is None,
        passing=_NO_LANGUAGE.search(detail) is None,
    )


def _reason(detail: str) -> str:
    # The innermost words of the chain say most: "Connection refused", "IncompleteMessage".
    found = re.findall(r'message: "([^"]+)"|"([^"]+ error)"|^\s+([A-Z]\w+),$', detail, re.MULTILINE)
    return ", ".join(dict.fromkeys(part for groups in found for part in groups if part and part != "Connect"))


def _plain(error: BaseException) -> str:
    first = str(error).partition("\n")[0]
    return _WHERE.sub(lambda match: f"{match[1]}: " if match[1] else "", first)
