"""Compares what two runs of a training script said about themselves. Knows nothing of ckptd, and imports nothing of it.

A run is a folder with `digests/list.RANK` (JSON lines that the script wrote: SHA-256 of its live tensors and objects
after a step, or right after a restore) and `launches/N/*.out` (what its ranks printed, a loss per step as hex float).

    python examples/judge.py build/demo/undisturbed build/demo/hurt
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STEP = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)
OBJECTS = ("optim/groups", "scheduler", "loader", "rng/python", "rng/numpy")


@dataclass(frozen=True, kw_only=True)
class Lists:
    """What one rank said at one moment."""

    step: int
    rank: int
    when: str
    sha256: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The outcome.

    Attributes:
        bit_exact: Everything that was said in the hurt run was said in the other one too, and nothing was left out.
        first_difference: Where it diverged first; None if it did not.
        tensors_compared: SHA-256 of tensors that were compared.
        objects_compared: Same for objects.
        losses_compared: Losses that were compared.
    """

    bit_exact: bool
    first_difference: str | None
    tensors_compared: int
    objects_compared: int
    losses_compared: int


def judge(undisturbed: Path, hurt: Path) -> Judgement:
    """Compare two runs; a run that says nothing is not equal to anything."""
    expected = {(said.step, said.rank): said for said in lists_of(undisturbed) if said.when == "step"}
    found = lists_of(hurt)
    losses, hurt_losses = dict(losses_of(undisturbed)), losses_of(hurt)
    differences = [*_missing(expected, found), *_different_digests(expected, found)]
    differences += [
        (step, -1, f"step {step}: loss {loss} instead of {losses.get(step)}")
        for step, loss in hurt_losses
        if losses.get(step) != loss
    ]
    differences += [
        (step, -1, f"step {step}: no loss was printed") for step in losses.keys() - {step for step, _ in hurt_losses}
    ]
    names = [name for said in found if (said.step, said.rank) in expected for name in said.sha256]
    objects = sum(name in OBJECTS for name in names)
    nothing = not expected or not losses
    first = "the undisturbed run says nothing" if nothing else min(differences, default=(0, 0, None))[2]
    return Judgement(
        bit_exact=first is None,
        first_difference=first,
        tensors_compared=len(names) - objects,
        objects_compared=objects,
        losses_compared=len(hurt_losses),
    )


def _missing(expected: dict[tuple[int, int], Lists], found: list[Lists]) -> Iterator[tuple[int, int, str]]:
    for step, rank in expected.keys() - {(said.step, said.rank) for said in found}:
        yield step, rank, f"step {step}, rank {rank}: no list was written"


def _different_digests(expected: dict[tuple[int, int], Lists], found: list[Lists]) -> Iterator[tuple[int, int, str]]:
    for said in found:
        other = expected.get((said.step, said.rank))
        if other is None:
            yield said.step, said.rank, f"step {said.step}, rank {said.rank}: the undisturbed run wrote no list"
            continue
        for name in sorted(said.sha256.keys() | other.sha256.keys()):
            if said.sha256.get(name) != other.sha256.get(name):
                where = " after a restore" if said.when == "restore" else ""
                yield said.step, said.rank, f"step {said.step}, rank {said.rank}{where}: {name} differs"
                break


def lists_of(run: Path) -> list[Lists]:
    """Read all lists of a run; a last line without an end is of a rank that was killed while it wrote."""
    found = []
    for path in sorted((run / "digests").glob("list.*")):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            told = json.loads(line)
            found.append(Lists(step=told["step"], rank=told["rank"], when=told["when"], sha256=told["sha256"]))
    return found


def losses_of(run: Path) -> list[tuple[int, str]]:
    """Read all losses that a run printed, in all its launches."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(run.glob("launches/*/*.out"))]
    return [(int(step), loss) for text in texts for step, loss in STEP.findall(text)]


if __name__ == "__main__":
    judgement = judge(Path(sys.argv[1]), Path(sys.argv[2]))
    print(judgement)
    sys.exit(0 if judgement.bit_exact else 1)
