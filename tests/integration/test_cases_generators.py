"""Faults from the field: generators and shuffled data after a resume on the same mesh, per rank and per library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures.agents import running_agents

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parent.parent / "fixtures" / "generator_ranks.py"
RANKS = range(2)
MIDDLE, END = 20, 64


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks drew."""
    folder = tmp_path_factory.mktemp("draws")
    with running_agents() as agents:
        (folder / "agent.sock").symlink_to(agents.new().socket)
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(folder), str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            for rank in RANKS
        ]
        try:
            for rank in ranks:
                out, _ = rank.communicate(timeout=100)
                assert rank.returncode == 0, out.decode()[-4000:]
        finally:
            for rank in ranks:
                rank.kill()
    return [json.loads((folder / f"draws.{rank}.json").read_text()) for rank in RANKS]


@pytest.mark.parametrize(("step", "which"), [(END, 0), (MIDDLE, 2)], ids=["end of an epoch", "in an epoch"])
def test_s125_every_later_draw_is_that_of_the_undisturbed_run(
    seen: list[dict[str, Any]], step: int, which: int
) -> None:
    """Python, numpy and torch, on each rank; the iterator that was built meanwhile drew too, and it does not matter."""
    for one in seen:
        assert len(one["straight"]) == 2 * 64
        assert one["resumed"][which] == one["straight"][step:]
    assert seen[0]["straight"] != seen[1]["straight"], "ranks must draw differently for this to show anything"


def test_s126_each_item_is_seen_once_in_each_epoch_after_a_resume(seen: list[dict[str, Any]]) -> None:
    """Saved at item 20 of 64: the other 44 follow, and the next epoch has the undisturbed run's order."""
    for one in seen:
        ids = [(epoch, item) for epoch, item, _ in [*one["straight"][:MIDDLE], *one["resumed"][2]]]
        assert sorted(ids) == [(epoch, item) for epoch in range(2) for item in range(64)]
        assert [item for epoch, item in ids if epoch == 1] == [item for _, item, _ in one["straight"][64:]]


def test_s130_two_restores_of_one_step_draw_alike(seen: list[dict[str, Any]]) -> None:
    """On the mesh that saved, every rank has its own state again, each time."""
    for one in seen:
        assert one["resumed"][0] == one["resumed"][1]


def test_a_checkpointer_keeps_no_process_group(seen: list[dict[str, Any]]) -> None:
    """Its threads end with `destroy_process_group`, however long the script holds the Checkpointer that was given it."""
    assert [one["group_is_gone"] for one in seen] == [True, True]
