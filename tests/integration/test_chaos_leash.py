"""Leashes: whatever ends the harness ends everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from ckptd.chaos.cluster.leash import descendants, start_time
from ckptd.chaos.cluster.process import Leashed, ProcessError
from ckptd.chaos.watch import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

WITHIN = timedelta(seconds=20)
# Each process writes its pid into a file of its own; one of them leaves session and parent behind, as ranks do.
TREE = textwrap.dedent("""
    import os, subprocess, sys, time
    folder, depth = sys.argv[1], int(sys.argv[2])
    if depth:
        subprocess.Popen([sys.executable, "-S", __file__, folder, str(depth - 1)], start_new_session=True)
    open(os.path.join(folder, str(os.getpid())), "w").close()
    if depth == 1:
        os._exit(0)  # its child is an orphan now
    while True:
        time.sleep(60)
""")
HARNESS = textwrap.dedent("""
    import os, sys, threading
    from pathlib import Path
    from ckptd.chaos.cluster.process import Leashed
    script, pids, shm = sys.argv[1:]
    keep = [
        Leashed([sys.executable, "-S", script, pids, "2"], environment=os.environ),
        Leashed([], environment=os.environ, wipe=[Path(shm)]),
    ]
    threading.Event().wait()
""")


def lives(pid: int) -> bool:
    return start_time(pid) is not None


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "tree.py"
    path.write_text(TREE)
    (tmp_path / "pids").mkdir()
    return path


def pids_of(tree: Path, *, count: int) -> list[int]:
    folder = tree.parent / "pids"
    assert wait_until(lambda: len(list(folder.iterdir())) == count, within=WITHIN)
    return [int(path.name) for path in folder.iterdir()]


def program_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def all_end(pids: list[int]) -> bool:
    return wait_until(lambda: not any(lives(pid) for pid in pids), within=WITHIN)


def test_everything_ends_when_the_harness_is_killed(tree: Path, tmp_path: Path) -> None:
    """After SIGKILL to the harness no process of any tree lives, and shared memory is gone."""
    shm = tmp_path / "shm"
    (shm / "slot").mkdir(parents=True)
    harness_script = tmp_path / "harness.py"
    harness_script.write_text(HARNESS)
    command = [sys.executable, *map(str, (harness_script, tree, tree.parent / "pids", shm))]
    with subprocess.Popen(command) as harness:
        pids = pids_of(tree, count=3)
        assert wait_until(lambda: len(descendants(harness.pid)) >= 3, within=WITHIN)
        leashes = [pid for pid in descendants(harness.pid) if pid not in pids]
        harness.kill()
    assert all_end([*pids, *leashes])
    assert not shm.exists()


def test_a_store_that_is_still_starting_dies_with_the_harness(tmp_path: Path) -> None:
    """A server that answers nobody yet is on a leash already: SIGKILL to the harness ends it."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom ckptd.chaos.seaweed import SeaweedServer\n"
        "SeaweedServer(folder=Path(sys.argv[1])).start()\nsys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "weed")], stdin=subprocess.PIPE) as harness:
        assert wait_until(lambda: "weed" in map(program_of, descendants(harness.pid)), within=WITHIN)
        below = descendants(harness.pid)
        harness.kill()
    assert all_end(below)


def test_kill_ends_orphans_and_other_sessions_and_wipes(tree: Path, tmp_path: Path) -> None:
    """`kill` returns when the whole tree is dead and the folders are gone."""
    shm = tmp_path / "shm"
    shm.mkdir()
    leashed = Leashed(
        [sys.executable, "-S", str(tree), str(tree.parent / "pids"), "2"], environment=os.environ, wipe=[shm]
    )
    pids = pids_of(tree, count=3)
    assert leashed.tree()[0] == leashed.pid
    leashed.kill()
    assert not any(lives(pid) for pid in pids)
    assert not shm.exists()
    leashed.kill()


def test_what_is_left_of_a_command_that_ended_dies_with_it(tree: Path, tmp_path: Path) -> None:
    """When the command itself dies, its orphans do not live on, and nothing is wiped."""
    shm = tmp_path / "shm"
    shm.mkdir()
    leashed = Leashed(
        [sys.executable, "-S", str(tree), str(tree.parent / "pids"), "2"], environment=os.environ, wipe=[shm]
    )
    pids = pids_of(tree, count=3)
    assert leashed.signal(signal.SIGKILL)
    assert leashed.wait(WITHIN) == 128 + signal.SIGKILL
    assert not any(lives(pid) for pid in pids)
    assert shm.exists()
    assert leashed.tree() == []
    assert not leashed.signal(signal.SIGTERM)
    leashed.kill()


def test_a_paused_tree_can_be_killed(tree: Path) -> None:
    """A zombie that sleeps on SIGSTOP does not outlive the harness."""
    with Leashed([sys.executable, "-S", str(tree), str(tree.parent / "pids"), "0"], environment=os.environ) as leashed:
        (pid,) = pids_of(tree, count=1)
        assert leashed.signal(signal.SIGSTOP)
    assert not lives(pid)


@pytest.mark.parametrize(
    ("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.abort()", 128 + signal.SIGABRT)]
)
def test_the_exit_code_is_the_commands(code: str, status: int) -> None:
    """Code and signal of the command can be told apart from outside."""
    with Leashed([sys.executable, "-S", "-c", code], environment=os.environ) as leashed:
        assert leashed.wait(WITHIN) == status


def test_output_goes_to_the_files(tmp_path: Path) -> None:
    """Output is appended; errors are joined unless they have a file of their own."""
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr)"
    for errors in (None, tmp_path / "err"):
        with Leashed(
            [sys.executable, "-c", code], environment=os.environ, stdout=tmp_path / "out", stderr=errors
        ) as it:
            assert it.wait(WITHIN) == 0
    assert (tmp_path / "out").read_text() == "out\nerr\nout\n"
    assert (tmp_path / "err").read_text() == "err\n"


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """The caller learns at once, and the log says why."""
    with pytest.raises(ProcessError, match="no-such-program did not start"):
        Leashed(["no-such-program"], environment=os.environ, stdout=tmp_path / "log")
    assert "cannot start no-such-program" in (tmp_path / "log").read_text()


def test_waiting_has_a_deadline() -> None:
    """`wait_until` says what it saw, and never waits for ever."""
    begun = time.monotonic()
    never: Callable[[], bool] = lambda: False  # noqa: E731 - a named constant answer
    assert not wait_until(never, within=timedelta(milliseconds=50))
    assert time.monotonic() - begun < 5
