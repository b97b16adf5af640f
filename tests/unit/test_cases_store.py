"""Faults from the field: what object stores answer, on a server in this process, with both S3 drivers."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fixtures.roots import RootBuilder
from fixtures.s3_double import Request, S3Double, Verdict, s3_double, s3_double_tls

from ckptd.daemon.catalog import read_catalog
from ckptd.daemon.cli import main
from ckptd.storage_backends.base import PutMode
from ckptd.storage_backends.errors import ClockSkew, InvalidUrl, NotFound, PermissionDenied, StorageError
from ckptd.storage_backends.obstore_driver import open_obstore
from ckptd.storage_backends.retrying import RetryingStore, RetryPolicy
from ckptd.storage_backends.urls import Driver, open_store

HASTY = RetryPolicy(attempts=10, first_pause=timedelta(milliseconds=10), longest_pause=timedelta(milliseconds=400))
URL = "s3://bucket/root"


@pytest.fixture(params=["obstore", "fsspec"])
def driver(request: pytest.FixtureRequest) -> Driver:
    chosen: Driver = request.param
    return chosen


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Double]:
    with s3_double() as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made


# ---------------------------------------------------------------- trying again


class FirstCalls:
    """Answers the first calls of each operation with these, then serves."""

    def __init__(self, *verdicts: Verdict) -> None:
        self._verdicts = verdicts
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, asked: Request) -> Verdict:
        with self._lock:
            self._calls[asked.op] += 1
            number = self._calls[asked.op]
        return self._verdicts[number - 1] if number <= len(self._verdicts) else None


def test_s055_slow_downs_errors_and_breaks_are_tried_again_with_growing_jittered_pauses(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five 503, a 500, a TLS error and a reset before each operation: all succeed, and the server saw how long they paused."""
    random.seed(55)
    bad: tuple[Verdict, ...] = (*[(503, "SlowDown")] * 5, (500, "InternalError"), "tls", "reset")
    with s3_double_tls(tmp_path) as (double, certificate):
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        monkeypatch.setenv("AWS_ENDPOINT_URL", double.endpoint)
        double.objects["/bucket/root/old"] = b"old"
        double.judge = FirstCalls(*bad)
        asked_for: list[float] = []

        def sleep(seconds: float) -> None:
            asked_for.append(seconds)
            time.sleep(seconds)

        with RetryingStore(open_store(URL, driver=driver, retry=None), HASTY, sleep=sleep) as store:
            store.put("new", b"x", mode=PutMode.OVERWRITE)
            assert store.get("old") == b"old"
            assert store.head("new").size == 1
            assert [info.key for info in store.list()] == ["new", "old"]
            store.delete("old")
        assert double.objects == {"/bucket/root/new": b"x"}
        pauses = [asked_for[at : at + len(bad)] for at in range(0, len(asked_for), len(bad))]
        for op, waited in zip(("PUT", "GET", "HEAD", "LIST", "DELETE"), pauses, strict=True):
            times = [request.at for request in double.of(op)]
            assert len(times) == len(bad) + 1, op
            # The server's own clock: nothing came sooner. How much later, the machine's other work decides.
            assert all(
                seen >= pause for seen, pause in zip(map(_between, itertools.pairwise(times)), waited, strict=True)
            )
    early, late = (sum(each[at] for each in pauses) for at in (0, -1))
    assert late > 4 * early, f"the pauses do not grow: {pauses}"
    assert len({each[-1] for each in pauses}) == len(pauses), f"no jitter: {pauses}"


def _between(times: tuple[float, float]) -> float:
    return times[1] - times[0]


@pytest.mark.parametrize(
    ("status", "code", "wanted"), [(403, "AccessDenied", PermissionDenied), (404, "NoSuchKey", NotFound)]
)
def test_s055_refusals_are_not_tried_again(
    double: S3Double, driver: Driver, status: int, code: str, wanted: type[StorageError]
) -> None:
    """403 and 404 pass at the first attempt: one request each."""
    double.status, double.code = status, code
    with open_store(URL, driver=driver, retry=HASTY) as store:
        for call in (lambda: store.get("key"), lambda: store.put("key", b"x")):
            double.requests.clear()
            with pytest.raises(wanted):
                call()
            assert len(double.requests) == 1


@pytest.mark.parametrize("bucket", ["tls-and-ssl", "certificate.InvalidContentType"])
def test_names_are_no_part_of_an_errors_meaning(double: S3Double, driver: Driver, bucket: str) -> None:
    """A connection that broke is worth a repeat, whatever words the URL of the object holds."""
    double.judge = FirstCalls("reset")
    with open_store(f"s3://{bucket}/ssl", driver=driver, retry=HASTY) as store:
        store.put("tls/certificate", b"x")
        double.judge = FirstCalls("reset")
        assert store.get("tls/certificate") == b"x"


# ---------------------------------------------------------------- clocks


def signed_at(asked: Request) -> datetime:
    return datetime.strptime(asked.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)


def test_s064_a_wrong_clock_fails_after_three_attempts_with_the_way_out(double: S3Double, driver: Driver) -> None:
    """RequestTimeTooSkewed to every request: no endless repeats, and the error says what to set."""
    double.status, double.code = 403, "RequestTimeTooSkewed"
    with open_store(URL, driver=driver, retry=HASTY) as store:
        for call in (lambda: store.put("key", b"x"), lambda: store.get("key")):
            double.requests.clear()
            with pytest.raises(ClockSkew, match="set this node's clock"):
                call()
            assert len(double.requests) == 3


def test_s064_a_request_that_waited_too_long_is_signed_anew(double: S3Double, driver: Driver) -> None:
    """The store refuses what was signed long ago (a slow queue): the next attempt bears a new time, and succeeds."""
    refused: list[datetime] = []
    waited = threading.Event()

    def judge(asked: Request) -> Verdict:
        if len(refused) < 2:
            # The first requests lie in a queue until their second is over: the signature counts seconds.
            waited.wait(1.1)
            refused.append(signed_at(asked))
            return 403, "RequestTimeTooSkewed"
        return (403, "RequestTimeTooSkewed") if signed_at(asked) <= refused[-1] else None

    double.judge = judge
    with open_store(URL, driver=driver, retry=HASTY) as store:
        store.put("key", b"x")
        assert store.get("key") == b"x"
    times = [signed_at(asked) for asked in double.of("PUT")]
    assert len(times) == 3
    assert times == sorted(set(times)), f"an attempt bore the time of one before: {times}"


# ---------------------------------------------------------------- folders that are none


def test_s062_prefixes_and_markers_without_objects_are_no_steps(
    double: S3Double, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    """A listing that shows empty folders, by common prefix or by marker object, changes nothing that anybody is told."""
    with open_store(URL, driver=driver, retry=None) as store:
        root = RootBuilder(store)
        root.start()
        root.commit(10)
        before = read_catalog(store)
        keys = [info.key for info in store.list()]
        step = f"index/000000000020.{root.timeline}"
        ghosts = ("step-20/", f"{step}/", "log/", "chunks/", "chunks/ab/", "step-20/nested/")
        double.common_prefixes = tuple(f"root/{ghost}" for ghost in ghosts)
        double.markers = tuple(f"root/{ghost}" for ghost in ghosts)
        after = read_catalog(store)
        assert (after.steps, after.latest, after.highest) == (before.steps, before.latest, before.highest)
        assert [info.key for info in store.list() if info.key in keys] == keys
    assert main(["ls", URL, "--driver", driver]) == 0
    told = capsys.readouterr()
    assert (" 20" in told.out, told.err) == (False, "")
    assert main(["verify", URL, "--driver", driver]) == 0
    assert main(["sweep", URL, "--driver", driver]) == 0


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("root", ["s3://bucket/a/../b", "s3://bucket/..", "file:///data/../b", "/data/.."])
def test_s060_two_dots_are_always_refused(root: str, driver: Driver) -> None:
    """Nothing leads out of a root, and the message says what may stand in its name."""
    if not root.startswith("s3:"):
        driver = "auto"
    with pytest.raises(InvalidUrl, match=r"'\.\.' segment"):
        open_store(root, driver=driver)


@pytest.mark.parametrize(
    "root", ["s3://bucket/" + "x" * 300, "/tmp/" + "x" * 300, "s3://bucket/a\\b", "s3://bucket/a//b"]
)
def test_s060_a_name_that_no_store_can_hold_is_refused_with_what_is_allowed(root: str) -> None:
    """Before anything is sent, with the whole rule and not only the part that was broken."""
    with pytest.raises(InvalidUrl) as caught:
        open_store(root)
    assert "1 to 255 bytes" in str(caught.value)
    assert "no '.' or '..' segment" in str(caught.value)


# ---------------------------------------------------------------- event loops


def test_s066_drivers_work_whatever_loop_runs_around_them(
    double: S3Double, driver: Driver, recwarn: pytest.WarningsRecorder
) -> None:
    """From a plain thread, two loops one after the other, inside a running one, and four threads at once; with one store."""
    with open_store(URL, driver=driver, retry=None) as store:

        def use(name: str) -> None:
            store.put(name, name.encode())
            assert store.get(name) == name.encode()
            assert name in [info.key for info in store.list()]

        async def inside(name: str) -> None:
            use(f"{name}-here")
            await asyncio.get_running_loop().run_in_executor(None, use, f"{name}-thread")

        use("plain")
        asyncio.run(inside("first"))
        asyncio.run(inside("second"))
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(use, f"thread{number}") for number in range(4)]:
                future.result(timeout=60)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, inside("loop-in-a-thread")).result(timeout=60)
        assert len(list(store.list())) == 11
    assert [str(warning.message) for warning in recwarn if "nclosed" in str(warning.message)] == []


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"small_timeout_s": "-1"}, "small_timeout_s is -1, not between 0 and 3600"),
        ({"bulk_timeout_s": "nan"}, "bulk_timeout_s is nan, not between 0 and 3600"),
        ({"bulk_timeout_s": "4000"}, "bulk_timeout_s is 4000, not between 0 and 3600"),
        ({"part_size": "1024"}, "unknown option"),
    ],
)
def test_s069_options_out_of_range_are_refused_before_native_code_sees_them(
    options: dict[str, str], words: str
) -> None:
    """Key, value and allowed range."""
    with pytest.raises(InvalidUrl, match=words):
        open_obstore("s3", "bucket", "root", options)


@pytest.mark.parametrize("attempts", [0, -1, 10_001])
def test_s069_attempts_out_of_range_are_refused(attempts: int) -> None:
    """Key, value and allowed range."""
    with pytest.raises(ValueError, match=f"attempts is {attempts}; it must be 1 to 10000"):
        RetryPolicy(attempts=attempts)
