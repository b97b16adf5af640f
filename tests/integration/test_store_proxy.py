"""The proxy between ckptd and a store: what passes, and how each fault reaches who uses the storage drivers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import blake3
import grpc
import pytest
from fixtures.agents import Agents
from fixtures.raw_job import Job, error_of

from ckptd.chaos.cluster.leash import start_time
from ckptd.chaos.cluster.process import ProcessError
from ckptd.chaos.cluster.proxied import proxied_store
from ckptd.chaos.cluster.store import S3Store
from ckptd.chaos.nemesis.injector import Struck
from ckptd.chaos.root import facts_of
from ckptd.chaos.scenario import Moment, StoreFault
from ckptd.chaos.schedule import PlannedFault
from ckptd.chaos.seaweed import SeaweedServer
from ckptd.chaos.store_proxy.handle import StoreProxy
from ckptd.chaos.store_proxy.orders import OrderError
from ckptd.chaos.watch import wait_until
from ckptd.protos.error_pb2 import REASON_CORRUPT
from ckptd.storage_backends.base import ObjectStore, PutMode
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
from ckptd.storage_backends.fault_script import Fault, FaultKind, Op
from ckptd.storage_backends.retrying import RetryingStore, RetryPolicy
from ckptd.storage_backends.urls import open_store

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.s3]

WITHIN = timedelta(seconds=20)
HASTY = RetryPolicy(attempts=40, first_pause=timedelta(milliseconds=20), longest_pause=timedelta(milliseconds=100))
SEED = 7
BIG = 3 << 20
K = FaultKind


@pytest.fixture(scope="module")
def running(seaweed: SeaweedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProxy]:
    with StoreProxy(seaweed.endpoint, tmp_path_factory.mktemp("proxy"), seed=SEED) as proxy:
        yield proxy


class Rig:
    """A fresh root behind the proxy: as the driver sees it, as an agent does, and without the proxy."""

    def __init__(self, proxy: StoreProxy, url: str) -> None:
        self.proxy = proxy
        self.bare = open_store(url, retry=None, options={"endpoint_url": proxy.endpoint})
        self.store = RetryingStore(self.bare, HASTY)
        hurried = {"endpoint_url": proxy.endpoint, "small_timeout_s": "0.5", "bulk_timeout_s": "0.5"}
        self.impatient = open_store(url, retry=None, options=hurried)
        self.true = open_store(url)
        self.prefix = url.split("/", 3)[3] + "/"
        self._before = len(proxy.done())

    def add(self, kind: FaultKind, **more: Any) -> None:
        prefix = "" if kind is K.OUTAGE else self.prefix + more.pop("prefix", "")
        self.proxy.add(Fault(kind=kind, prefix=prefix, **more))

    def done(self) -> list[tuple[str, str, str]]:
        """What the proxy says it did in this test: fault, op, key."""
        return [
            (line["fault"], line["op"], line["key"].removeprefix(self.prefix))
            for line in self.proxy.done()[self._before :]
        ]

    def lines(self) -> list[dict[str, Any]]:
        return self.proxy.done()[self._before :]


@pytest.fixture
def rig(running: StoreProxy, fresh_root: Callable[[], str]) -> Iterator[Rig]:
    rig = Rig(running, fresh_root())
    with closing(rig.bare), closing(rig.impatient), closing(rig.true):
        yield rig
        running.clear()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_without_faults_the_proxy_is_the_store(check: Callable[[ObjectStore], None], rig: Rig) -> None:
    """Every check of the storage contract passes through it, signatures included, and nothing is said to be done."""
    check(rig.bare)
    assert rig.lines() == []


def test_odd_keys_and_large_bodies_pass_as_they_are(rig: Rig) -> None:
    """Keys that need escaping, empty objects and 20 MiB come and go bit by bit; put-if-absent is refused as the store does."""
    data = bytes(range(256)) * (20 << 12)
    for key, body in (("a [x] #1?&%41+=ä", b"odd"), ("empty", b""), ("big", data)):
        rig.bare.put(key, body)
        assert rig.true.get(key) == body
        assert rig.bare.get(key) == body
    buffer = bytearray(17 << 20)
    rig.bare.get_into("big", memoryview(buffer), offset=5)
    assert buffer == data[5 : 5 + len(buffer)]
    with pytest.raises(AlreadyExists):
        rig.bare.put("big", data)


def test_the_connection_is_kept_between_requests(rig: Rig) -> None:
    """Two answers, one of them a refusal before the body was read, come over one connection."""
    where = urlsplit(rig.proxy.endpoint)
    rig.add(K.SLOW_DOWN)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as line:
        answers = line.makefile("rb")
        path = f"/bucket/{rig.prefix}key"
        for status, fault in ((b"503", b"SlowDown"), (b"403", b"AccessDenied")):
            line.sendall(
                f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 20}\r\n\r\n".encode() + bytes(1 << 20)
            )
            assert answers.readline().split()[1] == status
            headers = dict(row.lower().strip().split(b": ", 1) for row in iter(answers.readline, b"\r\n"))
            assert fault in answers.read(int(headers[b"content-length"]))


REFUSALS = [
    (K.ERROR, OutcomeUnknown, Unavailable),
    (K.SLOW_DOWN, Throttled, Throttled),
    (K.EXPIRED, PermissionDenied, PermissionDenied),
    (K.RESET, OutcomeUnknown, Unavailable),
]


@pytest.mark.parametrize(("kind", "create", "other"), REFUSALS)
def test_a_refusal_names_the_object_and_is_got_over(
    rig: Rig, kind: FaultKind, create: type[StorageError], other: type[StorageError]
) -> None:
    """Twice refused, a put and a get raise what the condition is; tried again by the wrapper, both succeed, once."""
    rig.add(kind, op=Op.PUT, prefix="bare")
    with pytest.raises(create, match="bare") as caught:
        rig.bare.put("bare", b"x" * 10)
    assert caught.value.retryable
    assert list(rig.true.list()) == []
    rig.true.put("read", b"as it is")
    rig.add(kind, op=Op.GET, prefix="read")
    with pytest.raises(other, match="read"):
        rig.bare.get("read")
    rig.add(kind, op=Op.PUT, prefix="again", times=3)
    rig.add(kind, op=Op.GET, prefix="read", times=3)
    rig.store.put("again", b"y" * BIG)
    assert rig.true.get("again") == b"y" * BIG
    assert rig.store.get("read") == b"as it is"
    expected = [(kind, "put", "bare"), (kind, "get", "read")]
    assert rig.done() == [*expected, *[(kind, "put", "again")] * 3, *[(kind, "get", "read")] * 3]
    assert [line["struck"] for line in rig.lines()] == [1, 1, 1, 2, 3, 1, 2, 3]


def test_a_store_that_says_nothing_is_a_timeout_and_is_got_over(rig: Rig) -> None:
    """Nothing comes until the client gives up: uncertain for a create, which the wrapper settles; no byte was written."""
    rig.add(K.HANG, op=Op.PUT)
    with pytest.raises(OutcomeUnknown, match="timed out: 'key'"):
        rig.impatient.put("key", b"x")
    with pytest.raises(NotFound):
        rig.true.head("key")
    rig.add(K.HANG, op=Op.PUT)
    RetryingStore(rig.impatient, HASTY).put("key", b"x")
    rig.add(K.HANG, op=Op.GET)
    with pytest.raises(Unavailable, match="timed out: 'key'"):
        rig.impatient.get("key")
    assert rig.true.get("key") == b"x"
    assert rig.done() == [("hang", "put", "key")] * 2 + [("hang", "get", "key")]


def test_a_hang_with_a_time_ends_with_the_connection(rig: Rig) -> None:
    """The client need not give up: it hears nothing for so long, then the connection ends, and nothing was done."""
    rig.add(K.HANG, op=Op.PUT, delay_s=0.2)
    begun = time.monotonic()
    with pytest.raises(OutcomeUnknown) as caught:
        rig.bare.put("key", b"x")
    assert "timed out" not in str(caught.value)
    assert time.monotonic() - begun >= 0.2
    with pytest.raises(NotFound):
        rig.true.head("key")
    rig.add(K.HANG, op=Op.GET, delay_s=0.1)
    rig.true.put("key", b"x")
    assert rig.store.get("key") == b"x"
    assert rig.done() == [("hang", "put", "key"), ("hang", "get", "key")]


def test_a_skewed_clock_is_said_after_three_attempts(rig: Rig) -> None:
    """RequestTimeTooSkewed is ClockSkew with the way out: each attempt is signed anew, and more do not help."""
    rig.add(K.SKEWED, times=None)
    for call in (lambda: rig.store.put("key", b"x"), lambda: rig.store.get("key"), rig.store.list):
        with pytest.raises(ClockSkew, match="set this node's clock"):
            call()
    assert [op for _, op, _ in rig.done()] == ["put"] * 3 + ["get"] * 3 + ["list"] * 3


def test_an_outage_refuses_everybody_and_ends(rig: Rig) -> None:
    """While the store is away connections are refused, also kept ones; the wrapper waits, and nothing is lost or doubled."""
    rig.store.put("before", b"x")
    rig.add(K.OUTAGE, for_s=60)
    # This one may go out on the kept connection before its reset has come in.
    with pytest.raises((Unavailable, OutcomeUnknown)):
        rig.bare.put("key", b"x")
    with pytest.raises(Unavailable, match="key") as caught:
        rig.bare.put("key", b"x")
    assert caught.value.hint is not None
    assert "network" in caught.value.hint
    worker = threading.Thread(target=rig.store.put, args=("key", b"y" * BIG))
    worker.start()
    with pytest.raises(OrderError, match="already"):
        rig.add(K.OUTAGE, for_s=1)
    rig.proxy.clear()
    worker.join(WITHIN.total_seconds())
    assert not worker.is_alive()
    assert rig.true.get("key") == b"y" * BIG
    begins, ends = rig.lines()
    assert (begins["fault"], begins["begins"], begins["for_s"]) == ("outage", True, 60)
    assert begins["connections_broken"] >= 1
    assert (ends["fault"], ends["begins"]) == ("outage", False)


def test_an_outage_ends_by_itself(rig: Rig) -> None:
    """After its time the port listens again, the same one."""
    rig.add(K.OUTAGE, for_s=0.3)
    rig.store.put("key", b"x")
    assert [line["begins"] for line in rig.lines()] == [True, False]
    assert rig.lines()[1]["t"] - rig.lines()[0]["t"] >= 0.29


def test_a_limit_throttles_one_prefix(rig: Rig) -> None:
    """Calls beyond the limit get 503, calls of other prefixes none; the wrapper gets all of them through."""
    rig.add(K.LIMIT, prefix="chunks/", op=Op.PUT, per_s=5)
    workers = [threading.Thread(target=rig.store.put, args=(f"chunks/{number}", b"x")) for number in range(8)]
    for worker in workers:
        worker.start()
    rig.store.put("log/1", b"x")
    for worker in workers:
        worker.join(WITHIN.total_seconds())
    assert [info.key for info in rig.true.list()] == [*(f"chunks/{number}" for number in range(8)), "log/1"]
    done = rig.done()
    assert done
    assert {(fault, op, key.partition("/")[0]) for fault, op, key in done} == {("limit", "put", "chunks")}


def test_a_drip_is_slow_and_right(rig: Rig) -> None:
    """A dripping put and get take no less than their bytes' time, and no byte is wrong; too slow is a timeout."""
    data = bytes(range(256)) * 512
    rig.add(K.DRIP, bytes_per_s=len(data) * 4, times=2)
    begun = time.monotonic()
    rig.bare.put("key", data)
    middle = time.monotonic()
    assert rig.bare.get("key") == data
    assert middle - begun >= 0.25
    assert time.monotonic() - middle >= 0.25
    rig.add(K.DRIP, bytes_per_s=1000)
    with pytest.raises(OutcomeUnknown, match="timed out: 'late'"):
        rig.impatient.put("late", data)
    assert rig.done() == [("drip", "put", "key"), ("drip", "get", "key"), ("drip", "put", "late")]
    with pytest.raises(NotFound):
        rig.true.get("late")


@pytest.mark.parametrize("large", [False, True])
def test_a_cut_body_never_passes_for_the_object(rig: Rig, large: bool) -> None:
    """Half a body is an error that names the object; the wrapper reads again and gets the whole."""
    data = bytes(range(256)) * ((20 << 12) if large else 4)
    rig.true.put("key", data)

    def read_into(store: ObjectStore) -> bytes:
        buffer = bytearray(len(data))
        store.get_into("key", memoryview(buffer))
        return bytes(buffer)

    def read_whole(store: ObjectStore) -> bytes:
        return store.get("key")

    for read in (read_whole, read_into):
        rig.add(K.TRUNCATED)
        with pytest.raises((Unavailable, Truncated), match="key") as caught:
            read(rig.bare)
        assert caught.value.retryable
        rig.add(K.TRUNCATED, times=2)
        assert read(rig.store) == data
    assert rig.done() == [("truncated", "get", "key")] * 6
    assert all(line["sent"] == line["of"] // 2 > 0 for line in rig.lines())


def test_a_fault_of_reading_waits_for_an_object(rig: Rig) -> None:
    """A get that finds nothing uses no fault up and is not recorded."""
    rig.add(K.CORRUPTED)
    with pytest.raises(NotFound):
        rig.bare.get("missing")
    assert rig.lines() == []
    rig.true.put("key", bytes(10))
    assert rig.bare.get("key") != bytes(10)
    assert rig.done() == [("corrupted", "get", "key")]


def test_a_corrupt_read_has_one_wrong_bit_that_the_digest_finds(rig: Rig) -> None:
    """Once: the next read is right. Always: each read shows the same wrong bit, where the record says."""
    data = bytes(range(256)) * 4096
    rig.true.put("key", data)
    rig.add(K.CORRUPTED)
    wrong, right = rig.store.get("key"), rig.store.get("key")
    assert right == data
    assert blake3.blake3(wrong).digest() != blake3.blake3(data).digest()
    rig.add(K.CORRUPTED, times=None)
    assert rig.store.get("key") == rig.store.get("key") == wrong
    line = rig.lines()[0]
    by_record = bytearray(data)
    by_record[line["place"]] ^= 1 << line["bit"]
    assert wrong == by_record
    assert len(rig.lines()) == 3


def test_a_lost_put_answers_well_and_only_head_finds_it(rig: Rig) -> None:
    """The put returns without an error and nothing is there, small or large; the second one lands."""
    for size in (0, 10, BIG):
        rig.add(K.PUT_LOST)
        rig.store.put(f"key{size}", bytes(size))
        with pytest.raises(NotFound):
            rig.store.head(f"key{size}")
        rig.store.put(f"key{size}", bytes(size))
        assert rig.store.head(f"key{size}").size == size
    assert [line["bytes"] for line in rig.lines()] == [0, 10, BIG]


@pytest.mark.parametrize("size", [10, BIG])
def test_an_answer_lost_after_the_put_is_settled_by_reading_back(rig: Rig, size: int) -> None:
    """The driver says OutcomeUnknown; the wrapper finds its own bytes and succeeds, or another's and does not."""
    rig.add(K.ANSWER_LOST, op=Op.PUT)
    with pytest.raises(OutcomeUnknown, match="bare"):
        rig.bare.put("bare", bytes(size))
    assert rig.true.head("bare").size == size
    rig.add(K.ANSWER_LOST, op=Op.PUT)
    rig.store.put("key", bytes(size))
    with pytest.raises(AlreadyExists):
        rig.store.put("key", b"\1" * size)
    rig.add(K.ANSWER_LOST, op=Op.DELETE)
    rig.proxy.add(Fault(kind=K.ANSWER_LOST, op=Op.DELETE))
    rig.store.delete("key")
    with pytest.raises(NotFound):
        rig.true.head("key")
    assert [(line["fault"], line["op"], line["status"]) for line in rig.lines()][:2] == [
        ("answer_lost", "put", 200)
    ] * 2
    assert rig.lines()[2]["op"] == "delete"


def test_a_lost_answer_of_a_refused_put_is_not_used_up(rig: Rig) -> None:
    """A put that the store refuses is not a deed whose answer could be lost."""
    rig.true.put("key", b"other")
    rig.add(K.ANSWER_LOST, op=Op.PUT)
    with pytest.raises(AlreadyExists):
        rig.bare.put("key", b"ours")
    assert rig.lines() == []
    with pytest.raises(Unavailable):
        rig.bare.put("key", b"ours", mode=PutMode.OVERWRITE)
    assert rig.true.get("key") == b"ours"


def test_a_stale_list_shows_the_past(rig: Rig) -> None:
    """A listing without what was put since, of the same folder; nothing where nothing had been asked."""
    rig.bare.put("log/1", b"x")
    assert [info.key for info in rig.bare.list("log/")] == ["log/1"]
    rig.bare.put("log/2", b"x")
    rig.add(K.STALE_LIST, times=2)
    assert [info.key for info in rig.bare.list("log/")] == ["log/1"]
    assert list(rig.bare.list()) == []
    assert [info.key for info in rig.bare.list("log/")] == ["log/1", "log/2"]
    assert [(line["op"], line["remembered"]) for line in rig.lines()] == [("list", True), ("list", False)]


def test_a_delay_goes_on(rig: Rig) -> None:
    """A delayed request is late and otherwise right."""
    rig.add(K.DELAY, delay_s=0.2)
    begun = time.monotonic()
    rig.bare.put("key", b"x")
    assert time.monotonic() - begun >= 0.2
    assert rig.done() == [("delay", "put", "key")]
    assert rig.true.get("key") == b"x"


def test_a_wrong_order_is_refused_with_what_is_allowed(rig: Rig) -> None:
    """The proxy says what is wrong with a fault, and does nothing."""
    with pytest.raises(OrderError, match="use reset with for_s"):
        rig.proxy.add(Fault(kind=K.OUTAGE, for_s=1, op=Op.PUT))
    assert rig.lines() == []


def test_a_scenarios_fault_that_struck_nothing_was_not_done(
    seaweed_env: SeaweedServer, fresh_root: Callable[[], str], tmp_path: Path
) -> None:
    """Of the faults that a run orders, those that no request met are said not to have fired, also where another of a kind was."""
    url = fresh_root()
    planned = [
        PlannedFault(
            index=index,
            do="store",
            kind="store",
            which=None,
            at=Moment(step=1),
            store=StoreFault(kind=kind, prefix=prefix, times=None),
        )
        for index, (kind, prefix) in enumerate(
            [("slow_down", "log/"), ("corrupted", "chunks/"), ("slow_down", "index/")]
        )
    ]
    through = proxied_store(S3Store(bucket=seaweed_env.bucket, variables=seaweed_env.env()), tmp_path, url, planned)
    assert through is not None
    with closing(through):
        for fault in planned:
            through.order(fault)
        options = {"endpoint_url": through.environment()["AWS_ENDPOINT_URL"]}
        with open_store(url, retry=None, options=options) as store:
            store.put("chunks/1", b"x")
            with pytest.raises(Throttled):
                store.put("log/1", b"x")
        fates = through.proved([Struck(fault=fault, fired=True, note="") for fault in planned])
    never = (False, "no request came that it could strike")
    assert [(fate.fired, fate.note) for fate in fates] == [(True, ""), never, never]


def test_the_proxy_goes_with_its_handle(seaweed: SeaweedServer, tmp_path: Path) -> None:
    """Closed, it leaves no process, no port and no folder behind; one that cannot start says why."""
    with StoreProxy(seaweed.endpoint, tmp_path) as proxy:
        process, folder, where = proxy._process, proxy._folder, urlsplit(proxy.endpoint)
        assert folder.stat().st_mode & 0o777 == 0o700
    assert wait_until(lambda: start_time(process.pid) is None, within=WITHIN)
    assert not folder.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((where.hostname or "", where.port or 0), timeout=5)
    (tmp_path / "other" / "store-faults.jsonl").mkdir(parents=True)
    with pytest.raises(ProcessError, match="Is a directory"):
        StoreProxy(seaweed.endpoint, tmp_path / "other")


def test_real_agents_get_over_what_the_store_does_and_name_what_they_cannot(
    rig: Rig, agents: Agents, seaweed_env: SeaweedServer
) -> None:
    """A step saved through lost puts and answers is whole; corrupt reads are read again, then named, and nothing is wrong."""
    url = seaweed_env.url(rig.prefix.rstrip("/"))
    through = {"AWS_ENDPOINT_URL": rig.proxy.endpoint}
    job = Job(url, [agents.new(env=through)], 2)
    assert [found.found for found, _, _ in job.restored()] == [False] * 2
    for kind, prefix in ((K.PUT_LOST, "chunks/"), (K.ANSWER_LOST, "chunks/"), (K.SLOW_DOWN, "log/")):
        rig.add(kind, op=Op.PUT, prefix=prefix)
    rig.add(K.PUT_LOST, prefix="index/")
    job.save(1)
    job.wait(1)
    job.detach()
    struck = [(fault, key.partition("/")[0]) for fault, _, key in rig.done()]
    assert sorted(struck) == [
        ("answer_lost", "chunks"),
        ("put_lost", "chunks"),
        ("put_lost", "index"),
        ("slow_down", "log"),
    ]
    facts = facts_of(rig.true)
    assert [step for step, _ in facts.listed] == [1]
    assert facts.problems == ()

    other = agents.new(env=through)
    rig.add(K.CORRUPTED, prefix="chunks/")
    again = Job(url, [other], 2)
    again.check(again.restored(1), 1)
    assert rig.done()[-1][0] == "corrupted"
    rejected = other.wait_event("rejected")
    assert rejected["key"] == rig.done()[-1][2]
    again.detach()

    rig.add(K.CORRUPTED, prefix="chunks/", times=None)
    third = Job(url, [agents.new(env=through)], 2)
    with pytest.raises(grpc.RpcError) as caught:
        third.restored(1)
    error = error_of(caught.value)
    assert error.reason == REASON_CORRUPT
    assert error.object in {key for fault, _, key in rig.done() if fault == "corrupted"}
    third.die()
    rig.proxy.clear()
    last = Job(url, [agents.new(env=through)], 2)
    last.check(last.restored(1), 1)
    last.detach()
