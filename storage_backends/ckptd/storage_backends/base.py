"""The contract between ckptd and whatever keeps its objects.

Owns the words (object, key, root, put mode) and the promises a driver makes. Knows no rank,
no step and no network: objects go in, objects come out. A driver that passes ``conformance``
keeps this contract.

Invariant: an object is seen whole or not at all, and a put that returned is durable and is
seen by every later get, head and list of every process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Self, TypeAlias

from .errors import InvalidKey

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "ALLOWED_NAMES",
    "MAX_KEY_BYTES",
    "RESERVED_FOLDER",
    "Buffer",
    "Capabilities",
    "ObjectInfo",
    "ObjectStore",
    "PutMode",
    "checked_key",
    "checked_prefix",
    "flat",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

# S3 allows 1024 bytes for root prefix and key together; this leaves 124 to the root.
MAX_KEY_BYTES = 900
# The longest name of one folder or file on every common file system. Held for all stores, so
# that a root can be copied from a bucket to a disk by any tool.
MAX_SEGMENT_BYTES = 255
# Where file stores write before an object gets its name; never a key, never listed.
RESERVED_FOLDER = ".ckptd-tmp"
ALLOWED_NAMES = (
    f"allowed are segments of 1 to {MAX_SEGMENT_BYTES} bytes of UTF-8 with single '/' between, {MAX_KEY_BYTES} bytes in all, "
    "no '.' or '..' segment, no control character, no backslash"
)
"""What `checked_key` allows, for errors."""


class PutMode(StrEnum):
    """What a put does when an object of that name is there already."""

    CREATE = "create"
    """Leave it and raise AlreadyExists; of several at once exactly one wins (where the store can)."""
    OVERWRITE = "overwrite"
    """Replace it; readers see the old object or the new one, never a mixture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """One object as the store lists it.

    Attributes:
        key: Name relative to the root, '/'-separated.
        size: Bytes.
    """

    key: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a store can do beyond the least that ckptd needs.

    Attributes:
        put_if_absent: Whether PutMode.CREATE is enforced by the store itself. Where False a
            CREATE put is a plain put: names must be unique by construction.
        remote: Whether requests cross a network, so that latency and retries matter.
        max_put_bytes: Largest object of a single put; None when only the disk limits it.
        concurrency: Requests in flight that a sensible caller keeps (more gives no more speed).
    """

    put_if_absent: bool
    remote: bool
    max_put_bytes: int | None
    concurrency: int


class ObjectStore(ABC):
    """Named, immutable-by-habit byte objects under one root.

    All methods are synchronous, block until done or failed, and may be called from many threads
    at once. Keys are relative to the root and '/'-separated; `checked_key` says which are
    allowed. No key may be a folder of another ("a" and "a/b"): file stores cannot hold both and
    refuse the second with InvalidKey. Nothing outside the root is ever read, written or listed.

    Every method raises the conditions of ``errors`` and nothing else. Any may raise
    PermissionDenied, BucketMissing, ClockSkew, Throttled and Unavailable besides those it names.

    Attributes:
        url: The root, without credentials, for messages.
        capabilities: What this store can do.
    """

    url: str
    capabilities: Capabilities

    @abstractmethod
    def put(self, key: str, data: Buffer, *, mode: PutMode = PutMode.CREATE) -> None:
        """Write one object.

        Atomic: nobody ever sees a part of it. Durable on return: it survives the loss of this
        process and, for file stores, of power (the file and every folder up to the root were
        fsynced). ``data`` must be contiguous, is not copied by Python code, and must not change
        until the call returns.

        Raises:
            AlreadyExists: With CREATE, an object of that name was there.
            OutcomeUnknown: With CREATE, the answer was lost: it may have landed.
            InvalidKey: The key is not allowed.
            NoSpace: Disk or quota is full; nothing was written.
        """

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Read a whole small object into fresh memory; for large ones use `get_into`.

        Raises:
            NotFound: There is none.
            Truncated: The answer was cut.
        """

    @abstractmethod
    def get_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        """Fill the whole buffer with the object's bytes from ``offset`` on, or raise.

        After an error the buffer's content is undefined. An empty buffer only asks whether the
        object is there and reaches to ``offset``.

        Args:
            key: The object.
            buffer: Writable, contiguous; its length in bytes says how much is read.
            offset: First byte of the object, counted from 0.

        Raises:
            NotFound: There is none.
            Truncated: The object ends before ``offset + len(buffer)``, or the answer was cut.
        """

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Say how large an object is, without reading it.

        Raises:
            NotFound: There is none.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List every object whose key starts with ``prefix``, sorted by key.

        The prefix is a plain string ("log/0000" finds "log/00003.x"), not a folder. Strongly
        consistent and never from a cache: shows every object whose put returned before the call,
        none whose delete returned before it; those that come or go meanwhile may or may not be
        there. Errors come at the first step of the iteration at the latest, never in the midst.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete one object; no error when there is none.

        A file store does not sync a delete: after a power cut the object may be back.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections and files; idempotent. The store must not be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def checked_key(key: str) -> str:
    """Return the key if every store can hold it.

    Allowed: 1 to 900 bytes of UTF-8, segments of 1 to 255 bytes separated by single '/', any
    character but control characters and backslash.

    Raises:
        InvalidKey: Says which rule is broken.
    """
    if not key:
        raise InvalidKey("the key is empty", key=key, hint="name the object")
    _check_text(key)
    _check_segments(key.split("/"), key)
    return key


def checked_prefix(prefix: str) -> str:
    """Return the prefix if a key could start with it ("" and a trailing '/' are allowed).

    Raises:
        InvalidKey: Says which rule is broken.
    """
    _check_text(prefix)
    *folders, last = prefix.split("/")
    _check_segments(folders, prefix)
    if last == "..":
        raise InvalidKey("the prefix has a '..' segment", key=prefix)
    return prefix


def flat(data: Buffer) -> memoryview:
    """View contiguous data of any item type as bytes, without copying.

    Raises:
        TypeError: The data is not C-contiguous.
    """
    view = memoryview(data)
    if view.format == "B" and view.ndim == 1 and view.contiguous:
        return view
    return view.cast("B")


def _check_text(text: str) -> None:
    try:
        length = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidKey("the key is not valid Unicode", key=ascii(text)) from None
    if length > MAX_KEY_BYTES:
        raise InvalidKey(f"the key has {length} bytes, more than {MAX_KEY_BYTES}", key=text[:80] + "…")
    if not text.isprintable() and any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 for c in text):
        raise InvalidKey("the key has control characters", key=ascii(text))
    if "\\" in text:
        # Object stores behind Rust's path type and Windows tools read it as a separator.
        raise InvalidKey("the key has a backslash", key=text, hint="separate folders with '/'")


def _check_segments(segments: list[str], key: str) -> None:
    for number, segment in enumerate(segments):
        if segment == "":
            raise InvalidKey(
                "the key is absolute" if number == 0 else "the key has an empty segment",
                key=key,
                hint="keys are relative, with single '/' between segments",
            )
        if segment in {".", ".."}:
            raise InvalidKey(f"the key has a {segment!r} segment", key=key)
        if len(segment.encode()) > MAX_SEGMENT_BYTES:
            raise InvalidKey(f"a segment of the key has more than {MAX_SEGMENT_BYTES} bytes", key=key)
    if segments and segments[0] == RESERVED_FOLDER:
        raise InvalidKey(f"{RESERVED_FOLDER!r} is reserved", key=key)
