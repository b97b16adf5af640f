"""Trying again, with growing random pauses, within a deadline; and finding out what became of a put.

Owns the one retry loop of the storage room: every driver's own is off. Permanent errors pass at
once, but for a clock that is said to be off: twice more, since each attempt is signed anew.

Invariant: a CREATE put ends in one of three ways only: our bytes stand under the key
(return), other bytes do (AlreadyExists), or nobody knows (OutcomeUnknown). An AlreadyExists that
follows a repeated attempt is never believed before the object was read back: the first attempt,
whose answer was lost, may be what is there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import tenacity

from .base import Buffer, ObjectInfo, ObjectStore, PutMode, flat
from .errors import (
    AlreadyExists,
    ClockSkew,
    NotDurable,
    NotFound,
    OutcomeUnknown,
    StorageError,
    Truncated,
    is_retryable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["RetryPolicy", "RetryingStore"]

T = TypeVar("T")

# Read back in pieces, so that comparing a 64 MiB object costs little memory.
_COMPARE_BYTES = 8 << 20
# A request that waited too long between its signature and the store is refused as one of a wrong clock is. The next
# attempt is signed anew; when that does not help either, it is the clock.
_SKEWED_ATTEMPTS = 3
_MOST_ATTEMPTS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How long and how often to try again.

    The pause before attempt n + 1 is random between half of ``first_pause`` and
    ``first_pause * 2 ** n``, at most ``longest_pause``.

    Attributes:
        attempts: Tries in all, 1 to 10000; None: as many as the deadline leaves time for.
        deadline: No new attempt begins later than this after the first; a running one is not cut.
        first_pause: Scale of the first pause.
        longest_pause: Bound of every pause.
    """

    attempts: int | None = 12
    deadline: timedelta = timedelta(minutes=3)
    first_pause: timedelta = timedelta(milliseconds=200)
    longest_pause: timedelta = timedelta(seconds=20)

    def __post_init__(self) -> None:
        if self.attempts is not None and not 1 <= self.attempts <= _MOST_ATTEMPTS:
            raise ValueError(f"attempts is {self.attempts}; it must be 1 to {_MOST_ATTEMPTS}")
        if not timedelta(0) <= self.first_pause <= self.longest_pause:
            raise ValueError("first_pause must lie between 0 and longest_pause")


class RetryingStore(ObjectStore):
    """A store whose passing failures are hidden for a while.

    Args:
        inner: The store to call; closed with this one.
        policy: How long and how often.
        sleep: Takes seconds; replaced in tests.
    """

    def __init__(
        self,
        inner: ObjectStore,
        policy: RetryPolicy | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.capabilities = inner.capabilities
        self._policy = policy or RetryPolicy()
        self._sleep = sleep

    def put(self, key: str, data: Buffer, *, mode: PutMode = PutMode.CREATE) -> None:
        """Write one object; an uncertain CREATE is settled by reading back.

        Raises:
            OutcomeUnknown: Only when the store could not even be read within the deadline.
        """
        if mode is PutMode.OVERWRITE:
            self._again(lambda: self.inner.put(key, data, mode=mode))
            return
        attempt = _CreatePut(self.inner, key, flat(data))
        try:
            self._again(attempt)
        except (AlreadyExists, OutcomeUnknown):
            raise
        except StorageError as error:
            if attempt.may_have_landed:
                raise OutcomeUnknown(
                    f"an earlier attempt may have landed; then: {error.message}",
                    key=key,
                    url=self.url,
                    hint=error.hint,
                ) from error
            raise

    def get(self, key: str) -> bytes:
        """Read a whole object; an answer that was cut is asked for again."""
        return self._again(lambda: self.inner.get(key))

    def get_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        """Fill the buffer from the object."""
        self._again(lambda: self.inner.get_into(key, buffer, offset=offset))

    def head(self, key: str) -> ObjectInfo:
        """Ask for the size."""
        return self._again(lambda: self.inner.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List; a listing that broke off begins anew."""
        return self._again(lambda: iter([*self.inner.list(prefix)]))

    def delete(self, key: str) -> None:
        """Delete one object."""
        self._again(lambda: self.inner.delete(key))

    def close(self) -> None:
        """Close the inner store."""
        self.inner.close()

    def _again(self, call: Callable[[], T]) -> T:
        policy = self._policy
        skewed = 0

        def is_worth_it(error: BaseException) -> bool:
            nonlocal skewed
            skewed += isinstance(error, ClockSkew)
            return is_retryable(error) or (isinstance(error, ClockSkew) and skewed < _SKEWED_ATTEMPTS)

        retrying = tenacity.Retrying(
            stop=tenacity.stop_before_delay(policy.deadline.total_seconds())
            | (tenacity.stop_never if policy.attempts is None else tenacity.stop_after_attempt(policy.attempts)),
            wait=tenacity.wait_random_exponential(
                multiplier=policy.first_pause.total_seconds(),
                max=policy.longest_pause.total_seconds(),
                min=policy.first_pause.total_seconds() / 2,
            ),
            retry=tenacity.retry_if_exception(is_worth_it),
            sleep=self._sleep,
            reraise=True,
        )
        return retrying(call)


class _CreatePut:
    """One CREATE put over all its attempts: what its failures so far allow for."""

    def __init__(self, inner: ObjectStore, key: str, view: memoryview) -> None:
        self._inner = inner
        self._key = key
        self._view = view
        self._is_repeated = False
        self.may_have_landed = False

    def __call__(self) -> None:
        try:
            self._inner.put(self._key, self._view, mode=PutMode.CREATE)
        except AlreadyExists:
            if not self._is_repeated:
                raise
            self.may_have_landed = True
            if not self._stands_there():
                raise OutcomeUnknown("the object was there and vanished", key=self._key, url=self._inner.url) from None
        except OutcomeUnknown as error:
            self._is_repeated = True
            self.may_have_landed = True
            # What is not durable can be read all the same; putting it again makes it so, or says why not.
            if not isinstance(error, NotDurable) and self._stands_there_if_readable():
                return
            raise
        except StorageError as error:
            self._is_repeated = self._is_repeated or error.retryable
            raise

    def _stands_there_if_readable(self) -> bool:
        """Like `_stands_there`; False also while the store cannot be read (the put is repeated)."""
        try:
            return self._stands_there()
        except StorageError as error:
            if error.retryable:
                return False
            raise

    def _stands_there(self) -> bool:
        """Whether our bytes stand under the key; False when nothing does (yet).

        Raises:
            AlreadyExists: Other bytes do.
        """
        try:
            if self._inner.head(self._key).size != len(self._view):
                raise self._taken()
            for start in range(0, len(self._view), _COMPARE_BYTES):
                ours = self._view[start : start + _COMPARE_BYTES]
                theirs = bytearray(len(ours))
                self._inner.get_into(self._key, memoryview(theirs), offset=start)
                if theirs != ours:
                    raise self._taken()
        except NotFound:
            return False
        except Truncated:
            raise self._taken() from None
        return True

    def _taken(self) -> AlreadyExists:
        return AlreadyExists("an object of that name with other bytes is there", key=self._key, url=self._inner.url)
