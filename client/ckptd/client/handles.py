"""Saves in flight: what a caller can wait for, and failures that are reported once.

Owns: the state of each save as events tell it, and the count of failures in a row. Does not own: the connection that
events come over. Thread-safe. Invariant: a handle ends once, durable or failed, and a failure is reported once: by
`wait`, to `on_failure`, or in the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import Event

from .errors import Aborted, CkptdError, InvalidRequest, Unavailable, from_wire

log = logging.getLogger("ckptd.client")

Level = Literal["staged", "durable", "peer"]
State = Literal["copied", "staged", "durable", "failed"]
_ORDER: dict[str, int] = {"copied": 0, "staged": 1, "durable": 2, "failed": 3}
_TOLD_KEPT = 64
"""Events kept for saves that are not registered yet: an abort may overtake the answer to Begin."""


class SaveHandle:
    """One save. Safe to use from any thread.

    Attributes:
        step: The step.
        skipped: True when every slot was busy, so that the step was skipped on all ranks alike.
    """

    def __init__(self, step: int, *, default_timeout_s: float) -> None:
        self.step = step
        self.skipped = False
        self.timeline = ""
        self._default_timeout_s = default_timeout_s
        self._changed = threading.Condition()
        self._state: State = "copied"
        self._error: CkptdError | None = None
        self._reported = False

    @property
    def state(self) -> State:
        """Return "copied" (this rank's bytes), "staged" (all ranks' bytes are their agents'), "durable" or "failed"."""
        return self._state

    @property
    def error(self) -> CkptdError | None:
        """Why it failed, or None."""
        return self._error

    def done(self) -> bool:
        """Say whether the save is durable or failed."""
        return self._state in ("durable", "failed")

    def wait(self, level: Level = "durable", timeout: float | None = None) -> None:
        """Wait until the save has reached a level.

        Args:
            level: "staged": all ranks' bytes are their agents', the trainers may die. "durable": the step survives
            the loss of every
                node, and no later restart can resolve a history without it.
            timeout: Seconds; default: commit_timeout_s.

        Raises:
            Aborted: the step did not commit (reason BUSY: it was skipped). Unavailable: it was lost, or is not there
            after `timeout` seconds (reason DEADLINE_EXCEEDED; it may still come). Fenced: a newer run has taken over.
            InvalidRequest: no such level ("peer" is not there yet). CkptdError: any other reason the save failed for.
        """
        if level not in ("staged", "durable"):
            known = level == "peer"
            raise InvalidRequest(
                f"wait({level!r}): {'copies on peers do not exist yet' if known else 'no such level'}",
                hint='use "staged" or "durable"',
                step=self.step,
            )
        limit = self._default_timeout_s if timeout is None else timeout
        deadline = time.monotonic() + limit
        with self._changed:
            while _ORDER[self._state] < _ORDER[level]:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Unavailable(
                        f"step {self.step} is not {level} after {limit:g} s; it is {self._state}",
                        reason=error_pb2.REASON_DEADLINE_EXCEEDED,
                        hint="it may still become so; wait again, or go on",
                        step=self.step,
                        phase="stage" if level == "staged" else "commit",
                    )
                self._changed.wait(left)
            if self._error is not None:
                self._reported = True
                raise self._error

    def advance(self, state: State, error: CkptdError | None = None) -> bool:
        """Move on, never back; return whether this ended the save. Called by the client itself."""
        with self._changed:
            if self.done() or _ORDER[state] <= _ORDER[self._state]:
                return False
            self._state, self._error = state, error
            self._changed.notify_all()
            return self.done()

    def settle(self, timeout_s: float) -> bool:
        """Wait until the save is decided; return whether it is. Tells nobody of a failure."""
        with self._changed:
            return self._changed.wait_for(self.done, timeout_s)

    def take_report(self) -> CkptdError | None:
        """Return the failure if nobody was told of it, and count it as told."""
        with self._changed:
            if self._error is None or self._reported or self.skipped:
                return None
            self._reported = True
            return self._error

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, state={self._state!r}{', skipped' if self.skipped else ''})"


class Ledger:
    """The saves of one Checkpointer.

    Args:
        on_failure: Called once per failed save, from the thread that notices it.
    """

    def __init__(self, on_failure: Callable[[SaveHandle, CkptdError], None] | None) -> None:
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._in_flight: dict[int, SaveHandle] = {}
        self._ended: list[SaveHandle] = []
        self._told: dict[tuple[str, int], Event.StepState] = {}
        self._failed_in_row = 0
        self._last_error: CkptdError | None = None

    def register(self, handle: SaveHandle) -> None:
        """Follow a save whose timeline is known."""
        with self._lock:
            self._in_flight[handle.step] = handle
            told = self._told.pop((handle.timeline, handle.step), None)
        if told is not None:
            self.on_step(told)

    def on_step(self, event: Event.StepState) -> None:
        """Take in what the agent says about a step."""
        with self._lock:
            handle = self._in_flight.get(event.step)
            if handle is None or handle.timeline != event.timeline:
                self._told[event.timeline, event.step] = event
                while len(self._told) > _TOLD_KEPT:
                    del self._told[next(iter(self._told))]
                return
        if event.state == Event.STAGED:
            handle.advance("staged")
        elif event.state == Event.COMMITTED:
            self._end(handle, None)
        elif event.state == Event.ABORTED:
            error = from_wire(event.error)
            if not isinstance(error, Aborted):
                # The step is gone for good, whatever lost it: that is what the caller has to know.
                error = Aborted.like(error)
            error.step = event.step
            self._end(handle, error)

    def fail(self, handle: SaveHandle, error: CkptdError) -> None:
        """End a save that failed on this rank."""
        self._end(handle, error)

    def withdraw(self, handle: SaveHandle, error: CkptdError) -> None:
        """End a save whose error is raised to the caller right now: it is told, and counts as none."""
        handle.advance("failed", error)
        handle.take_report()
        with self._lock:
            if self._in_flight.get(handle.step) is handle:
                del self._in_flight[handle.step]

    def skip(self, handle: SaveHandle, error: CkptdError) -> None:
        """End a save that was skipped on all ranks: no failure, and nothing to report."""
        handle.skipped = True
        handle.advance("failed", error)

    def fail_all(self, error: CkptdError) -> None:
        """End all saves in flight: nothing more will be heard of them."""
        with self._lock:
            handles = list(self._in_flight.values())
        for handle in handles:
            self._end(handle, error)

    def _end(self, handle: SaveHandle, error: CkptdError | None) -> None:
        if not handle.advance("durable" if error is None else "failed", error):
            return
        with self._lock:
            if self._in_flight.get(handle.step) is handle:
                del self._in_flight[handle.step]
            self._failed_in_row = 0 if error is None else self._failed_in_row + 1
            self._last_error = error
            if error is not None:
                self._ended.append(handle)
        if error is not None and self._on_failure is not None and handle.take_report() is not None:
            try:
                self._on_failure(handle, error)
            except Exception:
                log.exception("on_failure raised for step %d", handle.step)

    def report(self) -> None:
        """Log each failure that nobody was told of; called at the begin of every call."""
        with self._lock:
            ended, self._ended = self._ended, []
        for handle in ended:
            error = handle.take_report()
            if error is not None:
                log.warning("the save of step %d failed: %s", handle.step, error)

    def check_failures(self, limit: int | None) -> None:
        """Raise the last failure when `limit` saves in a row have failed.

        Raises:
            CkptdError: of the class of the last failure.
        """
        with self._lock:
            count, error = self._failed_in_row, self._last_error
        if limit is not None and error is not None and count >= limit:
            text = f"{count} saves in a row failed (max_failed_saves={limit}); the last one: {error.message}"
            raise type(error).like(error, text) from error

    def in_flight(self) -> list[SaveHandle]:
        """Return the saves that are not decided, in the order of their steps."""
        with self._lock:
            return [self._in_flight[step] for step in sorted(self._in_flight)]

    def drain(self, timeout_s: float) -> list[SaveHandle]:
        """Wait until everything in flight is decided; return what is not after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        for handle in self.in_flight():
            handle.settle(max(0.0, deadline - time.monotonic()))
        return self.in_flight()
