"""Faults from the field: torchdata's own loader, with and without worker processes, taken up in the middle of an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.two_nodes import TwoNodes

from ckptd.client import Checkpointer

# torchdata tells torch of itself in a way that torch no longer wants to hear.
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:.*set_vital")]

ITEMS, BATCH, SERVED, EPOCHS = 64, 4, 5, 3


class Job:
    """Batches of shuffled items, and noise beside each of them as dropout draws it."""

    def __init__(self, seed: int, workers: int, *, own: bool) -> None:
        loaders = pytest.importorskip("torchdata.stateful_dataloader")
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed) if own else None
        self.loader: Any = loaders.StatefulDataLoader(
            list(range(ITEMS)), batch_size=BATCH, shuffle=True, num_workers=workers, generator=self.generator
        )
        self.batches = iter([])  # type: ignore[var-annotated]

    def track(self, ckpt: Checkpointer) -> list[str]:
        """Track the loader, and its generator where it has one; return the names of what draws."""
        if self.generator is None:
            ckpt.track(loader=self.loader)
            return ["rng"]
        ckpt.track(loader=self.loader, shuffling=self.generator)
        return ["rng", "shuffling"]

    def begin(self) -> None:
        """Build the iterator: it draws from the generators, and takes over the state the loader was given."""
        self.batches = iter(self.loader)

    def some(self, count: int = ITEMS) -> list[tuple[list[int], float]]:
        """Return up to so many batches of this epoch, with the noise."""
        found = []
        for _ in range(count):
            batch = next(self.batches, None)
            if batch is None:
                break
            found.append((batch.tolist(), float(torch.rand(()))))
        return found

    def epochs(self) -> list[list[tuple[list[int], float]]]:
        """Return the rest of this epoch, and two more."""
        found = [self.some()]
        for _ in range(EPOCHS - 1):
            self.begin()
            found.append(self.some())
        return found


@pytest.mark.parametrize("own", [False, True], ids=["global generator", "its own generator"])
@pytest.mark.parametrize("workers", [0, 2])
def test_s126_torchdatas_loader_goes_on_as_if_undisturbed(
    two_nodes: TwoNodes, tmp_path: Path, workers: int, own: bool
) -> None:
    """Each item once, the next epochs in order, and every draw beside them.

    The iterator can only be built after the restore, and draws then: the generators are restored once more.
    """
    job = Job(4, workers, own=own)
    with two_nodes.on(two_nodes.first, tmp_path) as ckpt:
        job.track(ckpt)
        job.begin()
        seen = job.some(SERVED)
        ckpt.save(SERVED).wait()
        expected = job.epochs()
    assert sorted(item for batch, _ in [*seen, *expected[0]] for item in batch) == list(range(ITEMS))
    other = Job(99, workers, own=own)
    with two_nodes.on(two_nodes.other, tmp_path) as ckpt:
        generators = other.track(ckpt)
        ckpt.restore(required=True)
        other.begin()
        found = ckpt.restore(only=generators)
        assert found is not None
        assert found.step == SERVED
        got = other.epochs()
    assert [[batch for batch, _ in epoch] for epoch in got] == [[batch for batch, _ in epoch] for epoch in expected]
    assert got == expected
