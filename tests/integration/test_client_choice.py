"""A real agent and a real store: audits, generators, loaders, and restores in part, under other names and dtypes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.agents import AgentProcess, Agents
from fixtures.client_job import ClientJob
from torch import nn

from ckptd.client import Checkpointer

pytestmark = pytest.mark.integration

WIDTH = 64


class Wrapped(nn.Module):
    """A model whose names begin with "inner."."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    model(torch.rand(4, WIDTH, generator=generator)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def opened(root: str, agent: AgentProcess, **settings: Any) -> Checkpointer:
    return Checkpointer(root, job="job", socket=agent.socket, commit_timeout_s=60.0, restore_timeout_s=60.0, **settings)


@pytest.mark.parametrize("tier", ["memory", "store"])
def test_s083_a_job_goes_on_under_other_names(agents: Agents, tmp_path: Path, tier: str) -> None:
    """Parameters, moments and the script's own generator: the next steps are those of the undisturbed job."""
    root, agent = f"file://{tmp_path}/root", agents.new()
    torch.manual_seed(1)
    model, generator = Wrapped(), torch.Generator().manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with opened(root, agent, audit="raise") as checkpointer:
        checkpointer.track(model=model.inner, optimizer=optimizer, generator=generator)
        checkpointer.restore()
        train(model.inner, optimizer, generator)
        checkpointer.save(1).wait()
    for _ in range(2):
        train(model.inner, optimizer, generator)
    if tier == "store":
        agent.kill()
        agent.wipe()
        agent.start()
    other, other_generator = Wrapped(), torch.Generator()
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    with opened(root, agent) as checkpointer:
        checkpointer.track(model=other, optimizer=other_optimizer, generator=other_generator)
        restored = checkpointer.restore(required=True, names={"model/": "model/inner."})
        assert restored is not None
        assert restored.tier == tier
        for _ in range(2):
            train(other.inner, other_optimizer, other_generator)
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            for key, value in optimizer.state[theirs].items():
                assert torch.equal(other_optimizer.state[mine][key], value)
        checkpointer.save(2).wait()


def test_the_model_alone_in_another_dtype(agents: Agents, tmp_path: Path) -> None:
    """On two ranks: cast, nothing else touched, and what was left is named; the agent read the model's bytes only."""
    root, nodes = f"file://{tmp_path}/root", [agents.new(), agents.new()]

    def models() -> list[tuple[nn.Module, torch.optim.Optimizer]]:
        torch.manual_seed(3)
        made = [nn.Linear(WIDTH, WIDTH) for _ in nodes]
        for model in made:
            model.load_state_dict(made[0].state_dict())
        found: list[tuple[nn.Module, torch.optim.Optimizer]] = []
        for model in made:
            optimizer = torch.optim.AdamW(model.parameters())
            train(model, optimizer, torch.Generator().manual_seed(1))
            found.append((model, optimizer))
        return found

    stored = models()
    with ClientJob(root, nodes) as job:
        job.each(lambda rank: rank.track(model=stored[rank.rank][0], optimizer=stored[rank.rank][1]))
        job.wait(job.each(lambda rank: rank.save(1)))
    for node in nodes:
        node.kill()
        node.wipe()
        node.start()
    with ClientJob(root, nodes) as job:
        here = [model.to(torch.bfloat16) for model, _ in models()]
        optimizers = [torch.optim.AdamW(model.parameters()) for model in here]
        job.each(lambda rank: rank.track(model=here[rank.rank], optimizer=optimizers[rank.rank]))
        answers = job.each(lambda rank: rank.restore(only="model", cast=True))
    for rank, answer in enumerate(answers):
        assert answer is not None
        for mine, theirs in zip(here[rank].parameters(), stored[rank][0].parameters(), strict=True):
            assert torch.equal(mine, theirs.to(torch.bfloat16))
        assert not optimizers[rank].state
        assert {"optimizer", "rng", "optimizer/state/weight/exp_avg"} <= set(answer.left_out)


# torchdata tells torch of itself in a way that torch no longer wants to hear.
@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_torchdata_loader_goes_on_in_the_middle_of_an_epoch(
    agents: Agents, tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    """From the store: the batches that would have come, also of the next epoch; and the audit has nothing to say."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    root, agent = f"file://{tmp_path}/root", agents.new()
    torch.manual_seed(1)
    loader = loaders.StatefulDataLoader(list(range(30)), batch_size=4, shuffle=True, num_workers=workers)
    with caplog.at_level(logging.WARNING, "ckptd.client"), opened(root, agent) as checkpointer:
        checkpointer.track(loader=loader)
        checkpointer.restore()
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        checkpointer.save(3).wait()
    assert not caplog.records
    expected = [batch.tolist() for batch in (*batches, *loader)]
    agent.kill()
    agent.wipe()
    agent.start()
    other = loaders.StatefulDataLoader(list(range(30)), batch_size=4, shuffle=True, num_workers=workers)
    with opened(root, agent) as checkpointer:
        checkpointer.track(loader=other)
        checkpointer.restore(required=True)
        assert [batch.tolist() for batch in (*other, *other)] == expected
