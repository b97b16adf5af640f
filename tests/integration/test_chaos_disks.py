"""Disks of a run: really full, really read-only, seen by nobody else, and gone with whoever made them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from ckptd.chaos.cluster.disks import DiskError, Disks, missing, private_mounts
from ckptd.chaos.local_faults import DiskFault
from ckptd.chaos.watch import wait_until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.chaos,
    pytest.mark.root,
    pytest.mark.skipif(bool(missing()), reason=f"mounts of our own are not allowed: {missing()}"),
]

FAULT = DiskFault(disk="shm", kind="full", size_mib=8)
HARNESS = """
    import os, sys, threading
    from pathlib import Path
    from ckptd.chaos.cluster.disks import Disks, private_mounts
    from ckptd.chaos.cluster.process import Leashed
    from ckptd.chaos.local_faults import DiskFault
    folder = Path(sys.argv[1])
    (folder / "0").mkdir(parents=True)
    with private_mounts(), Disks([DiskFault(disk="shm", kind="full")]) as disks:
        janitor = Leashed([], environment=os.environ, wipe=[folder])
        disks.put_under({"shm": folder / "0"})
        (folder / "0" / "slot").write_bytes(b"x" * 4096)
        print("mounted", flush=True)
        threading.Event().wait()
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Disks, Path]]:
    """A file system of 8 MiB over a folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with private_mounts(), Disks([FAULT]) as disks:
        disks.put_under({"shm": folder, "store": tmp_path / "not wanted"})
        yield disks, folder


def mounts_of(pid: int | str) -> str:
    return Path(f"/proc/{pid}/mounts").read_text()


def test_a_full_disk_refuses_what_does_not_fit_until_it_has_room_again(disk: tuple[Disks, Path]) -> None:
    """ENOSPC at write and at fallocate, without a byte of ballast; what was there stays, and room comes back whole."""
    disks, folder = disk
    (folder / "before").write_bytes(b"b" * 100_000)
    disks.fill(folder, 64 << 10)
    with (folder / "file").open("wb", buffering=0) as file:
        with pytest.raises(OSError, match="No space left") as caught:
            os.posix_fallocate(file.fileno(), 0, 1 << 20)
        assert caught.value.errno == errno.ENOSPC
        assert file.write(b"x" * (1 << 20)) <= 64 << 10
    assert (folder / "before").read_bytes() == b"b" * 100_000
    disks.free(folder)
    (folder / "file").write_bytes(b"x" * (4 << 20))


def test_a_read_only_disk_refuses_writers_and_a_busy_one_says_so(
    disk: tuple[Disks, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """EROFS while it lasts; a file that is open for writing makes it impossible, which is an error and not a fault."""
    disks, folder = disk
    disks.forbid(folder)
    with pytest.raises(OSError, match="Read-only") as caught:
        (folder / "file").write_bytes(b"x")
    assert caught.value.errno == errno.EROFS
    disks.free(folder)
    monkeypatch.setattr("ckptd.chaos.cluster.disks._REMOUNT_WITHIN", timedelta(milliseconds=100))
    with (folder / "file").open("wb"), pytest.raises(DiskError, match="is open for writing"):
        disks.forbid(folder)


def test_what_a_disk_held_is_evidence_and_stays(tmp_path: Path) -> None:
    """In the end the folder itself holds it, and the mount is gone."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with private_mounts():
        with Disks([FAULT]) as disks:
            disks.put_under({"shm": folder})
            (folder / "log").mkdir()
            (folder / "log" / "record").write_bytes(b"r")
            assert str(folder) in mounts_of("thread-self")
        assert str(folder) not in mounts_of("thread-self")
    assert (folder / "log" / "record").read_bytes() == b"r"


def test_nobody_outside_sees_a_mount_and_a_harness_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """The mounts are of a namespace of their own; after SIGKILL the folder is gone, mount point and all."""
    folder = tmp_path / "shm"
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HARNESS), str(folder)], stdout=subprocess.PIPE, text=True
    ) as harness:
        assert harness.stdout is not None
        assert harness.stdout.readline() == "mounted\n"
        assert str(folder) in mounts_of(harness.pid)
        assert str(folder) not in mounts_of("thread-self")
        assert list((folder / "0").iterdir()) == []
        harness.send_signal(signal.SIGKILL)
    assert wait_until(lambda: not folder.exists(), within=timedelta(seconds=30))


def test_a_thread_that_leaves_its_own_mounts_is_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Namespace and working folder are those of before, also where a thread that was begun within lives on."""
    monkeypatch.chdir(tmp_path)
    before = Path("/proc/thread-self/ns/mnt").readlink()
    with private_mounts():
        inside = Path("/proc/thread-self/ns/mnt").readlink()
        with private_mounts():
            assert Path("/proc/thread-self/ns/mnt").readlink() == inside
        assert inside != before
        end = threading.Event()
        thread = threading.Thread(target=end.wait)
        thread.start()
    end.set()
    thread.join()
    assert Path("/proc/thread-self/ns/mnt").readlink() == before
    assert Path.cwd() == tmp_path
