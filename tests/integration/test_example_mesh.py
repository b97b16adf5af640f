"""examples/train_moe.py under torchrun: equal runs are equal, replicas are equal, and the mesh computes the same."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_moe.py"
STEPS = 4
PLAIN = ("--dropout=0", "--augment=0")  # what differs by rank on purpose
LAUNCH_S = 120  # a launch of four ranks takes about ten seconds on two idle cores

Twice: TypeAlias = tuple[list[dict[str, Any]], list[dict[str, Any]]]

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(5 * LAUNCH_S)]


def launch(folder: Path, *flags: str, world: int = 1) -> list[dict[str, Any]]:
    """Run the script to its end; returns its digest lines, in the order of ranks. Leaves no process behind."""
    folder.mkdir()
    starter = [sys.executable]
    if world > 1:
        starter = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
        starter += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = [*starter, str(SCRIPT), "--no-ckpt", f"--steps={STEPS}", "--digest-every=2", *flags]
    command += ["--digests", str(folder / "digests"), "--out", str(folder / "out.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, complaints = process.communicate(timeout=LAUNCH_S)
        finally:
            # torchrun ends its ranks when it is told to end.
            if process.poll() is None:
                process.terminate()
    assert process.returncode == 0, complaints
    assert complaints == ""
    losses = json.loads((folder / "out.json").read_text())["losses"]
    assert [line for line in said.splitlines() if line.startswith("step ")] == [
        f"step {step} loss {loss}" for step, loss in losses.items()
    ]
    lines = []
    for rank in range(world):
        lines += [json.loads(line) for line in (folder / f"digests.{rank}").read_text().splitlines()]
    assert [(line["rank"], line["step"]) for line in lines] == [(r, s) for r in range(world) for s in (2, 4)]
    assert all(line["loss"] == losses[str(line["step"])] for line in lines)
    return lines


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Twice:
    """The digest lines of two runs of one command on 2 x FSDP2 with experts spread over it, x 2 tp."""
    folder = tmp_path_factory.mktemp("moe")
    first, second = (launch(folder / str(n), "--dp-shard=2", "--tp=2", world=4) for n in range(2))
    return first, second


def test_two_runs_of_one_command_are_equal_to_the_bit(
    twice: Twice,
) -> None:
    """Losses and the digests of all tensors and objects of all ranks, with dropout and augmentation on."""
    first, second = twice
    assert first == second
    assert all(len(line["sha256"]) > 200 for line in first)


def test_ranks_that_hold_the_same_box_hold_the_same_bits(
    twice: Twice,
) -> None:
    """Tp cuts attention and dense layers and nothing else; dp_shard cuts all parameters, experts among them."""
    at_end = {(line["coord"]["dp_shard"], line["coord"]["tp"]): line["sha256"] for line in twice[0][1::2]}

    def differ(one: tuple[int, int], other: tuple[int, int]) -> set[str]:
        return {name for name in at_end[one] if at_end[one][name] != at_end[other][name]}

    over_tp = differ((0, 0), (0, 1))
    assert over_tp
    assert all(".qkv." in n or ".out.w" in n or ".up." in n or ".down.w" in n or "/head." in n for n in over_tp)
    assert not any("experts" in name or "rng/" in name or name == "loader" for name in over_tp)
    over_dp = differ((0, 0), (1, 0))
    parameters = {n for n in at_end[0, 0] if n.startswith("model/") and not n.endswith("ff.bias")}
    assert parameters <= over_dp
    assert {"loader", "rng/python", "rng/numpy"} <= over_dp


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The digest lines of one process, without dropout and augmentation."""
    return launch(tmp_path_factory.mktemp("moe") / "alone", *PLAIN)


@pytest.mark.parametrize("mesh", [("--pp=2", "--dp-shard=2"), ("--dp-shard=2", "--tp=2")], ids=" ".join)
def test_the_mesh_trains_the_model_of_one_process(
    alone: list[dict[str, Any]], mesh: tuple[str, str], tmp_path: Path
) -> None:
    """Without dropout and augmentation, a mesh loses what one process loses, but for rounding."""
    cut = launch(tmp_path / "cut", *PLAIN, *mesh, world=4)
    for one, other in zip(alone, cut[:2], strict=True):
        assert float.fromhex(other["loss"]) == pytest.approx(float.fromhex(one["loss"]), rel=1e-5)
