"""A store that fails on purpose, by a script and a seed, and keeps a record of what it did.

Owns how a fault is done to a call of any driver. Does not own which call is struck: that is `fault_script`. For tests and
the chaos harness, never in a running agent. Invariant: what goes wrong is what `FaultyStore.fired` tells: a fault that found
nothing to spoil is not used up.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .base import Buffer, ObjectInfo, ObjectStore, PutMode, flat
from .errors import ClockSkew, OutcomeUnknown, PermissionDenied, StorageError, Throttled, Truncated, Unavailable
from .fault_script import Fault, FaultKind, FaultScript, Fired, Op

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Fault", "FaultKind", "FaultyStore", "Fired", "Op"]

_REFUSALS = (
    FaultKind.ERROR,
    FaultKind.SLOW_DOWN,
    FaultKind.LIMIT,
    FaultKind.EXPIRED,
    FaultKind.SKEWED,
    FaultKind.OUTAGE,
    FaultKind.RESET,
    FaultKind.HANG,
)
_OF_BODIES = (FaultKind.CORRUPTED, FaultKind.TRUNCATED)
_AFTER_THE_DEED = (*_OF_BODIES, FaultKind.ANSWER_LOST)


class FaultyStore(ObjectStore):
    """A store with a script of faults; may be called from many threads.

    Args:
        inner: The store that does the work; closed with this one.
        faults: The script; more by `add`.
        seed: For probabilities and the places of wrong bits.
        sleep: Takes the seconds of a DELAY, HANG or DRIP; a test may wait for an event there.
        clock: Monotonic seconds; replaced in tests.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *faults: Fault,
        seed: int = 0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.capabilities = inner.capabilities
        self._script = FaultScript(*faults, seed=seed, clock=clock)
        self._seed = seed
        self._sleep = sleep
        self._last_lists: dict[str, tuple[ObjectInfo, ...]] = {}

    @property
    def fired(self) -> tuple[Fired, ...]:
        """What has struck so far, in order."""
        return self._script.fired

    def add(self, *faults: Fault) -> None:
        """Extend the script; the new faults count calls from now on."""
        self._script.add(*faults)

    def clear(self) -> None:
        """Drop the script: from now on nothing strikes."""
        self._script.clear()

    def put(self, key: str, data: Buffer, *, mode: PutMode = PutMode.CREATE) -> None:
        """Write one object, unless the script says otherwise."""
        creating = mode is PutMode.CREATE
        kinds = self._before(Op.PUT, key, creating=creating, nbytes=flat(data).nbytes)
        if FaultKind.PUT_LOST in kinds:
            return
        with self._undone_on_failure(kinds):
            self.inner.put(key, data, mode=mode)
        self._after(kinds, key, creating=creating)

    def get(self, key: str) -> bytes:
        """Read a whole object, perhaps wrongly."""
        kinds = self._before(Op.GET, key)
        with self._undone_on_failure(kinds):
            data = self.inner.get(key)
        if not data:
            self._take_back(kinds, _OF_BODIES)
        self._drip(kinds, len(data))
        self._after(kinds, key)
        if FaultKind.CORRUPTED in kinds and data:
            wrong = bytearray(data)
            self._flip_bit(memoryview(wrong), key)
            data = bytes(wrong)
        return data[: len(data) // 2] if FaultKind.TRUNCATED in kinds else data

    def get_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        """Fill the buffer, perhaps wrongly."""
        view = flat(buffer)
        kinds = self._before(Op.GET, key, nbytes=len(view))
        with self._undone_on_failure(kinds):
            self.inner.get_into(key, view, offset=offset)
        if not view:
            self._take_back(kinds, _OF_BODIES)
        self._after(kinds, key)
        if FaultKind.TRUNCATED in kinds and view:
            raise Truncated("fault: the answer was cut", key=key, url=self.url, retryable=True)
        if FaultKind.CORRUPTED in kinds and view:
            self._flip_bit(view, f"{key}/{offset}" if offset else key)

    def head(self, key: str) -> ObjectInfo:
        """Ask for the size."""
        kinds = self._before(Op.HEAD, key)
        with self._undone_on_failure(kinds):
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

    def _before(self, op: Op, key: str, *, creating: bool = False, nbytes: int = 0) -> dict[FaultKind, Fired]:
        """Record what strikes this call; wait and raise what comes before it."""
        struck = self._script.strikes(op, key)
        striking = {fired.fault.kind: fired for fired in struck}
        for fired in struck:
            if fired.fault.kind in (FaultKind.DELAY, FaultKind.HANG):
                self._sleep(fired.fault.delay_s)
        self._drip(striking, nbytes)
        for fired in struck:
            if fired.fault.kind in _REFUSALS:
                self._take_back(striking, _AFTER_THE_DEED)
                raise self._refusal(fired.fault, key, creating=creating)
        return striking

    @contextmanager
    def _undone_on_failure(self, striking: dict[FaultKind, Fired]) -> Iterator[None]:
        """Give back what would have struck after the deed when there was none: nothing to spoil, no answer to lose."""
        try:
            yield
        except BaseException:
            self._take_back(striking, _AFTER_THE_DEED)
            raise

    def _take_back(self, striking: dict[FaultKind, Fired], kinds: Iterable[FaultKind]) -> None:
        for kind in kinds:
            if (fired := striking.get(kind)) is not None:
                self._script.take_back(fired)

    def _drip(self, striking: dict[FaultKind, Fired], nbytes: int) -> None:
        if FaultKind.DRIP in striking and nbytes:
            self._sleep(nbytes / striking[FaultKind.DRIP].fault.bytes_per_s)

    def _refusal(self, fault: Fault, key: str, *, creating: bool) -> StorageError:
        """Return what the drivers make of such an answer, or of none."""
        if fault.error is not None:
            return fault.error(key, self.url)
        match fault.kind:
            case FaultKind.SLOW_DOWN | FaultKind.LIMIT:
                return Throttled("fault: slow down", key=key, url=self.url)
            case FaultKind.EXPIRED:
                return PermissionDenied("fault: the credentials have expired", key=key, url=self.url, retryable=True)
            case FaultKind.SKEWED:
                return ClockSkew("fault: the clock is off", key=key, url=self.url)
            case FaultKind.RESET | FaultKind.HANG if creating:
                return OutcomeUnknown("fault: nothing answered", key=key, url=self.url)
            case _:
                return Unavailable("fault: the store is away", key=key, url=self.url)

    def _after(self, kinds: dict[FaultKind, Fired], key: str, *, creating: bool = False) -> None:
        if FaultKind.ANSWER_LOST in kinds:
            condition = OutcomeUnknown if creating else Unavailable
            raise condition("fault: the answer was lost", key=key, url=self.url)

    def _flip_bit(self, view: memoryview, what: str) -> None:
        """Spoil the same bit of the same answer each time, as a rotten object would."""
        number = int.from_bytes(hashlib.sha256(f"{self._seed}/{what}".encode()).digest()[:8])
        view[number // 8 % len(view)] ^= 1 << number % 8
