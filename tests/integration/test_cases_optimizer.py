"""Faults from the field: optimizers that hold state of some parameters only, or are left out; other names; other shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.two_nodes import TwoNodes
from torch import nn

from ckptd.client import Checkpointer, InvalidRequest

pytestmark = pytest.mark.integration


class Job:
    """Four layers, AdamW with a schedule, and dropout, so that losses depend on everything."""

    def __init__(self, seed: int, width: int = 6) -> None:
        self.width = width
        torch.manual_seed(seed)
        layers = [nn.Linear(width, width) for _ in range(4)]
        self.net = nn.Sequential(*layers[:2], nn.Dropout(0.3), *layers[2:])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def tracked(self, ckpt: Checkpointer, *names: str) -> Checkpointer:
        """Track things by name; all of them where none is named."""
        things: dict[str, Any] = {"model": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler}
        ckpt.track(**{name: thing for name, thing in things.items() if not names or name in names})
        return ckpt

    def freeze(self, frozen: bool) -> None:
        """Freeze or thaw the second half."""
        for parameter in self.net[3:].parameters():
            parameter.requires_grad_(not frozen)

    def train_on(self, steps: int) -> list[str]:
        """Train; return the losses."""
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.net(torch.rand(3, self.width)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(float(loss.detach()).hex())
        return losses

    def bits(self) -> dict[str, bytes]:
        """Return every parameter and all state."""
        found = {name: tensor.numpy().tobytes() for name, tensor in self.net.state_dict().items()}
        for number, held in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}/{key}": value.numpy().tobytes() for key, value in held.items()}
        return found


def test_s089_state_of_frozen_parameters_survives_to_the_thaw(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """Train all, freeze half, save, restore into fresh objects, thaw, train: bits and losses of the undisturbed run."""
    job = Job(1)
    job.train_on(3)
    job.freeze(True)
    job.train_on(2)
    with two_nodes.on(two_nodes.first, tmp_path) as ckpt:
        job.tracked(ckpt).save(5).wait()
    job.train_on(1)
    job.freeze(False)
    expected, other = job.train_on(3), Job(2)
    other.freeze(True)
    with two_nodes.on(two_nodes.other, tmp_path) as ckpt:
        other.tracked(ckpt).restore(required=True)
    other.train_on(1)
    other.freeze(False)
    assert other.train_on(3) == expected
    assert other.bits() == job.bits()


def test_s089_a_parameter_without_state_stays_without(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """Only the first half was ever trained; then the rest starts from nothing, as in the undisturbed run."""
    job = Job(1)
    job.freeze(True)
    job.train_on(2)
    with two_nodes.on(two_nodes.first, tmp_path) as ckpt:
        job.tracked(ckpt).save(2).wait()
    held = list(job.optimizer.state_dict()["state"])
    assert 0 < len(held) < 8
    job.freeze(False)
    expected, other = job.train_on(3), Job(2)
    other.train_on(1)  # state of every parameter, which must go away
    with two_nodes.on(two_nodes.other, tmp_path) as ckpt:
        other.tracked(ckpt).restore(required=True)
    assert list(other.optimizer.state_dict()["state"]) == held
    assert other.train_on(3) == expected
    assert other.bits() == job.bits()


def test_s090_strict_is_one_error_and_non_strict_gives_both_lists(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """One key more and one fewer, buffers and an object among them, after a real trip through the store."""
    saved = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.BatchNorm1d(2)})
    two_nodes.saved(tmp_path, {"net": saved, "epoch": 3})
    other = nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2, bias=False)})
    kept = other.get_parameter("c.weight").detach().clone()
    fresh = other.get_parameter("a.weight").detach().clone()
    with two_nodes.on(two_nodes.other, tmp_path) as ckpt:
        with pytest.raises(InvalidRequest) as caught:
            ckpt.restore_into({"net": other, "more": 1})
        text = caught.value.message
        assert "2 missing in the snapshot: net/c.weight, more" in text
        assert "6 only in the snapshot: epoch, net/b.bias, net/b.num_batches_tracked, net/b.running_mean" in text
        assert torch.equal(other.get_parameter("a.weight"), fresh)
        state: dict[str, Any] = {"net": other, "more": 1}
        found = ckpt.restore_into(state, strict=False)
    assert found is not None
    assert found.missing == ("net/c.weight", "more")
    assert len(found.unexpected) == 6
    assert torch.equal(other.get_parameter("a.weight"), saved.get_parameter("a.weight"))
    assert torch.equal(other.get_parameter("c.weight"), kept)
    assert state["more"] == 1


def test_s091_a_snapshot_without_the_optimizer_restores_everything_else(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """Step, schedule and generators come back; the optimizer is reported as absent and keeps what it has."""
    job = Job(1)
    job.train_on(3)
    with two_nodes.on(two_nodes.first, tmp_path) as ckpt:
        job.tracked(ckpt, "model", "scheduler").save(3).wait()
    drawn, other = torch.rand(4), Job(2)
    other.train_on(1)
    before = {name: bits for name, bits in other.bits().items() if "/" in name}
    with two_nodes.on(two_nodes.other, tmp_path) as ckpt:
        other.tracked(ckpt)
        with pytest.raises(InvalidRequest, match="1 missing in the snapshot: optimizer"):
            ckpt.restore()
        found = ckpt.restore(strict=False)
    assert found is not None
    assert (found.step, found.missing, found.unexpected) == (3, ("optimizer",), ())
    assert torch.equal(torch.rand(4), drawn)
    assert other.scheduler.state_dict() == job.scheduler.state_dict()
    assert {name: bits for name, bits in other.bits().items() if "/" in name} == before
    assert torch.equal(other.net.get_parameter("0.weight"), job.net.get_parameter("0.weight"))


def test_s091_the_optimizer_of_a_snapshot_can_be_left_out(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """Model, schedule and generators alone are tracked: the optimizer's names are reported as not taken."""
    job = Job(1)
    job.train_on(3)
    with two_nodes.on(two_nodes.first, tmp_path) as ckpt:
        job.tracked(ckpt).save(3).wait()
    drawn, other = torch.rand(4), Job(2)
    with two_nodes.on(two_nodes.other, tmp_path) as ckpt:
        other.tracked(ckpt, "model", "scheduler")
        found = ckpt.restore(strict=False)
    assert found is not None
    assert (found.step, found.missing) == (3, ())
    assert {name.split("/")[0] for name in found.unexpected} == {"optimizer"}
    assert len(found.unexpected) == 1 + 8 * 3
    assert torch.equal(torch.rand(4), drawn)
    assert other.scheduler.state_dict() == job.scheduler.state_dict()
    assert not other.optimizer.state


class Wrapper(nn.Module):
    """Adds a prefix that torch does not know."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = inner


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_s083_a_compiled_model_restores_into_a_plain_one_and_back(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """Parameters and moments have the plain names, whatever wraps the module."""
    job = Job(1)
    job.train_on(2)
    plain, job.net = job.net, torch.compile(job.net)  # type: ignore[assignment] # never called, so nothing is compiled
    with two_nodes.on(two_nodes.first, tmp_path) as ckpt:
        job.tracked(ckpt).save(1).wait()
    job.net = plain
    for wrapped in (False, True):
        other = Job(2)
        inner = other.net
        other.net = torch.compile(inner) if wrapped else inner  # type: ignore[assignment]
        with two_nodes.on(two_nodes.other, tmp_path) as ckpt:
            other.tracked(ckpt).restore(required=True)
        other.net = inner
        assert other.bits() == job.bits()


def test_s083_another_prefix_is_one_error_that_names_it(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """First names of both sides, all counts, and the prefix; for the optimizer's state as well. Nothing is touched."""
    job, other = Job(1), Job(2)
    job.train_on(1)
    job.net = Wrapper(job.net)  # type: ignore[assignment]
    with two_nodes.on(two_nodes.first, tmp_path) as ckpt:
        job.tracked(ckpt).save(1).wait()
    before = other.bits()
    with two_nodes.on(two_nodes.other, tmp_path) as ckpt:
        other.tracked(ckpt)
        with pytest.raises(InvalidRequest) as caught:
            ckpt.restore()
    assert "8 missing in the snapshot: model/0.weight" in caught.value.message
    assert "32 only in the snapshot: model/model.0.bias" in caught.value.message
    assert "'model/model.'" in caught.value.hint
    assert other.bits() == before


@pytest.mark.parametrize("change", ["width", "dtype"])
def test_s140_another_width_or_dtype_is_one_short_error(two_nodes: TwoNodes, tmp_path: Path, change: str) -> None:
    """The count, five names with what is stored and what is here, in one line; model, optimizer and generators are as before."""
    job = Job(1)
    job.train_on(1)
    with two_nodes.on(two_nodes.first, tmp_path) as ckpt:
        job.tracked(ckpt).save(1).wait()
    other = Job(2, 7) if change == "width" else Job(2)
    if change == "dtype":
        other.net.to(torch.bfloat16)
    here = "float32[7, 7]" if change == "width" else "bfloat16[6, 6]"
    values = [parameter.detach().clone() for parameter in other.net.parameters()]
    generator = torch.get_rng_state()
    with two_nodes.on(two_nodes.other, tmp_path) as ckpt:
        other.tracked(ckpt)
        with pytest.raises(InvalidRequest) as caught:
            ckpt.restore(strict=False)
    text = caught.value.message
    assert "8 different: " in text
    assert f"model/0.weight (stored float32[6, 6], here {here})" in text
    assert text.count("stored float32") == 5
    assert text.endswith("...")
    assert all(torch.equal(a, b) for a, b in zip(values, other.net.parameters(), strict=True))
    assert torch.equal(generator, torch.get_rng_state())
    assert not other.optimizer.state
