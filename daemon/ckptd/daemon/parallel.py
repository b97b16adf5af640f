"""Runs one function over many items in a bounded number of threads.

Owns: the bound on threads and on what is waiting. Invariant: answers come in the order of the items; after an error nothing
new begins, and no thread is left running when the caller goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_WAITING_PER_WORKER = 4
"""Items handed out beyond those at work: enough to keep threads busy, few enough to hold for a million items."""


def in_parallel(function: Callable[[Item], Answer], items: Iterable[Item], *, workers: int) -> Iterator[Answer]:
    """Yield `function(item)` for every item, in order.

    Args:
        function: Called in several threads at once; in the caller's own with one worker.
        items: Taken as threads become free.
        workers: Threads.

    Raises:
        Exception: the first one that `function` raised, in the order of the items.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    waiting: deque[Future[Answer]] = deque()
    with ThreadPoolExecutor(workers, "ckptd-store") as threads:
        try:
            for item in items:
                waiting.append(threads.submit(function, item))
                if len(waiting) >= workers * (1 + _WAITING_PER_WORKER):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
