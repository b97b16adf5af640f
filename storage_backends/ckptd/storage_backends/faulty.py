"""A store that fails on purpose, by a script and a seed, and keeps a record of what it did.

Owns the faults a store or its network can show. For tests and the chaos harness, never in a
running agent. Invariant: the same script, seed and sequence of calls give the same faults, and
nothing goes wrong that `FaultyStore.fired` does not tell.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from .base import Buffer, ObjectInfo, ObjectStore, PutMode, flat
from .errors import OutcomeUnknown, StorageError, Truncated, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Fault", "FaultKind", "FaultyStore", "Fired", "Op"]

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
    """The call raises and nothing happens in the store."""
    ANSWER_LOST = "answer_lost"
    """The call is done, then raises: OutcomeUnknown for a CREATE put, else Unavailable."""
    PUT_LOST = "put_lost"
    """The put returns and nothing was written: a store that lies."""
    DELAY = "delay"
    """The call waits, then goes on."""
    TRUNCATED = "truncated"
    """A get gives half the bytes (`get`) or raises Truncated (`get_into`)."""
    CORRUPTED = "corrupted"
    """A get gives all the bytes, one bit of them wrong."""
    STALE_LIST = "stale_list"
    """A list gives what the last list of that prefix gave (nothing, the first time)."""


# Kinds that one method alone can show: calls of others are neither counted nor recorded.
_SPOILS = {
    FaultKind.PUT_LOST: Op.PUT,
    FaultKind.TRUNCATED: Op.GET,
    FaultKind.CORRUPTED: Op.GET,
    FaultKind.STALE_LIST: Op.LIST,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """When something goes wrong, and what.

    Attributes:
        kind: What.
        op: Of which calls; None for all.
        prefix: Only of keys (or listed prefixes) that start so.
        nth: The first matching call it strikes, counted from 1.
        times: How many matching calls from there on; None for all.
        probability: Of striking each of them, drawn from the store's seed.
        delay_s: Seconds, for DELAY.
        error: For ERROR, makes the error from key and URL; Unavailable when None.
    """

    kind: FaultKind
    op: Op | None = None
    prefix: str = ""
    nth: int = 1
    times: int | None = 1
    probability: float = 1.0
    delay_s: float = 0.0
    error: ErrorFactory | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fired:
    """A fault that struck.

    Attributes:
        fault: Which.
        op: What was called.
        key: On which key or listed prefix.
        call: Number of the call among those that match the fault, from 1.
    """

    fault: Fault
    op: Op
    key: str
    call: int


@dataclass(slots=True)
class _Script:
    """One fault and how far it is."""

    fault: Fault
    calls: int = 0
    struck: int = 0


class FaultyStore(ObjectStore):
    """A store with a script of faults; may be called from many threads.

    Args:
        inner: The store that does the work; closed with this one.
        faults: The script; more by `add`.
        seed: For probabilities and the places of wrong bits.
        sleep: Takes the seconds of a DELAY; a test may wait for an event there.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *faults: Fault,
        seed: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.capabilities = inner.capabilities
        self._scripts = [_Script(fault) for fault in faults]
        self._random = random.Random(seed)  # noqa: S311 - replayable on purpose
        self._sleep = sleep
        self._lock = threading.Lock()
        self._fired: list[Fired] = []
        self._last_lists: dict[str, tuple[ObjectInfo, ...]] = {}

    @property
    def fired(self) -> tuple[Fired, ...]:
        """What has struck so far, in order."""
        with self._lock:
            return tuple(self._fired)

    def add(self, *faults: Fault) -> None:
        """Extend the script; the new faults count calls from now on."""
        with self._lock:
            self._scripts.extend(_Script(fault) for fault in faults)

    def clear(self) -> None:
        """Drop the script: from now on nothing strikes."""
        with self._lock:
            self._scripts.clear()

    def put(self, key: str, data: Buffer, *, mode: PutMode = PutMode.CREATE) -> None:
        """Write one object, unless the script says otherwise."""
        kinds = self._before(Op.PUT, key)
        if FaultKind.PUT_LOST in kinds:
            return
        self.inner.put(key, data, mode=mode)
        self._after(kinds, key, creating=mode is PutMode.CREATE)

    def get(self, key: str) -> bytes:
        """Read a whole object, perhaps wrongly."""
        kinds = self._before(Op.GET, key)
        data = self.inner.get(key)
        self._after(kinds, key)
        if FaultKind.CORRUPTED in kinds and data:
            wrong = bytearray(data)
            self._flip_bit(memoryview(wrong))
            data = bytes(wrong)
        return data[: len(data) // 2] if FaultKind.TRUNCATED in kinds else data

    def get_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        """Fill the buffer, perhaps wrongly."""
        kinds = self._before(Op.GET, key)
        view = flat(buffer)
        self.inner.get_into(key, view, offset=offset)
        self._after(kinds, key)
        if FaultKind.TRUNCATED in kinds:
            raise Truncated("fault: the answer was cut", key=key, url=self.url, retryable=True)
        if FaultKind.CORRUPTED in kinds and view:
            self._flip_bit(view)

    def head(self, key: str) -> ObjectInfo:
        """Ask for the size."""
        kinds = self._before(Op.HEAD, key)
        info = self.inner.head(key)
        self._after(kinds, key)
        return info

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List, perhaps what is past."""
        kinds = self._before(Op.LIST, prefix)
        if FaultKind.STALE_LIST in kinds:
            return iter(self._last_lists.get(prefix, ()))
        found = tuple(self.inner.list(prefix))
        self._last_lists[prefix] = found
        self._after(kinds, prefix)
        return iter(found)

    def delete(self, key: str) -> None:
        """Delete one object."""
        kinds = self._before(Op.DELETE, key)
        self.inner.delete(key)
        self._after(kinds, key)

    def close(self) -> None:
        """Close the inner store."""
        self.inner.close()

    def _before(self, op: Op, key: str) -> set[FaultKind]:
        """Record what strikes this call; wait and raise what comes before it."""
        striking = self._strikes(op, key)
        for fault in striking:
            if fault.kind is FaultKind.DELAY:
                self._sleep(fault.delay_s)
        for fault in striking:
            if fault.kind is FaultKind.ERROR:
                if fault.error is not None:
                    raise fault.error(key, self.url)
                raise Unavailable("fault: the store is away", key=key, url=self.url)
        return {fault.kind for fault in striking}

    def _after(self, kinds: set[FaultKind], key: str, *, creating: bool = False) -> None:
        if FaultKind.ANSWER_LOST in kinds:
            condition = OutcomeUnknown if creating else Unavailable
            raise condition("fault: the answer was lost", key=key, url=self.url)

    def _strikes(self, op: Op, key: str) -> tuple[Fault, ...]:
        striking = []
        with self._lock:
            for script in self._scripts:
                fault = script.fault
                fits = fault.op in {None, op} and _SPOILS.get(fault.kind, op) is op
                if not fits or not key.startswith(fault.prefix):
                    continue
                script.calls += 1
                is_spent = fault.times is not None and script.struck >= fault.times
                if script.calls < fault.nth or is_spent:
                    continue
                if fault.probability < 1.0 and self._random.random() >= fault.probability:
                    continue
                script.struck += 1
                striking.append(fault)
                self._fired.append(Fired(fault=fault, op=op, key=key, call=script.calls))
        return tuple(striking)

    def _flip_bit(self, view: memoryview) -> None:
        with self._lock:
            place, bit = self._random.randrange(len(view)), self._random.randrange(8)
        view[place] ^= 1 << bit
