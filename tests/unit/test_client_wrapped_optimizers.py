"""Optimizers in optimizers: what one holds elsewhere is saved, or refused by name, or warned of; never lost without a word."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_agent import FakeAgent
from torch import nn, optim
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from ckptd.client import InvalidRequest
from ckptd.client.audit import audit
from ckptd.client.state import Collector

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of its functional optimizers
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
    from torch.distributed.optim.functional_adam import _FunctionalAdam
    from torch.distributed.optim.named_optimizer import _NamedOptimizer

__all__ = ["fake_agent", "make"]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one: torch's own wrappers ask for one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(3, 2)


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        model.zero_grad()
        loss = model(torch.arange(6.0).reshape(2, 3)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class Accelerated(optim.Optimizer):
    """As Accelerate's: no state of its own, everything is passed on to the one in it."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer, self.scaler, self.gradient_state = optimizer, None, {"sync": True}

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Lightning(optim.Optimizer):
    """As Lightning's: a class made on the spot, whose attributes are those of the one in it."""

    def __init__(self, optimizer: optim.Optimizer, strategy: object) -> None:
        self.__dict__ = {key: value for key, value in vars(optimizer).items() if key != "step"}
        self.__class__ = type("Lightning", (Lightning, type(optimizer)), {})
        self._optimizer, self._strategy = optimizer, strategy

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._optimizer.step(closure)


class Lookahead(optim.Optimizer):
    """Slow weights are its own state, the moments those of the one in it."""

    def __init__(self, base: optim.Optimizer, held: str = "attribute") -> None:
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        self.base = base if held == "attribute" else [base] if held == "list" else {"a": (base,)}
        self._step = base.step

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._step()
        for each in self.param_groups:
            for parameter in each["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                slow.lerp_(parameter.detach(), 0.5)


class Chain(optim.Optimizer):
    """Two optimizers, whose states it shows as one."""

    def __init__(self, parts: list[optim.Optimizer]) -> None:
        super().__init__([each for part in parts for each in part.param_groups], {})
        self.param_groups = [each for part in parts for each in part.param_groups]
        self.parts = parts

    @property
    def state(self) -> Any:
        return {key: entries for part in self.parts for key, entries in part.state.items()}

    @state.setter
    def state(self, state: Any) -> None: ...

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def found(**things: object) -> list[tuple[str, str]]:
    made = audit(things, scope_of=Collector().scope_of, world=1)
    return [(finding.kind, finding.name) for finding in made.findings]


def moments(optimizer: Any) -> list[Any]:
    return [copy.deepcopy(entries) for entries in optimizer.state.values()]


def test_an_optimizer_that_is_sharded_by_torch_is_refused_until_its_inner_one_is_tracked(
    make: Make, fake_agent: FakeAgent, group: None
) -> None:
    """The moments are in the inner one; tracked beside it all comes back, and the run goes on as if undisturbed."""
    model = net()
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, lr=0.1)
    assert found(model=model, optimizer=optimizer)[0] == ("untracked_optimizer", "optimizer.optim")
    checkpointer = make()
    checkpointer.save(1, {"model": model, "optimizer": optimizer}).wait()  # nothing to lose yet
    train(model, optimizer)
    with pytest.raises(InvalidRequest, match=r"optimizer\.optim in it has state of its own") as caught:
        checkpointer.save(2, {"model": model, "optimizer": optimizer})
    assert "optimizer_inner=optimizer.optim" in caught.value.hint
    assert caught.value.key == "optimizer"
    assert [request.step for request in fake_agent.failed] == [2]
    optimizer.param_groups[0]["lr"] = 0.03
    checkpointer.save(3, {"model": model, "optimizer": optimizer, "optimizer_inner": optimizer.optim}).wait()
    expected = train(model, optimizer)
    other = net()
    again: Any = ZeroRedundancyOptimizer(other.parameters(), optim.Adam, lr=0.1)
    checkpointer.restore_into({"model": other, "optimizer": again, "optimizer_inner": again.optim})
    assert train(other, again) == expected


def test_state_is_not_restored_to_where_torch_never_looks(make: Make, group: None) -> None:
    """A run that put its optimizer into ZeroRedundancyOptimizer would go on without moments."""
    model = net()
    plain = optim.Adam(model.parameters(), lr=0.1)
    train(model, plain)
    checkpointer = make()
    checkpointer.save(1, {"model": model, "optimizer": plain}).wait()
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, lr=0.1)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(InvalidRequest, match="would never look at the state that is stored"):
        checkpointer.restore_into({"model": model, "optimizer": optimizer})
    assert not model.weight.any()
    checkpointer.restore_into({"model": model, "optimizer": optimizer}, drop=("optimizer",))
    assert torch.equal(model.weight, before)
    checkpointer.restore_into({"model": model, "optimizer": optimizer.optim})
    assert [entries["step"] for entries in optimizer.optim.state.values()] == [3, 3]


@pytest.mark.parametrize("held", ["attribute", "list", "nested"])
def test_an_inner_optimizer_is_found_wherever_it_is_held(make: Make, held: str) -> None:
    """In an attribute, a list, or a tuple in a dict; refused by its path, and whole when it is tracked."""
    path = {"attribute": ".base", "list": ".base[0]", "nested": ".base['a'][0]"}[held]
    model = net()
    base = optim.Adam(model.parameters(), lr=0.1)
    optimizer = Lookahead(base, held)
    train(model, optimizer)
    checkpointer = make()
    with pytest.raises(InvalidRequest) as caught:
        checkpointer.save(1, {"model": model, "optimizer": optimizer})
    assert f"optimizer{path} in it has state" in caught.value.message
    checkpointer.save(2, {"model": model, "optimizer": optimizer, "base": base}).wait()
    expected = train(model, optimizer)
    other = net()
    inner = optim.Adam(other.parameters(), lr=0.1)
    again = Lookahead(inner, held)
    checkpointer.restore_into({"model": other, "optimizer": again, "base": inner})
    assert train(other, again) == expected
    assert [set(entries) for entries in again.state.values()] == [{"slow"}] * 2


@pytest.mark.filterwarnings("ignore:`TorchScript` support:DeprecationWarning")
def test_a_functional_optimizer_in_an_optimizer_is_found_by_its_form(make: Make) -> None:
    """Torch's cannot be tracked by themselves: the way out is another one."""
    model = net()
    parameters: list[torch.Tensor] = list(model.parameters())
    functional: Any = _FunctionalAdam(parameters, lr=0.1)
    functional.step([torch.ones_like(parameter) for parameter in parameters])
    optimizer: Any = optim.SGD(parameters, lr=0.1)
    optimizer.functional = functional
    with pytest.raises(InvalidRequest, match=r"optimizer\.functional in it has state") as caught:
        make().save(1, {"model": model, "optimizer": optimizer})
    assert "an object whose state_dict()" in caught.value.hint


def test_what_another_tracked_thing_saves_of_it_is_not_lost(make: Make) -> None:
    """A script that saves the inner one by an object of its own goes on as before."""
    model = net()
    base = optim.Adam(model.parameters(), lr=0.1)
    optimizer = Lookahead(base)
    train(model, optimizer)

    class Base:
        def state_dict(self) -> dict[str, Any]:
            return base.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            base.load_state_dict(state)

    make().save(1, {"model": model, "optimizer": optimizer, "base": Base()}).wait()


@pytest.mark.parametrize("kind", ["accelerated", "lightning", "named", "local", "chain", "stateless"])
def test_wrappers_that_show_the_state_of_the_one_in_them_go_on_working(
    make: Make, group: None, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is refused; state comes back bit for bit, and the run goes on as if undisturbed."""

    def build() -> tuple[nn.Linear, Any]:
        model = net()
        inner = optim.Adam(model.parameters(), lr=0.1)
        if kind == "accelerated":
            return model, Accelerated(Accelerated(inner))
        if kind == "lightning":
            return model, Lightning(inner, {"optimizers": [inner]})
        if kind == "named":
            return model, _NamedOptimizer(model.named_parameters(), optim.Adam, lr=0.1)  # type: ignore[arg-type]
        if kind == "local":
            return model, PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2, warmup_steps=100))
        if kind == "stateless":
            return model, Lookahead(optim.SGD(model.parameters(), lr=0.01))
        parts: list[optim.Optimizer] = [
            optim.Adam([model.weight], lr=0.1),
            optim.SGD([model.bias], lr=0.1, momentum=0.9),
        ]
        return model, Chain(parts)

    model, optimizer = build()
    train(model, optimizer)
    checkpointer = make()
    with caplog.at_level(logging.WARNING, "ckptd.client"):
        checkpointer.save(1, {"model": model, "optimizer": optimizer}).wait()
    said = "own_state_dict" if kind == "local" else ""
    assert [finding for finding, _ in found(model=model, optimizer=optimizer)] == [said][: bool(said)]
    assert len(caplog.records) == bool(said)
    before, expected = moments(optimizer), train(model, optimizer)
    other, again = build()
    train(other, again, steps=1)
    checkpointer.restore_into({"model": other, "optimizer": again})
    for mine, theirs in zip(moments(again), before, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in mine)
    assert train(other, again) == expected


def test_state_is_not_put_where_it_is_lost_at_once(make: Make) -> None:
    """A fresh chain shows a dict made anew: what would be restored into it is refused before anything is touched."""
    model = net()
    parts = [optim.Adam([model.weight], lr=0.1), optim.SGD([model.bias], lr=0.1, momentum=0.9)]
    chain = Chain([*parts])
    train(model, chain)
    checkpointer = make()
    checkpointer.save(1, {"model": model, "optimizer": chain}).wait()
    with torch.no_grad():
        model.weight.zero_()
    for part in parts:
        part.state.clear()
    with pytest.raises(InvalidRequest, match=r"its \.state is made anew each time") as caught:
        checkpointer.restore_into({"model": model, "optimizer": chain})
    assert "track the optimizers in it" in caught.value.hint
    assert not model.weight.any()


def test_what_an_optimizer_keeps_beside_its_state_is_found() -> None:
    """Tensors and objects in its attributes, what its own state_dict() adds, and what a hook adds to torch's."""
    model = net()

    class Keeps(optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.masters = [{"params": [torch.zeros(2)]}]
            self.views = [parameter.detach().view(-1) for parameter in self.param_groups[0]["params"]]
            self.scaler = torch.amp.GradScaler(enabled=False)
            self.cached = torch.empty(0)
            self._overflow_buffer = torch.zeros(1, dtype=torch.int32)

    class More(optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "rounds": 3}

    class Raises(optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not consolidated")

    class Copies(optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "state": {0: {"hidden": torch.ones(1)}}}

    hooked = optim.SGD(model.parameters(), lr=0.1)
    hooked.register_state_dict_post_hook(lambda _, state: {**state, "rounds": 3})
    assert found(model=model, optimizer=Keeps(model.parameters())) == [
        ("unsaved_tensor", "optimizer.masters"),
        ("unsaved_object", "optimizer.scaler"),
    ]
    others = [kind(model.parameters(), lr=0.1) for kind in (More, Raises, Copies)]
    for optimizer in (*others, hooked):
        assert found(model=model, optimizer=optimizer) == [("own_state_dict", "optimizer")]


def test_optimizers_that_step_in_the_backward_pass_are_found() -> None:
    """Torch hangs them on the parameters; those that are tracked are no finding."""
    model = net()
    _apply_optimizer_in_backward(optim.SGD, model.parameters(), {"lr": 0.1})
    held: list[Any] = [vars(parameter)["_in_backward_optimizers"][0] for parameter in model.parameters()]
    assert found(model=model) == [
        ("untracked_optimizer", "model/weight._in_backward_optimizers[0]"),
        ("untracked_optimizer", "model/bias._in_backward_optimizers[0]"),
    ]
    assert found(model=model, weight=held[0], bias=held[1]) == []


def test_a_schedule_of_what_a_tracked_wrapper_stands_for_is_no_finding() -> None:
    """It is bound to the inner one, whose state and groups the wrapper shows."""
    model = net()
    inner = optim.SGD(model.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.ConstantLR(inner)
    assert found(model=model, optimizer=Accelerated(inner), scheduler=scheduler) == []
