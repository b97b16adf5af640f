"""What param_groups hold comes back to the group, the parameter and the device it belongs to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from torch import nn, optim

from ckptd.client import optimizer_merge
from ckptd.client.modules import ParameterName
from ckptd.client.optimizer_state import HeldState
from ckptd.client.optimizers import TrackedOptimizer, parameter_names
from ckptd.client.sharding import Pieces, pieces_of
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL

__all__ = ["fake_agent", "make"]


def rates(optimizer: optim.Optimizer) -> list[float]:
    return [round(float(group["lr"]), 6) for group in optimizer.param_groups]


def shared(*nets: nn.Module) -> list[optim.Optimizer]:
    """Return an optimizer for each module, with a group for each parameter; one tensor is the rate of all groups."""
    rate = torch.tensor(0.1)
    return [optim.Adam([{"params": [each]} for each in net.parameters()], lr=rate, foreach=False) for net in nets]


def test_a_rate_that_groups_share_here_gets_each_groups_own_value(make: Make) -> None:
    """As torch's load_state_dict: the tensor stays that of the first, and of those with an equal value."""
    net = nn.Linear(2, 2)
    (optimizer,) = shared(net)
    optimizer.param_groups[1]["lr"] = torch.tensor(0.01)
    checkpointer = make()
    checkpointer.save(1, {"net": net, "optimizer": optimizer}).wait()
    (other,) = shared(net)
    held = other.param_groups[0]["lr"]
    checkpointer.restore_into({"net": net, "optimizer": other})
    assert rates(other) == [0.1, 0.01]
    assert other.param_groups[0]["lr"] is held
    held.fill_(0.5)
    assert rates(other) == [0.5, 0.01]


def test_a_rate_that_optimizers_share_here_gets_each_ones_own_value(make: Make) -> None:
    """A tensor given to two optimizers, of which the run changed one."""
    nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    one, two = shared(*nets)
    for group in two.param_groups:
        group["lr"] = torch.tensor(0.02)
    checkpointer = make()
    state: dict[str, Any] = {"a": nets[0], "b": nets[1]}
    checkpointer.save(1, {**state, "one": one, "two": two}).wait()
    one, two = shared(*nets)
    checkpointer.restore_into({**state, "one": one, "two": two})
    assert rates(one) == [0.1, 0.1]
    assert rates(two) == [0.02, 0.02]


def test_a_rate_that_groups_share_with_one_value_stays_shared(make: Make) -> None:
    """A schedule that fills it in place goes on to reach all groups."""
    net = nn.Linear(2, 2)
    (optimizer,) = shared(net)
    optimizer.param_groups[0]["lr"].fill_(0.3)
    checkpointer = make()
    checkpointer.save(1, {"net": net, "optimizer": optimizer}).wait()
    (other,) = shared(net)
    checkpointer.restore_into({"net": net, "optimizer": other})
    assert other.param_groups[0]["lr"] is other.param_groups[1]["lr"]
    assert rates(other) == [0.3, 0.3]


@pytest.mark.parametrize("is_named_here", [True, False])
def test_names_of_parameters_follow_them_into_another_order(make: Make, is_named_here: bool) -> None:
    """Torch keeps them by position; they go on to belong to the same parameters, and to what torch saves."""
    net = nn.Linear(2, 2)
    pairs = [(f"given {name}", parameter) for name, parameter in net.named_parameters()]
    optimizer = optim.SGD(pairs, lr=0.1)
    checkpointer = make()
    checkpointer.save(1, {"net": net, "optimizer": optimizer}).wait()
    turned: Any = pairs[::-1]
    other = optim.SGD(turned if is_named_here else [parameter for _, parameter in turned], lr=0.1)
    checkpointer.restore_into({"net": net, "optimizer": other})
    assert other.param_groups[0]["param_names"] == ["given bias", "given weight"]


def test_names_of_parameters_are_joined_on_another_mesh() -> None:
    """Stages held other parameters of one group: their names differ, and are no disagreement."""

    def stage(*params: str) -> dict[str, Any]:
        group = {"lr": 0.1, "params": list(params), "param_names": [f"given {name}" for name in params]}
        return {"param_groups": [group], "state": {}, "empty": {}, "host": [], "local": []}

    made = optimizer_merge.merged("optimizer", [stage("c", "a"), stage("b")], [{"a", "b", "c"}])
    assert made["param_groups"][0]["params"] == ["a", "b", "c"]
    assert made["param_groups"][0]["param_names"] == ["given a", "given b", "given c"]


def on(device: str) -> nn.Parameter:
    return nn.Parameter(torch.empty(2, device=device))


def noted(*steps: tuple[str, str]) -> dict[str, Any]:
    """Return what is noted of steps on devices, each of a parameter on a device that is not the host."""
    found = HeldState()
    for name, device in steps:
        on_host = pieces_of(torch.tensor(1.0), name)
        pieces = Pieces(on_host.dtype, on_host.global_shape, on_host.boxes, torch.tensor(1.0, device=device))
        found.add(name, "step", pieces, pieces.local, on("meta"), SCOPE_GLOBAL)
    return found.as_value()


def test_where_a_step_counter_lies_is_noted_for_each_parameter() -> None:
    """Nothing more is stored than before where all lie alike."""
    assert noted(("a", "cpu"), ("b", "meta")) == {
        **noted(("a", "cpu")),
        "device": {"b": ["step"]},
    }
    assert noted(("a", "cpu"), ("b", "cpu"))["host"] == ["step"]
    assert noted(("a", "meta"))["host"] == []
    assert not any("device" in noted((name, device)) for name, device in (("a", "cpu"), ("b", "meta")))


@pytest.mark.parametrize("device", [{"bias": ["step"]}, None])
def test_a_step_counter_comes_back_to_where_it_lay(device: dict[str, list[str]] | None) -> None:
    """Of a fused group on the device, of a plain one on the host; a step of before goes to the host, as it did."""
    net = nn.Linear(2, 2, device="meta")
    pairs = [(parameter, name) for name, parameter in net.named_parameters()]
    tracked = TrackedOptimizer("optimizer", optim.Adam(net.parameters()))
    names = parameter_names((parameter, found(name)) for parameter, name in pairs)
    tensors: dict[str, object] = {f"optimizer/state/{name}/step": torch.tensor(3.0) for _, name in pairs}
    value = {"param_groups": [{"params": ["weight", "bias"]}], "state": {}, "empty": {}, "host": ["step"], "local": []}
    tracked.load(value if device is None else {**value, "device": device}, tensors, names)
    lies = {name: tracked.optimizer.state[parameter]["step"].device.type for parameter, name in pairs}
    assert lies == {"weight": "cpu", "bias": "cpu" if device is None else "meta"}


def found(name: str) -> ParameterName:
    return ParameterName(tracked="net", name=name, scope=SCOPE_GLOBAL)


def test_where_step_counters_lie_is_joined_on_another_mesh() -> None:
    """What each stage said of its own parameters: one had all on the device, one on the host, one both."""

    def stage(host: list[str], device: dict[str, list[str]], *params: str) -> dict[str, Any]:
        value = {"param_groups": [{"params": [*params]}], "state": {}, "empty": {}, "host": host, "local": []}
        return {**value, "device": device} if device else value

    stages = [stage([], {}, "a"), stage(["step"], {}, "b"), stage(["step"], {"c": ["step"]}, "c", "d")]
    made = optimizer_merge.merged("optimizer", stages, [{"a", "b", "c", "d"}])
    assert made["host"] == ["step"]
    assert made["device"] == {"a": ["step"], "c": ["step"]}
    assert "device" not in optimizer_merge.merged("optimizer", stages[:1], [{"a"}])
