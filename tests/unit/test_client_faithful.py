"""What the containers and the places of a value say of its tensors and arrays comes back with them, or is refused."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_mesh import fake_mesh
from fixtures.tracked_things import Stateful
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckptd.client import InvalidRequest, PerRank
from ckptd.client.nested import Live, ask_fresh
from ckptd.client.values import decode, encode
from ckptd.protos.snapshot_pb2 import SCOPE_PER_RANK, Value

__all__ = ["fake_agent", "make"]


class Versioned(nn.Module):
    """Its second version holds what its first did ten times over; what has no version is of the first."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.ones(1))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version") is None:
            state[f"{prefix}b"] = state[f"{prefix}b"] * 10
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Wrapper:
    """A stateful thing around a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])


def through_bytes(value: object) -> Any:
    return decode(Value.FromString(encode(value, "x").SerializeToString()))


def test_the_version_in_a_modules_state_dict_comes_back(make: Make) -> None:
    """As with torch.save and torch.load: a module reads it to tell old states from new ones."""
    saved, other = Wrapper(Versioned()), Wrapper(Versioned())
    checkpointer = make()
    checkpointer.save(1, {"thing": saved, "plain": Versioned().state_dict()}).wait()
    here = OrderedDict[str, Any](b=torch.zeros(1))
    checkpointer.restore_into({"thing": other, "plain": here})
    assert other.module.get_buffer("b").tolist() == [1.0]
    assert here.__dict__["_metadata"] == {"": {"version": 2}}


@pytest.mark.parametrize("kind", [OrderedDict, Counter])
def test_attributes_of_a_container_come_back(kind: type[Any]) -> None:
    """Of both types that can have them; without any the bytes are what they were."""
    value = kind(a=1)
    bare = encode(value, "x").SerializeToString()
    value.note, value._metadata = [1, "two"], OrderedDict(x={"version": None})
    found = through_bytes(value)
    assert type(found) is kind
    assert found == value
    assert vars(found) == vars(value)
    assert type(found._metadata) is OrderedDict
    del value.note, value._metadata
    value.__orig_class__ = OrderedDict[str, int]  # what Python notes where a container is made with types
    assert encode(value, "x").SerializeToString() == bare
    assert not vars(through_bytes(value))


@pytest.mark.parametrize(("name", "attribute"), [("note", object()), ("note", torch.ones(1)), ("items", 5)])
def test_attributes_that_cannot_be_kept_are_refused(make: Make, name: str, attribute: object) -> None:
    """By name, with the way out."""
    value = OrderedDict(a=1)
    setattr(value, name, attribute)
    with pytest.raises(InvalidRequest, match=rf"x/in\.{name}: ") as caught:
        make().save(1, {"x": {"in": value}})
    assert "in a dict beside" in caught.value.hint


def test_an_attribute_that_hides_a_method_is_damage() -> None:
    """Nobody writes it."""
    stored = encode(OrderedDict(a=1), "x")
    stored.ordered_mapping.attributes.keys.add().text = "items"
    stored.ordered_mapping.attributes.values.add().integer = 1
    with pytest.raises(ValueError, match="'items'"):
        decode(stored)


def test_attributes_of_a_container_at_the_deepest_level_are_read_again() -> None:
    """What is deeper is refused when it is saved, not when it is parsed."""
    value = OrderedDict[str, Any]()
    value.__dict__["_metadata"] = {"": {"version": 1}}
    for _ in range(35):
        value = OrderedDict(x=value)
    found = through_bytes(value)
    for _ in range(35):
        found = found["x"]
    assert vars(found) == {"_metadata": {"": {"version": 1}}}


@pytest.mark.parametrize("dtype", ["f4", "u1", "M8[s]"])
def test_an_array_in_fortran_order_stays_so(dtype: str) -> None:
    """Its order decides in which one numpy adds up."""
    array = np.asfortranarray(np.arange(6).reshape(2, 3).astype(dtype))
    found = through_bytes(array)
    assert np.array_equal(found, array)
    assert found.flags.f_contiguous
    assert not found.flags.c_contiguous
    assert found.flags.writeable
    # Read by a program that does not know the mark: an equal array.
    stored = encode(array, "x")
    stored.array.fortran = False
    assert np.array_equal(decode(stored), array)
    assert encode(np.ascontiguousarray(array), "x") == stored


def test_what_a_per_rank_below_the_top_holds_is_filled_in_place(make: Make) -> None:
    """The tensor and the wrapper stay the objects they are, and the next save says the same."""
    checkpointer = make()
    checkpointer.save(1, {"v": {"x": PerRank({"t": torch.arange(3.0), "n": 5})}}).wait()
    t = torch.zeros(3)
    inner = {"t": t, "n": 0}
    state: dict[str, Any] = {"v": {"x": PerRank(inner)}}
    wrapper = state["v"]["x"]
    checkpointer.restore_into(state)
    assert state["v"]["x"] is wrapper
    assert wrapper.value is inner
    assert inner == {"t": t, "n": 5}
    assert inner["t"] is t
    assert t.tolist() == [0, 1, 2]


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_parameter_and_its_detached_self_stay_what_they_are(make: Make, is_shown: bool) -> None:
    """Stored once, in two places: one with gradients and one without, whichever comes first, and their memory is one.

    A hook that passes on what it sees changes nothing of that.
    """
    checkpointer = make()
    for name in "ab" if is_shown else "":
        checkpointer.on_load(name, lambda value: value)
    parameter = nn.Parameter(torch.arange(2.0))
    checkpointer.save(
        1, {"a": {"p": parameter, "d": parameter.detach()}, "b": {"d": parameter.detach(), "p": parameter}}
    ).wait()
    for is_shared in (True, False):
        for name in ("a", "b"):
            live = nn.Parameter(torch.zeros(2))
            plain = live.detach() if is_shared else torch.zeros(2)
            value = {"p": live, "d": plain} if name == "a" else {"d": plain, "p": live}
            other = nn.Parameter(torch.zeros(2))
            rest = {"p": other, "d": other.detach()} if name == "b" else {"d": other.detach(), "p": other}
            checkpointer.restore_into({name: value, ("a" if name == "b" else "b"): rest})
            assert isinstance(value["p"], nn.Parameter)
            assert not isinstance(value["d"], nn.Parameter)
            assert (value["p"].requires_grad, value["d"].requires_grad) == (True, False)
            assert value["p"].tolist() == value["d"].tolist() == [0, 1]
            assert value["p"].data_ptr() == value["d"].data_ptr()
            assert not is_shared or value["p"] is live


class Holder(nn.Module):
    """Holds its state beside its parameters."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self.w = state, nn.Parameter(torch.ones(1))

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_a_tensor_twice_in_extra_state_is_one_again(make: Make) -> None:
    """Stored once, too."""
    t = torch.arange(2.0)
    checkpointer = make()
    checkpointer.save(1, {"m": Holder({"a": t, "b": [t], "c": torch.zeros(2)})}).wait()
    other = Holder(None)
    checkpointer.restore_into({"m": other})
    assert other.state["a"] is other.state["b"][0]
    assert other.state["a"].tolist() == [0, 1]
    assert other.state["c"] is not other.state["a"]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(0, 2) as made:
        yield made


@pytest.mark.parametrize("how", ["PerRank", "pattern", "nested PerRank", "extra state"])
def test_a_piece_that_is_the_ranks_own_comes_back_as_a_piece(make: Make, mesh: DeviceMesh, how: str) -> None:
    """What is stored does not say so: what stands here does."""
    group = dist.new_group([0])
    per_rank = ["thing/*"] if how == "pattern" else []

    def thing(value: float) -> tuple[Any, Any]:
        piece = DTensor.from_local(torch.full((2, 2), value), mesh, [Shard(0)], run_check=False)
        state = {"x": PerRank({"w": piece})} if how == "nested PerRank" else {"x": {"w": piece}}
        made = Holder(state) if how == "extra state" else Stateful(state)
        return made, PerRank(made) if how == "PerRank" else made

    checkpointer = make(process_group=group, per_rank=per_rank)
    checkpointer.save(1, {"thing": thing(2.0)[1]}).wait()
    other, tracked = thing(0.0)
    before = other.state["x"]
    checkpointer.restore_into({"thing": tracked})
    found = other.state["x"]["w"]
    assert isinstance(found, DTensor)
    assert found.placements == (Shard(0),)
    assert found.shape == (4, 2)
    assert found.to_local().tolist() == [[2, 2], [2, 2]]
    assert other.state["x"] is not before
    # Where another piece stands, what is stored comes back as it did before: as the local tensor.
    small = DTensor.from_local(torch.zeros(1, 2), mesh, [Shard(0)], run_check=False)
    other.state = {"x": {"w": small}}
    checkpointer.restore_into({"thing": tracked})
    assert other.state["x"]["w"].tolist() == [[2, 2], [2, 2]]


def test_what_is_handed_over_is_made_where_the_live_tensor_is() -> None:
    """On its device, which nothing stored names; in host memory where there is none, or one without memory."""

    class Asked:
        def __init__(self) -> None:
            self.devices: dict[str, torch.device | None] = {}

        def scope_of(self, _name: str, _leaf: object, scope: int) -> int:
            return scope

        def fresh(self, name: str, *, like: object, device: torch.device | None) -> None:
            assert like is None
            self.devices[name] = device

    with FakeTensorMode():
        on_gpu = torch.empty(1, device="cuda")
    live = {
        "gpu": Live(on_gpu, SCOPE_PER_RANK),
        "own": Live(PerRank(on_gpu), SCOPE_PER_RANK),
        "meta": Live(torch.empty(1, device="meta"), SCOPE_PER_RANK),
    }
    asked = Asked()
    ask_fresh([*live, "none"], live, asked)  # type: ignore[arg-type] # what it asks for is all that matters
    assert asked.devices == {"gpu": on_gpu.device, "own": on_gpu.device, "meta": None, "none": None}
