"""Extra state of modules: keys that are on one side only, hooks that move them, and wrappers around whoever takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_agent import FakeAgent
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckptd.client import InvalidRequest
from ckptd.client.resharding import Gathered
from ckptd.client.stored import Elsewhere, Stored
from ckptd.client.tracking import Tracking

__all__ = ["fake_agent", "make"]


class Calls(nn.Module):
    """Counts calls, in its extra state, with a tensor there."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.t = at, torch.tensor([float(at)])

    def get_extra_state(self) -> dict[str, Any]:
        return {"at": self.at, "t": self.t}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.at, self.t = state["at"], state["t"]


def net(at: int, *names: str) -> nn.ModuleDict:
    return nn.ModuleDict({**{name: Calls(at) for name in names}, "linear": nn.Linear(1, 1)})


def at(module: nn.ModuleDict) -> dict[str, tuple[int, float]]:
    return {name: (each.at, each.t.item()) for name, each in module.items() if isinstance(each, Calls)}


def saved(make: Make, model: nn.Module) -> Any:
    checkpointer = make(audit="off")
    checkpointer.save(1, {"model": model}).wait()
    return checkpointer


@pytest.mark.parametrize(
    ("here", "missing", "unexpected"), [("a", [], ["b"]), ("abc", ["c"], []), ("c", ["c"], ["a", "b"])]
)
def test_keys_of_one_side_are_told(make: Make, here: str, missing: list[str], unexpected: list[str]) -> None:
    """strict: an error by name before anything is touched; else what fits is taken, and the rest told."""
    checkpointer = saved(make, net(1, "a", "b"))
    model = net(7, *here)
    weight = model.get_parameter("linear.weight").detach().clone()
    with pytest.raises(InvalidRequest, match=r"does not fit.*model/[abc]\._extra_state"):
        checkpointer.restore_into({"model": model})
    assert at(model) == dict.fromkeys(here, (7, 7.0))
    assert torch.equal(model.get_parameter("linear.weight"), weight)
    restored = checkpointer.restore_into({"model": model}, strict=False)
    assert restored is not None
    assert at(model) == {name: (1, 1.0) if name in "ab" else (7, 7.0) for name in here}
    assert restored.missing == tuple(f"model/{name}._extra_state" for name in missing)
    assert [name for name in restored.unexpected if not name.endswith("/t")] == [
        f"model/{name}._extra_state" for name in unexpected
    ]


def test_a_key_without_tensors_is_told_too(make: Make) -> None:
    """Nothing but the key itself says that it is there."""

    class Number(Calls):
        def get_extra_state(self) -> Any:
            return 1

        def set_extra_state(self, state: Any) -> None:
            self.at = state

    checkpointer = saved(make, nn.ModuleDict({"a": Number(1), "b": Number(1)}))
    for names, what in (("a", "only in the snapshot: model/b"), ("abc", "missing in the snapshot: model/c")):
        with pytest.raises(InvalidRequest, match=what):
            checkpointer.restore_into({"model": nn.ModuleDict({name: Number(7) for name in names})})


def test_keys_that_are_not_chosen_or_dropped_are_no_difference(make: Make) -> None:
    """A part of a module goes with its extra state; what is dropped keeps it."""
    checkpointer = saved(make, net(1, "a", "b"))
    model = net(7, "a", "c")
    assert checkpointer.restore_into({"model": model}, only=["model/a", "model/linear"]).missing == ()
    assert at(model) == {"a": (1, 1.0), "c": (7, 7.0)}
    with pytest.raises(InvalidRequest, match=r"1 missing in the snapshot: model/c\._extra_state"):
        checkpointer.restore_into({"model": model}, only=["model/c"])
    with pytest.raises(InvalidRequest, match=r"1 only in the snapshot: model/b\._extra_state"):
        checkpointer.restore_into({"model": nn.ModuleDict({"b": nn.Identity()})}, only=["model/b"])
    model = net(7, "a", "b")
    checkpointer.restore_into({"model": model}, drop=("model/b._extra_state",))
    assert at(model) == {"a": (1, 1.0), "b": (7, 7.0)}


def test_a_hook_may_move_extra_state(make: Make) -> None:
    """It gets all stored keys, with their tensors; keys are compared with what it returns."""
    checkpointer = saved(make, net(1, "a", "b"))
    checkpointer.on_load("model", lambda value: {key.replace("b.", "c."): item for key, item in value.items()})
    model = net(7, "a", "c")
    assert checkpointer.restore_into({"model": model}).missing == ()
    assert at(model) == {"a": (1, 1.0), "c": (1, 1.0)}
    checkpointer.on_load("model", lambda _value: None)
    with pytest.raises(InvalidRequest, match="2 missing in the snapshot"):
        checkpointer.restore_into({"model": model})


def test_of_another_mesh_keys_are_compared_where_one_rank_is_all() -> None:
    """With several, another one may take what is not here."""
    held = Tracking()
    held.add("model", nn.ModuleDict({"a": nn.Identity(), "b": nn.Identity()}))
    value = held.collect({"v": {"a._extra_state": 1, "b._extra_state": 2}}).objects
    data = dict(value)["v"]

    class Number(nn.Module):
        def get_extra_state(self) -> Any:
            return 7

        def set_extra_state(self, state: Any) -> None: ...

    for world, left in ((1, ("model/b._extra_state",)), (2, ())):
        elsewhere = Elsewhere(
            coordinates={0: {"dp": 0}, 1: {"dp": 1}},
            objects={0: ["model"], 1: ["model"]},
            own_rows={},
            step=7,
            here={"dp": 0},
            world=world,
        )
        tracking = Tracking()
        tracking.add("model", nn.ModuleDict({"a": Number(), "c": Number()}))
        restoring = tracking.restoring(Stored((), (), {}, elsewhere), None, drop=("rng",))
        restoring.decode(dict.fromkeys(restoring.targets.objects, data))
        told = restoring.with_extra((), (), strict=False, step=7)
        assert told == (("model/c._extra_state",), left)
        assert Gathered(elsewhere, restoring.targets, {("model", 0): data}).keys("model") == [
            "a._extra_state",
            "b._extra_state",
        ]


def test_one_module_under_two_names_is_given_one_value(make: Make) -> None:
    """It was two where it was saved: refused where their values differ, before anything is touched."""
    one = Calls(7)
    here = nn.ModuleDict({"a": one, "b": one})
    checkpointer = saved(make, nn.ModuleDict({"a": Calls(1), "b": Calls(2)}))
    with pytest.raises(InvalidRequest, match=r"model/b\._extra_state: stored apart from model/a\._extra_state"):
        checkpointer.restore_into({"model": here})
    assert one.at == 7
    checkpointer.restore_into({"model": here}, drop=("model/b._extra_state",))
    assert one.at == 1
    checkpointer.save(2, {"model": nn.ModuleDict({"a": Calls(3), "b": Calls(3)})}).wait()
    checkpointer.restore_into({"model": here})
    assert one.at == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wraps", [1, 2])
def test_extra_state_goes_through_wrappers(make: Make, wraps: int) -> None:
    """Activation checkpointing gives the wrapped module's names as its own, and takes nothing itself."""

    def wrapped(value: int) -> nn.Module:
        inner: nn.Module = Calls(value)
        for _ in range(wraps):
            inner = checkpoint_wrapper(inner)
        outer: nn.Module = nn.ModuleDict({"a": inner, "linear": nn.Linear(1, 1)})
        for _ in range(wraps):
            outer = checkpoint_wrapper(outer)
        return nn.ModuleDict({"outer": outer, "b": Calls(value)})

    saved(make, nn.ModuleDict({"outer": net(1, "a"), "b": Calls(1)})).close()
    model = wrapped(7)
    checkpointer = make(audit="off")
    checkpointer.restore_into({"model": model})
    counts = {name: module.at for name, module in model.named_modules() if isinstance(module, Calls)}
    assert list(counts.values()) == [1, 1], counts


def test_extra_state_that_nobody_takes_is_refused_before_the_restore(make: Make, fake_agent: FakeAgent) -> None:
    """By name, with the way out; no tensor is touched, and all ranks hear of it."""

    class Half(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

    checkpointer = saved(make, nn.ModuleDict({"a": Half(1, 1)}))
    model = nn.ModuleDict({"a": Half(1, 1)})
    weight = model.get_parameter("a.weight").detach().clone()
    with pytest.raises(InvalidRequest, match=r"model/a\._extra_state: .*Half .* no set_extra_state") as caught:
        checkpointer.restore_into({"model": model})
    assert 'drop=("model/a._extra_state",)' in caught.value.hint
    assert torch.equal(model.get_parameter("a.weight"), weight)
    assert len(fake_agent.refused) == 1
    checkpointer.restore_into({"model": model}, drop=("model/a._extra_state",))
    assert not torch.equal(model.get_parameter("a.weight"), weight)
