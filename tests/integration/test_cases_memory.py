"""Faults from the field: shared memory after processes were killed, and while a restarted trainer writes anew."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fixtures.agents import AgentProcess, Agents
from fixtures.forked_process import ForkedProcess, python
from fixtures.raw_job import Job
from fixtures.stored_root import states, unproved

from ckptd.daemon import slot_header
from ckptd.daemon.catalog import StepState
from ckptd.protos.agent_pb2 import Event

pytestmark = pytest.mark.integration

TESTS = Path(__file__).parents[1]
TRAINER = TESTS / "fixtures" / "raw_trainer.py"
KILLS = 10
WITHIN_S = 60.0
NAME = re.compile(r"(?P<job>[0-9a-f]{16})\.r(?P<rank>\d{6})\.s\d+\.[0-9a-f]{8}\.slot")


def trains(agent: AgentProcess, root: str, step: int, byte: int, how: str = "") -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a trainer on an agent."""
    command = python(TRAINER, agent.socket, root, str(step), str(byte), *filter(None, [how]))
    return command, {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ["PYTHONPATH"]])}


def trainer(agent: AgentProcess, root: str, step: int, byte: int, how: str = "") -> subprocess.Popen[str]:
    """Start a trainer on an agent, and listen to it."""
    command, env = trains(agent, root, step, byte, how)
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def segments(folder: Path) -> dict[str, int]:
    """Return name and inode of what lies in a folder of shared memory."""
    return {path.name: path.stat().st_ino for path in folder.iterdir() if not path.name.startswith("probe-")}


def test_s103_what_killed_processes_leave_in_shared_memory_is_given_back(agents: Agents, tmp_path: Path) -> None:
    """Ten trainers and ten agents killed in the midst of a save: nothing of them is left, and a living run's is untouched."""
    agent = agents.new(start=False)
    soon = {"CKPTD_REATTACH_S": "0.5"}
    agent.start(env=soon)
    beside = agents.new(start=False)
    beside.shm = agent.shm  # one folder, two agents: what the other one holds is not ours
    beside.start()
    living = Job(f"file://{tmp_path}/living", [beside], 1)
    living.restored()
    living.save(1)
    living.wait(1)
    kept = segments(agent.shm)
    assert kept
    root = f"file://{tmp_path}/root"
    for number in range(KILLS):
        command, env = trains(agent, root, number, 7, "die")
        assert ForkedProcess(command, kind="raw rank", env=env).wait(timeout=WITHIN_S) == -signal.SIGKILL
    assert len(segments(agent.shm)) > len(kept), "nothing was left to be given back"
    for number in range(KILLS):
        # Each agent dies with a slot that is being written, of a job of its own that never comes back.
        job = Job(f"file://{tmp_path}/lost{number}", [agent], 1)
        [rank] = job.ranks
        job.restored()
        assert rank.begin(1, rank.put_layout([b"x" * 300_000])).go
        agent.kill()
        job.die()
        agent.start(env=soon)
    deadline = time.monotonic() + WITHIN_S
    while segments(agent.shm) != kept and time.monotonic() < deadline:
        time.sleep(0.05)
    assert segments(agent.shm) == kept
    for name in kept:
        if not name.endswith(".slot"):
            continue
        assert NAME.fullmatch(name), name
        header = slot_header.decode(memoryview((agent.shm / name).read_bytes()[: slot_header.HEADER_BYTES]))
        assert header is not None
        assert (header.run_id, header.rank) == (living.ranks[0].about.run_id, 0)
    living.check(living.restored(1), 1)
    living.save(2)
    living.wait(2)
    living.detach()


def test_s105_a_restarted_trainer_does_not_write_into_what_is_being_uploaded(agents: Agents, tmp_path: Path) -> None:
    """It is killed while its snapshot uploads; the next one saves at once: each step has its own bytes, and nobody crashes."""
    root = f"file://{tmp_path}/root"
    agent = agents.new(start=False)
    agent.start(env={"CKPTD_FAILPOINTS": "uploader.before_put=delay:5"})
    with trainer(agent, root, 1, 11, "staged") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "staged\n"
        first.kill()
        assert first.wait(timeout=WITHIN_S) == -signal.SIGKILL
    assert agent.events("sealed-local") == [], "the upload must still run"
    with trainer(agent, root, 2, 22) as second:
        out, _ = second.communicate(timeout=WITHIN_S)
    assert (second.returncode, out) == (0, "durable\n")
    assert agent.process is not None
    assert agent.process.poll() is None
    assert states(root) == {1: StepState.COMMITTED, 2: StepState.COMMITTED}
    assert unproved(root) == []
    other = Job(root, [agents.new()], 1, read_only=True)
    for step, byte in ((1, 11), (2, 22)):
        [(found, [data], objects)] = other.restored(step)
        assert (found.step, found.tier) == (step, "store")
        assert data == bytes([byte]) * len(data)
        assert objects == {"byte": bytes([byte])}
    other.detach()


def test_s106_slots_follow_the_size_of_the_state_down_to_nothing(agents: Agents, tmp_path: Path) -> None:
    """10, 20, 5 and 0 MiB from one rank with one slot: all commit, and a slot that was too small is gone at once."""
    root = f"file://{tmp_path}/root"
    agent = agents.new()
    job = Job(root, [agent], 1, slots=1, wait_when_busy=True)
    [rank] = job.ranks
    job.restored()
    held = []
    for step, mib in enumerate((10, 20, 5, 0)):
        state = [bytes([step + 1]) * (mib << 20)]
        assert rank.save(step, state, {"mib": bytes([mib])}).go
        rank.event("step", state=Event.COMMITTED, step=step)
        slots = [path for path in agent.shm.iterdir() if path.suffix == ".slot"]
        assert len(slots) == 1
        held.append((slots[0].name, slots[0].stat().st_size >> 20))
        [(found, [data], _)] = job.restored(step)
        assert (found.step, data) == (step, state[0])
    names, sizes = zip(*held, strict=True)
    assert len(set(names)) == 2, "made anew for 20 MiB, used again for less"
    assert sizes[0] < sizes[1] == sizes[2] == sizes[3]
    assert unproved(root) == []
    job.detach()
