"""What is not restored keeps its value, also where what is restored shares a part of its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from fixtures.tracked_things import named
from torch import nn

from ckptd.client import InvalidRequest

__all__ = ["fake_agent", "make"]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row": lambda base: base[0],
    "transposed": lambda base: base.t(),
    "integers": lambda base: base.view(torch.int32),
    "expanded": lambda base: base[:1, 0].expand(4),
}


@pytest.mark.parametrize("chosen", ["base", "view"])
@pytest.mark.parametrize("kind", VIEWS)
def test_what_is_not_chosen_stays(make: Make, kind: str, chosen: str) -> None:
    """Within one module: the other one of two that share memory, as the same object."""
    base = torch.arange(4.0).view(2, 2)
    checkpointer = make(audit="off")
    checkpointer.save(1, {"model": named(base=base + 20, view=VIEWS[kind](base + 20).clone())}).wait()
    live = {"base": base, "view": VIEWS[kind](base)}
    before = {name: tensor.clone() for name, tensor in live.items()}
    model = named(**live)
    restored = checkpointer.restore_into({"model": model}, only=[f"model/{chosen}"])
    assert restored is not None
    for name, tensor in live.items():
        assert model.get_buffer(name) is tensor
        stored = torch.arange(4.0).view(2, 2) + 20
        want = {"base": stored, "view": VIEWS[kind](stored)}[name] if name == chosen else before[name]
        assert torch.equal(tensor, want), name


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "module": lambda view: named(row=view),
    "value": lambda view: {"row": view},
}


@pytest.mark.parametrize("how", [{"only": ["model"]}, {"drop": ("other",)}], ids=["only", "drop"])
@pytest.mark.parametrize("kind", HOLDERS)
def test_a_thing_that_is_not_restored_stays(make: Make, kind: str, how: dict[str, Any]) -> None:
    """Another module, or a plain value, that holds a view of what is restored."""
    stored = torch.full((2, 2), 20.0)
    checkpointer = make(audit="off")
    checkpointer.save(1, {"model": named(base=stored), "other": HOLDERS[kind](stored[0].clone())}).wait()
    base = torch.zeros(2, 2)
    view = base[0]
    state = {"model": named(base=base), "other": HOLDERS[kind](view)}
    checkpointer.restore_into(state, **how)
    assert view.tolist() == [0, 0]
    assert state["model"].get_buffer("base").tolist() == [[20, 20], [20, 20]]


@pytest.mark.parametrize("how", [{"only": ["model"]}, {"only": ["encoder"]}, {"drop": ("encoder",)}])
def test_a_tensor_that_is_tracked_twice_goes_with_either(make: Make, how: dict[str, Any]) -> None:
    """A part of a model, tracked by itself too: one tensor cannot both stay and be restored, and nothing is taken apart."""

    def made(value: float) -> tuple[nn.Module, nn.Module]:
        encoder = named(w=torch.full((2,), value))
        return nn.ModuleDict({"encoder": encoder}), encoder

    stored, part = made(5.0)
    checkpointer = make(audit="off")
    checkpointer.save(1, {"model": stored, "encoder": part}).wait()
    model, encoder = made(0.0)
    tensor = encoder.get_buffer("w")
    checkpointer.restore_into({"model": model, "encoder": encoder}, **how)
    assert encoder.get_buffer("w") is tensor
    assert tensor.tolist() == [5, 5]


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_could_not_be_restored_can_be_left_out(make: Make) -> None:
    """A lazy module is not read: `drop` leaves it as it is; asked for, it is refused."""
    checkpointer = make(audit="off")
    checkpointer.save(1, {"model": named(base=torch.ones(2)), "lazy": nn.Linear(1, 1)}).wait()
    state = {"model": named(base=torch.zeros(2)), "lazy": nn.LazyLinear(1)}
    with pytest.raises(InvalidRequest, match="lazy/weight"):
        checkpointer.restore_into(state)
    checkpointer.restore_into(state, drop=("lazy",))
    assert state["model"].get_buffer("base").tolist() == [1, 1]
