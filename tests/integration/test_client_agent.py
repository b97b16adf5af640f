"""One training process and a real agent: embedded start, deaths on both sides, forks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fixtures.agents import Agents
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckptd.chaos.watch import wait_until
from ckptd.client import Aborted, Checkpointer, InvalidRequest, Unavailable, restoring

pytestmark = pytest.mark.integration

SCRIPT = """
import json, os, sys, time
import torch
from ckptd.client import Checkpointer
root, verb = sys.argv[1:3]
model = torch.nn.Linear(64, 64)
checkpointer = Checkpointer(root, job="job")
checkpointer.track(model=model)
restored = checkpointer.restore()
found = restored and [restored.step, restored.tier]
print(json.dumps({"restored": found, "sum": float(model.weight.detach().sum())}), flush=True)
if verb == "die":
    with torch.no_grad():
        model.weight.fill_(2.0)
    checkpointer.save(7).wait("staged")
    os.kill(os.getpid(), 9)
with torch.no_grad():
    model.weight.fill_(1.0)
checkpointer.save((restored.step if restored else 0) + 1).wait()
if verb == "leave":
    sys.exit(0)
checkpointer.close()
"""


class Box:
    """Folders of an embedded agent, and scripts that use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shm = Path(f"/dev/shm/ckptd-test-{secrets.token_hex(4)}")
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")},
            "CKPTD_RUN_DIR": str(folder / "run"),
            "CKPTD_DATA_DIR": str(folder / "data"),
            "CKPTD_SHM_DIR": str(self.shm),
            "http_proxy": "http://127.0.0.1:1",
            "https_proxy": "http://127.0.0.1:1",
        }

    def spawn(self, verb: str, root: str = "root") -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", SCRIPT, f"file://{self.folder / root}", verb]
        return subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, verb: str, root: str = "root") -> tuple[int, dict[str, Any], str]:
        process = self.spawn(verb, root)
        out, err = process.communicate(timeout=90)
        return process.returncode, json.loads(out) if out else {}, err

    @property
    def agent(self) -> int:
        pid: int = json.loads((self.folder / "run" / "agent.json").read_text())["pid"]
        return pid

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            agent = psutil.Process(self.agent)
            agent.kill()
            agent.wait(10)
        shutil.rmtree(self.shm, ignore_errors=True)


@pytest.fixture
def box() -> Iterator[Box]:
    folder = Path(f"/tmp/ckptd-t-{secrets.token_hex(3)}")
    folder.mkdir()
    made = Box(folder)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_an_agent_is_started_by_itself_and_outlives_the_script(box: Box) -> None:
    """S011: later processes restore from its memory; whether a script closes or just ends, stderr stays empty."""
    first = box.run("close")
    assert first == (0, {"restored": None, "sum": first[1]["sum"]}, "")
    agent = box.agent
    assert psutil.Process(agent).is_running()
    assert os.getsid(agent) == agent
    assert box.run("leave") == (0, {"restored": [1, "memory"], "sum": 4096.0}, "")
    assert box.run("close")[1] == {"restored": [2, "memory"], "sum": 4096.0}
    assert box.agent == agent


def test_processes_that_start_at_once_start_one_agent(box: Box) -> None:
    """The others wait for it."""
    running = [box.spawn("close", f"root{number}") for number in range(3)]
    ends = [process.communicate(timeout=90) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], ends
    log = (box.folder / "run" / "agent.log").read_text()
    assert log == ""
    children = [p for p in psutil.process_iter(["cmdline"]) if str(box.folder / "run") in (p.info["cmdline"] or [])]
    assert [p.pid for p in children] == [box.agent]


def test_what_was_staged_survives_the_trainers_death(box: Box) -> None:
    """SIGKILL right after wait("staged"): the next start restores that very step."""
    assert box.run("die")[0] == -signal.SIGKILL
    assert box.run("close")[1] == {"restored": [7, "memory"], "sum": 64 * 64 * 2.0}


def test_a_folder_of_somebody_else_is_not_trusted(box: Box) -> None:
    """Its owner could put his own agent there and read the job's state."""
    run = box.folder / "run"
    run.mkdir()
    run.chmod(0o777)
    code, _, err = box.run("close")
    assert code == 1
    assert "can be written by other users" in err


def test_an_agent_that_cannot_start_says_why(box: Box) -> None:
    """The end of its log stands in the error."""
    box.env["CKPTD_SHM_DIR"] = "not/absolute"
    code, _, err = box.run("close")
    assert code == 1
    assert "must be an absolute path" in err
    assert "Unavailable" in err


@pytest.mark.parametrize("transport", ["shm", "stream"])
def test_an_agent_that_is_killed_and_comes_back_is_used_again(agents: Agents, transport: Any, tmp_path: Path) -> None:
    """Saves before, across and after its death end; the last one commits, and no handle waits for ever."""
    agent = agents.new()
    model = nn.Linear(200, 200)
    with Checkpointer(
        f"file://{tmp_path}", job="job", socket=agent.socket, transport=transport, begin_timeout_s=30.0
    ) as checkpointer:
        checkpointer.track(model=model)
        checkpointer.save(1).wait()
        across = checkpointer.save(2)
        agent.kill()
        agent.start()
        after = checkpointer.save(3)
        with contextlib.suppress(Aborted, Unavailable):
            across.wait(timeout=60)
        after.wait(timeout=60)
        assert across.done()
    other = nn.Linear(200, 200)
    with Checkpointer(f"file://{tmp_path}", job="job", socket=agent.socket, transport=transport) as checkpointer:
        checkpointer.track(model=other)
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.step == 3
        assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("moment", ["client.before_copy_in", "client.before_fill"])
@pytest.mark.parametrize("way", ["shm memory", "shm store", "stream memory", "stream store"])
def test_a_restore_outlives_the_death_of_its_agent(
    agents: Agents, monkeypatch: pytest.MonkeyPatch, way: str, moment: str, tmp_path: Path
) -> None:
    """Killed after it told where the bytes stand, before and after they were opened: every tensor is what was saved.

    The next agent cleans up what the dead one left, while the rank still copies from it.
    """
    agent = agents.new()
    transport, tier = way.split()
    model, other = nn.Linear(200, 200), nn.Linear(200, 200)
    config: dict[str, Any] = {"job": "job", "socket": agent.socket, "transport": transport}
    with Checkpointer(f"file://{tmp_path}", **config) as checkpointer:
        checkpointer.track(model=model, step=torch.optim.Adam(model.parameters()))
        checkpointer.save(1).wait()
    if tier == "store":
        agent.kill()
        agent.wipe()
        agent.start()
    fired: list[str] = []

    def dies_once(name: str) -> None:
        if name == moment and not fired:
            fired.append(name)
            agent.kill()
            agent.start()
            assert wait_until(lambda: not list(agent.shm.glob("*.arena")), within=timedelta(seconds=30))

    monkeypatch.setattr(restoring, "failpoint", dies_once)
    with Checkpointer(f"file://{tmp_path}", **config) as checkpointer:
        checkpointer.track(model=other, step=torch.optim.Adam(other.parameters()))
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.tier == tier
        assert torch.equal(model.weight, other.weight)
        assert torch.equal(model.bias, other.bias)
        checkpointer.save(2).wait()
    assert fired


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def left_since(before: set[int]) -> list[psutil.Process]:
    """Return children of this process that were not there before."""
    return [child for child in psutil.Process().children() if child.pid not in before]


def test_s113_forked_workers_and_subprocesses_do_not_disturb_saves(agents: Agents, tmp_path: Path) -> None:
    """DataLoaders that fork and subprocesses while saves are in flight: all commit, all children end."""
    agent = agents.new()
    before = {child.pid for child in psutil.Process().children()}
    data = TensorDataset(torch.arange(32.0).reshape(32, 1))
    with Checkpointer(f"file://{tmp_path}", job="job", socket=agent.socket, wait_when_busy=True) as checkpointer:
        checkpointer.track(model=nn.Linear(300, 300))
        handles = []
        for number in range(5):
            handles.append(checkpointer.save(number))
            loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
            assert sum(float(batch.sum()) for (batch,) in loader) == 496.0
            assert subprocess.run(["true"], check=True).returncode == 0
        for handle in handles:
            handle.wait(timeout=60)
    deadline = time.monotonic() + 10
    while left_since(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left_since(before)


@pytest.mark.parametrize(
    ("root", "reason"),
    [
        ("nonsense://bucket/x", "INVALID_ROOT"),
        ("file://relative/path", "INVALID_ROOT"),
        ("no-url", "INVALID_ROOT"),
    ],
)
def test_roots_that_cannot_be_used_fail_at_the_start(agents: Agents, root: str, reason: str) -> None:
    """With what, where and the way out."""
    with pytest.raises(InvalidRequest) as caught:
        Checkpointer(root, job="job", socket=agents.new().socket)
    assert caught.value.reason_name == reason
    assert root.split(":", maxsplit=1)[0] in str(caught.value)


@pytest.mark.parametrize("job", ["a b[c]?", "ünï/../x"])
def test_names_and_folders_with_odd_characters_work(agents: Agents, job: str, tmp_path: Path) -> None:
    """They are names, not patterns or paths."""
    folder = tmp_path / "ö [?] %41"
    with Checkpointer(f"file://{folder}", job=job, socket=agents.new().socket) as checkpointer:
        checkpointer.save(1, {"x": 1}).wait()
        state = {"x": 0}
        assert checkpointer.restore_into(state) is not None
        assert state == {"x": 1}


@pytest.mark.parametrize("job", ["..", " x", ""])
def test_names_that_are_none_are_refused(agents: Agents, job: str, tmp_path: Path) -> None:
    """At the start, with the way out."""
    with pytest.raises(InvalidRequest, match="job") as caught:
        Checkpointer(f"file://{tmp_path}", job=job, socket=agents.new().socket)
    assert caught.value.hint


def test_another_job_on_the_root_is_refused(agents: Agents, tmp_path: Path) -> None:
    """One root holds one job; both names stand in the error."""
    agent = agents.new()
    with Checkpointer(f"file://{tmp_path}", job="first", socket=agent.socket) as checkpointer:
        checkpointer.save(1).wait()
    with pytest.raises(InvalidRequest, match="first") as caught:
        Checkpointer(f"file://{tmp_path}", job="second", socket=agent.socket).save(1)
    assert caught.value.reason_name == "JOB_MISMATCH"


def test_s013_a_step_is_used_once(agents: Agents, tmp_path: Path) -> None:
    """Saving it again is refused, and the next one works."""
    with Checkpointer(f"file://{tmp_path}", job="job", socket=agents.new().socket) as checkpointer:
        checkpointer.save(5).wait()
        with pytest.raises(InvalidRequest) as caught:
            checkpointer.save(5)
        assert caught.value.reason_name == "INVALID_STEP"
        checkpointer.save(6).wait()


def test_s106_a_state_may_grow_and_shrink(agents: Agents, tmp_path: Path) -> None:
    """Sizes 10, 20, 5 and 0 MiB: all commit and come back."""
    agent = agents.new()
    with Checkpointer(f"file://{tmp_path}", job="job", socket=agent.socket) as checkpointer:
        for step, mib in enumerate([10, 20, 5, 0]):
            checkpointer.save(step, {"data": torch.full((mib << 18,), float(step))}).wait()
            state: dict[str, Any] = {"data": None}
            checkpointer.restore_into(state)
            assert state["data"].shape == (mib << 18,)
            assert bool((state["data"] == step).all())
