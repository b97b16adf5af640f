"""What can go wrong with a store, and which of its calls it strikes: by a script and a seed.

Owns the words (kind, call, fault) and the counting. Does not own how a fault is done: `faulty` does it to any driver, the
chaos harness's proxy to what goes over the wire. Invariant: the same script, seed and sequence of calls strike the same
calls, but for what depends on the clock (``for_s``, ``per_s``).
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from .errors import StorageError

__all__ = ["Fault", "FaultKind", "FaultScript", "Fired", "Op"]

ErrorFactory: TypeAlias = Callable[[str, str], StorageError]


class Op(StrEnum):
    """A method of the store; `get` stands for `get_into` as well."""

    PUT = "put"
    GET = "get"
    HEAD = "head"
    LIST = "list"
    DELETE = "delete"


class FaultKind(StrEnum):
    """What goes wrong."""

    ERROR = "error"
    """The store answers with an internal error (500), and nothing happens in it."""
    SLOW_DOWN = "slow_down"
    """The store asks to slow down (503), and nothing happens in it."""
    LIMIT = "limit"
    """Same, of calls beyond `per_s` in any second."""
    EXPIRED = "expired"
    """The store says that temporary credentials have expired."""
    SKEWED = "skewed"
    """The store says that the caller's clock is off."""
    OUTAGE = "outage"
    """The store cannot be reached for `for_s` seconds."""
    RESET = "reset"
    """The connection breaks before anything happens in the store; the caller cannot know that."""
    HANG = "hang"
    """Nothing happens in the store and nothing answers for `delay_s`, then the connection ends; over the wire, without
    `delay_s`, until the caller gives up."""
    ANSWER_LOST = "answer_lost"
    """The call is done, then the connection breaks: OutcomeUnknown for a CREATE put, else Unavailable."""
    PUT_LOST = "put_lost"
    """The put returns and nothing was written: a store that lies."""
    DELAY = "delay"
    """The call waits for `delay_s`, then goes on."""
    DRIP = "drip"
    """The bytes of a put or get go at `bytes_per_s`."""
    TRUNCATED = "truncated"
    """A get gives half the bytes (`get`) or raises Truncated (`get_into`)."""
    CORRUPTED = "corrupted"
    """A get gives all the bytes, one bit of them wrong."""
    STALE_LIST = "stale_list"
    """A list gives what the last list of that prefix gave (nothing, the first time)."""


# Kinds that some methods alone can show: calls of others are neither counted nor recorded.
_SPOILS = {
    FaultKind.PUT_LOST: {Op.PUT},
    FaultKind.DRIP: {Op.PUT, Op.GET},
    FaultKind.TRUNCATED: {Op.GET},
    FaultKind.CORRUPTED: {Op.GET},
    FaultKind.STALE_LIST: {Op.LIST},
}
_NEEDS = {
    FaultKind.LIMIT: "per_s",
    FaultKind.OUTAGE: "for_s",
    FaultKind.DELAY: "delay_s",
    FaultKind.DRIP: "bytes_per_s",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """When something goes wrong, and what.

    Attributes:
        kind: What.
        op: Of which calls; None for all.
        prefix: Only of keys (or listed prefixes) that start so.
        nth: The first matching call it strikes, counted from 1.
        times: How many matching calls from there on; None for all. OUTAGE and LIMIT strike all.
        probability: Of striking each of them, drawn from the seed.
        for_s: No call later than this many seconds after the first one it struck; None for no such bound.
        delay_s: Seconds, for DELAY and HANG.
        bytes_per_s: For DRIP.
        per_s: For LIMIT: calls that pass in any second.
        error: For ERROR, makes the error from key and URL; Unavailable when None.

    Raises:
        ValueError: The kind needs a number that is missing or not above 0.
    """

    kind: FaultKind
    op: Op | None = None
    prefix: str = ""
    nth: int = 1
    times: int | None = 1
    probability: float = 1.0
    for_s: float | None = None
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    per_s: int = 0
    error: ErrorFactory | None = None

    def __post_init__(self) -> None:
        if self.nth < 1 or (self.times is not None and self.times < 1):
            raise ValueError("nth and times are whole numbers from 1")
        needed = _NEEDS.get(self.kind)
        if needed is not None and not (getattr(self, needed) or 0) > 0:
            raise ValueError(f"{self.kind} needs {needed}, more than 0")
        if self.op is not None and self.op not in _SPOILS.get(self.kind, {self.op}):
            raise ValueError(f"{self.kind} cannot strike {self.op}; allowed: {', '.join(sorted(_SPOILS[self.kind]))}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fired:
    """A fault that struck.

    Attributes:
        fault: Which.
        op: What was called.
        key: On which key or listed prefix.
        call: Number of the call among those that match the fault, from 1.
        struck: How often the fault has struck, this one included.
    """

    fault: Fault
    op: Op
    key: str
    call: int
    struck: int


@dataclass(slots=True)
class _Line:
    """One fault of the script and how far it is."""

    fault: Fault
    calls: int = 0
    struck: int = 0
    ends_at: float | None = None
    passed: deque[float] = field(default_factory=deque)


class FaultScript:
    """A list of faults, asked before each call which of them strike it; for many threads.

    Args:
        faults: More by `add`.
        seed: For probabilities.
        clock: Monotonic seconds; replaced in tests.
    """

    def __init__(self, *faults: Fault, seed: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines = [_Line(fault) for fault in faults]
        self._random = random.Random(seed)  # noqa: S311 - replayable on purpose
        self._clock = clock
        self._lock = threading.Lock()
        self._fired: list[Fired] = []

    @property
    def fired(self) -> tuple[Fired, ...]:
        """What has struck so far, in order."""
        with self._lock:
            return tuple(self._fired)

    def add(self, *faults: Fault) -> None:
        """Extend the script; the new faults count calls from now on."""
        with self._lock:
            self._lines.extend(_Line(fault) for fault in faults)

    def clear(self) -> None:
        """Drop the script: from now on nothing strikes."""
        with self._lock:
            self._lines.clear()

    def strikes(self, op: Op, key: str) -> tuple[Fired, ...]:
        """Count a call, and record and return what strikes it, in the script's order."""
        striking = []
        with self._lock:
            for line in self._lines:
                fault = line.fault
                fits = fault.op in {None, op} and op in _SPOILS.get(fault.kind, {op})
                if not fits or not key.startswith(fault.prefix):
                    continue
                line.calls += 1
                if not self._strikes(line):
                    continue
                line.struck += 1
                fired = Fired(fault=fault, op=op, key=key, call=line.calls, struck=line.struck)
                striking.append(fired)
                self._fired.append(fired)
        return tuple(striking)

    def take_back(self, fired: Fired) -> None:
        """Undo a strike that could not be done, e.g. of an object that is not there: the next call may be struck."""
        with self._lock:
            for line in self._lines:
                if line.fault is fired.fault:
                    line.struck -= 1
            self._fired[:] = [each for each in self._fired if each is not fired]

    def _strikes(self, line: _Line) -> bool:
        fault, now = line.fault, self._clock()
        is_bounded = fault.times is not None and fault.kind not in (FaultKind.OUTAGE, FaultKind.LIMIT)
        is_spent = is_bounded and line.struck >= (fault.times or 0)
        is_over = line.ends_at is not None and now >= line.ends_at
        if line.calls < fault.nth or is_spent or is_over:
            return False
        if fault.probability < 1.0 and self._random.random() >= fault.probability:
            return False
        if fault.kind is FaultKind.LIMIT:
            while line.passed and now - line.passed[0] >= 1.0:
                line.passed.popleft()
            if len(line.passed) < fault.per_s:
                line.passed.append(now)
                return False
        if fault.for_s is not None and line.ends_at is None:
            line.ends_at = now + fault.for_s
        return True
