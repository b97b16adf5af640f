"""Cases of worlds that grow and shrink: experts, sharded optimizers and padded flat buffers, all ranks in this process."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fixtures.agents import AgentProcess, running_agents
from fixtures.client_job import ClientJob
from torch import nn

from ckptd.client import PerRank, Sharded
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.reshard_hooks import ReshardHook

pytestmark = [pytest.mark.integration, pytest.mark.mesh]


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    """One agent for all tests here."""
    with running_agents() as agents:
        yield agents.new()


@pytest.fixture
def root(agent: AgentProcess) -> str:
    """Return a root that nobody has used."""
    return f"file://{agent.folder}/root{next(_roots)}"


_roots = itertools.count()


def save(agent: AgentProcess, root: str, world: int, make: Callable[[int], Any], *, step: int = 1) -> list[Any]:
    """Save what `make` gives each rank; return it."""
    made = [make(rank) for rank in range(world)]

    def track(rank: Checkpointer) -> None:
        rank.track(thing=made[rank.rank])

    with ClientJob(root, [agent], world) as job:
        job.each(track)
        job.wait(job.each(lambda rank: rank.save(step)))
    return made


def restore(agent: AgentProcess, root: str, world: int, make: Callable[[int], Any]) -> list[Any]:
    """Restore what `make` gives each rank of a world; return it."""
    made = [make(rank) for rank in range(world)]

    def track(rank: Checkpointer) -> None:
        rank.track(thing=made[rank.rank])

    with ClientJob(root, [agent], world, read_only=True) as job:
        job.each(track)
        job.each(lambda rank: rank.restore(required=True))
    return made


EXPERTS, IN, OUT = 12, 3, 5


class Experts:
    """A rank's range of experts, every element stamped with its expert's number."""

    def __init__(self, rank: int, world: int, *, blank: bool = False) -> None:
        self.first, count = rank * EXPERTS // world, EXPERTS // world
        stamp = torch.arange(self.first, self.first + count, dtype=torch.int64)
        noise = torch.arange(IN * OUT).view(1, IN, OUT)
        self.up = torch.full((count, IN, OUT), -1) if blank else stamp.view(-1, 1, 1) * 1000 + noise
        self.bias = torch.full((OUT, count), -1) if blank else stamp.view(1, -1).expand(OUT, -1).contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {
            "up": Sharded(self.up, (EXPERTS, IN, OUT), (self.first, 0, 0)),
            "bias": Sharded(self.bias, (OUT, EXPERTS), (0, self.first)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.up, self.bias = state["up"].tensor, state["bias"].tensor


@pytest.mark.parametrize("source", [1, 4])
def test_s086_every_rank_gets_the_experts_of_its_own_range(agent: AgentProcess, root: str, source: int) -> None:
    """From one rank to two, four and more, and from four to fewer: by the number stamped into every element."""
    save(agent, root, source, partial(Experts, world=source))
    for world in (1, 2, 3, 4, 6):
        for rank, experts in enumerate(restore(agent, root, world, partial(Experts, world=world, blank=True))):
            own = list(range(rank * EXPERTS // world, (rank + 1) * EXPERTS // world))
            assert [set((one // 1000).flatten().tolist()) for one in experts.up] == [{expert} for expert in own]
            assert torch.equal(experts.up, Experts(rank, world).up)
            assert experts.bias.tolist() == [own] * OUT


class LocalExperts(nn.Module):
    """The same as a module whose parameters are each rank's own: nothing says what they are pieces of."""

    def __init__(self, rank: int, world: int, *, blank: bool = False) -> None:
        super().__init__()
        self.up = nn.Parameter(Experts(rank, world, blank=blank).up.to(torch.float32))


def test_s086_experts_that_are_each_ranks_own_are_split_by_a_hook(agent: AgentProcess, root: str) -> None:
    """Parameters and their moments, from one rank to two and four: the hook cuts out the range of the rank's place."""

    def trained(experts: LocalExperts) -> torch.optim.AdamW:
        optimizer = torch.optim.AdamW(experts.parameters(), lr=0.0, weight_decay=0.0)
        experts.up.grad = experts.up.detach().clone()
        optimizer.step()
        return optimizer

    whole = LocalExperts(0, 1)
    optimizer = trained(whole)
    with ClientJob(root, [agent], 1, mesh={"ep": 1}) as job:
        job.each(lambda rank: rank.track(experts=PerRank(whole), optimizer=optimizer))
        job.wait(job.each(lambda rank: rank.save(1)))
    for world in (2, 4):
        made = [LocalExperts(rank, world, blank=True) for rank in range(world)]
        optimizers = [torch.optim.AdamW(one.parameters()) for one in made]

        def split(pieces: Any, here: Any, count: int = EXPERTS // world) -> torch.Tensor:
            [piece] = pieces
            cut: torch.Tensor = piece.value[here["ep"] * count :][:count]
            return cut

        def load(
            rank: Checkpointer, made: Any = made, optimizers: Any = optimizers, split: ReshardHook = split
        ) -> None:
            rank.track(experts=PerRank(made[rank.rank]), optimizer=optimizers[rank.rank])
            rank.on_reshard("experts/up", split)
            rank.on_reshard("optimizer/state/*/exp_avg*", split)
            rank.on_reshard("optimizer/state/*/step", lambda pieces, _: pieces[0].value)
            rank.restore(required=True)

        with ClientJob(root, [agent], world, mesh={"ep": world}, read_only=True) as job:
            job.each(load)
        for rank, experts in enumerate(made):
            assert torch.equal(experts.up, LocalExperts(rank, world).up)
            state, stored = optimizers[rank].state[experts.up], optimizer.state[whole.up]
            own = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
            assert torch.equal(state["exp_avg"], stored["exp_avg"][own])
            assert torch.equal(state["exp_avg_sq"], stored["exp_avg_sq"][own])
            assert state["step"].item() == 1
            assert list(state) == list(stored)


class Zero:
    """A model whose flat parameters and moments are cut into one piece a rank, as sharded optimizers do; uneven at the end.

    Every rank has all gradients, so a step needs no communication.
    """

    def __init__(self, rank: int, world: int) -> None:
        torch.manual_seed(7)
        self._model = nn.Sequential(nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 3))
        flat = nn.utils.parameters_to_vector(self._model.parameters()).detach()
        self.total = flat.numel()
        each = -(-self.total // world)
        self.begin = min(rank * each, self.total)
        self.end = min(self.begin + each, self.total)
        self.own = nn.Parameter(flat[self.begin : self.end].clone())
        self.optimizer = torch.optim.AdamW([self.own], lr=0.01, weight_decay=0.1)

    def train(self, whole: torch.Tensor, step: int) -> None:
        """Step with the gradient at `whole`."""
        nn.utils.vector_to_parameters(whole, self._model.parameters())
        self._model.zero_grad()
        torch.manual_seed(step)
        self._model(torch.randn(5, 7)).square().sum().backward()
        gradient = torch.cat([one.grad.flatten() for one in self._model.parameters() if one.grad is not None])
        self.own.grad = gradient[self.begin : self.end].clone()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        state = self.optimizer.state[self.own]
        pieces = {"master": self.own.detach()}
        pieces |= {key: state.get(key, torch.zeros_like(self.own)) for key in ("exp_avg", "exp_avg_sq")}
        return {
            **{key: Sharded(piece, (self.total,), (self.begin,)) for key, piece in pieces.items()},
            "step": state.get("step", torch.zeros(())),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.own.copy_(state["master"].tensor)
        held = {key: state[key].tensor for key in ("exp_avg", "exp_avg_sq")}
        self.optimizer.state[self.own].update({"step": state["step"], **held})


def whole_of(ranks: list[Zero], key: str) -> torch.Tensor:
    """Gather one piece of state of all ranks."""
    return torch.cat([rank.state_dict()[key].tensor.clone() for rank in ranks])


def train(ranks: list[Zero], steps: range) -> None:
    for step in steps:
        whole = whole_of(ranks, "master")
        for rank in ranks:
            rank.train(whole, step)


def test_s131_a_sharded_optimizer_comes_back_in_any_world(agent: AgentProcess, root: str) -> None:
    """Saved by four ranks; the gathered state is bit-equal on one to eight, and training goes on alike."""
    saved = [Zero(rank, 4) for rank in range(4)]
    assert saved[0].total % 4
    train(saved, range(3))
    save(agent, root, 4, saved.__getitem__)
    before = {key: whole_of(saved, key) for key in ("master", "exp_avg", "exp_avg_sq")}
    train(saved, range(3, 5))
    for world in (1, 2, 3, 6, 8):
        ranks = restore(agent, root, world, partial(Zero, world=world))
        for key, value in before.items():
            assert torch.equal(whole_of(ranks, key), value), (world, key)
        assert {rank.state_dict()["step"].item() for rank in ranks} == {3.0}
        train(ranks, range(3, 5))
        for key in before:
            # Elementwise kernels round alike but for where a vector ends, and that is elsewhere in other pieces.
            torch.testing.assert_close(whole_of(ranks, key), whole_of(saved, key), rtol=1e-6, atol=1e-8)


CONTENT, MULTIPLE, CANARY = 1000, 64, float("nan")


class Padded:
    """A flat buffer of 1000 elements, padded so that it divides into pieces of a multiple of 64 elements; padding is NaN."""

    def __init__(self, rank: int, world: int, *, blank: bool) -> None:
        unit = world * MULTIPLE
        self.each = -(-CONTENT // unit) * unit // world
        self.begin = min(rank * self.each, CONTENT)
        self.count = min(self.each, CONTENT - self.begin)
        self.buffer = torch.full((self.each,), CANARY)
        self.buffer[: self.count] = -1 if blank else torch.arange(self.begin, self.begin + self.count) + 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"flat": Sharded(self.buffer[: self.count], (CONTENT,), (self.begin,))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer[: self.count] = state["flat"].tensor


@pytest.mark.parametrize(("source", "target"), [(4, 3), (3, 5), (5, 4)])
def test_s132_padding_is_neither_stored_nor_needed(agent: AgentProcess, root: str, source: int, target: int) -> None:
    """Content is equal and padding untouched, whatever each world pads; of the tensor 1000 elements are stored, no more."""
    ranks = save(agent, root, source, partial(Padded, world=source, blank=False))
    assert sum(rank.each for rank in ranks) > CONTENT
    restored = restore(agent, root, target, partial(Padded, world=target, blank=True))
    assert sum(rank.each for rank in restored) != sum(rank.each for rank in ranks)
    whole = torch.cat([rank.buffer[: rank.count] for rank in restored])
    assert torch.equal(whole, torch.arange(CONTENT) + 0.5)
    assert all(rank.buffer[rank.count :].isnan().all() for rank in restored)
    assert sum(rank.each - rank.count for rank in restored) > 0
    shown = subprocess.run(
        [sys.executable, "-m", "ckptd.daemon.cli", "show", root, "1", "--tensors", "--json"],
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    [flat] = [one for one in json.loads(shown.stdout)["tensors"] if one["name"] == "thing/flat"]
    assert (flat["shape"], flat["bytes"]) == ([CONTENT], 4 * CONTENT)
