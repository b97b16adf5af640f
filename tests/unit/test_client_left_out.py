"""A trained parameter that `state_dict()` leaves out is refused; a frozen base, and what something else saves, is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

from ckptd.client import InvalidRequest
from ckptd.client.audit import audit
from ckptd.client.state import Collector

__all__ = ["fake_agent", "make"]


class Adapted(nn.Module):
    """A base, an adapter beside it, and a hook that leaves out what begins with one of `out`."""

    def __init__(self, *out: str) -> None:
        super().__init__()
        self.base = nn.Linear(2, 3)
        self.adapter = nn.ParameterDict({"lora": torch.zeros(5)})
        self.register_buffer("seen", torch.zeros(1))

        def leave_out(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            for key in list(state):
                if key.removeprefix(prefix).startswith(out):
                    del state[key]

        self._register_state_dict_hook(leave_out)  # type: ignore[no-untyped-call]


def left_out(**things: object) -> list[str]:
    return [finding.name for finding in audit(things, scope_of=Collector(()).scope_of, world=1).of("left_out")]


def test_a_trained_parameter_that_is_left_out_is_refused(make: Make) -> None:
    """By name, whether an optimizer owns it or not; the audit names it too."""
    model = Adapted("adapter")
    assert left_out(model=model) == ["model/adapter.lora"]
    checkpointer = make(audit="off")
    checkpointer.track(model=model, optimizer=torch.optim.Adam(model.parameters()))
    with pytest.raises(InvalidRequest, match=r"model/adapter\.lora: a trained parameter .* leaves out") as caught:
        checkpointer.save(1)
    assert "requires_grad_(False)" in caught.value.hint
    model.adapter.requires_grad_(False)
    checkpointer.save(1).wait()


def test_one_that_is_trained_from_now_on_is_refused_from_now_on(make: Make) -> None:
    """Its keys and its tensors are those of the save before."""
    model = Adapted("base")
    model.base.requires_grad_(False)
    checkpointer = make(audit="off")
    checkpointer.track(model=model)
    checkpointer.save(1).wait()
    checkpointer.save(2).wait()
    model.base.bias.requires_grad_()
    with pytest.raises(InvalidRequest, match=r"model/base\.bias: a trained parameter"):
        checkpointer.save(3)


def test_a_frozen_base_may_be_left_out_and_is_told(make: Make) -> None:
    """As adapters of large models do; a persistent buffer likewise, and only a finding says so."""
    model = Adapted("base", "seen")
    model.base.requires_grad_(False)
    assert left_out(model=model) == ["model/base.weight", "model/base.bias", "model/seen"]
    make(audit="off").save(1, {"model": model}).wait()


class Copies:
    """Saves copies of tensors, on the host, as adapters' own functions give them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return {key: value.clone() for key, value in self.module.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state)


@pytest.mark.parametrize("how", ["module", "value", "copies"])
def test_what_something_else_saves_is_not_refused(make: Make, how: str) -> None:
    """A module of its own, a value, or an object that gives copies."""
    model = Adapted("adapter")
    others = {"module": model.adapter, "value": {"x": [model.adapter["lora"]]}, "copies": Copies(model.adapter)}
    assert how == "copies" or not left_out(model=model, other=others[how])
    make(audit="off").save(1, {"model": model, "other": others[how]}).wait()


def test_modules_that_give_all_they_have_are_left_alone(make: Make) -> None:
    """Tied weights, parametrizations, buffers that are not persistent, wrappers."""
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.BatchNorm1d(2), "d": nn.LSTM(2, 2)})
    model["b"].weight = model["a"].weight
    parametrizations.weight_norm(model["a"], "bias", dim=0)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    model["d"] = checkpoint_wrapper(model["d"])
    assert not left_out(model=model)
    make(audit="off").save(1, {"model": model}).wait()
