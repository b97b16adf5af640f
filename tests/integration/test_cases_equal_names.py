"""Faults from the field: other data under equal names on each rank, and tied weights, on real agents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.agents import Agents
from fixtures.client_job import ClientJob
from fixtures.stored_root import latest, unproved
from fixtures.two_nodes import TwoNodes, stored_bytes
from torch import nn

from ckptd.client import Checkpointer, PerRank
from ckptd.client.errors import Aborted, CkptdError

pytestmark = pytest.mark.integration


class Experts(nn.Module):
    """A router that all ranks hold alike, and experts of one's own under the same names."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
        with torch.no_grad():
            for parameter in self.router.parameters():
                parameter.fill_(0.5)
            for number, parameter in enumerate(self.experts.parameters()):
                parameter.fill_(100.0 * rank + number)

    def trained(self) -> torch.optim.Optimizer:
        """Take a step, of which the moments of experts tell the rank."""
        optimizer = torch.optim.AdamW(self.parameters())
        for parameter in self.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        return optimizer


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Return every parameter and every moment."""
    tensors = [*model.parameters(), *(held[key] for held in optimizer.state.values() for key in sorted(held))]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def test_s084_experts_under_equal_names_are_refused_on_all_ranks(agents: Agents, tmp_path: Path) -> None:
    """Undeclared, they are told from replicas by their bits: tensor and ranks are named; the store lists nothing."""
    root = f"file://{tmp_path}/root"
    models = [Experts(rank) for rank in range(4)]
    with ClientJob(root, [agents.new(), agents.new()], 2) as job:
        job.each(lambda ckpt: ckpt.track(model=models[ckpt.rank]))

        def told(ckpt: Checkpointer) -> Aborted:
            with pytest.raises(Aborted) as caught:
                ckpt.save(1).wait(timeout=30)
            return caught.value

        errors = job.each(told)
        assert {error.reason_name for error in errors} == {"REPLICAS_DIFFER"}
        assert len({error.message for error in errors}) == 1
        assert re.search(r"model/experts\.[01]\.weight.* ranks \[0\].* ranks \[3\]", errors[0].message)
        assert latest(root) is None
        # One replica that differs in one bit is no replica either.
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())
        models[3].router.weight.data.view(torch.int32)[2, 5] ^= 1
        job.each(lambda ckpt: ckpt.restore())
        for error in job.each(lambda ckpt: failed(ckpt, 2)):
            assert error.reason_name == "REPLICAS_DIFFER"
            assert "model/router.weight" in error.message
        models[3].router.weight.data.view(torch.int32)[2, 5] ^= 1
        for handle in job.each(lambda ckpt: ckpt.save(3)):
            handle.wait(timeout=30)
    assert latest(root) == 3


def failed(ckpt: Checkpointer, step: int) -> CkptdError:
    """Return how a save failed."""
    with pytest.raises(CkptdError) as caught:
        ckpt.save(step).wait(timeout=30)
    return caught.value


@pytest.mark.parametrize("lost", [False, True], ids=["memory", "store"])
def test_s084_declared_each_rank_gets_its_own_experts_and_their_moments(
    agents: Agents, tmp_path: Path, lost: bool
) -> None:
    """Named by a pattern: weights and optimizer state of every expert go back to the rank they came from."""
    root = f"file://{tmp_path}/root"
    nodes = [agents.new(), agents.new()]
    models = [Experts(rank) for rank in range(4)]
    optimizers = [model.trained() for model in models]
    want = [bits(*pair) for pair in zip(models, optimizers, strict=True)]
    with ClientJob(root, nodes, 2, per_rank=["model/experts.*"]) as job:
        job.each(lambda ckpt: ckpt.track(model=models[ckpt.rank], optimizer=optimizers[ckpt.rank]))
        job.wait(job.each(lambda ckpt: ckpt.save(1)))
    if lost:
        for node in nodes:
            node.kill()
            node.wipe()
            node.start()
    fresh = [Experts(9) for _ in range(4)]
    empty = [torch.optim.AdamW(model.parameters()) for model in fresh]
    with ClientJob(root, nodes, 2, per_rank=["model/experts.*"]) as job:
        job.each(lambda ckpt: ckpt.track(model=fresh[ckpt.rank], optimizer=empty[ckpt.rank]))
        found = job.each(lambda ckpt: ckpt.restore(required=True))
    assert not lost or {one.tier for one in found if one} == {"store"}
    assert [bits(*pair) for pair in zip(fresh, empty, strict=True)] == want
    assert len({model[2] for model in want}) == 4, "experts must differ for this to show anything"
    assert unproved(root) == []


def test_s087_each_of_eight_ranks_gets_its_own_loader(agents: Agents, tmp_path: Path) -> None:
    """On dp 4 x tp 2: blobs, numbers and tensors with the rank in each, on two nodes; tensors of other shapes too.

    Those of a tp group hold equal values of "shared": nobody declared them, so each has its own again.
    """
    root = f"file://{tmp_path}/root"
    nodes = [agents.new(), agents.new()]

    def state(rank: int) -> dict[str, Any]:
        return {
            "loader": {"rank": rank, "blob": bytes([rank]) * 1000, "order": torch.arange(rank + 3) * (rank + 1)},
            "same": PerRank(torch.full((5,), float(rank))),
            "shared": {"group": rank // 2, "values": torch.full((4,), float(rank // 2))},
        }

    with ClientJob(root, nodes, 4, mesh={"dp": 4, "tp": 2}) as job:
        job.wait(job.each(lambda ckpt: ckpt.save(1, state(ckpt.rank))))
    nodes[1].kill()
    nodes[1].wipe()
    nodes[1].start()
    with ClientJob(root, nodes, 4, mesh={"dp": 4, "tp": 2}) as job:

        def restored(ckpt: Checkpointer) -> dict[str, Any]:
            into: dict[str, Any] = {"loader": None, "same": None, "shared": None}
            ckpt.restore_into(into, required=True)
            return into

        for rank, got in enumerate(job.each(restored)):
            want = state(rank)
            assert got["loader"]["rank"] == rank
            assert got["loader"]["blob"] == want["loader"]["blob"]
            assert torch.equal(got["loader"]["order"], want["loader"]["order"])
            assert got["same"].tolist() == [float(rank)] * 5
            assert got["shared"]["group"] == rank // 2
            assert torch.equal(got["shared"]["values"], want["shared"]["values"])


class Tied(nn.Module):
    """An embedding and a head that are one parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(300, 100)
        self.head = nn.Linear(100, 300, bias=False)
        self.head.weight = self.embed.weight
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)

    def train_on(self, steps: int) -> list[str]:
        """Train on fixed data; return the losses."""
        losses = []
        for step in range(steps):
            self.optimizer.zero_grad()
            loss = self.head(self.embed(torch.arange(step, step + 9))).square().mean()
            loss.backward()
            self.optimizer.step()
            losses.append(float(loss.detach()).hex())
        return losses


def test_s081_tied_weights_and_their_moments_are_stored_once_and_tied_again(
    two_nodes: TwoNodes, tmp_path: Path
) -> None:
    """One copy of the weight and of each moment; after the restore one memory; losses equal the undisturbed run's."""
    model = Tied(1)
    model.train_on(2)
    with two_nodes.on(two_nodes.first, tmp_path) as ckpt:
        ckpt.track(model=model, optimizer=model.optimizer)
        ckpt.save(1).wait()
    once = 4 * 300 * 100
    assert 3 * once <= stored_bytes(tmp_path) < 3 * once + (64 << 10)
    expected = model.train_on(4)
    other = Tied(2)
    with two_nodes.on(two_nodes.other, tmp_path) as ckpt:
        ckpt.track(model=other, optimizer=other.optimizer)
        found = ckpt.restore(required=True)
    assert found is not None
    assert found.tier == "store"
    assert other.head.weight is other.embed.weight
    assert other.head.weight.data_ptr() == other.embed.weight.data_ptr()
    assert other.train_on(4) == expected


def third(model: Tied) -> nn.Module:
    """Return a module that has the same weight once more."""
    made = nn.Linear(100, 300, bias=False)
    made.weight = model.embed.weight
    return made


def test_s081_a_name_that_is_tied_later_is_known_in_the_next_step(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """Nothing but the ties changed, so every row is as before; and still the restore knows the new name."""
    model = Tied(1)
    with two_nodes.on(two_nodes.first, tmp_path) as ckpt:
        ckpt.track(model=model)
        ckpt.save(1).wait()
        model.add_module("third", third(model))
        ckpt.save(2).wait()
        del model.third
        ckpt.save(3).wait()
        model.add_module("third", third(model))
        ckpt.save(4).wait()
    for step, has in ((4, True), (3, False), (2, True)):
        other = Tied(2)
        if has:
            other.add_module("third", third(other))
        with two_nodes.on(two_nodes.other, tmp_path) as ckpt:
            ckpt.track(model=other)
            ckpt.restore(step=step, rollback=True)
        assert torch.equal(other.embed.weight, model.embed.weight)


def test_s081_a_tie_across_two_stages_is_stored_once_per_owner(agents: Agents, tmp_path: Path) -> None:
    """Stage 0 has the embedding, stage 1 the head, each with its own memory and name; both come back, moments too."""
    root, node = f"file://{tmp_path}/root", agents.new()
    full = Tied(3)
    full.train_on(1)

    def stage(rank: int, value: torch.Tensor) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.ModuleDict(
            {"embed": nn.Embedding(300, 100)} if not rank else {"head": nn.Linear(100, 300, bias=False)}
        )
        parameter = next(module.parameters())
        with torch.no_grad():
            parameter.copy_(value)
        return module, torch.optim.AdamW([parameter])

    stages = [stage(rank, full.embed.weight) for rank in range(2)]
    for module, optimizer in stages:
        parameter = next(module.parameters())
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    with ClientJob(root, [node], 2) as job:
        job.each(lambda ckpt: ckpt.track(model=stages[ckpt.rank][0], optimizer=stages[ckpt.rank][1]))
        job.wait(job.each(lambda ckpt: ckpt.save(1)))
    assert stored_bytes(tmp_path / "root") < 2 * 3 * 120_000 + (64 << 10)
    fresh = [stage(rank, torch.zeros(300, 100)) for rank in range(2)]
    with ClientJob(root, [node], 2) as job:
        job.each(lambda ckpt: ckpt.track(model=fresh[ckpt.rank][0], optimizer=fresh[ckpt.rank][1]))
        job.each(lambda ckpt: ckpt.restore(required=True))
    assert [bits(*pair) for pair in fresh] == [bits(*pair) for pair in stages]
