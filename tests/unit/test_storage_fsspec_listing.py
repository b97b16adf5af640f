"""A listing through fsspec is whole, or an error: fsspec itself leaves out what it cannot read."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ckptd.storage_backends.conformance import CHECKS
from ckptd.storage_backends.errors import BucketMissing, InvalidUrl, NotFound, StorageError, Unavailable
from ckptd.storage_backends.fsspec_driver import FsspecStore
from ckptd.storage_backends.urls import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.storage_backends.base import ObjectStore

PIN = "pins/000000000005.00000001-aaaaaaaaaaaa"
CHUNK = "chunks/ab/cd"


class FoldersFs(LocalFileSystem):  # type: ignore[misc]
    """Real folders, of which one cannot be listed; `listed` says how often that was asked for."""

    cachable = False
    broken = ""
    error: Exception | None = None
    listed = 0

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        if self.error is not None and path == self.broken:
            self.listed += 1
            raise self.error
        return super().ls(path, detail=detail, **kwargs)


class ForgetfulFs(FoldersFs):
    """It keeps listings, whatever it is told, until they are invalidated."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        if path not in self.kept:
            self.kept[path] = super().ls(path, detail=detail, **kwargs)
        return self.kept[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.kept.clear()


def folders(root: Path, kind: type[FoldersFs] = FoldersFs) -> tuple[FsspecStore, FoldersFs]:
    """A store of real folders that holds a pin and a chunk."""
    filesystem = kind()
    store = FsspecStore(filesystem, str(root), protocol="sftp", url="sftp://host/x")
    store.put(PIN, b"")
    store.put(CHUNK, b"four")
    return store, filesystem


def keys(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_folders_keep_the_contract(check: Callable[[ObjectStore], None], tmp_path: Path) -> None:
    """A file system of folders passes every check."""
    check(FsspecStore(FoldersFs(), str(tmp_path), protocol="sftp", url="sftp://host/x"))


@pytest.mark.parametrize("folder", ["", "/pins", "/chunks", "/chunks/ab"])
@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("reset"),
        TimeoutError("timed out"),
        PermissionError(errno.EACCES, "denied"),
        OSError("Failure"),
        RuntimeError("the session is closed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, folder: str, error: Exception) -> None:
    """No error of a listing reads as "nothing there", at whatever depth it comes."""
    store, filesystem = folders(tmp_path)
    assert keys(store) == [CHUNK, PIN]
    filesystem.broken, filesystem.error = f"{tmp_path}{folder}", error
    with pytest.raises(StorageError) as caught:
        list(store.list())
    assert filesystem.listed
    assert not isinstance(caught.value, NotFound)
    if folder == "/pins":
        with pytest.raises(StorageError):
            list(store.list("pins/"))
        assert keys(store, "chunks/") == [CHUNK]


def test_no_such_folder_counts_only_where_the_one_above_does_not_show_it(tmp_path: Path) -> None:
    """A folder that is there and "not found" is an error; one that is not there is empty, and so is a root that is not."""
    store, filesystem = folders(tmp_path / "root")
    assert keys(store, "index/") == []
    assert keys(FsspecStore(FoldersFs(), str(tmp_path / "none"), protocol="sftp", url="sftp://host/x"), "pins/") == []
    filesystem.broken, filesystem.error = f"{tmp_path}/root/pins", FileNotFoundError(errno.ENOENT, "no such file")
    for prefix in ("", "pins/"):
        with pytest.raises(Unavailable, match="cannot be listed"):
            list(store.list(prefix))
    assert filesystem.listed > 1


def test_a_folder_that_is_removed_while_it_is_listed_is_empty(tmp_path: Path) -> None:
    """What stood in it is gone by then, as from any LIST during which it is deleted."""
    store, filesystem = folders(tmp_path)
    removed = []

    def ls(path: str, detail: bool = False, **kwargs: Any) -> Any:
        if path == f"{tmp_path}/pins":
            removed.append(path)
            (tmp_path / PIN).unlink(missing_ok=True)
            if (tmp_path / "pins").exists():
                (tmp_path / "pins").rmdir()
        return LocalFileSystem.ls(filesystem, path, detail=detail, **kwargs)

    filesystem.ls = ls  # type: ignore[method-assign]
    assert keys(store) == [CHUNK]
    assert removed


def test_a_link_is_refused(tmp_path: Path) -> None:
    """What is neither file nor folder is an error: where it leads, and whether objects are there, is unknown."""
    store, filesystem = folders(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def ls(path: str, detail: bool = False, **kwargs: Any) -> Any:
        infos = LocalFileSystem.ls(filesystem, path, detail=detail, **kwargs)
        # As sftp lists it: LocalFileSystem follows links by itself.
        return [{**info, "type": "link"} if info["name"].endswith("/elsewhere") else info for info in infos]

    filesystem.ls = ls  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="neither a file nor a folder"):
        list(store.list())


def test_a_kept_listing_is_never_used(tmp_path: Path) -> None:
    """Every LIST and HEAD asks anew, also where the file system keeps listings against its orders."""
    store, filesystem = folders(tmp_path, ForgetfulFs)
    assert keys(store, "pins/") == [PIN]
    assert isinstance(filesystem, ForgetfulFs)
    assert filesystem.kept
    (tmp_path / PIN).with_suffix(".second").touch()
    assert len(keys(store, "pins/")) == 2
    store.head(PIN)
    assert not filesystem.kept


def test_a_library_s_own_class_of_error_says_missing_by_its_number(tmp_path: Path) -> None:
    """An OSError that is no FileNotFoundError, but carries its number, is NotFound."""

    class LibraryError(OSError):
        """Python turns OSError(ENOENT) into FileNotFoundError, a class of its own it does not."""

    store, filesystem = folders(tmp_path)
    filesystem.broken, filesystem.error = f"{tmp_path}/pins", LibraryError(errno.ENOENT, "no such file")
    with pytest.raises(Unavailable):
        list(store.list("pins/"))
    assert keys(store, "index/") == []
    filesystem.info = lambda *_, **__: filesystem.ls(filesystem.broken)
    with pytest.raises(NotFound):
        store.head("pins/x")


def test_a_flat_service_s_errors_come_through() -> None:
    """Where the file system lists by itself, its error is the answer; a missing bucket is one."""

    class FlatFs(MemoryFileSystem):  # type: ignore[misc]
        cachable = False
        error: Exception

        def find(
            self, path: str, maxdepth: Any = None, withdirs: Any = False, detail: Any = False, **kwargs: Any
        ) -> Any:
            raise self.error

    filesystem = FlatFs()
    store = FsspecStore(filesystem, "/root", protocol="memory", url="memory://root")
    for error, kind in ((ConnectionResetError("reset"), Unavailable), (FileNotFoundError("bucket"), BucketMissing)):
        filesystem.error = error
        with pytest.raises(kind):
            list(store.list())


def test_a_protocol_that_hides_errors_itself_is_refused() -> None:
    """Of ftp:// no listing can be believed: it is no root."""
    with pytest.raises(InvalidUrl, match="tell a folder that is empty"):
        open_store("ftp://host/folder")
