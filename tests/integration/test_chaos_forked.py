"""Forked processes are leashed like any other: their codes, their ends, and nothing that outlives the harness."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from ckptd.chaos.cluster.cluster import Cluster
from ckptd.chaos.cluster.fork_server import TAG
from ckptd.chaos.cluster.forked import ForkServer
from ckptd.chaos.cluster.launcher import Torchrun
from ckptd.chaos.cluster.leash import start_time
from ckptd.chaos.cluster.process import Leashed, ProcessError
from ckptd.chaos.watch import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

SOON = timedelta(seconds=20)
SCRIPT = """
import atexit, os, subprocess, sys, threading, time
atexit.register(lambda: print("atexit", flush=True))
print(__name__, sys.argv[1:], os.environ["COLOUR"], "json" in sys.modules, flush=True)
what = sys.argv[1]
if what == "exit": sys.exit(7)
if what == "raise": raise RuntimeError("boom")
if what == "thread": threading.Thread(target=lambda: (time.sleep(0.2), print("thread", flush=True))).start()
if what == "signals":
    import signal
    usual = {each.name: str(signal.getsignal(each)) for each in signal.Signals if each < signal.SIGRTMIN}
    print({name: handler.split(" at ")[0] for name, handler in usual.items()}, flush=True)
if what == "tree":
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("child", child.pid, flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One server for the module."""
    with ForkServer("json", environment=os.environ) as made:
        yield made


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def environment(tag: str = "0000") -> dict[str, str]:
    return {**os.environ, "COLOUR": "red", TAG: tag}


@pytest.mark.parametrize("case", [("exit", 7, "atexit"), ("raise", 1, "boom"), ("thread", 0, "thread")])
def test_a_forked_process_is_the_one_its_command_says(
    server: ForkServer, script: Path, tmp_path: Path, case: tuple[str, int, str]
) -> None:
    """Arguments, environment, output and exit code are its own; threads end and exit handlers run as usual."""
    what, code, printed = case
    out, err = tmp_path / "out", tmp_path / "err"
    made = server.spawn([sys.executable, str(script), what, "b"], environment=environment(), stdout=out, stderr=err)
    assert made.wait(SOON) == code
    assert made.poll() == code
    assert out.read_text().splitlines()[0] == f"__main__ ['{what}', 'b'] red True"
    assert printed in out.read_text() + err.read_text()
    assert "atexit" in out.read_text()
    assert made.kill() == code


def test_a_forked_process_handles_signals_like_a_started_one(server: ForkServer, script: Path, tmp_path: Path) -> None:
    """Above all SIGPIPE, which Python ignores: an agent whose rank dies while it is written to must not die of it."""
    forked, started = tmp_path / "forked", tmp_path / "started"
    command = [sys.executable, str(script), "signals"]
    assert server.spawn(command, environment=environment(), stdout=forked).wait(SOON) == 0
    with Leashed(command, environment=environment(), stdout=started) as leashed:
        assert leashed.wait(SOON) == 0
    handlers = started.read_text().splitlines()[1]
    assert forked.read_text().splitlines()[1] == handlers
    assert "'SIGPIPE': '1'" in handlers


def test_a_module_is_run_like_with_m(server: ForkServer, tmp_path: Path) -> None:
    """`-m` finds modules, and what a verb prints is its own."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "ckptd.daemon.cli", "--version"]
    assert server.spawn(command, environment=environment(), stdout=out).wait(SOON) == 0
    assert out.read_text().startswith("ckptd ")


def test_killing_it_ends_its_whole_tree(server: ForkServer, script: Path, tmp_path: Path) -> None:
    """Also what made a session of its own; a signal goes to the process alone, and its code tells which."""
    out = tmp_path / "out"
    made = server.spawn([sys.executable, str(script), "tree"], environment=environment(), stdout=out)
    assert wait_until(lambda: "child" in out.read_text() if out.exists() else False, within=SOON)
    child = int(out.read_text().split()[-1])
    assert set(made.tree()) == {made.pid, child}
    assert made.poll() is None
    assert made.kill() == 128 + signal.SIGKILL
    assert start_time(made.pid) is None
    assert start_time(child) is None
    assert made.kill() == 128 + signal.SIGKILL

    again = server.spawn([sys.executable, str(script), "tree"], environment=environment())
    assert again.signal(signal.SIGKILL)
    assert again.wait(SOON) == 128 + signal.SIGKILL
    assert not again.signal(signal.SIGKILL)


def test_a_forked_process_that_is_left_counts_as_a_leak(server: ForkServer, script: Path, tmp_path: Path) -> None:
    """Its environment cannot be seen from outside, and yet the cluster finds it, as long as it lives."""
    cluster = Cluster(nnodes=1, nproc=1, folder=tmp_path, launcher=Torchrun(tmp_path), environment={})
    out = tmp_path / "out"
    made = server.spawn([sys.executable, str(script), "tree"], environment=environment(cluster.tag), stdout=out)
    assert wait_until(lambda: out.exists() and "child" in out.read_text(), within=SOON)
    assert any(leak.startswith(f"process {made.pid}: ") for leak in cluster.leaks())
    made.kill()
    assert cluster.leaks() == []


def test_nothing_outlives_a_harness_that_is_killed(script: Path, tmp_path: Path) -> None:
    """SIGKILL to whoever holds the server ends the server and all that it forked, and removes its folder."""
    out = tmp_path / "out"
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from ckptd.chaos.cluster.forked import ForkServer\n"
        "server = ForkServer('json', environment=os.environ)\n"
        "made = server.spawn([sys.executable, sys.argv[1], 'tree'], environment=os.environ, stdout=Path(sys.argv[2]))\n"
        "print(server._server.pid, made.pid, server._folder.name, flush=True)\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(script), str(out)], env=environment(), stdout=subprocess.PIPE, text=True
    ) as harness:
        assert harness.stdout is not None
        first, second, folder = harness.stdout.readline().split()
        assert wait_until(lambda: out.exists() and "child" in out.read_text(), within=SOON)
        pids = [int(first), int(second), int(out.read_text().split()[-1])]
        assert all(start_time(pid) for pid in pids)
        harness.send_signal(signal.SIGKILL)
    assert wait_until(lambda: not any(start_time(pid) for pid in pids), within=SOON)
    assert wait_until(lambda: not Path(folder).exists(), within=SOON)


def test_a_server_that_cannot_import_says_why() -> None:
    """The message is the import's."""
    begun = time.monotonic()
    with pytest.raises(ProcessError, match="No module named 'no_such_module'"):
        ForkServer("no_such_module", environment=os.environ)
    assert time.monotonic() - begun < SOON.total_seconds()
