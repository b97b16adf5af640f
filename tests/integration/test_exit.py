"""How processes end: ours with no thread left, and torch's gloo, without us, with an abort."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.agents import Agents

pytestmark = pytest.mark.integration

FIXTURES = Path(__file__).parents[1] / "fixtures"
LIMIT_S = 120


def test_no_event_thread_is_left_when_the_interpreter_ends(agents: Agents) -> None:
    """Of a Checkpointer that is open, and of one that was dropped without `close`: both ran until then."""
    agent = agents.new()
    command = [sys.executable, str(FIXTURES / "unclosed.py"), str(agent.folder), str(agent.socket)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"when": "end", "event_threads": 2},
        {"when": "after all", "event_threads": 0},
    ]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python no longer unwinds threads that want the GIL too late")
def test_gloo_aborts_a_process_that_it_outlives() -> None:
    """Why scripts on gloo leave by `os._exit`. When this fails, torch has mended it: let any_mesh_ranks.py end by itself."""
    done = subprocess.run(
        [sys.executable, str(FIXTURES / "gloo_exit.py")], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert json.loads(done.stdout) == {"joined": 0, "kept": -6, "left": 0}
    assert "terminate called without an active exception" in done.stderr
