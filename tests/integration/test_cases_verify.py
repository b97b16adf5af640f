"""Faults from the field: is this checkpoint good? Asked before the job starts, of the store alone, in bounded memory."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.agents import Agents
from fixtures.raw_job import Job
from fixtures.raw_rank import RawRank
from fixtures.stored_root import objects_of, tree

from ckptd.daemon.cli import main
from ckptd.protos.agent_pb2 import Event

pytestmark = pytest.mark.integration

MIB = 1 << 20
LIMIT_BYTES = 256 * MIB
LARGE, SMALL = 5, 2
"""Chunks of 64 MiB of the good step: more than the limit; and of each damaged one, of 32 MiB."""


MEASURED = """
import sys
from ckptd.daemon.cli import main
code = main(sys.argv[1:])
[peak] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
sys.stderr.write("peak " + peak.split()[1])
sys.exit(code)
"""


def verified(arguments: list[str]) -> tuple[int, int, str]:
    """Run a verb in a process of its own; return its exit code, the most memory it had at once in bytes, and its output."""
    # Of itself: what wait4 tells of a child includes the memory of the process that started it.
    command = [sys.executable, "-c", MEASURED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, int(done.stderr.rpartition("peak ")[2]) << 10, done.stdout


def committed(rank: RawRank, step: int) -> None:
    """Wait until the rank was told, also on a machine whose disk does other things."""
    for _ in range(5):
        with contextlib.suppress(queue.Empty):
            rank.event("step", state=Event.COMMITTED, step=step)
            return
    raise TimeoutError(step)


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        [byte] = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_s072_verify_names_every_bad_object_and_reads_in_bounded_memory(agents: Agents, tmp_path: Path) -> None:
    """Good, bit-flipped, short, missing: exit code and list say which; two readers stay below 256 MB; nothing is written."""
    root = tmp_path / "root"
    url = f"file://{root}"
    job = Job(url, [agents.new()], 1, commit_timeout_s=300.0, begin_timeout_s=60.0)
    [rank] = job.ranks
    job.restored()
    for step in range(1, 5):
        count, size = (LARGE, 64 * MIB) if step == 1 else (SMALL, 32 * MIB)
        assert rank.save(step, [bytes([step, at]) * (size // 2) for at in range(count)], {}).go
        committed(rank, step)
    job.detach()
    damaged = {step: [str(path.relative_to(root)) for path in objects_of(root, step, "chunks")] for step in (2, 3, 4)}
    assert {len(keys) for keys in damaged.values()} == {SMALL}
    for key in damaged[2]:
        flip(root / key)
    for key in damaged[3]:
        os.truncate(root / key, (root / key).stat().st_size - 4096)
    for key in damaged[4]:
        (root / key).unlink()
    before = tree(root)
    words = {2: "altered", 3: "length", 4: "missing"}

    code, peak, out = verified(["verify", "--all", "--readers", "2", "--json", url])
    assert code == 4
    assert peak < LIMIT_BYTES, f"{peak >> 20} MiB for {LARGE * 64} MiB in one step"
    found = {one["step"]: one for one in json.loads(out)["steps"]}
    assert (found[1]["verdict"], found[1]["bad"]) == ("good", [])
    assert found[1]["bytes"] >= LARGE * 64 * MIB
    for step, word in words.items():
        assert found[step]["verdict"] == "corrupt"
        assert [bad["key"] for bad in found[step]["bad"]] == sorted(damaged[step])
        assert all(bad["what"].startswith(word) for bad in found[step]["bad"])
    assert [main(["verify", url, str(step)]) for step in (1, 2)] == [0, 4]
    assert tree(root) == before
