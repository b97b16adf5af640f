"""What both S3 drivers make of a server's answers, from a scripted server in this process."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import botocore.credentials  # type: ignore[import-untyped]
import pytest
from fixtures.s3_double import S3Double, s3_double

from ckptd.storage_backends import s3_settings
from ckptd.storage_backends.base import PutMode
from ckptd.storage_backends.errors import (
    AlreadyExists,
    BucketMissing,
    ClockSkew,
    InvalidUrl,
    NoSpace,
    NotFound,
    OutcomeUnknown,
    PermissionDenied,
    StorageError,
    Throttled,
    Truncated,
    Unavailable,
    is_retryable,
)
from ckptd.storage_backends.http_conditions import Answer, condition
from ckptd.storage_backends.obstore_driver import ObstoreStore
from ckptd.storage_backends.retrying import RetryPolicy
from ckptd.storage_backends.s3_settings import S3Credentials
from ckptd.storage_backends.urls import Driver, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckptd.storage_backends.base import ObjectStore

BULK = 3 << 20


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Double]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with s3_double() as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made


@pytest.fixture(params=["obstore", "fsspec"])
def driver(request: pytest.FixtureRequest) -> Driver:
    chosen: Driver = request.param
    return chosen


@pytest.fixture
def store(driver: Driver, script: S3Double) -> Iterator[ObjectStore]:
    with open_store("s3://bucket/root", driver=driver, retry=None) as opened:
        yield opened


ANSWERS = [
    (403, "AccessDenied", PermissionDenied, PermissionDenied),
    (403, "InvalidAccessKeyId", PermissionDenied, PermissionDenied),
    (403, "RequestTimeTooSkewed", ClockSkew, ClockSkew),
    (400, "ExpiredToken", PermissionDenied, PermissionDenied),
    (404, "NoSuchBucket", BucketMissing, BucketMissing),
    (412, "PreconditionFailed", AlreadyExists, AlreadyExists),
    (409, "ConditionalRequestConflict", Unavailable, Unavailable),
    (429, "TooManyRequests", Throttled, Throttled),
    (503, "SlowDown", Throttled, Throttled),
    (503, "ServiceUnavailable", OutcomeUnknown, Unavailable),
    (500, "InternalError", OutcomeUnknown, Unavailable),
    (502, "", OutcomeUnknown, Unavailable),
    (504, "", OutcomeUnknown, Unavailable),
    (507, "InsufficientStorage", NoSpace, NoSpace),
    (501, "NotImplemented", StorageError, StorageError),
    (400, "InvalidArgument", StorageError, StorageError),
    (400, "AuthorizationHeaderMalformed", InvalidUrl, InvalidUrl),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: f"{answer[0]}-{answer[1]}")
def test_answers_have_their_condition_and_are_not_repeated(
    store: ObjectStore, script: S3Double, answer: tuple[int, str, type[StorageError], type[StorageError]]
) -> None:
    """Each answer is one condition in both drivers, from exactly one request: no hidden repeats."""
    script.status, script.code, of_create, of_others = answer
    calls: list[tuple[Callable[[], object], type[StorageError]]] = [
        (lambda: store.put("key", b"x"), of_create),
        (lambda: store.put("key", b"x", mode=PutMode.OVERWRITE), of_others),
        (lambda: store.get("key"), of_others),
        (lambda: store.get_into("key", memoryview(bytearray(1))), of_others),
    ]
    for call, wanted in calls:
        script.requests.clear()
        with pytest.raises(StorageError) as caught:
            call()
        assert type(caught.value) is wanted
        assert caught.value.key == "key"
        assert caught.value.url == "s3://bucket/root"
        assert script.endpoint not in str(caught.value)
        assert len(script.requests) == 1


def test_a_create_put_is_conditional_unsigned_and_single(store: ObjectStore, script: S3Double) -> None:
    """CREATE sends If-None-Match: *, OVERWRITE does not, and either is one PUT of the very bytes."""
    data = bytes(range(256)) * (BULK // 256)
    store.put("key", memoryview(data))
    store.put("key", memoryview(data), mode=PutMode.OVERWRITE)
    create, overwrite = script.requests
    assert (create.command, overwrite.command, create.nbytes) == ("PUT", "PUT", BULK)
    assert create.headers["if-none-match"] == "*"
    assert "if-none-match" not in overwrite.headers
    assert script.objects == {"/bucket/root/key": data}


def test_put_if_absent_can_be_switched_off(script: S3Double) -> None:
    """Where the server knows no condition, CREATE is a plain put and the capability says so."""
    with open_store("s3://bucket/root", retry=None, options={"conditional_put": "disabled"}) as store:
        assert not store.capabilities.put_if_absent
        store.put("key", b"x")
        store.put("key", b"y")
        script.hang_up = "before"
        with pytest.raises(Unavailable):
            store.put("key", b"z")
    assert all("if-none-match" not in request.headers for request in script.requests)


def test_obstore_does_not_sign_the_payload(script: S3Double) -> None:
    """The bytes are not hashed for the signature: their digest is checked by the readers."""
    with open_store("s3://bucket/root", retry=None) as store:
        store.put("key", b"x")
    assert script.requests[0].headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"


@pytest.mark.parametrize("moment", ["before", "after", "reset"])
def test_a_connection_that_breaks_is_uncertain_for_create_only(
    store: ObjectStore, script: S3Double, moment: str
) -> None:
    """A reset without an answer is OutcomeUnknown for CREATE and Unavailable for everything else."""
    for call, wanted in (
        (lambda: store.put("key", b"x"), OutcomeUnknown),
        (lambda: store.put("key", b"x", mode=PutMode.OVERWRITE), Unavailable),
        (lambda: store.get("key"), Unavailable),
    ):
        script.hang_up = moment
        with pytest.raises(StorageError) as caught:
            call()
        assert type(caught.value) is wanted
        assert is_retryable(caught.value)


@pytest.mark.parametrize("moment", ["before", "after", "reset"])
def test_a_lost_answer_is_settled_by_reading_back(driver: Driver, script: S3Double, moment: str) -> None:
    """With retries a CREATE put whose connection breaks succeeds, landed or not, and exactly once."""
    policy = RetryPolicy(first_pause=timedelta(milliseconds=1))
    with open_store("s3://bucket/root", driver=driver, retry=policy) as store:
        script.hang_up = moment
        store.put("key", b"ours")
        with pytest.raises(AlreadyExists):
            store.put("key", b"ours")
    puts = script.of("PUT")
    assert len(puts) == (3 if moment == "before" else 2)
    assert script.objects == {"/bucket/root/key": b"ours"}


def test_a_server_that_says_nothing_times_out(script: S3Double) -> None:
    """A request without an answer ends at its deadline: uncertain for CREATE, Unavailable else."""
    script.hang_up = "silent"
    options = {"small_timeout_s": "0.3", "bulk_timeout_s": "0.4"}
    with open_store("s3://bucket/root", retry=None, options=options) as store:
        with pytest.raises(OutcomeUnknown, match="timed out"):
            store.put("key", b"x")
        with pytest.raises(OutcomeUnknown, match="timed out"):
            store.put("key", bytes(BULK))
        with pytest.raises(Unavailable, match="timed out"):
            store.get("key")


def test_large_reads_that_fail_leave_no_writer_behind(script: S3Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """When one piece of a large read fails, get_into returns only after all pieces have ended."""
    failed, release = threading.Event(), threading.Event()

    def get_piece(_store: ObjectStore, key: str, _view: memoryview, start: int) -> None:
        if start == 0:
            failed.set()
            raise Unavailable("passing", key=key)
        assert release.wait(30)
        if start == 32 << 20:
            raise NotFound("permanent", key=key)

    monkeypatch.setattr(ObstoreStore, "_get_piece", get_piece)
    with open_store("s3://bucket/root", retry=None) as store, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.get_into, "key", memoryview(bytearray(40 << 20)))
        assert failed.wait(30)
        with pytest.raises(TimeoutError):
            reading.exception(timeout=0.2)
        release.set()
        assert isinstance(reading.exception(timeout=30), NotFound)


def test_missing_is_not_found(store: ObjectStore) -> None:
    """404 with NoSuchKey, or without any code for HEAD, is NotFound."""
    with pytest.raises(NotFound):
        store.get("key")


@pytest.mark.parametrize(
    ("answer", "creating", "wanted"),
    [
        (Answer(status=None, code=None, text="refused", reached=False), True, Unavailable),
        (Answer(status=None, code=None, text="bad certificate", passing=False), True, StorageError),
        (Answer(status=None, code=None, text="reset"), True, OutcomeUnknown),
        (Answer(status=None, code=None, text="reset"), False, Unavailable),
        (Answer(status=404, code="ContainerNotFound", text=""), False, BucketMissing),
        (Answer(status=409, code="BlobAlreadyExists", text=""), True, AlreadyExists),
        (Answer(status=503, code="ServerBusy", text=""), True, Throttled),
        (Answer(status=416, code=None, text=""), False, Truncated),
        (Answer(status=408, code="RequestTimeout", text=""), True, OutcomeUnknown),
    ],
)
def test_conditions_of_other_services(answer: Answer, creating: bool, wanted: type[StorageError]) -> None:
    """Azure's and GCS's codes, and requests without an answer, have their condition."""
    assert type(condition(answer, key="k", url="u", creating=creating)) is wanted


def test_expired_credentials_are_worth_a_repeat() -> None:
    """ExpiredToken is PermissionDenied, but retryable: the next credentials are fetched within a minute."""
    error = condition(Answer(status=400, code="ExpiredToken", text=""), key="k", url="u", creating=False)
    assert isinstance(error, PermissionDenied)
    assert is_retryable(error)


def test_credentials_in_a_file_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile file that changes is followed after the time to live; before, nothing is read."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    path.write_text("[default]\naws_access_key_id=one\naws_secret_access_key=s\naws_session_token=t\n")
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    credentials = S3Credentials(None)
    first = credentials()
    assert (first["access_key_id"], first["token"]) == ("one", "t")
    assert datetime.now(UTC) < first["expires_at"] <= datetime.now(UTC) + timedelta(minutes=1)
    path.write_text("[default]\naws_access_key_id=two\naws_secret_access_key=s\n")
    assert credentials()["access_key_id"] == "one"
    now += 61
    assert credentials()["access_key_id"] == "two"


def test_temporary_credentials_renew_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials of a role are renewed by their source when they are about to end."""
    fetched: list[int] = []

    def fetch() -> dict[str, str]:
        fetched.append(1)
        ends = datetime.now(UTC) + timedelta(minutes=5)  # within the mandatory renewal window
        return {
            "access_key": f"key{len(fetched)}",
            "secret_key": "s",
            "token": "t",
            "expiry_time": ends.isoformat(),
        }

    class Session:
        def get_credentials(self) -> Any:
            return botocore.credentials.RefreshableCredentials.create_from_metadata(
                fetch(), refresh_using=fetch, method="test"
            )

    monkeypatch.setattr(s3_settings, "_session", lambda _profile: Session())
    credentials = S3Credentials(None)
    assert credentials()["access_key_id"] == "key2"
    assert credentials()["access_key_id"] == "key3"


@pytest.mark.parametrize(
    ("environment", "endpoint", "region"),
    [
        ({}, None, "us-east-1"),
        ({"AWS_ENDPOINT_URL": "http://a/"}, "http://a", "us-east-1"),
        ({"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b"}, "http://b", "us-east-1"),
        ({"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "us-west-2"}, None, "eu-west-1"),
        ({"AWS_DEFAULT_REGION": "us-west-2"}, None, "us-west-2"),
    ],
)
def test_endpoint_and_region_come_from_the_usual_variables(
    environment: dict[str, str],
    endpoint: str | None,
    region: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The S3-specific endpoint beats the general one, AWS_REGION the older variable."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = s3_settings.s3_settings({})
    assert (settings.endpoint, settings.region) == (endpoint, region)
    chosen = s3_settings.s3_settings({"endpoint_url": "https://c", "region": "x"})
    assert (chosen.endpoint, chosen.region) == ("https://c", "x")
