"""Leaving tracked things out with `drop`, alone and together with a choice, against an agent in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from fixtures.tracked_things import Counter
from torch import nn

from ckptd.client import Checkpointer, InvalidRequest

__all__ = ["fake_agent", "make"]


def linear(value: float) -> nn.Linear:
    made = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        made.weight.fill_(value)
    return made


def opened(make: Make, **things: Any) -> Checkpointer:
    checkpointer = make()
    checkpointer.track(**things)
    return checkpointer


def saved(make: Make) -> None:
    checkpointer = opened(make, model=linear(1), head=linear(1), loader=Counter(1))
    checkpointer.save(5).wait()
    checkpointer.close()


def test_what_is_dropped_stays_and_is_not_unexpected(make: Make) -> None:
    """On the mesh that saved too: a module's tensors, an object and the generators, with strict on."""
    saved(make)
    model, head, loader, before = linear(2), linear(2), Counter(2), torch.get_rng_state()
    restored = opened(make, model=model, head=head, loader=loader).restore(drop=("head", "loader", "rng"))
    assert restored is not None
    assert (model.weight[0, 0].item(), head.weight[0, 0].item(), loader.at) == (1, 2, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert restored.dropped == ("head", "loader", "rng")
    assert (restored.missing, restored.unexpected, restored.left_out) == ((), (), ())


def test_drop_wins_over_only(make: Make) -> None:
    """What is chosen and dropped is dropped: it stands in `dropped` and not in `left_out`."""
    saved(make)
    model, head, loader = linear(2), linear(2), Counter(2)
    again = opened(make, model=model, head=head, loader=loader)
    restored = again.restore(only=["*", "loader", "head/weight"], drop=("loader", "head"))
    assert restored is not None
    assert (model.weight[0, 0].item(), head.weight[0, 0].item(), loader.at) == (1, 2, 2)
    assert (restored.dropped, restored.left_out, restored.unexpected) == (("loader", "head"), (), ())
    restored = again.restore(only="head", drop=("loader",))
    assert restored is not None
    assert (head.weight[0, 0].item(), loader.at) == (1, 2)
    assert restored.left_out == ("model/weight", "rng")


def test_drop_speaks_of_names_here(make: Make) -> None:
    """That is, after `names`; a name that only the step knows is refused."""
    saved(make)
    model, other, position = linear(2), linear(2), Counter(2)
    again = opened(make, model=model, other=other, position=position)
    names = {"head/": "other/", "loader": "position"}
    with pytest.raises(InvalidRequest, match="drop: loader is not tracked"):
        again.restore(names=names, drop=("loader",))
    restored = again.restore(names=names, drop=("position", "other"))
    assert restored is not None
    assert (model.weight[0, 0].item(), other.weight[0, 0].item(), position.at) == (1, 2, 2)
    assert restored.unexpected == ()


def test_tensors_of_a_module_can_be_dropped_singly(make: Make) -> None:
    """By name or pattern; they are neither restored nor missing, unexpected or left out, with strict on."""

    def normed(value: float) -> nn.Module:
        made = nn.ModuleDict({"fc": linear(value), "norm": nn.BatchNorm1d(2)})
        for buffer in made.buffers():
            buffer.fill_(value)
        return made

    checkpointer = opened(make, model=normed(1))
    checkpointer.save(5).wait()
    checkpointer.close()
    model = normed(2)
    again = opened(make, model=model, loader=Counter(2))
    restored = again.restore(drop=("model/*.running_*", "model/fc.weight", "loader"))
    assert restored is not None
    assert {name: tensor.flatten()[0].item() for name, tensor in model.state_dict().items()} == {
        "fc.weight": 2,
        "norm.weight": 1,
        "norm.bias": 0,
        "norm.running_mean": 2,
        "norm.running_var": 2,
        "norm.num_batches_tracked": 1,
    }
    assert (restored.missing, restored.unexpected, restored.left_out) == ((), (), ())


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("loader/at", "'loader/at' is a part of 'loader', which is restored as a whole or not at all"),
        ("other/x", "drop: other/x is not tracked"),
        ("model/weihgt", "drop: 'model/weihgt' fits no name that is stored or tracked"),
    ],
)
def test_a_drop_of_nothing_is_refused(make: Make, drop: str, message: str) -> None:
    """A slip of the pen must not restore what was to be kept."""
    saved(make)
    model = linear(2)
    again = opened(make, model=model, head=linear(2), loader=Counter(2))
    with pytest.raises(InvalidRequest, match=message) as caught:
        again.restore(drop=(drop,))
    assert model.weight[0, 0].item() == 2
    if "weihgt" in drop:
        assert caught.value.hint == "near it: model/weight"


def test_of_tied_tensors_both_are_dropped_or_none(make: Make) -> None:
    """One memory cannot be kept and restored at once."""

    def tied() -> nn.Module:
        made = nn.ModuleDict({"a": linear(1), "b": linear(1)})
        made["b"].weight = made["a"].weight
        return made

    checkpointer = opened(make, model=tied())
    checkpointer.save(5).wait()
    checkpointer.close()
    with pytest.raises(InvalidRequest, match=r"drop: model/b\.weight shares memory with model/a\.weight"):
        opened(make, model=tied()).restore(drop=("model/b.weight",))
    assert opened(make, model=tied()).restore(drop=("model/a.weight", "model/b.weight")) is not None
