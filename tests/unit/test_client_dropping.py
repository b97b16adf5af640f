"""Leaving tracked things out with `drop`, alone and together with a choice, against an agent in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from torch import nn

from ckptd.client import Checkpointer, InvalidRequest
from ckptd.client.mapping import Renaming
from ckptd.client.selecting import Choice, ChosenTargets
from ckptd.client.stored import Elsewhere, Stored

__all__ = ["fake_agent", "make"]


class Counter:
    """A loader's position."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


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


@pytest.mark.parametrize(
    "chosen",
    [Choice(only=("model",)), Choice(names=Renaming({"a/": "b/"})), Choice(cast=True)],
    ids=["only", "names", "cast"],
)
def test_a_choice_of_a_step_of_another_mesh_is_refused(chosen: Choice) -> None:
    """When targets are made, so before anything is asked for; the error says what works."""
    elsewhere = Elsewhere(coordinates={0: {"dp": 0}}, objects={0: []}, own_rows={}, step=7, here={"dp": 0}, world=1)
    scope_of: Callable[[str, object, int], int] = lambda _name, _leaf, default: default  # noqa: E731 - typed
    with pytest.raises(InvalidRequest, match="only=, names= and cast= need the mesh that saved") as caught:
        ChosenTargets(
            Stored([], [], {}, elsewhere), scope_of, chosen=chosen, modules=["model"], others=[], optimizers={}
        )
    assert "drop=" in caught.value.hint
    assert caught.value.step == 7
