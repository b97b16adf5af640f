"""Every optimizer and schedule of torch comes back bit for bit, in type and in value, and goes on as if undisturbed."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_mesh import fake_mesh
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import lr_scheduler

from ckptd.client import InvalidRequest, Sharded

__all__ = ["fake_agent", "make"]

Parameters = list[nn.Parameter]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "foreach": {"foreach": True},
    "single": {"foreach": False},
    "fused": {"fused": True},
    "maximize": {"maximize": True},
    "amsgrad": {"amsgrad": True},
    "momentum": {"momentum": 0.9},
    "no momentum": {"momentum": 0.0},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "centered": {"centered": True},
    "decoupled": {"decoupled_weight_decay": True},
    "strong wolfe": {"line_search_fn": "strong_wolfe"},
    "started": {"initial_accumulator_value": 0.3},
    "rate is a tensor": {"lr": torch.tensor(0.01)},
}
KINDS = [kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)]


def built(kind: type[optim.Optimizer], options: dict[str, Any], parameters: Parameters) -> optim.Optimizer:
    made: Any = kind
    given = copy.deepcopy({"lr": 0.01, **options})
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    found: optim.Optimizer = made(matrices if kind.__name__ == "Muon" else parameters, **given)
    return found


def variants() -> Iterator[tuple[type[optim.Optimizer], str]]:
    """Yield what torch lets one build on a host; sparse gradients are another test's."""
    for kind in KINDS:
        for name, options in VARIANTS.items():
            if kind not in {optim.Optimizer, optim.SparseAdam}:
                try:
                    built(kind, options, [nn.Parameter(torch.ones(2, 2))])
                except (TypeError, ValueError, RuntimeError):
                    continue
                yield kind, name


FOUND = list(variants())


def test_the_table_holds_what_torch_has() -> None:
    """A new torch with new names changes the table, not what is tried."""
    assert len({kind for kind, _ in FOUND}) >= 13
    assert len(FOUND) >= 50


def same(one: Any, other: Any, at: str = "") -> list[str]:
    """Return where two nested values differ: in type, value, or one bit of a tensor or a float."""
    if type(one) is not type(other):
        return [f"{at}: {type(one)}, {type(other)}"]
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
            return [f"{at}: {one}, {other}"]
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return [] if torch.equal(*bits) else [f"{at}: other bits"]
    if isinstance(one, dict):
        if set(one) != set(other):
            return [f"{at}: keys {sorted(map(str, one))}, {sorted(map(str, other))}"]
        return [text for key in one for text in same(one[key], other[key], f"{at}/{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{at}: {len(one)} items, {len(other)}"]
        return [text for i, (a, b) in enumerate(zip(one, other, strict=True)) for text in same(a, b, f"{at}/{i}")]
    if isinstance(one, float):
        return [] if struct.pack("<d", one) == struct.pack("<d", other) else [f"{at}: {one}, {other}"]
    if isinstance(one, np.ndarray):
        return same((one.dtype, one.shape, one.tobytes()), (other.dtype, other.shape, other.tobytes()), at)
    return [] if one == other else [f"{at}: {one!r}, {other!r}"]


class Job:
    """A net of two layers, the second of which is frozen for the first step, and its optimizer."""

    def __init__(self, seed: int, build: Callable[[Parameters], optim.Optimizer]) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.optimizer = build(list(self.net.parameters()))

    def train(self, steps: int) -> list[str]:
        losses = []
        for step in range(steps):

            def closure() -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = self.net(torch.arange(12.0).reshape(3, 4) / 10).square().sum()
                loss.backward()
                return cast("torch.Tensor", loss)

            loss: Any = self.optimizer.step(cast("Any", closure))
            losses.append(f"{step}: {float(loss.detach()).hex()}")
        return losses

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(self.optimizer.state_dict())


@pytest.mark.parametrize(("kind", "variant"), FOUND, ids=[f"{kind.__name__}-{name}" for kind, name in FOUND])
def test_every_optimizer_comes_back_and_goes_on(make: Make, kind: type[optim.Optimizer], variant: str) -> None:
    """Into a fresh one and into one that has trained otherwise: state, hyperparameters and every later loss."""

    def build(parameters: Parameters) -> optim.Optimizer:
        return built(kind, VARIANTS[variant], parameters)

    job = Job(1, build)
    job.train(3)
    checkpointer = make()
    checkpointer.save(3, {"net": job.net, "optimizer": job.optimizer}).wait()
    want, expected = job.state(), job.train(3)
    for seed, before in ((2, 0), (3, 2)):
        other = Job(seed, build)
        other.train(before)
        checkpointer.restore_into({"net": other.net, "optimizer": other.optimizer}, step=3)
        assert same(other.state(), want) == []
        assert other.train(3) == expected


SCHEDULES: dict[str, Callable[[optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 5]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0),
    "CyclicLR of a function": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, scale_fn=lambda x: 1 / x),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, 12),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, 0.1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_comes_back_and_goes_on(make: Make, name: str) -> None:
    """The rates and momenta of six later steps are those of the run that nobody disturbed."""

    class Scheduled:
        def __init__(self) -> None:
            self.optimizer = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
            self.schedule = SCHEDULES[name](self.optimizer)

        def steps(self, count: int) -> list[tuple[str, str]]:
            seen = []
            for _ in range(count):
                self.optimizer.step()
                self.schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
                group = self.optimizer.param_groups[0]
                seen.append((float(group["lr"]).hex(), float(group["momentum"]).hex()))
            return seen

    job = Scheduled()
    job.steps(4)
    checkpointer = make()
    checkpointer.save(1, {"optimizer": job.optimizer, "schedule": job.schedule}).wait()
    want, expected = copy.deepcopy(job.schedule.state_dict()), job.steps(6)
    other = Scheduled()
    other.steps(1)
    checkpointer.restore_into({"optimizer": other.optimizer, "schedule": other.schedule})
    stored = other.schedule.state_dict()
    assert {key: str(value) for key, value in stored.items()} == {key: str(value) for key, value in want.items()}
    assert other.steps(6) == expected


STATE: dict[Any, Any] = {
    "count": 2**70,
    "flag": True,
    "one": 1,
    "rate": -0.0,
    "nothing": None,
    "scalar": np.float32(1.5),
    "array": np.arange(3, dtype=np.uint16),
    "words": ("a", b"b"),
    "history": [torch.arange(3.0), None, [torch.tensor(1)]],
    3: torch.tensor(5, dtype=torch.int16),
    ("a", 1): {"deep": torch.ones(1, 1)},
    "step": torch.tensor(4.0),
    "counter": torch.tensor(2**40),
    "moment": torch.full((2, 3), -0.0, dtype=torch.bfloat16),
    "zero": torch.zeros(0, 3),
}


def test_state_of_any_type_keeps_its_type(make: Make) -> None:
    """Python and numpy scalars, None, nested tensors, keys that are no text; a parameter without state stays without."""
    one, two, three = (nn.Parameter(torch.zeros(2, 3)) for _ in range(3))
    optimizer, other = optim.SGD([one, two, three]), optim.SGD([one, two, three])
    optimizer.state[one], optimizer.state[two] = copy.deepcopy(STATE), {}
    other.state[three] = {"gone": torch.ones(1)}
    net = nn.ParameterList([one, two, three])
    checkpointer = make()
    checkpointer.save(1, {"net": net, "optimizer": optimizer}).wait()
    checkpointer.restore_into({"net": net, "optimizer": other})
    assert same(dict(other.state[one]), STATE) == []
    assert three not in other.state
    assert not other.state.get(two)


@pytest.mark.parametrize("named", [False, True])
def test_groups_keep_their_hyperparameters_by_parameter(make: Make, named: bool) -> None:
    """Three groups, of two modules that use one name, with extra keys; in the order of the optimizer that restores."""

    def made(rates: list[float]) -> tuple[nn.Module, nn.Module, optim.Optimizer]:
        one, two = nn.Linear(2, 2), nn.Linear(2, 2)
        lists: list[list[Any]] = [
            [("weight", one.weight)],
            [("weight", two.weight), ("bias", two.bias)],
            [("b", one.bias)],
        ]
        groups = [
            {
                "params": pairs if named else [each for _, each in pairs],
                "lr": rate,
                "name": f"g{rate}",
                "betas": (rate, 0.5),
            }
            for pairs, rate in zip(lists, rates, strict=True)
        ]
        optimizer = optim.Adam(groups)
        for _ in range(int(10 * rates[0])):
            sum(parameter.square().sum() for parameter in [*one.parameters(), *two.parameters()]).backward()  # type: ignore[union-attr]
            optimizer.step()
        return one, two, optimizer

    one, two, optimizer = made([0.1, 0.2, 0.3])
    checkpointer = make()
    checkpointer.save(1, {"one": one, "two": two, "optimizer": optimizer}).wait()
    a, b, other = made([0.3, 0.7, 0.8])
    checkpointer.restore_into({"one": a, "two": b, "optimizer": other})
    assert same(other.state_dict(), optimizer.state_dict()) == []
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("kind", ["same", "another dtype", "another shape", "none"])
def test_a_rate_that_is_a_tensor_keeps_every_bit(make: Make, kind: str) -> None:
    """In place where it has the stored look, so that a captured graph sees it; else replaced, and never converted."""
    stored = torch.tensor(0.1, dtype=torch.float64)
    live: dict[str, Any] = {
        "same": torch.tensor(7.0, dtype=torch.float64),
        "another dtype": torch.tensor(7.0),
        "another shape": torch.tensor([7.0], dtype=torch.float64),
        "none": 7.0,
    }
    parameter = nn.Parameter(torch.ones(2))
    checkpointer = make()
    checkpointer.save(1, {"optimizer": optim.SGD([parameter], lr=stored)}).wait()
    other = optim.SGD([parameter], lr=live[kind])
    checkpointer.restore_into({"optimizer": other})
    rate = other.param_groups[0]["lr"]
    assert same(rate, stored) == []
    assert (rate is live[kind]) == (kind == "same")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of two, of which this is the second."""
    with fake_mesh(1, 2) as made:
        yield made


def shard(mesh: DeviceMesh, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> DTensor:
    """Return the second rank's part, which is nothing, of one row."""
    local, shape = torch.empty(0, columns, dtype=dtype), torch.Size([rows, columns])
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(columns, 1))


def test_shards_without_elements_keep_shape_and_dtype(make: Make, mesh: DeviceMesh) -> None:
    """Also where these are not the parameter's, as the row variances of Adafactor; else other ranks would disagree later."""

    def made() -> tuple[nn.Parameter, optim.Optimizer]:
        parameter = nn.Parameter(shard(mesh, 1, 4))
        return parameter, optim.SGD([parameter])

    parameter, optimizer = made()
    optimizer.state[parameter] = {
        "row_var": shard(mesh, 1, 1),
        "moment": shard(mesh, 1, 4),
        "counts": shard(mesh, 1, 4, torch.int16),
        "local": torch.empty(0, 4, dtype=torch.float64),
        "step": torch.tensor(3.0),
    }
    checkpointer = make(process_group=dist.new_group([1]))
    checkpointer.save(1, {"net": nn.ParameterList([parameter]), "optimizer": optimizer}).wait()
    other, fresh = made()
    checkpointer.restore_into({"net": nn.ParameterList([other]), "optimizer": fresh})
    for key, want in optimizer.state[parameter].items():
        got = fresh.state[other][key]
        assert (type(got), got.dtype, got.shape) == (type(want), want.dtype, want.shape), key
        if isinstance(want, DTensor):
            assert (got.placements, got.to_local().shape) == (want.placements, want.to_local().shape)


def test_a_piece_without_elements_beside_a_whole_parameter_is_never_made_up(make: Make) -> None:
    """Nothing says how a fresh optimizer is to hold it: refused by name; where it stands already it stays."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer, other = optim.SGD([parameter]), optim.SGD([parameter])
    optimizer.state[parameter] = {"part": Sharded(torch.empty(0), (4,), (4,))}
    net = nn.ParameterList([parameter])
    checkpointer = make()
    checkpointer.save(1, {"net": net, "optimizer": optimizer}).wait()
    live = torch.zeros(4)
    with pytest.raises(InvalidRequest, match="nothing here says how to hold it") as caught:
        checkpointer.restore_into({"net": net, "optimizer": other})
    assert caught.value.key == "optimizer/state/0/part"
    assert not live.any()
    piece = Sharded(torch.empty(0), (4,), (4,))
    other.state[parameter] = {"part": piece}
    checkpointer.restore_into({"net": net, "optimizer": other})
    assert other.state[parameter]["part"] is piece
