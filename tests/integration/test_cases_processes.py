"""Faults from the field: processes that outlive their parents, ports that are taken, other operating systems."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fixtures.agents import AgentProcess, Agents
from fixtures.raw_rank import RawRank, options, run_credentials
from fixtures.sockets import listeners

pytestmark = pytest.mark.integration

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS / "fixtures" / "endless_ranks.py"
WITHIN_S = 60.0
STARTED_S = 240.0
"""Four processes that import torch, on a machine that does other things too."""


def of_run(mark: str) -> list[psutil.Process]:
    """Return the living processes with these words in their command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if any(mark in word for word in process.info["cmdline"] or []) and process.info["status"] != "zombie"
    ]


def zombies_under(agent: AgentProcess) -> list[psutil.Process]:
    """Return the dead children that an agent did not wait for."""
    assert agent.process is not None
    children = psutil.Process(agent.process.pid).children(recursive=True)
    return [child for child in children if child.status() == psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    "victim", ["launcher", *(pytest.param(one, marks=pytest.mark.long) for one in ("trainer", "agent"))]
)
def test_s108_nothing_of_a_run_is_left_whoever_is_killed(agents: Agents, tmp_path: Path, victim: str) -> None:
    """SIGKILL to torchrun, to one trainer of four, or to the agent, while a save is uploaded: all others end; no zombies."""
    agent = agents.new(start=False, is_forked=False)  # its helpers are looked for by its command line
    agent.start(env={"CKPTD_FAILPOINTS": "uploader.before_put=delay:0.3"})
    mark = str(tmp_path / "run")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", str(SCRIPT), mark, str(agent.socket)]
    with (tmp_path / "out").open("wb") as out:
        launcher = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        agent.wait_event("acknowledged", seconds=STARTED_S)
        ranks = [one for one in of_run(mark) if one.pid != launcher.pid]
        assert len(ranks) == 4
        if victim == "launcher":
            launcher.kill()
        elif victim == "trainer":
            ranks[2].kill()
        else:
            agent.kill()
        launcher.wait(timeout=WITHIN_S)
        deadline = time.monotonic() + WITHIN_S
        while of_run(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert of_run(mark) == [], (tmp_path / "out").read_text()[-3000:]
        if victim == "agent":
            assert of_run(str(agent.folder)) == [], "an agent has no helper processes that could be left"
        else:
            assert zombies_under(agent) == []
            assert agent.kill(signal.SIGTERM) == 0
    finally:
        for left in of_run(mark):
            left.kill()


def free_port() -> int:
    """Ask the kernel."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_on(agent: AgentProcess, root: str) -> RawRank:
    """Return rank 0 of a run of its own."""
    run = os.urandom(8).hex()
    return RawRank(
        agent.socket, root=root, job="job", rank=0, world=1, run=run, credentials=run_credentials(), opts=options()
    )


def test_s109_a_port_that_is_taken_is_named_and_never_shared(agents: Agents, tmp_path: Path) -> None:
    """A second agent on a port in use ends at its start; one that was there before takes another port, and says which."""
    port = free_port()
    first, second = agents.new("--port", str(port)), agents.new("--port", str(port))
    endpoint = rank_on(first, f"file://{tmp_path}/one").lead()
    assert endpoint == f"127.0.0.1:{port}"
    other = rank_on(second, f"file://{tmp_path}/two").lead()
    assert other != endpoint
    assert [f"{address}:{number}" for address, number in listeners(second)] == [other]
    folder = tmp_path / "third"
    arguments = [word for name in ("run", "data", "shm") for word in (f"--{name}-dir", str(folder / name))]
    done = subprocess.run(
        [sys.executable, "-m", "ckptd.daemon.cli", "agent", *arguments, "--port", str(port)],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (6, 1)
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert listeners(first) == [("127.0.0.1", port)]


def test_s109_a_restarted_agent_has_its_port_each_time(agents: Agents, tmp_path: Path) -> None:
    """Killed twenty times with a run on the port: the next one listens there at once."""
    port = free_port()
    agent = agents.new("--port", str(port))
    for _ in range(20):
        rank = rank_on(agent, f"file://{tmp_path}/root")
        assert rank.lead() == f"127.0.0.1:{port}"
        rank.attach(f"127.0.0.1:{port}")  # a connection to the port that the kill leaves behind
        agent.kill()
        rank.die()
        agent.start("--port", str(port))


def test_s109_port_0_publishes_the_port_that_was_taken(agents: Agents, tmp_path: Path) -> None:
    """What ranks are told is what the kernel says."""
    agent = agents.new("--port", "0")
    endpoint = rank_on(agent, f"file://{tmp_path}/root").lead()
    [(address, port)] = listeners(agent)
    assert port > 0
    assert endpoint == f"{address}:{port}"
