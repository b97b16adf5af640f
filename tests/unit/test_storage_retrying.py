"""Trying again, and settling what became of a put."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from ckptd.storage_backends.base import PutMode
from ckptd.storage_backends.conformance import CHECKS, create_refuses_what_is_there
from ckptd.storage_backends.errors import (
    AlreadyExists,
    NotFound,
    OutcomeUnknown,
    PermissionDenied,
    StorageError,
    Throttled,
    Truncated,
    Unavailable,
)
from ckptd.storage_backends.faulty import Fault, FaultKind, FaultyStore, Op
from ckptd.storage_backends.memory import MemoryStore
from ckptd.storage_backends.retrying import RetryingStore, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.storage_backends.base import ObjectStore

ATTEMPTS = 5
POLICY = RetryPolicy(
    attempts=ATTEMPTS, first_pause=timedelta(milliseconds=100), longest_pause=timedelta(milliseconds=800)
)


class Rig:
    """A memory store behind faults behind retries, with pauses that are only noted down."""

    def __init__(self, *faults: Fault, policy: RetryPolicy = POLICY) -> None:
        self.memory = MemoryStore()
        self.faulty = FaultyStore(self.memory, *faults)
        self.pauses: list[float] = []
        self.store = RetryingStore(self.faulty, policy, sleep=self.pauses.append)


# After a repeated attempt, equal bytes under the key cannot be told from our own: success, by design.
FAIR_CHECKS = [check for check in CHECKS if check is not create_refuses_what_is_there]


@pytest.mark.parametrize("check", FAIR_CHECKS, ids=lambda check: check.__name__)
def test_retrying_keeps_the_contract(check: Callable[[ObjectStore], None]) -> None:
    """The wrapper passes every check, over a store that fails each fifth call at random."""
    faults = [
        Fault(kind=FaultKind.ERROR, times=None, probability=0.2),
        Fault(kind=FaultKind.ANSWER_LOST, times=None, probability=0.2),
    ]
    policy = RetryPolicy(attempts=50, first_pause=timedelta(0), longest_pause=timedelta(0))
    check(RetryingStore(FaultyStore(MemoryStore(), *faults, seed=7), policy))


def test_passing_failures_are_hidden() -> None:
    """Every method succeeds after two passing failures, with a pause before each new attempt."""
    calls: list[Callable[[ObjectStore], object]] = [
        lambda store: store.put("new", b"x"),
        lambda store: store.put("old", b"y", mode=PutMode.OVERWRITE),
        lambda store: store.get("old"),
        lambda store: store.get_into("old", memoryview(bytearray(1))),
        lambda store: store.head("old"),
        lambda store: list(store.list()),
        lambda store: store.delete("old"),
    ]
    for call in calls:
        rig = Rig(Fault(kind=FaultKind.ERROR, times=2))
        rig.memory.put("old", b"x")
        call(rig.store)
        assert len(rig.faulty.fired) == 2
        assert len(rig.pauses) == 2


def test_pauses_grow_within_their_bounds() -> None:
    """Pause n lies between half the first pause and first * 2 ** n, at most the longest."""
    longest = []
    for _ in range(50):
        rig = Rig(Fault(kind=FaultKind.ERROR, times=None))
        with pytest.raises(Unavailable):
            rig.store.get("key")
        assert len(rig.pauses) == ATTEMPTS - 1
        for number, pause in enumerate(rig.pauses):
            assert 0.05 <= pause <= min(0.1 * 2**number, 0.8) + 1e-9
        longest.append(rig.pauses)
    means = [sum(column) / len(column) for column in zip(*longest, strict=True)]
    assert means == sorted(means)
    assert len({pauses[-1] for pauses in longest}) > 1


@pytest.mark.parametrize("condition", [PermissionDenied, NotFound, StorageError, Truncated])
def test_permanent_errors_are_not_repeated(condition: type[StorageError]) -> None:
    """An error that repeating cannot mend passes at the first attempt."""
    fault = Fault(kind=FaultKind.ERROR, times=None, error=lambda key, url: condition("no", key=key, url=url))
    rig = Rig(fault)
    for call in (lambda: rig.store.get("key"), lambda: rig.store.put("key", b"x")):
        with pytest.raises(condition):
            call()
    assert len(rig.faulty.fired) == 2
    assert rig.pauses == []


def test_a_deadline_ends_it() -> None:
    """No attempt begins after the deadline, however many are left."""
    policy = RetryPolicy(attempts=1000, deadline=timedelta(0), first_pause=timedelta(seconds=1))
    rig = Rig(Fault(kind=FaultKind.ERROR, times=None), policy=policy)
    with pytest.raises(Unavailable):
        rig.store.get("key")
    assert len(rig.faulty.fired) == 1


def test_a_lost_answer_of_a_put_that_landed_is_success() -> None:
    """When our bytes stand there after a lost answer, the put succeeded, without a second write."""
    rig = Rig(Fault(kind=FaultKind.ANSWER_LOST, op=Op.PUT))
    rig.store.put("key", b"ours")
    assert rig.memory.get("key") == b"ours"
    assert rig.pauses == []


def test_a_lost_answer_beside_anothers_object_is_already_exists() -> None:
    """When other bytes, of other or equal length, stand there after a lost answer, they won."""
    for theirs in (b"theirs", b"ourz", b""):
        rig = Rig(Fault(kind=FaultKind.ERROR, op=Op.PUT, error=lambda *_: OutcomeUnknown("lost")))
        rig.memory.put("key", theirs)
        with pytest.raises(AlreadyExists, match="other bytes"):
            rig.store.put("key", b"ours")
        assert rig.memory.get("key") == theirs


def test_a_lost_put_is_written_again() -> None:
    """When nothing stands there after a lost answer, the put is tried again."""
    rig = Rig(Fault(kind=FaultKind.ERROR, op=Op.PUT, times=2, error=lambda *_: OutcomeUnknown("lost")))
    rig.store.put("key", b"ours")
    assert rig.memory.get("key") == b"ours"
    assert len(rig.pauses) == 2


def test_already_exists_after_a_retry_may_be_ourselves() -> None:
    """After any repeated attempt AlreadyExists is believed only when the bytes differ."""
    for condition in (Unavailable, Throttled, OutcomeUnknown):
        rig = Rig()

        def lands_late(key: str, url: str, condition: type[StorageError] = condition, rig: Rig = rig) -> StorageError:
            rig.memory.put(key, b"ours" if key == "mine" else b"other")
            return condition("answer lost", key=key, url=url)

        rig.faulty.add(
            Fault(kind=FaultKind.ERROR, op=Op.PUT, prefix="mine", error=lands_late),
            Fault(kind=FaultKind.ERROR, op=Op.PUT, prefix="taken", error=lands_late),
        )
        rig.store.put("mine", b"ours")
        with pytest.raises(AlreadyExists):
            rig.store.put("taken", b"ours")


def test_already_exists_at_the_first_attempt_is_believed() -> None:
    """Without a failure before, equal bytes are somebody else's: no read-back."""
    rig = Rig()
    rig.memory.put("key", b"same")
    with pytest.raises(AlreadyExists):
        rig.store.put("key", b"same")
    assert rig.pauses == []


def test_a_landed_put_is_found_even_when_reading_fails_at_first() -> None:
    """The read-back is tried again as well; the second put's AlreadyExists is our own object."""
    rig = Rig(
        Fault(kind=FaultKind.ANSWER_LOST, op=Op.PUT),
        Fault(kind=FaultKind.ERROR, op=Op.HEAD, times=2),
    )
    rig.store.put("key", b"ours")
    assert len(rig.pauses) == 2


@pytest.mark.parametrize("last", [Unavailable, Throttled, PermissionDenied])
def test_what_nobody_knows_is_outcome_unknown(last: type[StorageError]) -> None:
    """When an attempt may have landed, no later failure is passed off as "not written"."""
    rig = Rig(
        Fault(kind=FaultKind.ERROR, op=Op.PUT, error=lambda *_: OutcomeUnknown("lost")),
        Fault(kind=FaultKind.ERROR, op=Op.HEAD, times=None),
        Fault(
            kind=FaultKind.ERROR,
            op=Op.PUT,
            nth=2,
            times=None,
            error=lambda key, url: last("later", key=key, url=url),
        ),
    )
    with pytest.raises(OutcomeUnknown):
        rig.store.put("key", b"ours")


def test_a_put_that_never_landed_stays_unavailable() -> None:
    """When no attempt can have landed, the last error passes as it is."""
    rig = Rig(Fault(kind=FaultKind.ERROR, op=Op.PUT, times=None))
    with pytest.raises(Unavailable):
        rig.store.put("key", b"ours")


def test_large_objects_are_compared_to_the_last_byte() -> None:
    """The read-back compares piece by piece up to the end, for lengths around the piece size."""
    piece = 8 << 20
    for length, place in itertools.product((piece - 1, piece, piece + 1), (0, -1)):
        ours = bytearray(length)
        theirs = bytearray(length)
        for expected in (None, AlreadyExists):
            if expected is not None:
                theirs[place] ^= 1
            rig = Rig(Fault(kind=FaultKind.ERROR, op=Op.PUT, error=lambda *_: OutcomeUnknown("lost")))
            rig.memory.put("key", theirs)
            if expected is None:
                rig.store.put("key", ours)
            else:
                with pytest.raises(expected):
                    rig.store.put("key", ours)


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"first_pause": timedelta(seconds=-1)},
        {"first_pause": timedelta(seconds=2), "longest_pause": timedelta(seconds=1)},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    """Out-of-range policies are ValueErrors."""
    with pytest.raises(ValueError, match=r"must"):
        RetryPolicy(**wrong)  # type: ignore[arg-type]
