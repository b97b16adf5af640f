"""A store that is read and never written: what is put and deleted stays in this process. For asking what would be.

Owns: laying a few objects over those of another store. Does not own: either store. Small objects only: what is put is kept
in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptd.storage_backends.base import Buffer, ObjectInfo, ObjectStore, PutMode
from ckptd.storage_backends.errors import AlreadyExists, NotFound
from ckptd.storage_backends.memory import MemoryStore


class OverlayStore(ObjectStore):
    """Another store, and what was put over it.

    Args:
        inner: The store that is only read. Closed by its owner.
    """

    def __init__(self, inner: ObjectStore) -> None:
        self.url = inner.url
        self.capabilities = inner.capabilities
        self._inner = inner
        self._over = MemoryStore()
        self._deleted: set[str] = set()

    def put(self, key: str, data: Buffer, *, mode: PutMode = PutMode.CREATE) -> None:
        """Keep one object in memory; CREATE is enforced."""
        if mode is PutMode.CREATE and self._is_there(key):
            raise AlreadyExists("an object of that name is there", key=key, url=self.url)
        self._over.put(key, data, mode=PutMode.OVERWRITE)
        self._deleted.discard(key)

    def get(self, key: str) -> bytes:
        """Read a whole object."""
        return self._where(key).get(key)

    def get_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        """Fill the buffer from the object."""
        self._where(key).get_into(key, buffer, offset=offset)

    def head(self, key: str) -> ObjectInfo:
        """Say how large an object is."""
        return self._where(key).head(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List both."""
        found = {info.key: info for info in self._inner.list(prefix) if info.key not in self._deleted}
        found |= {info.key: info for info in self._over.list(prefix)}
        return iter(sorted(found.values(), key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Show the object no longer."""
        self._over.delete(key)
        self._deleted.add(key)

    def close(self) -> None:
        """Do nothing: the inner store is its owner's."""

    def _where(self, key: str) -> ObjectStore:
        if key in self._deleted:
            raise NotFound("no such object", key=key, url=self.url)
        try:
            self._over.head(key)
        except NotFound:
            return self._inner
        return self._over

    def _is_there(self, key: str) -> bool:
        try:
            self.head(key)
        except NotFound:
            return False
        return True
