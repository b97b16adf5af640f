"""Faults from the field: scalars, shards that do not divide, and generators, on four ranks and on other numbers of them."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.agents import AgentProcess, running_agents
from fixtures.client_job import ClientJob, equal
from fixtures.stored_root import unproved
from torch import nn

from ckptd.client import Checkpointer, Sharded, rng

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[AgentProcess]]:
    """Two agents for all tests of this module."""
    with running_agents() as agents:
        yield [agents.new(), agents.new()]


def spread(nodes: list[AgentProcess], world: int) -> tuple[list[AgentProcess], int]:
    """Return nodes, and ranks on each, for a world."""
    return (nodes, world // 2) if world % 2 == 0 else (nodes[:1], world)


class Scalars(nn.Module):
    """Parameters of one element in every shape there is, and buffers; all ranks hold replicas."""

    def __init__(self, value: float) -> None:
        super().__init__()
        for number, shape in enumerate([(), (1,), (1, 1), (1, 1, 1)]):
            self.register_parameter(f"p{number}", nn.Parameter(torch.full(shape, value + number)))
        self.register_buffer("count", torch.tensor(int(value) + 2**40))
        self.register_buffer("none", torch.zeros(0, 3, dtype=torch.int16))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, amsgrad=True)

    def train_on(self, steps: int) -> None:
        """Train."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            torch.autograd.backward(torch.stack([parameter.square().sum() for parameter in self.parameters()]).sum())
            self.optimizer.step()

    def values(self) -> dict[str, Any]:
        """Return all that must come back."""
        return {"net": dict(self.state_dict()), "optimizer": self.optimizer.state_dict()["state"]}


@pytest.mark.parametrize("world", [4, 3])
def test_s075_scalars_and_tensors_of_one_element_come_back_on_four_ranks(
    nodes: list[AgentProcess], tmp_path: Path, world: int
) -> None:
    """Parameters (), (1,), (1, 1) with their moments and step counters: bits and shapes, and () stays (); also on three."""
    root = f"file://{tmp_path}/root"
    models = [Scalars(3.0) for _ in range(4)]
    for model in models:
        model.train_on(2)
    with ClientJob(root, *spread(nodes, 4)) as job:
        job.each(lambda ckpt: ckpt.track(model=models[ckpt.rank], optimizer=models[ckpt.rank].optimizer))
        job.wait(job.each(lambda ckpt: ckpt.save(1)))
    want = models[0].values()
    assert want["net"]["p0"].shape == want["optimizer"][0]["exp_avg"].shape == ()
    fresh = [Scalars(0.0) for _ in range(world)]
    with ClientJob(root, *spread(nodes, world)) as job:
        job.each(lambda ckpt: ckpt.track(model=fresh[ckpt.rank], optimizer=fresh[ckpt.rank].optimizer))
        job.each(lambda ckpt: ckpt.restore(required=True))
    for model in fresh:
        assert equal(model.values(), want)
    assert unproved(root) == []


SIZES = (1, 5, 6, 7)


def shards(whole: dict[str, torch.Tensor], world: int, rank: int, *, blank: bool) -> dict[str, Any]:
    """Return what torch.chunk gives a rank of each tensor; the last ranks get less or nothing."""
    held: dict[str, Any] = {}
    for name, tensor in whole.items():
        step = -(-len(tensor) // world)
        low = min(rank * step, len(tensor))
        part = tensor[low : low + step]
        held[name] = Sharded(torch.zeros_like(part) if blank else part, tensor.shape, (low, 0))
    return {"shards": held}


def test_s076_shards_that_do_not_divide_come_back_on_any_number_of_ranks(
    nodes: list[AgentProcess], tmp_path: Path
) -> None:
    """Dimensions of 1, 5, 6, 7 over 4 ranks (2, 2, 2, 0), read on 4, 3 and 8: every element, and nothing else."""
    root = f"file://{tmp_path}/root"
    whole = {str(size): torch.arange(size * 3, dtype=torch.float64).reshape(size, 3) + size for size in SIZES}
    with ClientJob(root, *spread(nodes, 4)) as job:
        job.wait(job.each(lambda ckpt: ckpt.save(1, shards(whole, 4, ckpt.rank, blank=False))))
    assert not shards(whole, 4, 3, blank=False)["shards"]["6"].tensor.numel()
    assert unproved(root) == []

    def restored(world: int, ckpt: Checkpointer) -> dict[str, Any]:
        into = shards(whole, world, ckpt.rank, blank=True)
        ckpt.restore_into(into, required=True)
        found: dict[str, Any] = into["shards"]
        return found

    for world in (4, 3, 8):
        with ClientJob(root, *spread(nodes, world), read_only=True) as job:
            got = job.each(functools.partial(restored, world))
        for rank, held in enumerate(got):
            want = shards(whole, world, rank, blank=False)["shards"]
            for name in whole:
                assert torch.equal(held[name].tensor, want[name].tensor), (world, rank, name)
        for name, tensor in whole.items():
            assert torch.equal(torch.cat([held[name].tensor for held in got]), tensor), (world, name)


def states(rank: int) -> dict[str, object]:
    """Return generators' states that tell the rank."""
    numpys = np.random.RandomState(rank)
    kind, keys, position, has_gauss, cached = numpys.get_state(legacy=True)
    return {
        "python": random.Random(rank).getstate(),
        "numpy": (kind, np.array(keys), int(position), int(has_gauss), float(cached)),
        "torch": torch.Generator().manual_seed(rank).get_state().numpy().tobytes(),
    }


def test_s130_generators_of_four_ranks_come_back_on_two_and_on_eight(
    nodes: list[AgentProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No crash: each rank is seeded by the stored states, the step and its place; twice alike, and apart from the others.

    Ranks are threads here and have one set of generators, so states are given and seeds are noted instead of set.
    """
    root = f"file://{tmp_path}/root"
    here = threading.local()
    seeds: dict[int, bytes] = {}
    monkeypatch.setattr(rng, "capture", lambda: states(here.rank))
    monkeypatch.setattr(rng, "reseed", lambda seed: seeds.update({here.rank: seed}))
    put_back: dict[int, Any] = {}
    monkeypatch.setattr(rng, "apply", lambda state: put_back.update({here.rank: state}))

    def saved(ckpt: Checkpointer) -> None:
        here.rank = ckpt.rank
        ckpt.save(5, {"n": 1}).wait(timeout=30)

    def restored(ckpt: Checkpointer) -> None:
        here.rank = ckpt.rank
        ckpt.restore_into({"n": 0}, required=True)

    with ClientJob(root, *spread(nodes, 4)) as job:
        job.each(saved)
    found: dict[int, list[dict[int, bytes]]] = {}
    for world in (2, 8, 2, 8):
        seeds.clear()
        with ClientJob(root, *spread(nodes, world), read_only=True) as job:
            job.each(restored)
        assert sorted(seeds) == list(range(world))
        found.setdefault(world, []).append(dict(seeds))
    for one, other in found.values():
        assert one == other
        assert len(set(one.values())) == len(one)
        assert {len(seed) for seed in one.values()} == {32}
    assert not put_back
    with ClientJob(root, *spread(nodes, 4), read_only=True) as job:
        job.each(restored)
    assert {rank: state["torch"] for rank, state in put_back.items()} == {
        rank: states(rank)["torch"] for rank in range(4)
    }
    monkeypatch.undo()
    draws = []
    for _ in range(2):
        rng.reseed(found[8][0][3])
        draws.append([random.random(), np.random.rand(), *torch.rand(18).tolist()])  # noqa: NPY002
    assert draws[0] == draws[1]
    rng.reseed(found[8][0][4])
    assert random.random() != draws[0][0]
