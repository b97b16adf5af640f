"""The throttled and the faulty store, and the probe that finds bad stores out."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.storage_backends.base import PutMode
from ckptd.storage_backends.conformance import CHECKS
from ckptd.storage_backends.errors import (
    AlreadyExists,
    ClockSkew,
    NotFound,
    OutcomeUnknown,
    PermissionDenied,
    StorageError,
    Throttled,
    Truncated,
    Unavailable,
)
from ckptd.storage_backends.fault_script import FaultScript
from ckptd.storage_backends.faulty import Fault, FaultKind, FaultyStore, Op
from ckptd.storage_backends.memory import MemoryStore
from ckptd.storage_backends.probe import probe
from ckptd.storage_backends.throttled import ThrottledStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.storage_backends.base import Buffer, ObjectStore


class ManualTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_wrappers_keep_the_contract(check: Callable[[ObjectStore], None]) -> None:
    """A fast throttle over a store without faults passes every check."""
    check(ThrottledStore(FaultyStore(MemoryStore()), bytes_per_s=1e12, requests_per_s=1e9))


def test_throttled_keeps_the_byte_rate() -> None:
    """Put and got bytes take size / rate, one after another."""
    time = ManualTime()
    store = ThrottledStore(MemoryStore(), bytes_per_s=1000, clock=time.clock, sleep=time.sleep)
    store.put("a", bytes(500))
    assert time.now == 1000.5
    store.put("b", bytes(2000))
    assert time.now == 1002.5
    store.get_into("b", memoryview(bytearray(1000)))
    assert time.now == 1003.5
    store.get("a")
    store.put("c", b"")
    assert time.now == 1004.0


def test_throttled_keeps_the_request_rate() -> None:
    """Requests of every kind are spread to the rate; idle time is not saved up."""
    time = ManualTime()
    store = ThrottledStore(MemoryStore(), requests_per_s=10, clock=time.clock, sleep=time.sleep)
    store.put("a", b"x")
    store.get("a")
    store.head("a")
    list(store.list())
    store.delete("a")
    assert time.now == pytest.approx(1000.5)
    time.now += 100
    for _ in range(5):
        list(store.list())
    assert time.now == pytest.approx(1101.0)


@pytest.mark.parametrize("rates", [{"bytes_per_s": 0}, {"requests_per_s": -1}])
def test_throttled_refuses_rates_that_never_end(rates: dict[str, Any]) -> None:
    """A rate of nothing would hang for ever and is refused."""
    with pytest.raises(ValueError, match="more than 0"):
        ThrottledStore(MemoryStore(), **rates)


def test_faulty_strikes_the_nth_matching_call() -> None:
    """A fault counts only calls of its op and prefix, strikes from nth on, for times calls."""
    fault = Fault(kind=FaultKind.ERROR, op=Op.PUT, prefix="log/", nth=2, times=2)
    store = FaultyStore(MemoryStore(), fault)
    store.put("chunks/1", b"")
    store.put("log/1", b"")
    for number in (2, 3):
        with pytest.raises(Unavailable):
            store.put(f"log/{number}", b"")
    store.put("log/4", b"")
    assert [info.key for info in store.list()] == ["chunks/1", "log/1", "log/4"]
    assert [(fired.key, fired.call, fired.fault) for fired in store.fired] == [
        ("log/2", 2, fault),
        ("log/3", 3, fault),
    ]


def test_faulty_answers_lost_after_the_deed() -> None:
    """ANSWER_LOST writes first, and is OutcomeUnknown for CREATE only."""
    store = FaultyStore(MemoryStore(), Fault(kind=FaultKind.ANSWER_LOST, times=None))
    with pytest.raises(OutcomeUnknown):
        store.put("a", b"x")
    with pytest.raises(Unavailable):
        store.put("b", b"y", mode=PutMode.OVERWRITE)
    assert [info.key for info in store.inner.list()] == ["a", "b"]
    with pytest.raises(Unavailable):
        store.delete("a")
    assert [info.key for info in store.inner.list()] == ["b"]


def test_faulty_puts_are_lost_silently() -> None:
    """PUT_LOST answers as if written."""
    store = FaultyStore(MemoryStore(), Fault(kind=FaultKind.PUT_LOST))
    store.put("a", b"x")
    with pytest.raises(NotFound):
        store.get("a")
    assert len(store.fired) == 1


@pytest.mark.parametrize("times", [1, None])
def test_faulty_reads_are_wrong_by_one_bit_once_or_always(times: int | None) -> None:
    """CORRUPTED flips exactly one bit of what is read, the object itself stays whole; seeds replay."""
    data = bytes(1000)
    flips = []
    for _ in range(2):
        store = FaultyStore(MemoryStore(), Fault(kind=FaultKind.CORRUPTED, op=Op.GET, times=times), seed=3)
        store.put("a", data)
        got = [store.get("a")]
        buffer = bytearray(1000)
        store.get_into("a", memoryview(buffer))
        got.append(bytes(buffer))
        flips.append([sum(byte.bit_count() for byte in one) for one in got])
        assert store.inner.get("a") == data
    assert flips[0] == flips[1] == [1, 1 if times is None else 0]


def test_faulty_reads_are_cut() -> None:
    """TRUNCATED gives half the bytes, or Truncated where a whole buffer was asked for."""
    store = FaultyStore(MemoryStore(), Fault(kind=FaultKind.TRUNCATED, op=Op.GET, times=2))
    store.put("a", b"123456")
    assert store.get("a") == b"123"
    with pytest.raises(Truncated):
        store.get_into("a", memoryview(bytearray(6)))
    assert store.get("a") == b"123456"


def test_faulty_lists_are_stale() -> None:
    """STALE_LIST repeats the last listing of that prefix."""
    store = FaultyStore(MemoryStore(), Fault(kind=FaultKind.STALE_LIST, nth=2))
    store.put("a", b"x")
    assert [info.key for info in store.list()] == ["a"]
    store.put("b", b"x")
    assert [info.key for info in store.list()] == ["a"]
    assert [info.key for info in store.list()] == ["a", "b"]


def test_faulty_delays_and_own_errors_and_clear() -> None:
    """DELAY goes on after sleeping, ERROR raises what the script says, and clear ends it all."""
    slept: list[float] = []
    store = FaultyStore(MemoryStore(), Fault(kind=FaultKind.DELAY, delay_s=2.5, times=None), sleep=slept.append)
    store.put("a", b"x")
    assert slept == [2.5]
    store.add(Fault(kind=FaultKind.ERROR, times=None, error=lambda *_: PermissionDenied("no")))
    with pytest.raises(PermissionDenied):
        store.get("a")
    store.clear()
    assert store.get("a") == b"x"
    assert slept == [2.5, 2.5]


def test_faults_strike_only_calls_they_can_spoil() -> None:
    """A fault of reading, listing or putting neither counts nor records calls of another kind."""
    store = FaultyStore(
        MemoryStore(),
        Fault(kind=FaultKind.CORRUPTED),
        Fault(kind=FaultKind.STALE_LIST),
        Fault(kind=FaultKind.PUT_LOST, nth=2),
    )
    store.put("a", b"x")
    store.head("a")
    assert not store.fired
    assert store.get("a") != b"x"
    assert list(store.list()) == []
    store.put("b", b"x")
    assert [fired.op for fired in store.fired] == [Op.GET, Op.LIST, Op.PUT]


@pytest.mark.parametrize(
    ("kind", "create", "other"),
    [
        (FaultKind.SLOW_DOWN, Throttled, Throttled),
        (FaultKind.EXPIRED, PermissionDenied, PermissionDenied),
        (FaultKind.SKEWED, ClockSkew, ClockSkew),
        (FaultKind.RESET, OutcomeUnknown, Unavailable),
        (FaultKind.HANG, OutcomeUnknown, Unavailable),
    ],
)
def test_faulty_refusals_leave_the_store_alone(
    kind: FaultKind, create: type[StorageError], other: type[StorageError]
) -> None:
    """Each refusal is the condition that a driver would raise, names the object, and nothing was done."""
    slept: list[float] = []
    store = FaultyStore(MemoryStore(), Fault(kind=kind, delay_s=3, times=3), sleep=slept.append)
    with pytest.raises(create, match="'a'"):
        store.put("a", b"x")
    with pytest.raises(other):
        store.put("a", b"x", mode=PutMode.OVERWRITE)
    with pytest.raises(other):
        store.get("a")
    assert list(store.inner.list()) == []
    assert slept == ([3, 3, 3] if kind is FaultKind.HANG else [])
    assert [(fired.op, fired.struck) for fired in store.fired] == [(Op.PUT, 1), (Op.PUT, 2), (Op.GET, 3)]
    store.put("a", b"x")
    assert store.get("a") == b"x"


def test_faulty_outages_last_from_the_first_call_they_strike() -> None:
    """An outage hits every call for its time, counted from the first one it hit, and then none."""
    time = ManualTime()
    store = FaultyStore(MemoryStore(), Fault(kind=FaultKind.OUTAGE, for_s=10, nth=2), clock=time.clock)
    store.put("a", b"x")
    time.now += 100
    for _ in range(2):
        with pytest.raises(Unavailable):
            store.get("a")
        time.now += 5
    assert store.get("a") == b"x"
    assert len(store.fired) == 2


def test_faulty_limits_let_so_many_calls_of_a_prefix_pass_in_any_second() -> None:
    """Calls beyond the limit are throttled, others pass, and a second later the next ones do."""
    time = ManualTime()
    store = FaultyStore(MemoryStore(), Fault(kind=FaultKind.LIMIT, prefix="chunks/", per_s=2), clock=time.clock)
    for second in range(2):
        for number in range(2):
            store.put(f"chunks/{second}.{number}", b"")
            time.now += 0.25
        for _ in range(2):
            with pytest.raises(Throttled):
                store.put("chunks/more", b"")
        store.put(f"log/{second}", b"")
        time.now += 0.5
    assert len(store.fired) == 4


def test_faulty_drips_take_as_long_as_their_bytes() -> None:
    """A drip waits for size / rate, for puts and both kinds of get, and gives the right bytes."""
    slept: list[float] = []
    store = FaultyStore(MemoryStore(), Fault(kind=FaultKind.DRIP, bytes_per_s=100, times=None), sleep=slept.append)
    store.put("a", bytes(50))
    assert store.get("a") == bytes(50)
    store.get_into("a", memoryview(bytearray(20)), offset=30)
    store.head("a")
    assert slept == [0.5, 0.5, 0.2]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"kind": FaultKind.OUTAGE}, "outage needs for_s"),
        ({"kind": FaultKind.DRIP, "bytes_per_s": 0}, "drip needs bytes_per_s"),
        ({"kind": FaultKind.LIMIT, "per_s": -1}, "limit needs per_s"),
        ({"kind": FaultKind.PUT_LOST, "op": Op.GET}, "put_lost cannot strike get; allowed: put"),
        ({"kind": FaultKind.ERROR, "nth": 0}, "from 1"),
    ],
)
def test_faults_that_never_strike_are_refused(wrong: dict[str, Any], complaint: str) -> None:
    """A fault without its number, or of a call it cannot spoil, is an error when it is made."""
    with pytest.raises(ValueError, match=complaint):
        Fault(**wrong)


def test_a_strike_that_is_taken_back_strikes_the_next_call() -> None:
    """What could not be done is not recorded and not used up."""
    script = FaultScript(Fault(kind=FaultKind.CORRUPTED))
    (first,) = script.strikes(Op.GET, "missing")
    script.take_back(first)
    assert script.fired == ()
    (second,) = script.strikes(Op.GET, "a")
    assert (second.key, second.call, second.struck) == ("a", 2, 1)
    assert script.strikes(Op.GET, "a") == ()


def test_faulty_probabilities_replay() -> None:
    """The same seed strikes the same calls; another seed others."""

    def struck(seed: int) -> list[int]:
        fault = Fault(kind=FaultKind.ERROR, op=Op.LIST, times=None, probability=0.3)
        store = FaultyStore(MemoryStore(), fault, seed=seed)
        for _ in range(200):
            try:
                store.list()
            except Unavailable:
                continue
        return [fired.call for fired in store.fired]

    assert struck(1) == struck(1) != struck(2)
    assert 30 <= len(struck(1)) <= 90


class StaleGets(MemoryStore):
    """Gives the first bytes ever put under a key."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, bytes] = {}

    def put(self, key: str, data: Buffer, *, mode: PutMode = PutMode.CREATE) -> None:
        super().put(key, data, mode=mode)
        self.first.setdefault(key, bytes(data))

    def get(self, key: str) -> bytes:
        super().get(key)
        return self.first[key]


class LateDeletes(MemoryStore):
    """Answers deletes and does nothing."""

    def delete(self, key: str) -> None:
        pass


@pytest.mark.parametrize(
    ("store", "complaint"),
    [
        (StaleGets(), "GET gives what was overwritten"),
        (LateDeletes(), "LIST shows what was deleted"),
        (FaultyStore(MemoryStore(), Fault(kind=FaultKind.STALE_LIST, times=None)), "LIST does not show"),
        (FaultyStore(MemoryStore(), Fault(kind=FaultKind.STALE_LIST, nth=2)), "LIST shows what was deleted"),
        (FaultyStore(MemoryStore(), Fault(kind=FaultKind.CORRUPTED)), "GET does not give what was put"),
    ],
)
def test_the_probe_refuses_stores_that_are_not_consistent(store: ObjectStore, complaint: str) -> None:
    """A store whose GET or LIST shows the past is refused, saying which."""
    with pytest.raises(StorageError, match=complaint):
        probe(store)


def test_the_probe_passes_on_what_a_request_raises_and_tidies_up() -> None:
    """Errors of the store pass through the probe, and its key is gone afterwards."""
    denied = Fault(kind=FaultKind.ERROR, op=Op.LIST, error=lambda *_: PermissionDenied("no"))
    store = FaultyStore(MemoryStore(), denied)
    with pytest.raises(PermissionDenied):
        probe(store)
    assert list(store.list()) == []


def test_the_probe_corrects_a_false_claim_of_put_if_absent() -> None:
    """A store that says it has put-if-absent and overwrites all the same is used as one without."""

    class Careless(MemoryStore):
        def put(self, key: str, data: Buffer, *, mode: PutMode = PutMode.CREATE) -> None:
            super().put(key, data, mode=PutMode.OVERWRITE)

    store = Careless()
    assert store.capabilities.put_if_absent
    probe(store)
    assert not store.capabilities.put_if_absent


def test_a_fault_that_finds_nothing_to_spoil_is_not_used_up() -> None:
    """An object that is not there, an empty one, a put that is refused: the fault waits for the next, and `fired` is silent."""
    for kind in (FaultKind.CORRUPTED, FaultKind.TRUNCATED, FaultKind.ANSWER_LOST):
        memory = MemoryStore()
        memory.put("empty", b"")
        memory.put("there", b"x")
        store = FaultyStore(memory, Fault(kind=kind))
        with pytest.raises(NotFound):
            store.get("none")
        if kind is FaultKind.ANSWER_LOST:
            with pytest.raises(AlreadyExists):
                store.put("there", b"y")
        else:
            assert store.get("empty") == b""
            store.get_into("empty", memoryview(bytearray(0)))
        assert list(store.fired) == []
        with contextlib.suppress(Truncated, Unavailable):
            assert store.get("there") != b"x"
        assert [fired.fault.kind for fired in store.fired] == [kind]


def test_a_rotten_object_is_wrong_in_the_same_place_each_time() -> None:
    """Two reads of it agree, and so do `get` and `get_into`."""
    memory = MemoryStore()
    memory.put("key", bytes(range(256)))
    store = FaultyStore(memory, Fault(kind=FaultKind.CORRUPTED, times=None), seed=3)
    buffer = bytearray(256)
    store.get_into("key", memoryview(buffer))
    assert store.get("key") == store.get("key") == bytes(buffer) != memory.get("key")
