"""Four real ranks on FSDP2 over tensor parallelism, one real agent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures.agents import Agents

pytestmark = [pytest.mark.integration, pytest.mark.mesh]

SCRIPT = Path(__file__).parent.parent / "fixtures" / "client_ranks.py"
RANKS = range(4)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    agents = Agents(folder)
    try:
        agent = agents.new()
        (folder / "agent.sock").symlink_to(agent.socket)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(SCRIPT), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return [json.loads((folder / f"seen.{rank}.json").read_text()) for rank in RANKS]
    finally:
        agents.close()


def test_s027_every_shard_moment_and_generator_comes_back_bit_for_bit(seen: list[dict[str, Any]]) -> None:
    """S075, S076: uneven widths, scalars and one-element parameters, into a fresh model; and training goes on alike."""
    for one in seen:
        assert one["none"]
        assert one["restored"] == [2, "memory", {"loss": 1.0}]
        assert one["bits"]
        assert one["generator"]
        assert one["goes_on"]


def test_s087_each_rank_gets_its_own_objects(seen: list[dict[str, Any]]) -> None:
    """Python values and tensors of the loader."""
    assert [one["loader"] for one in seen] == [[rank, 2, [float(rank)] * (rank + 1)] for rank in RANKS]


def test_s033_one_rank_that_raises_is_named_on_all_ranks(seen: list[dict[str, Any]]) -> None:
    """Soon, not at the deadline."""
    for one in seen:
        assert "rank 3" in one["raised"]["text"]
        assert "boom" in one["raised"]["text"]
        assert one["raised"]["reason"] == "RANK_FAILED"
        assert one["raised"]["seconds"] < 3


def test_ranks_that_do_not_save_are_named(seen: list[dict[str, Any]]) -> None:
    """Within the deadline, on every rank that did."""
    for rank in (0, 2, 3):
        assert seen[rank]["some"]["reason"] == "RANKS_MISSING"
        assert "1" in seen[rank]["some"]["text"]
        assert seen[rank]["some"]["seconds"] < 20


def test_unequal_steps_are_an_error_on_every_rank(seen: list[dict[str, Any]]) -> None:
    """That says so."""
    for one in seen:
        assert one["disagree"]["reason"] == "RANKS_DISAGREE"
        assert one["disagree"]["class"] == "InvalidRequest"


def test_s084_equal_names_with_other_values_are_never_merged(seen: list[dict[str, Any]]) -> None:
    """Declared as replicas they are refused with the name; declared per rank each comes back to its rank."""
    for rank, one in enumerate(seen):
        assert one["differ"]["reason"] == "REPLICAS_DIFFER"
        assert "w" in one["differ"]["text"]
        assert one["declared"]["class"] == ""
        assert one["own"] == [float(rank)] * 4


def test_a_piece_that_nobody_holds_is_refused_before_anything_is_copied(seen: list[dict[str, Any]]) -> None:
    """With the tensor's name."""
    for one in seen:
        assert one["coverage"]["reason"] == "COVERAGE"
        assert "w" in one["coverage"]["text"]


def test_checkpointers_of_groups_are_independent(seen: list[dict[str, Any]]) -> None:
    """Each group saves and restores its own, beside one of the whole job."""
    for rank, one in enumerate(seen):
        assert one["group"] == [rank % 2, 2]
        assert one["beside"]["class"] == ""
        assert one["x"] == rank


def test_after_all_that_a_proper_save_commits(seen: list[dict[str, Any]]) -> None:
    """Nothing that failed before is in its way."""
    assert [one["last"]["class"] for one in seen] == [""] * 4


def test_replicas_are_compared_as_told_and_not_read_in_between(seen: list[dict[str, Any]]) -> None:
    """Every third save, all of them after a difference until one is good, and the first after a restore; ranks alike."""
    compared = [1, 4, 7, 8, 9, 11]
    by_rank = [one["compared"]["tensors"] for one in seen]
    assert sorted(rank["1"] for rank in by_rank) == [0, 1, 1, 1]  # one of the four writes it
    for rank in by_rank:
        assert rank == {str(step): rank["1"] if step in compared else 0 for step in range(1, 13)}
    for one in seen:
        assert {step: end["reason"] for step, end in one["compared"]["outcome"].items()} == {
            str(step): "REPLICAS_DIFFER" if step in {7, 8} else "" for step in range(1, 13)
        }
        assert one["compared"]["restored"] == [float(at + 10) for at in range(8)]


def test_a_replica_that_drifted_is_named_on_every_rank(seen: list[dict[str, Any]]) -> None:
    """Tensor, box and ranks, in the same words, at the next save that is compared."""
    texts = {one["compared"]["outcome"]["7"]["text"] for one in seen}
    assert len(texts) == 1
    text = texts.pop()
    assert "step 7: tensor 'w', box [0:8]: replicas differ" in text
    assert "ranks [0, 1, 3]" in text
    assert "ranks [2]" in text


def test_ranks_with_different_policies_are_told_so(seen: list[dict[str, Any]]) -> None:
    """Before anything is saved, on every rank, with both."""
    for one in seen:
        assert one["policies"]["class"] == "InvalidRequest"
        assert one["policies"]["reason"] == "RANKS_DISAGREE"
        assert "rank 3 comes with verify_replicas 'first', rank 0 with 'every:4'" in one["policies"]["text"]
        assert one["policies"]["ranks"] == [0, 3]
