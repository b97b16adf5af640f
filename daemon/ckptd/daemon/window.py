"""The window: memory for chunks of which only a part is wanted, between their reading and the copy of that part.

Owns: the bound on it, and who has which part of it. Does not own: what is read into it (`fetcher`). Invariants: what is given
out is never more than the window, and no byte of it to two at a time; a thread that hangs keeps its part, and a window that
was released meanwhile never gives that out again.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckptd.protos.error_pb2 import REASON_ABORTED

from .errors import DaemonError
from .shared_files import page_rounded


class Window:
    """Memory of its own process, kept until it is released: the next chunk finds pages that were touched. Thread-safe.

    Args:
        nbytes: At least the longest chunk.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._changed = threading.Condition()
        self._memory: _Memory | None = None

    @contextmanager
    def room(self, nbytes: int, stop: threading.Event) -> Iterator[memoryview]:
        """Give out memory of undefined content, aligned to pages; waits while too much is given out already.

        Raises:
            DaemonError: ABORTED, `stop` was set (and `wake` called) meanwhile.
            ValueError: the window is smaller than that.
        """
        if nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes do not fit a window of {self.nbytes}")
        with self._changed:
            while True:
                if stop.is_set():
                    raise DaemonError.of("the fetch was stopped", reason=REASON_ABORTED, phase="restore")
                memory = self._memory = self._memory or _Memory(self.nbytes)
                begin = memory.take(page_rounded(nbytes))
                if begin is not None:
                    break
                self._changed.wait()
        try:
            yield memoryview(memory.pages)[begin : begin + nbytes]
        finally:
            with self._changed:
                memory.give_back(begin)
                self._changed.notify_all()

    @property
    def peak_bytes(self) -> int:
        """Most that was given out at once, in whole pages, since the window was made or released last."""
        with self._changed:
            return self._memory.peak if self._memory is not None else 0

    def wake(self) -> None:
        """Make those who wait look whether they were stopped."""
        with self._changed:
            self._changed.notify_all()

    def release(self) -> None:
        """Give the memory back, once nobody has a part of it any more; idempotent."""
        with self._changed:
            self._memory = None


class _Memory:
    """Anonymous memory and who has which part. For one thread at a time."""

    def __init__(self, nbytes: int) -> None:
        self.pages = mmap.mmap(-1, page_rounded(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):  # not on every kernel or build; large pages are fewer first touches
            self.pages.madvise(mmap.MADV_HUGEPAGE)
        self._taken: dict[int, int] = {}
        self.peak = 0

    def take(self, nbytes: int) -> int | None:
        """Return where so many bytes are free, lowest first, or None."""
        at = 0
        for begin in sorted(self._taken):
            if begin - at >= nbytes:
                break
            at = begin + self._taken[begin]
        if at + nbytes > len(self.pages):
            return None
        self._taken[at] = nbytes
        self.peak = max(self.peak, sum(self._taken.values()))
        return at

    def give_back(self, begin: int) -> None:
        """Take a part back."""
        del self._taken[begin]
