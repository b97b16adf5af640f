"""Calls that a signal's handler must not interrupt in the midst: in another thread, while the main one waits.

Owns: the thread of such a call, and what is left when the wait is interrupted. Does not own: what is called. Invariant: the main
thread waits on no lock of Python's or gRPC's, which may stay taken for good when a handler raises between two of its steps.
"""

from __future__ import annotations

import _thread
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

_Answers: TypeAlias = "queue.SimpleQueue[tuple[Any, BaseException | None]]"
_left: list[_Answers] = []
"""Of calls whose answer nobody waits for any more: an interrupt ended the wait."""


def settle(timeout_s: float = 1.0) -> None:
    """Wait for calls that were left to end, when their channels are closed: none may come back as the interpreter ends."""
    for answers in _left:
        with contextlib.suppress(queue.Empty):
            answers.get(timeout=timeout_s)
    _left.clear()


def aside(call: Callable[[], Any]) -> Any:
    """Call in another thread and wait, where a signal's handler may raise meanwhile: in the main thread.

    gRPC's own locks may stay taken for good when that happens in the midst of a call, and no event would come any more; those of
    a pool's threads, and nothing would be copied. After an interrupt the call goes on.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    answers: _Answers = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as failure:  # raised where the call is waited for
            answers.put((None, failure))

    # No threading.Thread: that waits for its start on a lock of Python's, of which the same is true.
    _thread.start_new_thread(run, ())
    try:
        reply, failure = answers.get()
    except BaseException:
        _left[:] = [*(one for one in _left if one.empty()), answers]
        raise
    if failure is not None:
        raise failure
    return reply
