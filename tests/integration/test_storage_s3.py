"""Both S3 drivers against a real server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptd.storage_backends.base import PutMode
from ckptd.storage_backends.conformance import CHECKS
from ckptd.storage_backends.errors import (
    BucketMissing,
    InvalidUrl,
    PermissionDenied,
    StorageError,
    Throttled,
    Unavailable,
)
from ckptd.storage_backends.urls import Driver, open_store, probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptd.chaos.seaweed import SeaweedServer
    from ckptd.storage_backends.base import ObjectStore

pytestmark = pytest.mark.s3
DRIVERS: tuple[Driver, ...] = ("obstore", "fsspec")


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> Driver:
    chosen: Driver = request.param
    return chosen


@pytest.fixture
def store(driver: Driver, fresh_root: Callable[[], str]) -> Iterator[ObjectStore]:
    with open_store(fresh_root(), driver=driver, retry=None) as opened:
        yield opened


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_s3_keeps_the_contract(check: Callable[[ObjectStore], None], store: ObjectStore) -> None:
    """Both S3 drivers pass every check on a real server."""
    check(store)


def test_probe_passes_and_leaves_nothing(store: ObjectStore) -> None:
    """A good root passes the probe, which leaves no object behind and finds put-if-absent enforced."""
    probe(store)
    assert list(store.list()) == []
    assert store.capabilities.put_if_absent


def test_a_prefix_is_no_sibling(driver: Driver, fresh_root: Callable[[], str]) -> None:
    """A root does not list what stands under a longer name beside it, nor outside."""
    root = fresh_root()
    with (
        open_store(root, driver=driver) as store,
        open_store(root + "-other", driver=driver) as other,
        open_store(root + "/sub [x] #1?", driver=driver) as below,
    ):
        store.put("a", b"1")
        other.put("b", b"1")
        below.put("c", b"1")
        assert [info.key for info in store.list()] == ["a", "sub [x] #1?/c"]
        assert [info.key for info in below.list()] == ["c"]
        store.delete("a")
        assert other.get("b") == b"1"


def test_one_put_is_one_object_without_multipart(
    driver: Driver, seaweed: SeaweedServer, fresh_root: Callable[[], str]
) -> None:
    """A 64 MiB object is one PUT: its ETag is no multipart one and no upload is left open."""
    root = fresh_root()
    data = memoryview(bytearray(64 << 20))
    with open_store(root, driver=driver, retry=None) as store:
        store.put("big", data)
    client = seaweed.client()
    head = client.head_object(Bucket=seaweed.bucket, Key=root.split("/", 3)[3] + "/big")
    assert head["ContentLength"] == 64 << 20
    assert "-" not in head["ETag"]
    assert not client.list_multipart_uploads(Bucket=seaweed.bucket).get("Uploads")
    with open_store(root, driver=driver) as store:
        store.delete("big")


def test_a_missing_bucket_is_named_and_not_made(driver: Driver, seaweed_env: SeaweedServer) -> None:
    """Every method on a missing bucket says so, nothing is retried, and no bucket appears."""
    with open_store("s3://no-such-bucket/root", driver=driver) as store:
        for call in (
            lambda: store.put("key", b"x"),
            lambda: store.put("key", b"x", mode=PutMode.OVERWRITE),
            lambda: store.get("key"),
            store.list,
            lambda: probe(store),
        ):
            with pytest.raises(BucketMissing, match="make the bucket"):
                call()
    names = [bucket["Name"] for bucket in seaweed_env.client().list_buckets()["Buckets"]]
    assert "no-such-bucket" not in names


@pytest.mark.parametrize("wrong", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
def test_wrong_credentials_are_refused_at_once(
    driver: Driver, seaweed_env: SeaweedServer, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """A wrong key or secret is PermissionDenied from every method, and the secret is not in the message."""
    monkeypatch.setenv(wrong, "wrongwrongwrong")
    with open_store(seaweed_env.url("root"), driver=driver) as store:
        for call in (lambda: store.put("key", b"x"), lambda: store.get("key"), store.list, lambda: probe(store)):
            with pytest.raises(PermissionDenied) as caught:
                call()
            assert seaweed_env.secret_key not in str(caught.value)
            assert "wrongwrongwrong" not in str(caught.value)


def test_no_credentials_say_where_they_are_looked_for(
    driver: Driver, seaweed_env: SeaweedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without any credentials the first request is PermissionDenied, with the places to put them."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    with open_store(seaweed_env.url("root"), driver=driver) as store, pytest.raises(PermissionDenied):
        store.get("key")


def test_a_profile_in_the_files_works(
    driver: Driver, seaweed_env: SeaweedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Credentials, region and endpoint come from ~/.aws alone when AWS_PROFILE names a profile there."""
    for name in seaweed_env.env():
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "cluster")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "credentials").write_text(
        f"[cluster]\naws_access_key_id={seaweed_env.access_key}\naws_secret_access_key={seaweed_env.secret_key}\n"
    )
    (tmp_path / "config").write_text(f"[profile cluster]\nregion=us-east-1\nendpoint_url={seaweed_env.endpoint}\n")
    with open_store(seaweed_env.url("profile"), driver=driver) as store:
        probe(store)


def test_an_unknown_profile_is_an_invalid_url(
    driver: Driver, seaweed_env: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS_PROFILE that names no profile is said at once."""
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(InvalidUrl, match="nobody"):
        open_store(seaweed_env.url("root"), driver=driver)


def test_a_server_that_is_away_is_unavailable(driver: Driver, seaweed_env: SeaweedServer) -> None:
    """A refused connection is Unavailable for every method, a CREATE put included: nothing was written."""
    options = {"endpoint_url": "http://127.0.0.1:1"}
    with open_store(seaweed_env.url("root"), driver=driver, retry=None, options=options) as store:
        for call in (lambda: store.put("key", b"x"), lambda: store.get("key"), store.list):
            with pytest.raises(Unavailable):
                call()


def test_an_https_endpoint_is_not_spoken_to_in_http(driver: Driver, seaweed_env: SeaweedServer) -> None:
    """An https endpoint that speaks http only is an error that no retry repeats."""
    options = {"endpoint_url": seaweed_env.endpoint.replace("http:", "https:")}
    with open_store(seaweed_env.url("root"), driver=driver, options=options) as store:
        with pytest.raises(StorageError) as caught:
            store.get("key")
        assert not isinstance(caught.value, Unavailable | Throttled)
        assert not caught.value.retryable


def test_environment_is_not_changed(driver: Driver, fresh_root: Callable[[], str]) -> None:
    """Opening and using a store leaves this process's environment alone."""
    before = dict(os.environ)
    with open_store(fresh_root(), driver=driver) as store:
        probe(store)
    assert dict(os.environ) == before
