"""Trying a store at start, before anything depends on it.

Owns the few requests that show whether a root can be written, read, listed and deleted, and
whether what was written is seen at once. Invariant: touches nothing but one new key under
``probe/``, and leaves nothing behind unless the process is killed within it; the key tells when,
so that a sweep can delete what was left.
"""

from __future__ import annotations

import re
import secrets
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from .base import PutMode
from .errors import AlreadyExists, NotFound, StorageError

if TYPE_CHECKING:
    from .base import ObjectStore

__all__ = ["ABANDONED_S", "PROBE_PREFIX", "is_abandoned", "is_probe", "probe"]

PROBE_PREFIX = "probe/"
ABANDONED_S = 86_400.0
"""Age, seconds, at which no probe is under way any more, by clocks that are an hour wrong, too."""
_KEY = re.compile(r"probe/([0-9a-f]{10})-[0-9a-f]{24}")
"""Unix seconds, and a random number."""
_UNFIT = "ckptd needs a store whose GET and LIST show what was written before; turn off caches in between"


def probe(store: ObjectStore) -> None:
    """Put, put again, read, list, overwrite and delete one object with a random name.

    Where the store claims put-if-absent but does not enforce it, ``store.capabilities`` is
    corrected: the protocol does without.

    Raises:
        PermissionDenied: The root is not writable, or the credentials are wrong.
        BucketMissing: There is no such bucket.
        StorageError: GET or LIST is not consistent; or whatever else a request raised.
    """
    key = f"{PROBE_PREFIX}{int(time.time()):010x}-{secrets.token_hex(12)}"
    first, second = secrets.token_bytes(64), secrets.token_bytes(96)
    try:
        store.put(key, first)
        _require(store, store.get(key) == first, "GET does not give what was put", key)
        _require(store, _listed_size(store, key) == len(first), "LIST does not show what was put", key)
        if store.capabilities.put_if_absent and not _is_refused(store, key, second):
            store.capabilities = replace(store.capabilities, put_if_absent=False)
        store.put(key, second, mode=PutMode.OVERWRITE)
        _require(store, store.get(key) == second, "GET gives what was overwritten", key)
        _require(store, store.head(key).size == len(second), "HEAD tells what was overwritten", key)
        store.delete(key)
        _require(store, _listed_size(store, key) is None, "LIST shows what was deleted", key)
        _require(store, not _is_there(store, key), "GET gives what was deleted", key)
    except BaseException:
        with suppress(StorageError):
            store.delete(key)
        raise


def is_probe(key: str) -> bool:
    """Whether a key is of an object that `probe` puts and deletes: what stands there belongs to nobody for long."""
    return _KEY.fullmatch(key) is not None


def is_abandoned(key: str, now: float) -> bool:
    """Whether a key is of a probe that was killed.

    Args:
        key: Any.
        now: Unix time, seconds.
    """
    made = _KEY.fullmatch(key)
    return made is not None and int(made[1], 16) + ABANDONED_S < now


def _is_refused(store: ObjectStore, key: str, data: bytes) -> bool:
    try:
        store.put(key, data, mode=PutMode.CREATE)
    except AlreadyExists:
        return True
    return False


def _listed_size(store: ObjectStore, key: str) -> int | None:
    return next((info.size for info in store.list(key) if info.key == key), None)


def _is_there(store: ObjectStore, key: str) -> bool:
    try:
        store.get(key)
    except NotFound:
        return False
    return True


def _require(store: ObjectStore, holds: bool, complaint: str, key: str) -> None:
    if not holds:
        raise StorageError(f"the store is not consistent: {complaint}", key=key, url=store.url, hint=_UNFIT)
