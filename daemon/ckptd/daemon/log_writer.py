"""Writes an object of the log once, whatever became of an earlier attempt.

Owns: telling our own earlier put from another process's. Does not own: what is written (`history`), or trying again.
Invariant: on return our bytes stand under the key.
"""

from __future__ import annotations

from ckptd.protos import error_pb2
from ckptd.storage_backends.base import ObjectStore, PutMode
from ckptd.storage_backends.errors import AlreadyExists

from .errors import DaemonError


def put_once(store: ObjectStore, key: str, data: bytes) -> None:
    """Put one record or claim; durable on return. May be called again with the same bytes after any error.

    A put whose answer was lost for good may have landed: the next attempt is told that the object is there, for ever. Every
    key of the log has one writer, so what stands there is our own, unless this process was cloned with its nonce.

    Raises:
        DaemonError: INTERNAL, other bytes stand under our name: two processes have one nonce. Never try that again.
        StorageError: as the store raised it; calling again is safe.
    """
    try:
        store.put(key, data, mode=PutMode.CREATE)
    except AlreadyExists:
        if store.get(key) != data:
            raise DaemonError.of(
                f"{key} holds other bytes than this process wrote there",
                reason=error_pb2.REASON_INTERNAL,
                hint="two processes share one timeline, as clones of a machine image do: end this one",
                object=key,
                phase="commit",
            ) from None
