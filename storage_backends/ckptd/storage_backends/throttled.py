"""A store that is slower than it could be: bytes and requests per second are bounded.

Owns two counters of time already spoken for. Used to leave bandwidth to the training job, and
by tests to be a slow network. Invariant: over any stretch longer than one request the rates are
kept, however many threads call.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from .base import Buffer, ObjectInfo, ObjectStore, PutMode, flat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["ThrottledStore"]


class ThrottledStore(ObjectStore):
    """A store that waits before each request until the rates allow it.

    Args:
        inner: The store to call; closed with this one.
        bytes_per_s: Bound of put and got bytes together; None for no bound.
        requests_per_s: Bound of requests of every kind; None for no bound.
        clock: Monotonic seconds; replaced in tests.
        sleep: Takes seconds; replaced in tests.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        bytes_per_s: float | None = None,
        requests_per_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        for name, rate in (("bytes_per_s", bytes_per_s), ("requests_per_s", requests_per_s)):
            if rate is not None and rate <= 0:
                raise ValueError(f"{name} is {rate}; it must be more than 0")
        self.inner = inner
        self.url = inner.url
        self.capabilities = inner.capabilities
        self._bytes_per_s = bytes_per_s
        self._requests_per_s = requests_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def put(self, key: str, data: Buffer, *, mode: PutMode = PutMode.CREATE) -> None:
        """Write one object when its bytes' turn has come."""
        view = flat(data)
        self._wait(len(view))
        self.inner.put(key, view, mode=mode)

    def get(self, key: str) -> bytes:
        """Read a whole object; its bytes count against the next request."""
        self._wait(0)
        data = self.inner.get(key)
        self._reserve(len(data), requests=0)
        return data

    def get_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        """Fill the buffer when its bytes' turn has come."""
        view = flat(buffer)
        self._wait(len(view))
        self.inner.get_into(key, view, offset=offset)

    def head(self, key: str) -> ObjectInfo:
        """Ask for the size."""
        self._wait(0)
        return self.inner.head(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List; counts as one request."""
        self._wait(0)
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        """Delete one object."""
        self._wait(0)
        self.inner.delete(key)

    def close(self) -> None:
        """Close the inner store."""
        self.inner.close()

    def _wait(self, size: int) -> None:
        # The whole cost is waited for beforehand: a large put then takes as long as over a slow
        # line, and a fault injected meanwhile finds it unfinished.
        pause = self._reserve(size, requests=1)
        if pause > 0:
            self._sleep(pause)

    def _reserve(self, size: int, *, requests: int) -> float:
        """Book the next stretch of time; returns the seconds until its end."""
        cost = 0.0
        if self._bytes_per_s is not None:
            cost = size / self._bytes_per_s
        if self._requests_per_s is not None:
            cost = max(cost, requests / self._requests_per_s)
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now) + cost
            return self._free_at - now
