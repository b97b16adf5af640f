"""Restoring on another mesh as a script sees it: hooks for what was each rank's own, and going on to save there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.agents import AgentProcess, Agents
from torch import nn

from ckptd.client import Checkpointer, InvalidRequest, PerRank, StoredPiece

pytestmark = [pytest.mark.integration, pytest.mark.mesh]

MOE = Path(__file__).parents[2] / "examples" / "train_moe.py"
LAUNCH_S = 120


class Loader:
    """Has a tensor of its own."""

    def __init__(self, at: int) -> None:
        self.at, self.own = at, torch.full((2,), at)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "own": self.own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.own = state["at"], state["own"]


class Job:
    """A model with an optimizer that has state, and a loader."""

    def __init__(self, agent: AgentProcess, mesh: dict[str, int] | None, at: int, **more: object) -> None:
        torch.manual_seed(at)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.loader = Loader(at)
        self.ckpt = Checkpointer(f"file://{agent.folder / 'root'}", job="use", socket=agent.socket, mesh=mesh)
        self.ckpt.track(model=self.model, optimizer=self.optimizer, **more)  # type: ignore[arg-type] # any trackable

    def saved(self, step: int) -> None:
        """Train a step and save it."""
        self.model(torch.ones(3)).sum().backward()
        self.optimizer.step()
        self.ckpt.save(step).wait()
        self.ckpt.close()


MESH = {"dp": 1, "tp": 1}


def test_what_is_each_ranks_own_needs_a_hook_or_is_dropped(agents: Agents) -> None:
    """Until then nothing live is touched; the hook gets the piece with its tensor and its place."""
    agent = agents.new()
    first = Job(agent, MESH, 1, loader=PerRank(Loader(1)))
    first.saved(1)
    here = Loader(2)
    job = Job(agent, None, 2, loader=PerRank(here))
    before = job.model.weight.detach().clone()
    with pytest.raises(InvalidRequest, match=r"loader: step 1 was saved on another mesh"):
        job.ckpt.restore()
    assert torch.equal(job.model.weight, before)
    assert not job.optimizer.state
    dropped = job.ckpt.restore(drop=("loader",))
    assert dropped is not None
    assert dropped.dropped == ("loader",)
    assert here.at == 2
    assert torch.equal(job.model.weight, first.model.weight)
    seen: list[tuple[dict[str, int], dict[str, int]]] = []

    def hook(pieces: Sequence[StoredPiece], place: Any) -> Any:
        seen.append((dict(pieces[0].coordinate), dict(place)))
        return {**pieces[0].value, "at": pieces[0].value["at"] + 10}

    job.ckpt.on_reshard("loader", hook)
    job.ckpt.restore()
    assert (here.at, here.own.tolist()) == (11, [1, 1])
    assert seen == [({"dp": 0, "tp": 0}, {"world": 0})]
    job.saved(2)


def test_a_tracked_generator_is_each_ranks_own(agents: Agents) -> None:
    """It needs a hook, which gets its state as it was stored; the process's own generators have a rule instead."""
    agent = agents.new()
    Job(agent, MESH, 1, mine=torch.Generator().manual_seed(1)).saved(1)
    here = torch.Generator().manual_seed(2)
    job = Job(agent, None, 2, mine=here)
    with pytest.raises(InvalidRequest, match=r"mine: step 1 was saved on another mesh"):
        job.ckpt.restore()
    assert here.initial_seed() == 2
    job.ckpt.on_reshard("mine", lambda pieces, _: pieces[0].value)
    assert job.ckpt.restore() is not None
    assert torch.equal(here.get_state(), torch.Generator().manual_seed(1).get_state())
    job.ckpt.close()


def moe(agent: AgentProcess, steps: int, *flags: str, world: int = 1) -> str:
    """Run the example to `steps`; return what it said."""
    starter = [sys.executable]
    if world > 1:
        starter += ["-m", "torch.distributed.run", "--nproc-per-node", str(world)]
        starter += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command = [*starter, str(MOE), f"--steps={steps}", "--save-every=2", "--hidden=32", "--seq=16", *flags]
    command += ["--root", f"file://{agent.folder / 'moe'}", "--corpus-bytes=100000"]
    environment = os.environ | {"CKPTD_SOCKET": str(agent.socket)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LAUNCH_S, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[:8000]
    assert f"step {steps} loss" in done.stdout
    return done.stdout


def test_a_job_goes_on_and_saves_on_another_mesh_and_back(agents: Agents) -> None:
    """From one process to two ranks to one process again, from each other's steps."""
    agent = agents.new()
    moe(agent, 2)
    assert "restored step=2" in moe(agent, 4, "--dp-shard=2", world=2)
    assert "restored step=4" in moe(agent, 6)
