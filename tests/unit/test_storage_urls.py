"""From a URL to a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.storage_backends.conformance import CHECKS
from ckptd.storage_backends.errors import InvalidUrl, PermissionDenied
from ckptd.storage_backends.local import LocalStore
from ckptd.storage_backends.memory import MemoryStore
from ckptd.storage_backends.retrying import RetryingStore
from ckptd.storage_backends.urls import open_store, probe

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.storage_backends.base import ObjectStore


def inner(store: ObjectStore) -> ObjectStore:
    assert isinstance(store, RetryingStore)
    return store.inner


def test_schemes_choose_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scheme opens its driver, without a request; auto and explicit choice agree."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert isinstance(open_store("memory://job"), MemoryStore)
    assert open_store("memory://job") is open_store("memory://job/")
    assert isinstance(inner(open_store(str(tmp_path))), LocalStore)
    for url, driver, kind in (
        ("s3://bucket/prefix", "auto", "ObstoreStore"),
        ("S3://bucket/prefix/", "obstore", "ObstoreStore"),
        ("s3://bucket/prefix", "fsspec", "FsspecStore"),
        ("gs://bucket/prefix", "auto", "ObstoreStore"),
        ("memory://fsspec-one", "fsspec", "FsspecStore"),
    ):
        store = inner(open_store(url, driver=driver))  # type: ignore[arg-type]
        assert type(store).__name__ == kind
        assert store.url == url.replace("S3", "s3").rstrip("/")
        store.close()
    assert not isinstance(open_store(str(tmp_path), retry=None), RetryingStore)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///data/runs/x", "/data/runs/x"),
        ("file:///data/with%20space/%5Bx%5D%3F", "/data/with space/[x]?"),
        ("file:///data/with space/[x]", "/data/with space/[x]"),
        ("/data/100%/[x]?#", "/data/100%/[x]?#"),
        ("/data/trailing/", "/data/trailing"),
        ("FILE:///data", "/data"),
    ],
)
def test_file_urls_name_paths(url: str, path: str) -> None:
    """file:// URLs are percent-decoded, plain paths are taken as they are."""
    assert open_store(url).url == f"file://{path}"


@pytest.mark.parametrize("path", ["as uri [x]? #1 100% ünï", "plain"])
def test_pathlib_uris_come_back(tmp_path: Path, path: str) -> None:
    """What pathlib makes of any path opens that path."""
    store = open_store((tmp_path / path).as_uri())
    store.put("key", b"x")
    assert (tmp_path / path / "key").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("url", "way_out"),
    [
        ("", "file:///"),
        ("relative/path", "/relative/path"),
        ("./x", "say /"),
        ("file:relative", "say /"),
        ("file://host/path", "file:///host/path"),
        ("file:///a/../b", "'..'"),
        ("/a/../b", "'..'"),
        ("file:///%2e%2e/x", "'..'"),
        ("/", "folder"),
        ("/nul\0", "file:///"),
        ("memory://", "memory://some-name"),
        ("s3://", "s3://bucket/prefix"),
        ("s3:///prefix", "s3://bucket/prefix"),
        ("s3://ab/prefix", "3 or more"),
        ("s3://buc ket/prefix", "3 or more"),
        ("s3://key:secret@bucket/prefix", "environment"),
        ("s3://localhost:9000/bucket", "AWS_ENDPOINT_URL"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket/a//b", "empty segment"),
        ("s4://bucket/x", "did you mean"),
        ("nonesuch://bucket/x", "use file://"),
        ("sftp://host/../x", "'..'"),
    ],
)
def test_bad_urls_say_the_way_out(url: str, way_out: str) -> None:
    """Every URL that cannot be a root is InvalidUrl at once, and the message says what would do."""
    with pytest.raises(InvalidUrl, match=None) as caught:
        open_store(url)
    assert way_out in str(caught.value)
    assert "secret" not in str(caught.value)


def test_bad_options_are_refused(tmp_path: Path) -> None:
    """Unknown options, values out of range and drivers that do not fit are InvalidUrl."""
    bad: list[tuple[str, dict[str, Any]]] = [
        (str(tmp_path), {"options": {"x": "1"}}),
        (str(tmp_path), {"driver": "fsspec"}),
        ("memory://x", {"options": {"x": "1"}}),
        ("sftp://host/x", {"driver": "obstore"}),
        ("s3://bucket/x", {"options": {"nonsense": "1"}}),
        ("s3://bucket/x", {"options": {"small_timeout_s": "0"}}),
        ("s3://bucket/x", {"options": {"bulk_timeout_s": "soon"}}),
        ("s3://bucket/x", {"options": {"endpoint_url": "ftp://host"}}),
    ]
    for url, arguments in bad:
        with pytest.raises(InvalidUrl):
            open_store(url, **arguments)


def test_a_protocol_whose_package_is_missing_says_so() -> None:
    """A protocol known to fsspec without its package is InvalidUrl, naming the package."""
    with pytest.raises(InvalidUrl, match="install"):
        open_store("hdfs://host/x")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_other_protocols_keep_the_contract(
    check: Callable[[ObjectStore], None], request: pytest.FixtureRequest
) -> None:
    """A protocol without a driver of its own passes every check through fsspec, without put-if-absent."""
    name = request.node.name.replace("[", "/").rstrip("]")
    store = open_store(f"memory://fsspec/{name}", driver="fsspec")
    assert not store.capabilities.put_if_absent
    check(store)


def test_a_read_only_protocol_is_refused_by_the_probe() -> None:
    """A protocol that cannot write is PermissionDenied at the probe."""
    with pytest.raises(PermissionDenied, match="cannot"):
        probe(open_store("data://x/y"))


def test_passwords_are_not_shown() -> None:
    """A password in the URL of another protocol is in no message."""
    with pytest.raises(InvalidUrl) as caught:
        open_store("sftp://user:hunter2@host/../x")
    assert "hunter2" not in str(caught.value)
