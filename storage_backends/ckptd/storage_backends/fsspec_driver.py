"""Objects in whatever fsspec reaches: S3 through s3fs when chosen, and every protocol without a driver.

Owns the calling of a synchronous fsspec file system so that it keeps the contract: no listing
cache, no shared instance, no repeats of its own, no bucket ever made. Reading its exceptions is
``fsspec_errors``, listing ``fsspec_listing``. Invariant: an object appears whole: by one PUT where the protocol is an object
store, else by renaming a finished temporary file (as atomic as that protocol's rename is).
"""

from __future__ import annotations

import io
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import fsspec
import fsspec.asyn

from .base import (
    RESERVED_FOLDER,
    Buffer,
    Capabilities,
    ObjectInfo,
    ObjectStore,
    PutMode,
    checked_key,
    checked_prefix,
    flat,
)
from .errors import InvalidUrl, NotFound, StorageError, Truncated
from .fsspec_errors import translated
from .fsspec_listing import UNFIT, files_below
from .s3_settings import s3_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["FsspecStore", "open_fsspec"]

_S3 = {"s3", "s3a"}
# Where a put of one object is one request, and a name appears only with all its bytes.
_OBJECT_STORES = _S3 | {"gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "tos", "hf", "memory"}
# Where pipe_file(mode="create") is a condition that the service checks.
_PUT_IF_ABSENT = _S3 | {"gs", "gcs", "az", "abfs", "abfss"}
_MAX_PUT_BYTES = 5 << 30
_CONCURRENCY = 4
_CLOSE_S = 5.0


def open_fsspec(protocol: str, url: str, shown_url: str, options: Mapping[str, str]) -> FsspecStore:
    """Build the driver of one root; sends no request where the protocol allows that.

    Args:
        protocol: The URL's scheme.
        url: The root as fsspec reads it.
        shown_url: The same without secrets.
        options: Arguments of the file system; for S3 also "endpoint_url", "region", "profile".

    Raises:
        InvalidUrl: No such protocol, its package is missing, it refuses the options, or its listings hide errors.
    """
    if protocol in UNFIT:
        raise InvalidUrl(
            f"{protocol}:// is no place for snapshots: {UNFIT[protocol]}",
            url=shown_url,
            hint="use sftp://, s3:// or file://",
        )
    arguments: dict[str, Any] = {
        **options,
        "use_listings_cache": False,
        "skip_instance_cache": True,
    }
    if protocol in _S3:
        arguments.update(_s3_arguments(options))
    try:
        filesystem, root = fsspec.core.url_to_fs(url, **arguments)
    except ImportError as error:
        raise InvalidUrl(
            f"{protocol}:// needs a package that is not installed: {error}",
            url=shown_url,
            hint="install it, or use s3://, gs://, az://, file://",
        ) from error
    except (ValueError, TypeError) as error:
        raise InvalidUrl(f"fsspec cannot open it: {error}", url=shown_url) from error
    except OSError as error:
        raise StorageError(f"fsspec cannot connect: {error}", url=shown_url, retryable=True) from error
    return FsspecStore(filesystem, root, protocol=protocol, url=shown_url)


class FsspecStore(ObjectStore):
    """A root in an fsspec file system; made by `open_fsspec`.

    Args:
        filesystem: A synchronous one, used by this store alone.
        root: Its path of the root.
        protocol: Decides what a put can promise.
        url: For messages, redacted.
    """

    def __init__(self, filesystem: Any, root: str, *, protocol: str, url: str) -> None:
        self.url = url
        self.capabilities = Capabilities(
            put_if_absent=protocol in _PUT_IF_ABSENT,
            remote=protocol != "memory",
            max_put_bytes=_MAX_PUT_BYTES if protocol in _S3 else None,
            concurrency=_CONCURRENCY,
        )
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._protocol = protocol
        self._is_s3 = protocol in _S3
        self._is_object_store = protocol in _OBJECT_STORES
        if self._is_s3:
            # s3fs would repeat a put whose answer was lost and then report our own object as taken.
            self._fs.retries = 1

    def put(self, key: str, data: Buffer, *, mode: PutMode = PutMode.CREATE) -> None:
        """Write one object; on S3 with one PUT."""
        path = self._path(checked_key(key))
        view = flat(data).toreadonly()
        limit = self.capabilities.max_put_bytes
        if limit is not None and len(view) > limit:
            raise StorageError(f"{len(view)} bytes are more than one PUT may carry", key=key, url=self.url)
        creating = mode is PutMode.CREATE and self.capabilities.put_if_absent
        with translated(key, self.url, creating=creating):
            if self._is_s3:
                # A part size beyond every object keeps s3fs from multipart uploads.
                extra = {"mode": "create"} if creating else {}
                self._fs.pipe_file(path, _ViewFile(view), chunksize=_MAX_PUT_BYTES, **extra)
            elif self._is_object_store:
                self._fs.pipe_file(path, view, **({"mode": "create"} if creating else {}))
            else:
                self._put_by_rename(path, view)

    def get(self, key: str) -> bytes:
        """Read a whole object."""
        path = self._path(checked_key(key))
        with translated(key, self.url):
            return bytes(self._fs.cat_file(path))

    def get_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        """Fill the buffer with one ranged read."""
        path = self._path(checked_key(key))
        view = flat(buffer)
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        if not view:
            size = self.head(key).size
            if offset > size:
                raise Truncated(f"the object has only {size} bytes", key=key, url=self.url)
            return
        with translated(key, self.url):
            data = self._fs.cat_file(path, start=offset, end=offset + len(view))
        if len(data) != len(view):
            raise Truncated(f"{len(data)} of {len(view)} bytes came from offset {offset}", key=key, url=self.url)
        view[:] = memoryview(data)

    def head(self, key: str) -> ObjectInfo:
        """Ask for the size."""
        path = self._path(checked_key(key))
        with translated(key, self.url):
            self._fs.invalidate_cache()  # for file systems that cache whatever they are told
            info = self._fs.info(path)
        if info["type"] != "file":
            raise NotFound("no such object", key=key, url=self.url)
        return ObjectInfo(key=key, size=int(info["size"]))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List the folder of the prefix and keep what starts with it."""
        folder = checked_prefix(prefix).rpartition("/")[0]
        with translated(prefix or None, self.url):
            path = self._path(folder) if folder else self._root
            found = files_below(self._fs, self._root, path, protocol=self._protocol)
        start = len(self._root) + 1
        infos = [
            ObjectInfo(key=name[start:], size=size)
            for name, size in found.items()
            if name.startswith(f"{self._root}/{prefix}")
            and not name.startswith(f"{self._root}/{RESERVED_FOLDER}/")
            and not name.endswith("/")
        ]
        return iter(sorted(infos, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Delete one object."""
        path = self._path(checked_key(key))
        with suppress(NotFound), translated(key, self.url):
            self._fs.rm_file(path)

    def close(self) -> None:
        """Close the connections where the file system offers it."""
        creator = getattr(self._fs, "_s3creator", None) if self._is_s3 else None
        if creator is not None:
            # On its own loop: s3fs's way to close takes whatever loop runs in this thread, and leaves sockets open there.
            with suppress(Exception):
                fsspec.asyn.sync(self._fs.loop, creator.__aexit__, None, None, None, timeout=_CLOSE_S)
            self._fs._s3creator = None  # noqa: SLF001 - it has no public way

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _put_by_rename(self, path: str, view: memoryview) -> None:
        temp = self._path(f"{RESERVED_FOLDER}/{secrets.token_hex(12)}")
        self._fs.makedirs(temp.rpartition("/")[0], exist_ok=True)
        try:
            self._fs.pipe_file(temp, view)
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.mv(temp, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temp)
            raise


class _ViewFile(io.RawIOBase):
    """A file that reads from memory without owning a copy, for botocore, which takes no memoryview."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._position = 0

    def __len__(self) -> int:
        return len(self._view)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._view)}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        end = len(self._view) if size is None or size < 0 else self._position + size
        piece = self._view[self._position : end]
        self._position += len(piece)
        return bytes(piece)

    def close(self) -> None:
        # aiohttp closes a body when its request ends; botocore may send it once more on a redirect.
        return


def _s3_arguments(options: Mapping[str, str]) -> dict[str, Any]:
    settings = s3_settings(options)
    arguments: dict[str, Any] = {
        "client_kwargs": {"region_name": settings.region},
        "max_concurrency": 1,
        "config_kwargs": {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": 10,
            "read_timeout": 120,
            "max_pool_connections": 32,
            "s3": {"addressing_style": "path"} if settings.endpoint else {},
            "http_session_cls": _session_without_repeats(),
            # Newer defaults add a checksum trailer that many S3 servers do not know.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
    }
    if settings.endpoint is not None:
        arguments["endpoint_url"] = settings.endpoint
    if settings.ca_bundle is not None:
        arguments["client_kwargs"]["verify"] = settings.ca_bundle
    return {**{name: value for name, value in options.items() if name != "region"}, **arguments}


def _session_without_repeats() -> type[Any]:
    """Make the HTTP session class that sends each request once.

    aiohttp sends a PUT once more by itself when its connection broke: the second then meets the
    first one's object, and our own bytes would be reported as somebody else's.
    """
    from aiobotocore.httpsession import (  # type: ignore[import-untyped] # noqa: PLC0415 - only for S3
        AIOHTTPSession,
    )

    class OnceSession(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            session._retry_connection = False  # noqa: SLF001 - aiohttp has no public switch
            return session

    return OnceSession
