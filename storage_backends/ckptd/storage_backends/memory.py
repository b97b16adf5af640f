"""Objects in this process's memory: for tests and for jobs that need no durability.

Owns a locked dict per name. Does not outlive the process, so "durable" here means no more than
"seen by everybody in it". Invariant: what `get` returns is never changed afterwards.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar

from .base import Buffer, Capabilities, ObjectInfo, ObjectStore, PutMode, checked_key, checked_prefix, flat
from .errors import AlreadyExists, NotFound, Truncated

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MemoryStore"]


class MemoryStore(ObjectStore):
    """A store in memory; `shared` gives the one of a name, the constructor a private one.

    Args:
        name: Shown in ``url``.
        put_if_absent: False makes CREATE a plain put, to try the protocol on the least that a
            store may offer.
    """

    _shared: ClassVar[dict[str, MemoryStore]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str = "private", *, put_if_absent: bool = True) -> None:
        self.url = f"memory://{name}"
        self.capabilities = Capabilities(put_if_absent=put_if_absent, remote=False, max_put_bytes=None, concurrency=4)
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @classmethod
    def shared(cls, name: str) -> MemoryStore:
        """Return the store of that name, the same object for every caller in this process."""
        with cls._shared_lock:
            return cls._shared.setdefault(name, cls(name))

    def put(self, key: str, data: Buffer, *, mode: PutMode = PutMode.CREATE) -> None:
        """Write one object (see the contract); the one copy made here is the object."""
        checked_key(key)
        owned = bytes(flat(data))
        with self._lock:
            if mode is PutMode.CREATE and self.capabilities.put_if_absent and key in self._objects:
                raise AlreadyExists("an object of that name is there", key=key, url=self.url)
            self._objects[key] = owned

    def get(self, key: str) -> bytes:
        """Read a whole object."""
        checked_key(key)
        try:
            return self._objects[key]
        except KeyError:
            raise NotFound("no such object", key=key, url=self.url) from None

    def get_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        """Fill the buffer from the object."""
        view = flat(buffer)
        data = memoryview(self.get(key))
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        if offset + len(view) > len(data):
            raise Truncated(
                f"the object has {len(data)} bytes, {offset + len(view)} were asked for",
                key=key,
                url=self.url,
            )
        view[:] = data[offset : offset + len(view)]

    def head(self, key: str) -> ObjectInfo:
        """Say how large an object is."""
        return ObjectInfo(key=key, size=len(self.get(key)))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List the keys with that prefix, as they were when called."""
        checked_prefix(prefix)
        with self._lock:
            found = [
                ObjectInfo(key=key, size=len(data)) for key, data in self._objects.items() if key.startswith(prefix)
            ]
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Delete one object."""
        checked_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def close(self) -> None:
        """Do nothing: a shared store belongs to everybody."""
