"""A save that finds everything as before does not take it apart again, and nothing that changed is missed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import nn

from ckptd.client import sharding, state
from ckptd.client.errors import InvalidRequest
from ckptd.client.state import Collected
from ckptd.client.tracking import Tracking


class Job:
    """A module with a tie, a frozen parameter and a buffer; an optimizer that also owns a parameter of nobody's."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
        self.net[2].weight = self.net[0].weight
        self.net[1].bias.requires_grad_(False)
        self.loose = nn.Parameter(torch.ones(2))
        self.empty = nn.Parameter(torch.ones(0))
        self.net.register_parameter("empty", self.empty)
        self.optimizer = torch.optim.Adam([{"params": list(self.net.parameters())}, {"params": [self.loose]}])
        for number, parameter in enumerate([*self.net.parameters(), self.loose]):
            parameter.grad = torch.full_like(parameter, float(number)) if parameter.requires_grad else None
        self.optimizer.step()
        self.tracking = self.tracked()

    def tracked(self) -> Tracking:
        """Return a tracking that remembers nothing."""
        tracking = Tracking()
        tracking.add("model", self.net)
        tracking.add("optimizer", self.optimizer)
        return tracking

    @property
    def weight(self) -> nn.Parameter:
        """The tied parameter."""
        return cast("nn.Parameter", self.net[0].weight)

    @property
    def moments(self) -> dict[str, object]:
        """The weight's state."""
        entries: dict[str, object] = self.optimizer.state[self.weight]
        return entries


def assert_same(found: Collected, expected: Collected) -> None:
    assert found.layout.rows == expected.layout.rows
    assert found.layout.digest == expected.layout.digest
    assert found.layout.aliases == expected.layout.aliases
    assert list(found.objects) == list(expected.objects)
    assert len(found.views) == len(expected.views)
    for one, other in zip(found.views, expected.views, strict=True):
        assert (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
            *(other.data_ptr(), other.shape),
            *(other.stride(), other.dtype),
        )


def _replace_parameter(job: Job) -> None:
    job.net[1].weight = nn.Parameter(torch.zeros(3))


def _untie(job: Job) -> None:
    job.net[2].weight = nn.Parameter(job.weight.detach().clone())


def _untie_data(job: Job) -> None:
    job.net[2].weight = nn.Parameter(job.weight.detach())  # tied still, as another object


def _tie_by_data(job: Job) -> None:
    job.net[1].running_mean.data = job.net[1].running_var.data


def _other_group(job: Job) -> None:
    first, second = job.optimizer.param_groups
    second["params"].append(first["params"].pop())


def _state_elsewhere(job: Job) -> None:
    job.moments["exp_avg"] = torch.full((3, 3), 7.0)


def _loose_frozen(job: Job) -> None:
    job.loose.requires_grad_(False)


CHANGES: dict[str, Callable[[Job], object]] = {
    "nothing": lambda _: None,
    "values": lambda job: job.net[1].get_buffer("running_mean").add_(1),
    "a step of training": lambda job: job.optimizer.step(),
    "data of a parameter replaced": lambda job: setattr(job.net[1].weight, "data", torch.zeros(3)),
    "data of another shape": lambda job: setattr(job.net[1].weight, "data", torch.zeros(4)),
    "data of another dtype": lambda job: setattr(job.net[1].weight, "data", torch.zeros(3, dtype=torch.float64)),
    "data of other strides": lambda job: setattr(job.weight, "data", job.weight.data.t()),
    "parameter replaced": _replace_parameter,
    "parameter frozen": lambda job: job.weight.requires_grad_(False),
    "parameter thawed": lambda job: job.net[1].bias.requires_grad_(True),
    "parameter of no module frozen": _loose_frozen,
    "buffer replaced": lambda job: setattr(job.net[1], "running_mean", torch.full((3,), 5.0)),
    "buffer added": lambda job: job.net.register_buffer("more", torch.zeros(2)),
    "buffer gone": lambda job: job.net[1].__delattr__("running_mean"),
    "weights no longer tied": _untie,
    "weights tied by another object": _untie_data,
    "buffers tied by address": _tie_by_data,
    "state key added": lambda job: job.moments.update(extra=torch.zeros(3, 3)),
    "state key gone": lambda job: job.moments.pop("exp_avg"),
    "state keys in another order": lambda job: job.moments.update(exp_avg=job.moments.pop("exp_avg")),
    "state replaced": _state_elsewhere,
    "state of another shape": lambda job: job.moments.update(exp_avg=torch.zeros(2)),
    "state of another dtype": lambda job: job.moments.update(exp_avg=torch.zeros(3, 3, dtype=torch.bfloat16)),
    "state became a number": lambda job: job.moments.update(step=3),
    "state of a parameter gone": lambda job: job.optimizer.state.pop(job.weight),
    "state of a parameter emptied": lambda job: job.moments.clear(),
    "state became per-rank": lambda job: job.moments.update(exp_avg=sharding.PerRank(torch.zeros(3, 3))),
    "all state gone": lambda job: job.optimizer.state.clear(),
    "parameter in another group": _other_group,
    "group added": lambda job: job.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    "hyperparameter changed": lambda job: job.optimizer.param_groups[0].update(lr=0.5),
    "hyperparameter became a tensor": lambda job: job.optimizer.param_groups[0].update(lr=torch.tensor(0.5)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changed_between_saves_is_seen(change: Callable[[Job], object]) -> None:
    """After any change, and after the one before it was undone by nobody, a save equals that of a new process."""
    job = Job()
    for _ in range(2):
        assert_same(job.tracking.collect(None), job.tracked().collect(None))
    change(job)
    for _ in range(2):
        assert_same(job.tracking.collect(None), job.tracked().collect(None))


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view], ids=["conjugated", "negated"])
def test_a_tie_that_became_a_conjugate_or_negated_view_is_none_any_more(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """It has the address, the strides and the dtype of before, and other values."""
    net = nn.ParameterDict({name: nn.Parameter(torch.ones(2, dtype=torch.complex64)) for name in ("a", "b")})
    net["b"].data = net["a"].data
    tracking, fresh = Tracking(), Tracking()
    tracking.add("model", net)
    fresh.add("model", net)
    assert len(tracking.collect(None).layout.aliases.alias) == 1
    net["b"].data = view(net["a"].data)
    found = tracking.collect(None)
    assert not found.layout.aliases.alias
    assert_same(found, fresh.collect(None))


REFUSED: dict[str, Callable[[Job], object]] = {
    "sparse state": lambda job: job.moments.update(exp_avg=torch.zeros(3, 3).to_sparse()),
    "meta state": lambda job: job.moments.update(exp_avg=torch.zeros(3, 3, device="meta")),
    "state of nobody": lambda job: job.optimizer.state[nn.Parameter(torch.zeros(1))].update(sum=torch.zeros(1)),
    "parameter without bytes": lambda job: job.net.to("meta"),
    "nested state": lambda job: job.moments.update(
        exp_avg=torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged)
    ),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_stored_is_refused_at_the_next_save(change: Callable[[Job], object]) -> None:
    """What was stored before and no longer can be is refused, at every save from then on."""
    job = Job()
    job.tracking.collect(None)
    change(job)
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            job.tracking.collect(None)


def test_an_unchanged_save_takes_nothing_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save of the same tensors asks for no pieces of any, and its layout is the same object."""
    job = Job()
    first = job.tracking.collect(None)
    monkeypatch.setattr(state, "pieces_of", None)
    monkeypatch.setattr(state.Collector, "pieces", None)
    job.optimizer.step()
    assert job.tracking.collect(None).layout is first.layout


def test_a_name_used_twice_is_still_refused_when_nothing_changed() -> None:
    """A state of the caller that takes a tracked tensor's name is refused although the module is as before."""
    job = Job()
    job.tracking.collect(None)
    job.tracking.collect(None)
    other = nn.ParameterList([nn.Parameter(torch.zeros(1))])
    job.tracking.add("other", other)
    job.tracking.collect(None)
    second = job.tracked()
    with pytest.raises(InvalidRequest, match="tracked as this already"):
        second.add("model", other)


def test_the_memory_keeps_no_tensor_alive() -> None:
    """A buffer that was replaced after a save is freed at once, not at the next save."""
    job = Job()
    job.tracking.collect(None)
    gone = weakref.ref(job.net[1].running_mean)
    job.net[1].running_mean = torch.zeros(3)
    assert gone() is None
