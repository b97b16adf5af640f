"""What is collected of modules, optimizers and nested values, under which names, and that reading changes nothing."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fixtures.tracked_things import Stateful
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.client.errors import InvalidRequest
from ckptd.client.sharding import PerRank, Sharded
from ckptd.client.state import Collected
from ckptd.client.tracking import CaptureFailedError, Tracking
from ckptd.client.values import decode
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK, Value


class Net(nn.Module):
    """Two layers, a buffer, a tie and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.middle = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.middle.bias.requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.get_buffer("count").add_(1)
        hidden: torch.Tensor = self.head(self.middle(self.embed(tokens)))
        return hidden


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.tensor([step % 5, 1, 2])).square().sum().backward()
        optimizer.step()


def collected(state: Any = None, per_rank: Any = (), **things: Any) -> Collected:
    tracking = Tracking(per_rank)
    for name, thing in things.items():
        tracking.add(name, thing)
    return tracking.collect(state)


def names(found: Collected) -> list[str]:
    return [row.name for row in found.layout.rows]


def view(found: Collected, name: str) -> torch.Tensor:
    return found.views[names(found).index(name)]


def value(found: Collected, name: str) -> Any:
    return decode(Value.FromString(dict(found.objects)[name]), tensor=lambda name: f"tensor:{name}")


def test_a_module_gives_persistent_tensors_under_canonical_names() -> None:
    """Ties are stored once and named; buffers that are not persistent are not stored; views alias the live tensors."""
    net = Net()
    found = collected(model=net)
    assert names(found) == ["model/count", "model/embed.weight", "model/middle.weight", "model/middle.bias"]
    assert dict(zip(found.layout.aliases.alias, found.layout.aliases.target, strict=True)) == {
        "model/head.weight": "model/embed.weight"
    }
    assert view(found, "model/embed.weight").data_ptr() == net.embed.weight.data_ptr()
    groups = {row.name: row.group for row in found.layout.rows}
    assert groups["model/middle.bias"] == 1
    assert groups["model/middle.weight"] == 0
    assert {row.scope for row in found.layout.rows} == {SCOPE_GLOBAL}


@pytest.mark.filterwarnings("ignore")
def test_s083_wrappers_do_not_change_names() -> None:
    """Compiled modules and activation checkpointing."""
    plain = names(collected(model=Net()))
    assert names(collected(model=torch.compile(Net()))) == plain
    wrapped = Net()
    wrapped.add_module("middle", checkpoint_wrapper(wrapped.middle))
    assert names(collected(model=wrapped)) == plain


def test_chunks_of_a_pipeline_are_one_module() -> None:
    """A list of modules has the names of all; the same name twice is refused."""
    first, second = nn.ModuleDict({"0": nn.Linear(1, 1)}), nn.ModuleDict({"1": nn.Linear(1, 1)})
    assert names(collected(model=[first, second])) == [
        "model/0.weight",
        "model/0.bias",
        "model/1.weight",
        "model/1.bias",
    ]
    with pytest.raises(InvalidRequest, match=r"model/0\.weight.*two tensors"):
        collected(model=[first, nn.ModuleDict({"0": nn.Linear(1, 1)})])


def test_optimizer_state_is_named_by_parameter() -> None:
    """Scalars, moments, hyperparameters; a parameter without a gradient has no state and gets none."""
    net = Net()
    groups: list[dict[str, Any]] = [
        {"params": [net.middle.weight, net.middle.bias], "lr": 0.5},
        {"params": [net.embed.weight]},
    ]
    optimizer = torch.optim.AdamW(groups)
    trained(net, optimizer)
    found = collected(optimizer=optimizer, model=net)
    state = [name for name in names(found) if name.startswith("optimizer")]
    assert state == [
        f"optimizer/state/{parameter}/{key}"
        for parameter in ("middle.weight", "embed.weight")
        for key in ("step", "exp_avg", "exp_avg_sq")
    ]
    made = value(found, "optimizer")
    assert [group["params"] for group in made["param_groups"]] == [["middle.weight", "middle.bias"], ["embed.weight"]]
    assert made["param_groups"][0]["lr"] == 0.5
    assert made["param_groups"][0]["betas"] == (0.9, 0.999)
    assert made["state"] == {}


def test_optimizer_state_that_is_no_tensor_is_in_the_object() -> None:
    """SGD without momentum keeps None; nested state with tensors keeps its structure."""
    net = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net.weight] = {"momentum_buffer": None, "history": [torch.ones(2), 3], 7: torch.zeros(1)}
    found = collected(model=net, optimizer=optimizer)
    assert value(found, "optimizer")["state"]["weight"] == {
        "momentum_buffer": None,
        "history": ["tensor:optimizer/state/weight/history/0", 3],
        7: "tensor:optimizer/state/weight/%k7",
    }


def test_parameters_in_no_tracked_module_are_the_ranks_own() -> None:
    """Only their place names them, and ranks need not agree about places."""
    loose = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([loose])
    loose.grad = torch.ones(2)
    optimizer.step()
    found = collected(optimizer=optimizer)
    assert names(found) == [f"optimizer/state/#0/{key}" for key in ("step", "exp_avg", "exp_avg_sq")]
    assert {row.scope for row in found.layout.rows} == {SCOPE_PER_RANK}


def test_one_optimizer_over_two_modules_keeps_equal_names_apart() -> None:
    """A GAN with one optimizer."""
    one, two = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD([one.weight, two.weight], lr=0.1, momentum=0.9)
    (one(torch.ones(1)) + two(torch.ones(1))).sum().backward()
    optimizer.step()
    found = collected(generator=one, critic=two, optimizer=optimizer)
    assert names(found)[2:] == [
        "optimizer/state/generator%2Fweight/momentum_buffer",
        "optimizer/state/critic%2Fweight/momentum_buffer",
    ]


def test_nested_state_becomes_shards_and_one_object() -> None:
    """S084: plain tensors in it are each rank's own; Sharded ones are pieces of a global tensor."""
    state = {"at": 5, "buf": [torch.ones(2), PerRank(torch.zeros(1))], "part": Sharded(torch.ones(2), (4,), (2,))}
    found = collected(loader=Stateful(state))
    assert names(found) == ["loader/buf/0", "loader/buf/1", "loader/part"]
    assert [row.scope for row in found.layout.rows] == [SCOPE_PER_RANK, SCOPE_PER_RANK, SCOPE_GLOBAL]
    assert value(found, "loader") == {
        "at": 5,
        "buf": ["tensor:loader/buf/0", "tensor:loader/buf/1"],
        "part": "tensor:loader/part",
    }


def test_per_rank_can_be_said_by_value_and_by_pattern() -> None:
    """Of a whole module, of a subtree, of names."""
    net = nn.BatchNorm1d(2)
    assert {row.scope for row in collected(model=PerRank(net)).layout.rows} == {SCOPE_PER_RANK}
    scopes = {row.name: row.scope for row in collected(model=net, per_rank=("model/running_*",)).layout.rows}
    assert scopes["model/running_mean"] == SCOPE_PER_RANK
    assert scopes["model/weight"] == SCOPE_GLOBAL
    subtree = collected({"x": {"y": PerRank({"z": Sharded(torch.ones(1), (1,), (0,))})}})
    assert [row.scope for row in subtree.layout.rows] == [SCOPE_PER_RANK]


def test_an_unchanged_layout_is_the_same_object_and_a_changed_one_is_not() -> None:
    """So that later saves exchange nothing, and a changed structure is never overlooked."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    tracking = Tracking()
    tracking.add("model", net)
    tracking.add("optimizer", optimizer)
    first = tracking.collect(None).layout
    assert tracking.collect(None).layout is first
    trained(net, optimizer, 1)
    second = tracking.collect(None).layout
    assert second.digest != first.digest
    trained(net, optimizer, 1)
    assert tracking.collect(None).layout is second
    net.middle.weight.requires_grad_(False)
    assert tracking.collect(None).layout.digest != second.digest
    net.middle = nn.Linear(3, 3, dtype=torch.float64)
    assert tracking.collect(None).layout.digest not in {first.digest, second.digest}


def _note(fired: list[int], *_: object) -> None:
    fired.append(1)


def test_capturing_leaves_optimizer_rng_and_tensors_bit_identical() -> None:
    """Also on a fresh optimizer: no state appears, no hook fires, no generator moves."""
    net = Net()
    for steps in (0, 2):
        optimizer = torch.optim.AdamW(net.parameters())
        fired: list[int] = []
        optimizer.register_step_pre_hook(functools.partial(_note, fired))
        trained(net, optimizer, steps)
        fired.clear()
        before = (
            copy.deepcopy(optimizer.state_dict()),
            {name: tensor.clone() for name, tensor in net.state_dict().items()},
            random.getstate(),
            np.random.get_state(legacy=False),  # noqa: NPY002
            torch.get_rng_state(),
        )
        versions = [parameter._version for parameter in net.parameters()]
        collected(model=net, optimizer=optimizer)
        after = optimizer.state_dict()
        assert not fired
        assert torch.equal(torch.get_rng_state(), before[4])
        assert random.getstate() == before[2]
        assert str(np.random.get_state(legacy=False)) == str(before[3])  # noqa: NPY002
        assert after["param_groups"] == before[0]["param_groups"]
        assert after["state"].keys() == before[0]["state"].keys()
        for key, state in after["state"].items():
            assert all(torch.equal(tensor, before[0]["state"][key][word]) for word, tensor in state.items())
        assert all(torch.equal(tensor, before[1][name]) for name, tensor in net.state_dict().items())
        assert [parameter._version for parameter in net.parameters()] == versions


@pytest.mark.parametrize(
    ("things", "word"),
    [
        ({"model": {"a": 1}}, "cannot be tracked"),
        ({"model": 3}, "cannot be tracked"),
        ({"rng": nn.Linear(1, 1)}, "this name"),
        ({"model": nn.Linear}, "cannot be tracked"),
    ],
)
def test_what_cannot_be_tracked_is_refused_at_once(things: dict[str, object], word: str) -> None:
    """With the name and the way out."""
    with pytest.raises(InvalidRequest, match=word) as caught:
        collected(**things)
    assert caught.value.key == next(iter(things))
    assert caught.value.hint


def test_a_name_cannot_be_taken_twice() -> None:
    """Neither by track nor by state."""
    tracking = Tracking()
    tracking.add("model", nn.Linear(1, 1))
    with pytest.raises(InvalidRequest, match="already"):
        tracking.add("model", nn.Linear(1, 1))
    with pytest.raises(InvalidRequest, match="already"):
        tracking.collect({"model": 1})


def test_a_state_dict_hook_that_makes_its_own_tensors_is_refused() -> None:
    """They could be saved, but a restore in place would never reach the module."""
    net = nn.Linear(1, 1)
    cast("Any", net).register_state_dict_post_hook(
        lambda _m, state, prefix, _meta: state.update({prefix + "extra": torch.ones(1)})
    )
    with pytest.raises(InvalidRequest, match=r"model/extra.*neither a parameter nor a buffer"):
        collected(model=net)


def test_a_tracked_things_own_exception_names_it() -> None:
    """S033: the cause is kept."""

    class Broken(Stateful):
        def state_dict(self) -> Any:
            raise ValueError("boom")

    with pytest.raises(CaptureFailedError, match="boom") as caught:
        collected(loader=Broken(None))
    assert caught.value.name == "loader"
    assert isinstance(caught.value.__cause__, ValueError)


def test_extra_state_of_modules_is_kept() -> None:
    """get_extra_state may give anything that can be stored; tensors in it are the rank's own."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": torch.ones(1), "n": 3}

        def set_extra_state(self, state: Any) -> None: ...

    found = collected(model=nn.Sequential(Extra(1, 1)))
    assert "model/0._extra_state/scale" in names(found)
    assert value(found, "model") == {"0._extra_state": {"scale": "tensor:model/0._extra_state/scale", "n": 3}}


def test_s083_ddp_does_not_change_names() -> None:
    """Nor does DDP around a compiled module."""
    store = FakeStore()
    dist.init_process_group("fake", rank=0, world_size=2, store=store)
    try:
        plain = names(collected(model=nn.Linear(2, 2)))
        net = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net.module.weight.grad = torch.ones(2, 2)
        optimizer.step()
        assert names(collected(model=net, optimizer=optimizer)) == [*plain, "optimizer/state/weight/momentum_buffer"]
    finally:
        dist.destroy_process_group()
