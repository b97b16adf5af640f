"""The local-files driver."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.storage_backends.base import RESERVED_FOLDER, PutMode
from ckptd.storage_backends.conformance import CHECKS
from ckptd.storage_backends.errors import (
    AlreadyExists,
    InvalidKey,
    InvalidUrl,
    NoSpace,
    NotDurable,
    NotFound,
    OutcomeUnknown,
    PermissionDenied,
    StorageError,
    Unavailable,
    is_retryable,
)
from ckptd.storage_backends.local import LocalStore
from ckptd.storage_backends.local_temp import clear_stale
from ckptd.storage_backends.retrying import RetryingStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.storage_backends.base import ObjectStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "not yet" / "root")


def paths_under(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def temp_files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / RESERVED_FOLDER).iterdir())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_local_keeps_the_contract(check: Callable[[ObjectStore], None], store: LocalStore) -> None:
    """The local driver passes every check."""
    check(store)


class SyscallRecord:
    """Records fsync, link and rename with the paths they touch, in order."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.calls: list[tuple[str, str]] = []
        real_fsync, real_link, real_rename = os.fsync, os.link, os.rename

        def path_of(fd: int) -> str:
            return os.path.relpath(Path(f"/proc/self/fd/{fd}").readlink(), root)

        def fsync(fd: int) -> None:
            path = path_of(fd)
            self.calls.append(("fsync", "temp" if path.startswith(RESERVED_FOLDER) else path))
            real_fsync(fd)

        def link(src: str, dst: str, **fds: Any) -> None:
            self.calls.append(("link", f"{path_of(fds['dst_dir_fd'])}/{dst}"))
            real_link(src, dst, **fds)

        def rename(src: str, dst: str, **fds: Any) -> None:
            self.calls.append(("rename", f"{path_of(fds['dst_dir_fd'])}/{dst}"))
            real_rename(src, dst, **fds)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "link", link)
        monkeypatch.setattr(os, "rename", rename)


@pytest.mark.parametrize(("mode", "naming"), [(PutMode.CREATE, "link"), (PutMode.OVERWRITE, "rename")])
def test_s006_bytes_are_synced_before_the_name_and_folders_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: PutMode, naming: str
) -> None:
    """A put syncs the file, then gives it its name, then syncs every folder up to the root and its parent."""
    root = tmp_path / "root"
    record = SyscallRecord(root, monkeypatch)
    LocalStore(root).put("chunks/ab/object", b"bytes", mode=mode)
    assert record.calls == [
        ("fsync", ".."),
        ("fsync", "temp"),
        (naming, "chunks/ab/object"),
        ("fsync", "chunks/ab"),
        ("fsync", "chunks"),
        ("fsync", "."),
    ]


def test_s006_a_record_is_named_after_everything_it_names_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a save's order of puts, every fsync of chunk and index precedes the record's link."""
    root = tmp_path / "root"
    store = LocalStore(root)
    record = SyscallRecord(root, monkeypatch)
    for key in ("chunks/ab/c1", "index/s/n.pb", "log/1.json"):
        store.put(key, b"x")
    named = record.calls.index(("link", "log/1.json"))
    for folder in ("chunks/ab", "chunks", "index/s", "index"):
        synced = [number for number, call in enumerate(record.calls) if call == ("fsync", folder)]
        assert synced
        assert max(synced) < named


@pytest.mark.parametrize("is_seen_before", [True, False])
def test_what_stands_in_the_way_of_a_create_is_made_durable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_seen_before: bool
) -> None:
    """AlreadyExists, before the write or from the race for the name, comes after a sync of the folders."""
    root = tmp_path / "root"
    LocalStore(root).put("a/b/object", b"x")
    store = LocalStore(root)
    if not is_seen_before:
        monkeypatch.setattr(LocalStore, "_is_there", lambda *_: False)
    record = SyscallRecord(root, monkeypatch)
    with pytest.raises(AlreadyExists):
        store.put("a/b/object", b"x")
    assert record.calls[-3:] == [("fsync", "a/b"), ("fsync", "a"), ("fsync", ".")]
    assert (("link", "a/b/object") in record.calls) is not is_seen_before


@pytest.mark.parametrize("call", ["fsync", "link", "write"])
@pytest.mark.parametrize(
    ("number", "condition"),
    [
        (errno.ENOSPC, NoSpace),
        (errno.EDQUOT, NoSpace),
        (errno.EROFS, PermissionDenied),
        (errno.EACCES, PermissionDenied),
        (errno.ENAMETOOLONG, InvalidKey),
        (errno.ESTALE, Unavailable),
        (errno.EMFILE, Unavailable),
        (errno.EOPNOTSUPP, StorageError),
        (errno.EIO, StorageError),
    ],
)
def test_a_put_that_fails_is_translated_and_leaves_nothing(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, call: str, number: int, condition: type[StorageError]
) -> None:
    """Whatever system call fails, the error says the condition, and no file or temporary file stays."""
    store.put("other", b"x")

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(condition) as caught:
            store.put("folder/object", b"12345")
    assert caught.value.key == "folder/object"
    assert isinstance(caught.value.__cause__, OSError)
    if isinstance(caught.value, NoSpace):
        assert caught.value.needed_bytes == 5
        assert caught.value.free_bytes is not None
    assert is_retryable(caught.value) == (condition is Unavailable)
    assert [info.key for info in store.list()] == ["other"]
    assert temp_files(Path(store.url.removeprefix("file://"))) == []


def _fsync_that_fails_for_folders(times: int) -> Callable[[int], None]:
    """The first so many syncs of a folder fail; files are synced."""
    real, left = os.fsync, [times]

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    return fsync


def test_s141_a_name_whose_folder_cannot_be_synced_is_not_denied(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others can see the object: a CREATE may not say that nothing was written. The same put again makes it durable."""
    store.put("folder/other", b"x")
    monkeypatch.setattr(os, "fsync", _fsync_that_fails_for_folders(1))
    with pytest.raises(NotDurable, match="its folder cannot be synced: No space left on device"):
        store.put("folder/object", b"12345")
    assert store.get("folder/object") == b"12345"
    with pytest.raises(AlreadyExists):
        store.put("folder/object", b"12345")


@pytest.mark.parametrize(("failures", "outcome"), [(1, None), (99, OutcomeUnknown)])
def test_s141_a_put_is_not_done_before_its_folder_is_synced(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, failures: int, outcome: type[StorageError] | None
) -> None:
    """The retries put it again, which syncs again, instead of reading back what a loss of power could take away."""
    store.put("folder/other", b"x")
    retrying = RetryingStore(store, sleep=lambda _s: None)
    record = _fsync_that_fails_for_folders(failures)
    synced: list[str] = []

    def fsync(fd: int) -> None:
        record(fd)
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    monkeypatch.setattr(os, "fsync", fsync)
    if outcome is None:
        retrying.put("folder/object", b"12345")
        assert synced[-2] == "folder"
    else:
        with pytest.raises(outcome, match="an earlier attempt may have landed"):
            retrying.put("folder/object", b"12345")


def test_s141_a_disk_that_complains_at_close_denies_nothing_that_was_synced(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fsync has confirmed and a name stands for is there; the put says so."""
    real = os.close

    def close(fd: int) -> None:
        is_written = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
        real(fd)
        if is_written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        store.put("folder/object", b"12345")
    assert store.get("folder/object") == b"12345"
    assert temp_files(Path(store.url.removeprefix("file://"))) == []


def test_an_unwritable_root_is_refused() -> None:
    """A root that cannot be made says so at the first put."""
    with pytest.raises(StorageError, match="proc"):
        LocalStore("/proc/ckptd-test").put("key", b"x")


def test_a_file_is_no_root(tmp_path: Path) -> None:
    """A root that is a file, or relative, is an invalid URL."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidUrl):
        LocalStore(tmp_path / "file")
    with pytest.raises(InvalidUrl, match="relative"):
        LocalStore("some/where")


def test_symbolic_links_do_not_lead_out_of_the_root(tmp_path: Path) -> None:
    """Links inside the root, to a file or a folder, are neither followed nor listed nor written through."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    store = LocalStore(root)
    assert list(store.list()) == []
    assert list(store.list("folder/")) == []
    for key in ("folder/secret", "file"):
        with pytest.raises((PermissionDenied, NotFound)):
            store.get(key)
    with pytest.raises((PermissionDenied, InvalidKey)):
        store.put("folder/new", b"x")
    with pytest.raises(AlreadyExists):
        store.put("file", b"x")
    store.delete("folder/secret")
    assert paths_under(outside) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


def test_a_root_behind_a_link_is_used(tmp_path: Path) -> None:
    """The root itself may be a symbolic link: whoever configured it said so."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    LocalStore(tmp_path / "root").put("key", b"x")
    assert (tmp_path / "disk" / "key").read_bytes() == b"x"


def test_an_object_and_a_folder_collide_loudly(store: LocalStore) -> None:
    """A key that is a folder of another, or below an object, is refused with InvalidKey."""
    store.put("a/b", b"x")
    with pytest.raises((InvalidKey, AlreadyExists)):
        store.put("a", b"x")
    with pytest.raises(InvalidKey):
        store.put("a", b"x", mode=PutMode.OVERWRITE)
    with pytest.raises(InvalidKey):
        store.put("a/b/c", b"x")
    assert store.get("a/b") == b"x"


def test_what_is_no_regular_file_is_no_object(store: LocalStore, tmp_path: Path) -> None:
    """A FIFO in the root is not listed and does not hang a reader."""
    store.put("x", b"1")
    os.mkfifo(Path(store.url.removeprefix("file://")) / "fifo")
    assert [info.key for info in store.list()] == ["x"]
    with pytest.raises(StorageError, match="regular"):
        store.get("fifo")


def test_folders_that_deletes_empty_are_removed(store: LocalStore) -> None:
    """After the last object of a folder is deleted, the folder is gone as well, but never the root."""
    store.put("index/1/n", b"x")
    store.put("index/2/n", b"x")
    root = Path(store.url.removeprefix("file://"))
    store.delete("index/1/n")
    assert paths_under(root) == [RESERVED_FOLDER, "index", "index/2", "index/2/n"]
    store.delete("index/2/n")
    assert paths_under(root) == [RESERVED_FOLDER]


def test_puts_survive_deletes_that_empty_their_folder(store: LocalStore) -> None:
    """A put never fails or vanishes because a delete removes the emptied folder under it."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def sweeper() -> None:
        try:
            while not stop.is_set():
                store.put("deep/folder/dead", b"x", mode=PutMode.OVERWRITE)
                store.delete("deep/folder/dead")
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=sweeper)
    thread.start()
    try:
        for number in range(150):
            store.put(f"deep/folder/{number}", b"x")
            assert [info.key for info in store.list("deep/folder/live")] == []
            assert store.get(f"deep/folder/{number}") == b"x"
            store.delete(f"deep/folder/{number}")
    finally:
        stop.set()
        thread.join()
    assert failures == []


def test_lists_survive_folders_that_vanish(store: LocalStore) -> None:
    """A listing beside puts and deletes never fails and always shows what stands still."""
    store.put("still", b"x")
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            store.put("come/and/go", b"x", mode=PutMode.OVERWRITE)
            store.delete("come/and/go")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(300):
            assert {info.key for info in store.list()} in ({"still"}, {"still", "come/and/go"})
    finally:
        stop.set()
        thread.join()


KILLED_WRITER = """
import os, signal, sys
from ckptd.storage_backends import local_temp
from ckptd.storage_backends.local import LocalStore
point = sys.argv[2]
real_link = os.link
def link(*args, **kwargs):
    if point == "before_name":
        os.kill(os.getpid(), signal.SIGKILL)
    real_link(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
real_write = os.write
def write(fd, data):
    real_write(fd, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
os.link = link
if point == "mid_write":
    os.write = write
LocalStore(sys.argv[1]).put("folder/object", b"x" * 100000)
"""


@pytest.mark.parametrize(("point", "expected"), [("mid_write", []), ("before_name", []), ("after_name", [100000])])
def test_s002_a_killed_writer_leaves_the_whole_object_or_none(tmp_path: Path, point: str, expected: list[int]) -> None:
    """SIGKILL at any point of a put leaves nothing or everything, and the next process tidies up."""
    root = tmp_path / "root"
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(root), point], check=False, timeout=60)
    assert done.returncode == -9
    store = LocalStore(root)
    assert [info.size for info in store.list()] == expected
    assert len(temp_files(root)) == 1
    store.put("next", b"x")
    assert temp_files(root) == []
    if expected:
        assert store.get("folder/object") == b"x" * 100000


def test_temporary_files_of_living_writers_are_left_alone(store: LocalStore) -> None:
    """Clearing takes unlocked temporary files only; neither kind is ever listed."""
    store.put("object", b"x")
    root = Path(store.url.removeprefix("file://"))
    (root / RESERVED_FOLDER / "dead").write_bytes(b"stale")
    with (root / RESERVED_FOLDER / "living").open("wb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        assert [info.key for info in store.list()] == ["object"]
        fd = os.open(root, os.O_RDONLY)
        try:
            assert clear_stale(fd) == 1
        finally:
            os.close(fd)
        assert temp_files(root) == ["living"]


def test_reading_needs_no_root(store: LocalStore) -> None:
    """Reading a root that does not exist finds nothing and makes nothing."""
    assert list(store.list()) == []
    with pytest.raises(NotFound):
        store.get("key")
    store.delete("key")
    assert not Path(store.url.removeprefix("file://")).exists()
