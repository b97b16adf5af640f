"""What shares memory with an optimizer's state and rates, or is sharded beside it, is so again after a restore."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_mesh import fake_mesh
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ckptd.client import InvalidRequest, optimizer_merge
from ckptd.client.mapping import RenamedStored, Renaming
from ckptd.client.optimizer_state import HeldState, on_host
from ckptd.client.sharding import Pieces, pieces_of
from ckptd.client.stored import Stored
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL

__all__ = ["fake_agent", "make"]


class Learned(nn.Module):
    """A weight, and the rate it is trained with, which is trained too."""

    def __init__(self, rate: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=dtype))
        self.rate = nn.Parameter(torch.tensor(rate, dtype=dtype))


def learned(rate: float, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return a module, the optimizer of its weight, and that of its rate."""
    net = Learned(rate, dtype)
    return {
        "net": net,
        "inner": optim.SGD([net.weight], lr=cast("Any", net.rate)),
        "outer": optim.SGD([net.rate], lr=0.01),
    }


def opened(make: Make, things: dict[str, Any], **settings: Any) -> Any:
    checkpointer = make(commit_timeout_s=120.0, **settings)
    checkpointer.track(**things)
    return checkpointer


def saved(make: Make, things: dict[str, Any], **settings: Any) -> None:
    checkpointer = opened(make, things, **settings)
    checkpointer.save(1).wait()
    checkpointer.close()


def rate_of(optimizer: optim.Optimizer) -> Any:
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rate_that_is_learned_stays_the_one_that_steps(make: Make, dtype: torch.dtype) -> None:
    """A copy in its stead would be used for ever, whatever the other optimizer learns. Cast, it stays the parameter too."""
    saved(make, learned(0.3))
    here = learned(0.1, dtype)
    opened(make, here).restore(cast=dtype is not torch.float32)
    assert rate_of(here["inner"]) is here["net"].rate
    assert torch.equal(here["net"].rate.detach(), torch.tensor(0.3, dtype=dtype))


def halves(rate: torch.Tensor) -> dict[str, Any]:
    """Return a net, and an optimizer for each of its parameters, of one rate."""
    net = nn.Linear(2, 2)
    return {"net": net, "one": optim.SGD([net.weight], lr=rate), "two": optim.SGD([net.bias], lr=rate)}


@pytest.mark.parametrize("choice", [{"drop": ("two",)}, {"only": ["net", "one"]}], ids=["drop", "only"])
def test_an_optimizer_that_is_left_out_keeps_the_rate_it_shares(make: Make, choice: dict[str, Any]) -> None:
    """The one that is restored gets a rate of its own; with equal values they go on to share it."""
    saved(make, halves(torch.tensor(0.5)))
    here = halves(torch.tensor(0.1))
    before = rate_of(here["two"])
    opened(make, here).restore(**choice)
    assert rate_of(here["two"]) is before
    assert (rate_of(here["one"]).item(), rate_of(here["two"]).item()) == (0.5, pytest.approx(0.1))
    here = halves(torch.tensor(0.5))
    opened(make, here).restore(**choice)
    assert rate_of(here["one"]) is rate_of(here["two"])


def test_a_wrapper_that_is_dropped_lends_its_groups(make: Make) -> None:
    """Its groups are those of the inner one, which is restored: their rate is filled in place."""

    def made(value: float) -> tuple[torch.Tensor, dict[str, Any]]:
        rate, net = torch.tensor(value), nn.Linear(2, 2)
        inner, wrapper = optim.SGD(net.parameters(), lr=rate), optim.SGD(net.parameters())
        wrapper.param_groups, wrapper.state = inner.param_groups, inner.state
        return rate, {"net": net, "inner": inner, "wrapper": wrapper}

    saved(make, made(0.5)[1])
    rate, here = made(0.1)
    opened(make, here).restore(drop=("wrapper",))
    assert rate_of(here["inner"]) is rate
    assert rate.item() == 0.5


def test_what_is_dropped_keeps_the_rate_that_lies_in_it(make: Make) -> None:
    """In a parameter of a module, and as one element of a buffer: neither is written through the optimizer."""

    def made(value: float) -> tuple[Any, dict[str, Any]]:
        here = learned(value)
        here["net"].register_buffer("rates", torch.tensor([0.0, value]))
        here["outer"].param_groups[0]["lr"] = here["net"].rates[1]
        return here["net"], here

    saved(make, made(0.5)[1])
    net, here = made(0.25)
    opened(make, here).restore(drop=("net",))
    assert (net.rate.item(), net.rates[1].item()) == (0.25, 0.25)
    assert (rate_of(here["inner"]).item(), rate_of(here["outer"]).item()) == (0.5, 0.5)


def test_a_rate_that_two_groups_cut_from_one_tensor_is_filled_in_place(make: Make) -> None:
    """Elements of one tensor are not one memory: nothing else stands in it, so a schedule of both goes on to reach them."""

    def made(*values: float) -> tuple[torch.Tensor, dict[str, Any]]:
        rates, net = torch.tensor(values), nn.Linear(2, 2)
        groups = [{"params": [each], "lr": rate} for each, rate in zip(net.parameters(), rates, strict=True)]
        return rates, {"net": net, "optimizer": optim.SGD(groups)}

    saved(make, made(0.5, 0.25)[1])
    rates, here = made(0.0, 0.0)
    opened(make, here).restore()
    assert rates.tolist() == [0.5, 0.25]


class Scaled(nn.Module):
    """A weight and a scale without dimensions."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes])


def trained(kind: Any, dtype: torch.dtype, sizes: tuple[tuple[int, ...], ...], steps: int) -> tuple[Scaled, Any]:
    net = Scaled(dtype, sizes)
    optimizer = kind(net.parameters())
    for _ in range(steps):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("kind", [optim.AdamW, optim.NAdam, optim.ASGD])
@pytest.mark.parametrize("sizes", [((3,), ()), ((),)])
def test_step_counters_are_never_cast(make: Make, kind: Any, sizes: tuple[tuple[int, ...], ...]) -> None:
    """Beside a parameter without dimensions too, whose state has none either: bfloat16 cannot count beyond 256."""
    net, optimizer = trained(kind, torch.float32, sizes, 1)
    for state in optimizer.state.values():
        state["step"].fill_(1001.0)
    saved(make, {"net": net, "optimizer": optimizer})
    other, restored = trained(kind, torch.bfloat16, sizes, 0)
    opened(make, {"net": other, "optimizer": restored}).restore(cast=True)
    assert [restored.state[each]["step"].item() for each in other.parameters()] == [1001.0] * len(sizes)
    like = {key: value.dtype for key, value in restored.state[other.all[0]].items()}
    if len(sizes) > 1:  # what has no dimensions beside a weight either is no moment
        assert {key: value.dtype for key, value in restored.state[other.all[1]].items()} == like
    moment = "ax" if kind is optim.ASGD else "exp_avg"
    assert all(restored.state[each][moment].dtype is torch.bfloat16 for each in other.parameters())


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one."""
    with fake_mesh(0, 1) as made:
        yield made


@pytest.fixture
def pair() -> Iterator[DeviceMesh]:
    """A mesh of two, of which this is the first."""
    with fake_mesh(0, 2) as made:
        yield made


def sharded(mesh: DeviceMesh, whole: torch.Tensor, placement: Placement | None = None) -> DTensor:
    """Return a DTensor, here of the first rank's part."""
    placements = [placement or Shard(0)]
    is_split = placements[0] == Shard(0) and whole.ndim
    local = whole.chunk(mesh.size())[0].clone() if is_split else whole.clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def beside(mesh: DeviceMesh, *parameters: DTensor) -> tuple[Any, optim.Optimizer, dict[str, Any]]:
    net = nn.ParameterList([nn.Parameter(parameter) for parameter in parameters])
    optimizer = optim.SGD(net.parameters())
    return net, optimizer, {"net": net, "optimizer": optimizer}


def alone() -> dict[str, Any]:
    return {"process_group": dist.new_group([0])}


def test_local_state_is_local_for_each_parameter(make: Make, mesh: DeviceMesh) -> None:
    """Under one key one parameter's is a plain tensor and the other's a DTensor; a counter is plain beside any."""
    whole = torch.arange(8.0).reshape(4, 2)

    def made() -> Any:
        return beside(mesh, sharded(mesh, whole), sharded(mesh, whole), sharded(mesh, torch.tensor(2.0), Replicate()))

    net, optimizer, things = made()
    for at, moment in enumerate([whole + 1, sharded(mesh, whole + 2), sharded(mesh, torch.tensor(3.0), Replicate())]):
        optimizer.state[net[at]] = {"moment": moment, "step": torch.tensor(4.0)}
    saved(make, things, **alone())
    other, fresh, here = made()
    opened(make, here, **alone()).restore()
    kinds = [[type(value) for value in fresh.state[each].values()] for each in other]
    plain = torch.Tensor
    assert kinds == [[plain, plain], [DTensor, plain], [DTensor, plain]]
    assert [float(value.sum()) for value in fresh.state[other[0]].values()] == [36.0, 4.0]


def test_what_is_local_is_joined_on_another_mesh() -> None:
    """What each stage said of its own parameters: all plain, all DTensors, and both."""

    def stage(local: list[str], sharded: dict[str, list[str]], *params: str) -> dict[str, Any]:
        value = {"param_groups": [{"params": [*params]}], "state": {}, "empty": {}, "host": [], "local": local}
        return {**value, "sharded": sharded} if sharded else value

    stages = [stage([], {}, "a"), stage(["m"], {}, "b"), stage(["m"], {"c": ["m"]}, "c", "d")]
    made = optimizer_merge.merged("optimizer", stages, [{"a", "b", "c", "d"}])
    assert (made["local"], made["sharded"]) == (["m"], {"a": ["m"], "c": ["m"]})
    assert "sharded" not in optimizer_merge.merged("optimizer", stages[1:2], [{"b"}])


def test_state_that_parameters_share_is_shared_again(make: Make) -> None:
    """A counter of all parameters, and one tensor under two keys: as torch.save and torch.load keep them."""

    def made() -> tuple[nn.Linear, optim.Optimizer]:
        net = nn.Linear(2, 2)
        return net, optim.SGD(net.parameters())

    net, optimizer = made()
    step, moment = torch.tensor(3.0), torch.ones(2)
    optimizer.state[net.weight] = {"step": step, "empty": torch.empty(0)}
    optimizer.state[net.bias] = {"step": step, "moment": moment, "again": moment, "view": moment[:1]}
    saved(make, {"net": net, "optimizer": optimizer})
    for stands in (False, True):
        other, fresh = made()
        if stands:  # apart
            fresh.state[other.weight] = {"step": torch.tensor(9.0)}
            fresh.state[other.bias] = {"step": torch.tensor(8.0)}
        opened(make, {"net": other, "optimizer": fresh}).restore()
        weight, bias = fresh.state[other.weight], fresh.state[other.bias]
        assert weight["step"] is bias["step"]
        assert bias["moment"] is bias["again"]
        assert (weight["step"].item(), bias["moment"].tolist(), bias["view"].tolist()) == (3.0, [1.0, 1.0], [1.0])


def test_state_is_looked_at_again_when_it_is_shared_since_the_save_before(make: Make) -> None:
    """It looks as it did, key by key and tensor by tensor; and when it is no longer shared, each has its own value."""
    net = nn.Linear(2, 2)
    optimizer = optim.SGD(net.parameters())
    checkpointer = opened(make, {"net": net, "optimizer": optimizer})
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    for step, (weight, bias) in enumerate([(one, two), (one, one), (one, two)], 1):
        optimizer.state[net.weight]["step"], optimizer.state[net.bias]["step"] = weight, bias
        checkpointer.save(step).wait()
    for step, (is_shared, value) in enumerate([(False, 2.0), (True, 1.0), (False, 2.0)], 1):
        fresh = optim.SGD(net.parameters())
        opened(make, {"net": net, "optimizer": fresh}).restore(step=step, rollback=True)
        weight, bias = fresh.state[net.weight]["step"], fresh.state[net.bias]["step"]
        assert (weight is bias, bias.item()) == (is_shared, value)


def test_shared_state_comes_back_to_one_device() -> None:
    """The counter that two parameters share is brought to theirs once."""
    from ckptd.client.modules import ParameterName  # noqa: PLC0415
    from ckptd.client.optimizers import TrackedOptimizer, parameter_names  # noqa: PLC0415

    net = nn.Linear(2, 2, device="meta")
    tracked = TrackedOptimizer("optimizer", optim.Adam(net.parameters()))
    names = parameter_names(
        (parameter, ParameterName(tracked="net", name=name, scope=SCOPE_GLOBAL))
        for name, parameter in net.named_parameters()
    )
    step = torch.tensor(3.0)
    groups = [{"params": ["weight", "bias"]}]
    value = {"param_groups": groups, "state": {"bias": {"step": step}}, "empty": {}, "host": [], "local": []}
    tracked.load(value, {"optimizer/state/weight/step": step}, names)
    states = tracked.optimizer.state
    assert states[net.weight]["step"].device.type == "meta"
    assert states[net.weight]["step"] is states[net.bias]["step"]


def test_a_hyperparameter_that_is_sharded_comes_back_so(make: Make, mesh: DeviceMesh) -> None:
    """In place, and nested in a tuple."""

    def made(value: float) -> tuple[dict[str, Any], dict[str, Any]]:
        _, optimizer, things = beside(mesh, sharded(mesh, torch.ones(4, 2)))
        group = optimizer.param_groups[0]
        group["table"], group["both"] = (
            sharded(mesh, torch.full((4,), value)),
            (sharded(mesh, torch.full((2,), value)),),
        )
        return group, things

    saved(make, made(2.0)[1], **alone())
    group, here = made(0.0)
    table = group["table"]
    opened(make, here, **alone()).restore()
    assert group["table"] is table
    assert isinstance(group["both"][0], DTensor)
    assert (table.to_local().tolist(), group["both"][0].to_local().tolist()) == ([2.0] * 4, [2.0] * 2)


def test_a_piece_of_a_hyperparameter_is_not_taken_for_the_whole(make: Make, pair: DeviceMesh) -> None:
    """Nothing says here that it was one: refused by name."""
    _, optimizer, things = beside(pair, sharded(pair, torch.ones(4, 2)))
    optimizer.param_groups[0]["table"] = sharded(pair, torch.ones(4))
    saved(make, things, **alone())
    _, _, here = beside(pair, sharded(pair, torch.ones(4, 2)))
    with pytest.raises(InvalidRequest, match="nothing here says how to hold it") as caught:
        opened(make, here, **alone()).restore()
    assert "optimizer/param_groups/0/table" in str(caught.value)


def test_sharded_state_of_another_shape_comes_back_sharded(make: Make, pair: DeviceMesh) -> None:
    """As Adafactor's variances: whole on each rank, or, where its parameter too has one row, whole on the first alone."""

    def made() -> Any:
        return beside(pair, sharded(pair, torch.ones(4, 2)), sharded(pair, torch.ones(1, 2)))

    net, optimizer, things = made()
    optimizer.state[net[0]] = {"column": sharded(pair, torch.full((1, 2), 5.0), Replicate()), "own": torch.ones(3)}
    optimizer.state[net[1]] = {"row": sharded(pair, torch.full((1, 1), 6.0))}
    saved(make, things, **alone())
    other, fresh, here = made()
    opened(make, here, **alone()).restore()
    (column, own), row = fresh.state[other[0]].values(), fresh.state[other[1]]["row"]
    assert isinstance(column, DTensor)
    assert isinstance(row, DTensor)
    assert (column.placements, row.placements, type(own)) == ((Replicate(),), (Shard(0),), torch.Tensor)
    assert (column.to_local().tolist(), row.to_local().tolist()) == ([[5.0, 5.0]], [[6.0]])


def test_a_rank_without_elements_refuses_what_the_others_would_hold_whole(make: Make) -> None:
    """One row of many, sharded: the first rank would take all of it for a replica, so the second does not go along."""
    with fake_mesh(1, 2) as both:

        def made() -> Any:
            return beside(both, sharded(both, torch.ones(4, 2)))

        net, optimizer, things = made()
        row = DTensor.from_local(
            torch.empty(0, 2), both, [Shard(0)], run_check=False, shape=torch.Size([1, 2]), stride=(2, 1)
        )
        optimizer.state[net[0]] = {"row": row}
        saved(make, things, process_group=dist.new_group([1]))
        with pytest.raises(InvalidRequest, match="nothing here says how to hold it") as caught:
            opened(make, made()[2], process_group=dist.new_group([1])).restore()
        assert "optimizer/state/0/row" in str(caught.value)


def test_names_here_go_with_where_each_step_counter_lies() -> None:
    """Of a fused group on the device, of a plain one on the host, under the names that the parameters have here."""
    on_cpu, parameter = (
        pieces_of(torch.tensor(1.0), "step"),
        SimpleNamespace(device=torch.device("cuda"), shape=torch.Size([3])),
    )
    held = HeldState()
    for name, device in (("module.a", "meta"), ("module.b", "cpu")):
        pieces = Pieces(on_cpu.dtype, (), on_cpu.boxes, torch.tensor(1.0, device=device))
        held.add(name, "step", pieces, None, cast("Any", parameter), SCOPE_GLOBAL)
    value: dict[str, Any] = {**held.as_value(), "param_groups": [{"params": ["module.a", "module.b"]}]}
    value["sharded"] = {"module.b": ["m"]}

    def row(name: str) -> ShardRow:
        return ShardRow(
            name=name,
            dtype="float32",
            global_shape=(3,),
            offset=(0,),
            length=(3,),
            scope=SCOPE_GLOBAL,
            nbytes=12,
            group=0,
        )

    stored = Stored([row("model/module.a"), row("model/module.b")], ["optimizer"], {})
    renamed = RenamedStored(
        stored, Renaming({"model/module.": "model/"}), {"optimizer": {"model/a": "a", "model/b": "b"}}
    )
    found = renamed.optimizer_value("optimizer", value)
    assert [on_host(found, name, "step") for name in ("a", "b")] == [False, True]
    assert found["sharded"] == {"b": ["m"]}
