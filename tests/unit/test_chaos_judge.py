"""The demo's judge: equal runs are equal, and each way of not being equal is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SAVED = (2, 4)


def write_run(folder: Path, *, lists: dict[int, list[dict[str, Any]]], losses: dict[str, str] | None = None) -> Path:
    (folder / "digests").mkdir(parents=True)
    for rank, lines in lists.items():
        text = "".join(json.dumps({"rank": rank, **line}) + "\n" for line in lines)
        (folder / "digests" / f"list.{rank}").write_text(text)
    outputs = losses or {"1": "".join(f"step {step} loss 0x{step}\n" for step in range(1, 5))}
    for launch, text in outputs.items():
        (folder / "launches" / launch).mkdir(parents=True)
        (folder / "launches" / launch / "0.out").write_text(text)
    return folder


def line(step: int, *, when: str = "step", **changed: str) -> dict[str, Any]:
    return {"step": step, "when": when, "sha256": {"model/w": f"w{step}", "scheduler": f"s{step}"} | changed}


def run_judge(tmp_path: Path, hurt: Path) -> tuple[int, str]:
    whole = tmp_path / "undisturbed"
    if not whole.exists():
        write_run(whole, lists={rank: [line(step) for step in SAVED] for rank in (0, 1)})
    ran = subprocess.run(
        [sys.executable, "-S", "-c", JUDGE, str(EXAMPLES), str(whole), str(hurt)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.stderr == ""
    return ran.returncode, ran.stdout


# -S: without site-packages, so that nothing of ckptd can be imported.
JUDGE = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from judge import judge
found = judge(Path(sys.argv[2]), Path(sys.argv[3]))
print(found)
sys.exit(0 if found.bit_exact else 1)
"""


def hurt_lists() -> dict[int, list[dict[str, Any]]]:
    return {rank: [line(2), line(4), line(2, when="restore"), line(4)] for rank in (0, 1)}


def test_a_run_that_came_back_is_bit_exact(tmp_path: Path) -> None:
    """Replayed steps and restores count as well; tensors and objects are counted apart."""
    code, told = run_judge(tmp_path, write_run(tmp_path / "hurt", lists=hurt_lists()))
    assert code == 0
    assert "tensors_compared=8, objects_compared=8, losses_compared=4" in told


def changed(rank: int, position: int, name: str) -> dict[int, list[dict[str, Any]]]:
    lists = hurt_lists()
    lists[rank][position]["sha256"][name] = "flipped"
    return lists


@pytest.mark.parametrize(
    ("lists", "losses", "named"),
    [
        (changed(1, 2, "model/w"), None, "step 2, rank 1 after a restore: model/w differs"),
        (changed(0, 3, "scheduler"), None, "step 4, rank 0: scheduler differs"),
        ({0: hurt_lists()[0], 1: [line(2)]}, None, "step 4, rank 1: no list was written"),
        (
            hurt_lists(),
            {"1": "step 1 loss 0x1\nstep 2 loss 0x9\nstep 3 loss 0x3\nstep 4 loss 0x4\n"},
            "step 2: loss 0x9",
        ),
        (hurt_lists(), {"1": "step 1 loss 0x1\n", "2": "step 3 loss 0x3\nstep 4 loss 0x4\n"}, "step 2: no loss"),
    ],
)
def test_what_differs_or_is_missing_is_named(
    lists: dict[int, list[dict[str, Any]]], losses: dict[str, str] | None, named: str, tmp_path: Path
) -> None:
    """One flipped digest, one other loss, one missing list or step: not bit-exact, and the place is told."""
    code, told = run_judge(tmp_path, write_run(tmp_path / "hurt", lists=lists, losses=losses))
    assert code == 1
    assert named in told


def test_a_run_that_says_nothing_is_not_equal(tmp_path: Path) -> None:
    """No evidence is no equality."""
    write_run(tmp_path / "undisturbed", lists={}, losses={"1": "nothing\n"})
    code, told = run_judge(tmp_path, write_run(tmp_path / "hurt", lists={}, losses={"1": "nothing\n"}))
    assert code == 1
    assert "says nothing" in told
