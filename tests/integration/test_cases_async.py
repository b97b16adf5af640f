"""Faults from the field: what is saved is the state at the call, whatever the trainer does while it is uploaded."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.agents import Agents
from fixtures.client_job import ClientJob, config_of, equal
from fixtures.stored_root import catalog_of, latest, unproved
from torch import nn

from ckptd.client import Checkpointer
from ckptd.daemon.catalog import StepState

pytestmark = pytest.mark.integration


def slow(seconds: float) -> dict[str, str]:
    """Return the environment of an agent whose store is slow."""
    return {"CKPTD_FAILPOINTS": f"uploader.before_put=delay:{seconds}"}


def test_s012_a_step_counter_that_moves_on_during_the_upload_changes_nothing(agents: Agents, tmp_path: Path) -> None:
    """The trainer counts to 103 while step 100 is uploaded: names, record and restored state all say 100."""
    root = tmp_path / "root"
    node = agents.new(env=slow(1.0))
    counter = torch.tensor(100)
    state: dict[str, Any] = {"counter": counter, "position": {"step": 100}, "weight": torch.ones(10)}
    with Checkpointer(config=config_of(f"file://{root}", node)) as ckpt:
        handle = ckpt.save(int(counter), state)
        counter += 3
        state["position"]["step"] = 103
        assert handle.state in ("copied", "staged"), "the upload must still run"
        handle.wait()
        assert handle.step == 100
    names = [path.name for kind in ("chunks", "log", "index") for path in (root / kind).rglob("*")]
    assert any("000000000100" in name for name in names)
    assert not any("000000000103" in name for name in names)
    assert latest(f"file://{root}") == 100
    again: dict[str, Any] = {"counter": torch.tensor(0), "position": {}, "weight": torch.zeros(10)}
    with Checkpointer(config=config_of(f"file://{root}", node)) as ckpt:
        restored = ckpt.restore_into(again)
    assert restored is not None
    assert (restored.step, int(again["counter"]), again["position"]) == (100, 100, {"step": 100})


def test_s019_values_changed_right_after_the_call_are_saved_as_they_were(agents: Agents, tmp_path: Path) -> None:
    """Tensors, numpy arrays, lists, dicts and numbers, all changed in place while the store sleeps."""
    root = f"file://{tmp_path}/root"
    node = agents.new(env=slow(1.0))

    def made() -> dict[str, Any]:
        return {
            "tensors": [torch.arange(1000, dtype=torch.float32), torch.tensor(7), torch.zeros(3, dtype=torch.bfloat16)],
            "array": np.arange(12, dtype=np.int16).reshape(3, 4),
            "nested": {"list": [1, 2, {"deep": [3]}], "text": "then", "number": 5},
        }

    state, expected = made(), made()
    with Checkpointer(config=config_of(root, node)) as ckpt:
        handle = ckpt.save(1, state)
        for tensor in state["tensors"]:
            tensor.add_(1)
        state["array"] += 1
        state["nested"]["list"][2]["deep"].append(4)
        state["nested"]["list"].append("more")
        state["nested"] |= {"text": "now", "number": 6}
        assert not handle.done(), "the upload must still run"
        handle.wait()
    again: dict[str, Any] = {
        "tensors": [torch.zeros_like(tensor) for tensor in expected["tensors"]],
        "array": None,
        "nested": None,
    }
    with Checkpointer(config=config_of(root, node)) as ckpt:
        assert ckpt.restore_into(again) is not None
    array, wanted = again.pop("array"), expected.pop("array")
    assert equal(again, expected)
    assert array.dtype == wanted.dtype
    assert np.array_equal(array, wanted)


def test_s020_zero_dim_counters_of_an_optimizer_never_run_ahead_of_their_weights(
    agents: Agents, tmp_path: Path
) -> None:
    """200 counters of AdamW, saved at a step, five more steps while the upload is throttled: 50 of 50 restore as saved."""
    node = agents.new(env=slow(0.04))
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(200)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train() -> None:
        for parameter in model:
            parameter.grad = torch.randn(4)
        optimizer.step()

    def counters() -> set[float]:
        return {float(optimizer.state[parameter]["step"]) for parameter in model}

    with Checkpointer(config=config_of(f"file://{tmp_path}/root", node, keep_last=2)) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        in_flight = 0
        for repeat in range(1, 51):
            train()
            assert counters() == {float(repeat)}
            weights = [parameter.detach().clone() for parameter in model]
            handle = ckpt.save(repeat)
            train()
            # Looked at as soon as they have moved: on a busy machine five steps may take longer than the upload.
            in_flight += not handle.done()
            for _ in range(4):
                train()
            assert counters() == {repeat + 5.0}
            handle.wait()
            restored = ckpt.restore()
            assert restored is not None
            assert restored.step == repeat
            assert counters() == {float(repeat)}
            assert all(torch.equal(one, other) for one, other in zip(model, weights, strict=True))
        assert in_flight > 10, "the upload must have been running while the counters moved"


def test_s022_a_restore_during_an_upload_gives_the_step_before_and_never_a_mix(agents: Agents, tmp_path: Path) -> None:
    """While step 2 is uploaded, restore gives step 1: in the same process, and to a reader on a node of its own."""
    root = f"file://{tmp_path}/root"
    node = agents.new(start=False)
    node.start(env={"CKPTD_FAILPOINTS": "uploader.before_index=delay:4@2"})
    other = agents.new()
    with ClientJob(root, [node], 2) as job:
        job.wait(job.save(1))
        handles = job.save(2)
        job.check(job.restore(), 1)
        with ClientJob(root, [other], 2, read_only=True) as reader:
            reader.check(reader.restore(), 1)
        assert not any(handle.done() for handle in handles), "the upload must still run"
        job.wait(handles)
        job.check(job.restore(), 2)
    with ClientJob(root, [other], 2, read_only=True) as reader:
        reader.check(reader.restore(), 2)


class Trainer:
    """A training of which every number counts: weights, moments, counter, and the noise of torch and Python."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        random.seed(1)
        self.model = nn.Linear(6, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def until(self, step: int) -> None:
        while self.steps < step:
            self.optimizer.zero_grad()
            (self.model(torch.randn(5, 6)).square().mean() * random.random()).backward()
            self.optimizer.step()
            self.steps += 1

    def result(self) -> list[torch.Tensor]:
        moments = [state[key] for state in self.optimizer.state.values() for key in sorted(state)]
        return [tensor.detach().clone() for tensor in [*self.model.parameters(), *moments, torch.rand(4)]]


def test_s027_the_second_resume_is_as_good_as_the_first(agents: Agents, tmp_path: Path) -> None:
    """Train to 25, 45 and 60 with a new start between: counters 25, 45, 60, and every bit that of an undisturbed run."""
    undisturbed = Trainer()
    undisturbed.until(60)
    expected = undisturbed.result()
    node = agents.new()
    seen = []
    for target in (25, 45, 60):
        trainer = Trainer()
        with Checkpointer(config=config_of(f"file://{tmp_path}/root", node)) as ckpt:
            ckpt.track(model=trainer.model, optimizer=trainer.optimizer, trainer=trainer)
            restored = ckpt.restore()
            seen.append((restored.step if restored else 0, trainer.steps))
            trainer.until(target)
            ckpt.save(trainer.steps).wait()
        node.kill()
        node.wipe()
        node.start()
    assert seen == [(0, 0), (25, 25), (45, 45)]
    assert trainer.steps == 60
    assert equal(trainer.result(), expected)


EXITS = """
import sys
sys.path[:0] = {path!r}
from fixtures.client_job import state_of
from ckptd.client import Checkpointer

ckpt = Checkpointer({root!r}, job="job", socket={socket!r}, mesh={{"dp": 1}})
ckpt.save(1, state_of(1, 0)).wait()
handle = ckpt.save(2, state_of(2, 0))
print(handle.done())
"""


def test_s011_a_trainer_that_exits_without_waiting_is_resumed_from_its_last_step_or_the_one_before(
    agents: Agents, tmp_path: Path
) -> None:
    """Async saves only, no wait, no close, exit 0 in the midst of an upload: a committed step is always found."""
    root = f"file://{tmp_path}/root"
    node = agents.new(env={"CKPTD_FAILPOINTS": "uploader.before_index=delay:1@2"})
    script = textwrap.dedent(EXITS).format(path=sys.path, root=root, socket=str(node.socket))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"], "the trainer must end before the commit"
    with ClientJob(root, [node]) as job:
        job.check(job.restore(), 2)
        job.wait(job.save(3))
    assert unproved(root) == []

    # The node is lost right after the exit: the step before is what there is.
    node.kill()
    node.wipe()
    node.start(env={"CKPTD_FAILPOINTS": "uploader.before_index=delay:5"})
    with_loss = ClientJob(root, [node])
    with_loss.check(with_loss.restore(), 3)
    with_loss.save(4)
    with_loss.die()
    node.kill()
    assert latest(root) == 3, "the loss must come before the commit"
    node.wipe()
    node.start()
    with ClientJob(root, [node]) as job:
        job.check(job.restore(), 3)


def test_s011_a_step_that_was_waited_for_is_resumed_from(agents: Agents, tmp_path: Path) -> None:
    """Async saves only: after wait() and a lost node the next run finds that very step."""
    root = f"file://{tmp_path}/root"
    node = agents.new()
    with ClientJob(root, [node]) as job:
        handles = [handle for step in (1, 2, 3) for handle in job.save(step)]
        kept = [handle for handle in handles if not handle.skipped]
        job.wait(kept)
    node.kill()
    node.wipe()
    node.start()
    with ClientJob(root, [node]) as job:
        job.check(job.restore(), kept[-1].step)
    assert [step.id.step for step in catalog_of(root).steps if step.state is StepState.COMMITTED]
