"""A stored step without the job: what `load` and `open_step` give, and that they leave nothing anywhere."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fixtures.agents import Agents
from fixtures.client_job import ClientJob, state_of
from fixtures.two_rank_root import STEP, WIDE, TwoRankRoot, raw, same

from ckptd.client import (
    Config,
    InvalidRequest,
    OpenStep,
    SnapshotCorrupt,
    SnapshotNotFound,
    StoredTensor,
    load,
    open_step,
    private_agent,
)
from ckptd.client.private_agent import PrivateAgent

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")]

SMALL = 1 << 20
"""A window that the wide tensors do not fit into."""


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Return every file and folder below one, with sizes and times of change."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        found[str(path)] = (0 if path.is_dir() else status.st_size, status.st_mtime_ns)
    return found


def private_memory() -> set[str]:
    """Return the folders in shared memory that agents of readers have made."""
    return {path.name for path in Path("/dev/shm").glob(f"{private_agent._PREFIX}*")}


@pytest.fixture
def own_folders(monkeypatch: pytest.MonkeyPatch) -> str:
    """Agents of readers in this test have folders with a beginning of their own: other tests run beside it. Returns that."""
    prefix = f"ckptd-private-{secrets.token_hex(4)}-"
    monkeypatch.setattr(private_agent, "_PREFIX", prefix)
    return prefix


@pytest.fixture(scope="module")
def opened(two_rank_root: TwoRankRoot) -> Iterator[OpenStep]:
    """The step, open with a small window."""
    with open_step(two_rank_root.url, window_bytes=SMALL) as step:
        yield step


def test_every_tensor_comes_whole_bit_for_bit(two_rank_root: TwoRankRoot) -> None:
    """All dtypes, 0-dim, empty, sharded by rows and by columns, larger than the window; ties share memory; nothing is written."""
    before = listing(two_rank_root.folder)
    found = load(two_rank_root.url, window_bytes=SMALL)
    assert (found.step, dict(found.metrics), dict(found.tags)) == (STEP, {"loss": 0.5}, {"kind": "test"})
    assert dict(found.mesh) == {"dp": 2}
    assert set(found) == set(two_rank_root.whole)
    assert [name for name, tensor in two_rank_root.whole.items() if not same(found[name], tensor)] == []
    assert all(tensor.device.type == "cpu" and not tensor.requires_grad for tensor in found.values())
    assert dict(found.ties) == {"model/head.weight": "model/embed.weight"}
    assert found["model/head.weight"].data_ptr() == found["model/embed.weight"].data_ptr()
    assert (found.objects, found.own) == ({}, {})
    assert listing(two_rank_root.folder) == before


def test_names_are_those_of_restore(opened: OpenStep, two_rank_root: TwoRankRoot) -> None:
    """A name and all below it, patterns, a tie alone; what chooses nothing is an error that says what there is."""
    assert set(opened.names("buffers")) == {"buffers/int64", "buffers/bool", "buffers/uint8"}
    assert opened.names(["*/bool", "wide/rows"]) == ["all/bool", "buffers/bool", "wide/rows"]
    alone = opened.read("model/head")
    assert dict(alone) == {"model/head.weight": alone["model/head.weight"]}
    assert same(alone["model/head.weight"], two_rank_root.whole["model/embed.weight"])
    assert dict(alone.ties) == {}
    with pytest.raises(InvalidRequest, match=r"'modell' chooses nothing") as caught:
        opened.read(["model", "modell"])
    assert caught.value.hint == "it holds all, buffers, model, wide"
    with pytest.raises(InvalidRequest, match="'loader' chooses nothing") as caught:
        opened.read("loader")
    assert "objects=True" in caught.value.hint
    for nothing in ("", [], [""]):
        with pytest.raises(InvalidRequest, match="names nothing"):
            opened.read(nothing)


def test_objects_and_each_ranks_own_come_by_coordinate(opened: OpenStep) -> None:
    """They are seen without being read; tensors that were not chosen stand in objects as what is known of them."""
    assert opened.objects["loader"] == ({"dp": 0}, {"dp": 1})
    assert [piece.value.shape for piece in opened.own["loader/shuffle"]] == [(3,), (4,)]
    found = opened.read(["loader", "mine", "rng", "wide"], objects=True)
    assert set(found) == {"wide/columns", "wide/rows"}
    assert [piece.coordinate for piece in found.objects["loader"]] == [{"dp": 0}, {"dp": 1}]
    for rank, piece in enumerate(found.objects["loader"]):
        assert (piece.value["rank"], piece.value["seen"]) == (rank, [1, 2, rank])
        assert torch.equal(piece.value["shuffle"], torch.arange(rank + 3))
    assert [piece.value.tolist() for piece in found.own["mine"]] == [[0.0] * 3, [1.0] * 3]
    assert found.objects["wide"][0].value["rows"].data_ptr() == found["wide/rows"].data_ptr()
    assert set(found.objects["rng"][1].value) >= {"python", "numpy", "torch"}
    only = opened.read(["buffers/bool", "buffers"], objects=True).objects["buffers"][0].value
    assert only["int64"].dtype is torch.int64
    few = opened.read(["all/bool", "mine"], objects=True)
    assert list(few.objects) == ["mine"]
    assert few.objects["mine"][0].value.tolist() == [0.0] * 3


def test_an_object_does_not_need_its_tensors(opened: OpenStep) -> None:
    """What it refers to and was not chosen is a description with name, dtype and shape."""
    value = opened._object("wide", {}, {})[0].value
    assert value["rows"] == StoredTensor(
        name="wide/rows", dtype=torch.float32, shape=WIDE, nbytes=4 * WIDE[0] * WIDE[1]
    )


def test_pieces_are_the_step_in_the_order_it_is_stored(opened: OpenStep, two_rank_root: TwoRankRoot) -> None:
    """They hold each element once; none is larger than the window; a tie comes once; each chunk is read about once."""
    found = {name: torch.zeros_like(tensor, dtype=torch.uint8) for name, tensor in two_rank_root.whole.items()}
    before, total, seen = opened.read_bytes, 0, []
    for piece in opened.pieces():
        name = piece.tensor.name
        box, times = two_rank_root.whole[name], found[name]
        for dim, (at, length) in enumerate(zip(piece.offset, piece.data.shape, strict=True)):
            box, times = box.narrow(dim, at, length), times.narrow(dim, at, length)
        assert piece.data.is_contiguous()
        assert same(
            box.view(torch.uint8) if box.dtype.itemsize == 1 else box,
            piece.data.view(torch.uint8) if box.dtype.itemsize == 1 else piece.data,
        )
        times += 1
        nbytes = piece.data.numel() * piece.data.element_size()
        assert nbytes <= SMALL
        total += nbytes
        seen.append((name, piece.offset, tuple(piece.data.shape)))
    del found["model/head.weight"]
    assert all(bool((times == 1).all()) for times in found.values())
    assert total == sum(len(raw(two_rank_root.whole[name])) for name in found)
    assert seen == [(one.name, offset, length) for one, offset, length in opened.cuts_of(list(found))]
    # Two ranks' streams of 2.7 MiB in one chunk each: each of its windows reads it.
    assert opened.read_bytes - before < 6 * total


def test_what_is_not_there_is_said(two_rank_root: TwoRankRoot, tmp_path: Path) -> None:
    """A missing step with those there are; an empty root, which stays as it is; another job's name."""
    with pytest.raises(SnapshotNotFound, match=rf"no step 9; existing steps: \[{STEP}\]"):
        load(two_rank_root.url, 9)
    nowhere = tmp_path / "nowhere"
    with pytest.raises(SnapshotNotFound, match="there is no step under"):
        load(f"file://{nowhere}")
    assert not nowhere.exists()
    with pytest.raises(InvalidRequest, match="belongs to job 'job', not to 'other'"):
        load(two_rank_root.url, job="other")
    with pytest.raises(InvalidRequest, match="no whole number"):
        load(two_rank_root.url, "5")  # type: ignore[arg-type]


@pytest.mark.usefixtures("own_folders")
def test_a_step_of_one_process_comes_like_any_other(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved by a world of one, read by a world of one; from an agent of its own, beside the running job's."""
    root, node = f"file://{tmp_path}", agents.new()
    with ClientJob(root, [node]) as job:
        job.wait(job.save(1))
        job.wait(job.save(2))
        before = listing(tmp_path)
        mine = {child.pid for child in psutil.Process().children(recursive=True)}
        found = load(root, 1, objects=True)
        assert same(found.own["weight"][0].value, state_of(1, 0)["weight"])
        assert found.objects["notes"][0].value == state_of(1, 0)["notes"]
        assert load(root, objects=True).step == 2
        # Nothing was claimed or left, no process and no memory; and the job goes on as if nothing had been.
        assert listing(tmp_path) == before
        assert {child.pid for child in psutil.Process().children(recursive=True)} == mine
        assert not private_memory()
        job.wait(job.save(3))
        assert job.ranks[0].timeline.startswith("00000001-")
    # Where there is no shared memory, or not enough: in mapped files, and over the socket.
    monkeypatch.setattr(private_agent, "_SHARED_MEMORY", tmp_path / "none")
    for transport in ("auto", "stream"):
        found = load(root, objects=True, config=Config(transport=transport))
        assert found.step == 3
        assert same(found.own["weight"][0].value, state_of(3, 0)["weight"])


def test_bytes_that_changed_are_never_handed_out(two_rank_root: TwoRankRoot, tmp_path: Path) -> None:
    """One bit of one chunk: an error that names the object; no older step is taken, and nothing is quarantined."""
    folder = tmp_path / "root"
    shutil.copytree(two_rank_root.folder, folder)
    chunk = max(
        (path for path in (folder / "chunks").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    chunk.chmod(0o644)
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    before = listing(folder)
    with pytest.raises(SnapshotCorrupt, match=chunk.name) as caught:
        load(f"file://{folder}")
    assert "ckptd verify" in caught.value.hint
    assert listing(folder) == before


READER = """
import json, sys
from ckptd.client import load
found = load(sys.argv[1], names="buffers")
print(json.dumps({name: tensor.tolist() for name, tensor in found.items()}))
"""


def test_a_user_who_can_only_read_can_load(two_rank_root: TwoRankRoot, tmp_path: Path) -> None:
    """No folder or file of the root may be written: as root, without the capability to do so all the same."""
    folder = tmp_path / "root"
    shutil.copytree(two_rank_root.folder, folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    powerless: list[str] = []
    if os.geteuid() == 0:
        powerless = ["setpriv", "--bounding-set", "-dac_override", "--inh-caps", "-dac_override", "--"]
    check = [*powerless, sys.executable, "-c", f"open({str(folder / 'x')!r}, 'w')"]
    refused = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert "PermissionError" in refused.stderr
    before = listing(folder)
    command = [*powerless, sys.executable, "-c", READER, f"file://{folder}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    expected = {name: tensor.tolist() for name, tensor in two_rank_root.whole.items() if name.startswith("buffers/")}
    assert json.loads(done.stdout) == expected
    assert listing(folder) == before
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)


ORPHAN = """
import sys
from ckptd.client import private_agent, open_step
private_agent.ORPHANED_S = 1
private_agent._PREFIX = sys.argv[2]
with open_step(sys.argv[1]) as step:
    print(step._session._agent.pid, step._session._agent.memory, flush=True)
    sys.stdin.read()
"""


def test_the_agent_of_a_reader_that_is_killed_ends_by_itself(
    two_rank_root: TwoRankRoot, own_folders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time an orphan gets; what it leaves is removed by the next one, which leaves living ones alone."""
    command = [sys.executable, "-c", ORPHAN, two_rank_root.url, own_folders]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        pid, memory = reader.stdout.readline().split()
        agent = psutil.Process(int(pid))
        assert agent.is_running()
        monkeypatch.setattr(private_agent, "_STALE_S", -1.0)
        PrivateAgent(room=1, deadline=time.monotonic() + 30).close()
        assert agent.is_running()
        assert Path(memory).is_dir()
        reader.send_signal(signal.SIGKILL)
        agent.wait(timeout=60)
    PrivateAgent(room=1, deadline=time.monotonic() + 30).close()
    assert not Path(memory).exists()


@pytest.mark.usefixtures("own_folders")
def test_an_agent_that_does_not_come_up_is_said_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of it is left."""
    from ckptd.client import Unavailable  # noqa: PLC0415

    monkeypatch.setenv("CKPTD_HASH_THREADS", "none")
    with pytest.raises(Unavailable, match=r"ended with exit code 2; its log ends with:\n.*hash_threads"):
        PrivateAgent(room=1, deadline=time.monotonic() + 30)
    assert not private_memory()


LARGE, TENSORS, WINDOW = 32 << 20, 4, 8 << 20
CHUNK = LARGE
"""A shard of this size has a chunk of its own."""
MEASURE = """
import json, os, sys
from pathlib import Path
from ckptd.client import open_step
from ckptd.client.restored_files import SharedFiles
import ckptd.client.step_session as session

arenas = []

class Seen(SharedFiles):
    def read(self, path, offset, nbytes):
        arenas.append(os.stat(path).st_size)
        return super().read(path, offset, nbytes)

def most():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))

session.SharedFiles = Seen
with open_step(sys.argv[1], window_bytes=int(sys.argv[2])) as step:
    before = most()
    total = sum(piece.data.numel() * piece.data.element_size() for piece in step.pieces())
    print(json.dumps({"grown": most() - before, "arena": max(arenas), "rounds": len(arenas), "total": total}))
"""


def test_memory_is_bounded_by_the_window(agents: Agents, tmp_path: Path) -> None:
    """A state of sixteen windows: the process grows by a few windows, the shared memory is one and the chunks it touches."""
    root, node = f"file://{tmp_path}", agents.new()
    with ClientJob(root, [node], audit="off") as job:
        state = {str(number): torch.full((LARGE >> 12, 1 << 10), float(number)) for number in range(TENSORS)}
        module = torch.nn.Module()
        for name, tensor in state.items():
            module.register_buffer(name, tensor)
        job.wait(job.each(lambda rank: rank.save(1, {"model": module})))
    command = [sys.executable, "-c", MEASURE, root, str(WINDOW)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    print(seen)  # noqa: T201 - figures for the reader
    assert seen["total"] == LARGE * TENSORS
    assert seen["arena"] <= WINDOW + 2 * CHUNK
    assert seen["grown"] <= 4 * WINDOW
