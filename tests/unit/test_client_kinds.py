"""Any kind of tensor comes back bit for bit, or is refused by name before anything is begun."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_agent import FakeAgent
from torch import nn
from torch._subclasses import FakeTensorMode

from ckptd.client import InvalidRequest, PerRank, Sharded
from ckptd.client.tracking import Tracking

__all__ = ["fake_agent", "make"]

QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)} - QUANTIZED, key=str)


class OwnParameter(nn.Parameter):
    """A parameter that may mean something else."""


class OwnTensor(torch.Tensor):
    """A tensor that may mean something else."""


def held(**tensors: Any) -> nn.Module:
    """Return a module with buffers and parameters of these names."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
    return module


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def leaked(transform: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]) -> torch.Tensor:
    """Return a tensor that left the transform it was made in."""
    kept: list[torch.Tensor] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return x.sum()

    transform(noted)(torch.arange(6.0).reshape(2, 3))
    return kept[0]


def freed(left: int = 0) -> torch.Tensor:
    """Return a tensor whose storage was made smaller than its elements take, as FSDP1 does."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(left)
    return tensor


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.ones(2, device="meta"), "on the meta device"),
    "sparse coo": (lambda: torch.eye(3).to_sparse(), "of layout sparse_coo"),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), "of layout sparse_csr"),
    "sparse csc": (lambda: torch.eye(3).to_sparse_csc(), "of layout sparse_csc"),
    "sparse bsr": (lambda: torch.eye(4).to_sparse_bsr(2), "of layout sparse_bsr"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        "of the subclass torch.nested._internal.nested_tensor.NestedTensor",
    ),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"quantized \(qint8\)"),
    "quantized by view": (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.quint8), r"quantized \(quint8\)"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "of layout _mkldnn"),
    "fake": (fake, "of the subclass torch._subclasses.fake_tensor.FakeTensor"),
    "subclass": (lambda: torch.ones(2).as_subclass(OwnTensor), "of the subclass .*OwnTensor"),
    "parameter subclass": (lambda: OwnParameter(torch.ones(2)), "of the subclass .*OwnParameter"),
    "lazy parameter": (nn.UninitializedParameter, "of the subclass .*UninitializedParameter"),
    "lazy buffer": (nn.UninitializedBuffer, "of the subclass .*UninitializedBuffer"),
    "out of grad": (lambda: leaked(torch.func.grad), "inside a transform"),
    "out of vmap": (lambda: leaked(torch.func.vmap), "inside a transform"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(3)), "inside a transform"),
    "zeros without memory": (lambda: torch._efficientzerotensor((3,)), "of zeros that has no memory"),
    "freed": (freed, "whose memory was freed"),
    "made smaller": (lambda: freed(100), "whose memory was freed or made smaller"),
}
"""What cannot be stored, and the kind that its refusal names."""


@pytest.fixture(params=REFUSED)
def odd(request: pytest.FixtureRequest) -> tuple[torch.Tensor, str]:
    """A tensor that cannot be stored, and its kind."""
    made, kind = REFUSED[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return made(), kind


def places(tensor: torch.Tensor) -> dict[str, Any]:
    """Return things that hold a tensor, by the key that a refusal of it names."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = {"odd": tensor, "deep": [1, tensor]}
    deep = torch.optim.SGD([parameter])
    deep.state[parameter] = {"deep": [1, {"odd": tensor}]}

    class Thing:
        def state_dict(self) -> dict[str, Any]:
            return {"odd": [tensor]}

        def load_state_dict(self, _: Any) -> None: ...

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"odd": tensor}

    return {
        "module/odd": held(fine=torch.ones(1), odd=tensor),
        "value/0/odd": [{"odd": tensor}],
        "own/odd": PerRank({"odd": tensor}),
        "sharded": Sharded(tensor, (2,), (0,)),
        "sgd/state/#0/odd": optimizer,
        "sgd/state/#0/deep/1/odd": deep,
        "thing/odd/0": Thing(),
        "module/_extra_state/odd": Extra(1, 1),
    }


PLACES = list(places(torch.ones(1)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", PLACES)
def test_what_has_no_plain_bytes_is_refused_wherever_it_stands(key: str, odd: tuple[torch.Tensor, str]) -> None:
    """By key and kind, while the state is read: no agent has been asked for anything then."""
    tensor, kind = odd
    tracking = Tracking()
    with pytest.raises(InvalidRequest, match=f"a tensor {kind}.* cannot be stored") as caught:
        tracking.collect({"first": torch.ones(3), key.partition("/")[0]: places(tensor)[key]})
    assert caught.value.key == key
    assert caught.value.message.startswith(f"{key}: ")
    assert tracking.collect({"first": torch.ones(3)}).layout.rows[0].name == "first"


@pytest.mark.filterwarnings("ignore")
def test_no_slot_is_taken_for_what_is_refused(make: Make, fake_agent: FakeAgent, odd: tuple[torch.Tensor, str]) -> None:
    """The agent hears of the failure and of nothing else; the next save works."""
    tensor, kind = odd
    checkpointer = make(audit="off")
    with pytest.raises(InvalidRequest, match=kind):
        checkpointer.save(1, {"fine": torch.ones(2), "odd": {"odd": tensor}})
    assert {"PutLayout", "Begin", "GetPlan", "Staged"}.isdisjoint(fake_agent.calls)
    assert [request.step for request in fake_agent.failed] == [1]
    assert "odd/odd" in fake_agent.failed[0].error.message
    checkpointer.save(2, {"fine": torch.ones(2)}).wait()


@pytest.mark.filterwarnings("ignore")
def test_what_has_no_plain_bytes_is_no_target_either(make: Make, odd: tuple[torch.Tensor, str]) -> None:
    """A restore refuses it by key and kind, and touches none of the others."""
    tensor, kind = odd
    checkpointer = make(audit="off")
    checkpointer.save(1, {"first": torch.ones(2), "model": held(odd=torch.ones(2))}).wait()
    live = torch.zeros(2)
    with pytest.raises(InvalidRequest, match=kind) as caught:
        checkpointer.restore_into({"first": live, "model": held(odd=tensor)})
    assert caught.value.key == "model/odd"
    assert not live.any()


def test_memory_that_goes_away_between_two_saves_is_noticed(make: Make, fake_agent: FakeAgent) -> None:
    """Also where nothing else about model and optimizer has changed: what follows from looks is not enough."""
    net = nn.Linear(30, 30)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(30)).sum().backward()
    optimizer.step()
    moment = optimizer.state[net.weight]["momentum_buffer"]
    checkpointer = make()
    checkpointer.track(model=net, optimizer=optimizer)
    checkpointer.save(1).wait()
    for step, (tensor, key) in enumerate(
        [(moment, "optimizer/state/weight/momentum_buffer"), (net.weight, "model/weight")], 2
    ):
        size = tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)
        begun = fake_agent.calls.count("Begin")
        with pytest.raises(InvalidRequest, match="whose memory was freed") as caught:
            checkpointer.save(step)
        assert caught.value.key == key
        assert fake_agent.calls.count("Begin") == begun
        tensor.untyped_storage().resize_(size)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_s078_bits_of_every_dtype_survive_strides_and_threads(make: Make, dtype: torch.dtype) -> None:
    """Random bits, transposed and stepped, small and large, made and in place into other strides."""
    raw = {
        "small": np.random.default_rng(1).integers(0, 256, (40, 60, dtype.itemsize), dtype=np.uint8),
        "large": np.random.default_rng(2).integers(0, 256, (1500, 900, dtype.itemsize), dtype=np.uint8),
    }

    def tensor(data: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(data.copy().reshape(data.shape[0], -1)).view(dtype)

    def plain(data: torch.Tensor) -> bytes:
        return data.contiguous().view(torch.uint8).numpy().tobytes()

    state = {name: {"t": tensor(data).t(), "step": tensor(data)[:, ::3]} for name, data in raw.items()}
    checkpointer = make()
    checkpointer.save(1, {"state": state}).wait()
    live = {name: tensor(np.zeros_like(data)).t() for name, data in raw.items()}
    target: dict[str, Any] = {"state": {name: {"t": live[name], "step": None} for name in raw}}
    checkpointer.restore_into(target)
    for name, data in raw.items():
        got = target["state"][name]
        assert got["t"] is live[name]
        assert plain(got["t"].t()) == data.tobytes()
        assert plain(got["step"]) == np.ascontiguousarray(data[:, ::3]).tobytes()
        assert (got["step"].dtype, got["step"].is_contiguous()) == (dtype, True)


@pytest.mark.parametrize("view", [torch.Tensor.conj, lambda t: t.conj().imag, torch._neg_view])
def test_a_conjugate_or_negated_view_is_no_tie(make: Make, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """It has its base's address and other values: both are stored, resolved, and come back apart or together."""
    base = torch.complex(torch.arange(1.0, 4.0), torch.arange(4.0, 7.0))
    want = view(base).resolve_conj().resolve_neg().clone()
    checkpointer = make(audit="off")
    checkpointer.save(1, {"model": held(base=base, view=view(base))}).wait()
    apart = held(base=torch.zeros(3, dtype=base.dtype), view=torch.zeros(3, dtype=want.dtype))
    together = torch.zeros(3, dtype=base.dtype)
    for live in (apart, held(base=together, view=view(together))):
        checkpointer.restore_into({"model": live})
        assert torch.equal(live.get_buffer("base"), base)
        assert torch.equal(live.get_buffer("view"), want)
    assert together.data_ptr() == live.get_buffer("base").data_ptr()


@pytest.mark.parametrize("name", ["_extra_state", "my_extra_state", "_extra_state_"])
def test_a_buffer_may_be_called_as_extra_state_is(make: Make, name: str) -> None:
    """What get_extra_state gives is told by where it comes from."""

    class Both(nn.Linear):
        def __init__(self, extra: Any) -> None:
            super().__init__(1, 1)
            self.extra = extra

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    def made(value: float) -> nn.Module:
        tensor = torch.full((2,), value)
        return nn.ModuleDict({"x": held(**{name: tensor}), "extra": Both({"t": tensor.clone(), "n": value})})

    checkpointer = make(audit="off")
    checkpointer.save(1, {"model": made(3.0)}).wait()
    other = made(0.0)
    live = next(other["x"].buffers())  # type: ignore[index]
    checkpointer.restore_into({"model": other})
    assert live.tolist() == [3.0, 3.0]
    extra = other["extra"].extra  # type: ignore[index]
    assert (extra["n"], extra["t"].tolist()) == (3.0, [3.0, 3.0])


@pytest.mark.parametrize("elements", [4, 400_000])
def test_tensors_made_in_inference_mode_are_saved_and_filled(make: Make, elements: int) -> None:
    """Small, large, transposed, expanded; they stay what they are, and their memory is theirs."""
    with torch.inference_mode():
        state = {"a": torch.arange(float(elements)), "t": torch.ones(elements // 2, 2).t()}
        live = {"a": torch.zeros(elements), "t": torch.zeros(elements // 2, 2).t()}
        wide = torch.zeros(1, 1).expand(3, 3)
    model = held(wide=wide)
    checkpointer = make(audit="off")
    checkpointer.save(1, {"state": state, "model": held(wide=torch.full((3, 3), 5.0))}).wait()
    target: dict[str, Any] = {"state": dict(live), "model": model}
    checkpointer.restore_into(target)
    for name, tensor in live.items():
        assert target["state"][name] is tensor
        assert torch.equal(tensor, state[name])
        assert tensor.is_inference()
    assert torch.equal(wide, torch.full((3, 3), 5.0))


@pytest.mark.parametrize("key", ["\ud800", "fine\udfff"], ids=["alone", "at the end"])
@pytest.mark.parametrize("place", ["top", "key", "value", "buffer", "tensor", "parameter"])
def test_text_that_utf8_cannot_hold_is_refused_by_key(make: Make, fake_agent: FakeAgent, key: str, place: str) -> None:
    """Wherever it stands, before anything is begun; the other ranks hear of it in words that a message can hold."""
    states: dict[str, dict[str, Any]] = {
        "top": {key: 1},
        "key": {"x": {key: 1}},
        "value": {"x": [key]},
        "buffer": {"x": held(**{key: torch.ones(1)})},
        "tensor": {"x": {key: torch.ones(1)}},
        "parameter": {"x": nn.ParameterDict({key: nn.Parameter(torch.ones(1))})},
    }
    checkpointer = make(audit="off")
    with pytest.raises(InvalidRequest, match="lone surrogates") as caught:
        checkpointer.save(1, states[place])
    assert caught.value.key.endswith(key) or place == "value"
    assert "Begin" not in fake_agent.calls
    assert "surrogates" in fake_agent.failed[0].error.message
    checkpointer.save(2, {"x": {"ok": torch.ones(1)}}).wait()


@pytest.mark.parametrize(
    ("beside", "text"),
    [
        ({"tags": {"why": "\ud800"}}, "lone surrogates"),
        ({"tags": {"\ud800": "x"}}, "lone surrogates"),
        ({"tags": {"why": 1}}, r"tags\['why'\] = 1 is no text"),
        ({"tags": {"why": "x" * (5 << 20)}}, r"tags\['why'\] has 5242883 bytes, .* more than the 1048576"),
        ({"metrics": {"\ud800": 1.0}}, "lone surrogates"),
        ({"metrics": {"loss": 10**400}}, "metrics.'loss'. is no number"),
        ({"metrics": {"loss": "x"}}, "metrics.'loss'. is no number"),
        ({"metrics": {"loss": None}}, "metrics.'loss'. is no number"),
        ({"metrics": {"loss": torch.ones(2)}}, "metrics.'loss'. is no number"),
    ],
)
def test_what_is_said_beside_the_state_is_refused_by_name(
    make: Make, fake_agent: FakeAgent, beside: dict[str, Any], text: str
) -> None:
    """Metrics are floats and tags are texts, and both go into messages; nothing is begun with others."""
    checkpointer = make()
    with pytest.raises(InvalidRequest, match=text):
        checkpointer.save(1, {"x": 1}, **beside)
    assert "Begin" not in fake_agent.calls


@pytest.mark.parametrize("numbers", [(2.0, 0.0), ("2", "0"), (None, None)])
def test_a_sharded_of_no_integers_is_refused(numbers: tuple[Any, Any]) -> None:
    """Also of floats that equal integers; and no cache remembers them for those who pass integers."""
    with pytest.raises(InvalidRequest, match="x: global_shape and offsets of a Sharded must be integers"):
        Tracking().collect({"x": Sharded(torch.ones(2), (numbers[0],), (numbers[1],))})
    numpys: Any = (np.int64(2),), (np.int32(0),)
    found = Tracking().collect({"x": Sharded(torch.ones(2), *numpys)})
    assert [(type(at), at) for at in found.layout.rows[0].offset] == [(int, 0)]
    assert [(type(size), size) for size in found.layout.rows[0].global_shape] == [(int, 2)]


def test_what_was_said_to_be_a_ranks_own_is_so_again_after_a_restore(make: Make) -> None:
    """Pieces below PerRank are filled in place, keep their kind, and the next save has the same rows."""

    class Thing:
        def __init__(self, value: float) -> None:
            self.state: Any = {"piece": PerRank(Sharded(torch.full((2,), value), (4,), (2,)))}

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    def state(value: float) -> dict[str, Any]:
        held = {"piece": Sharded(torch.full((2,), value), (4,), (2,)), "plain": torch.full((3,), value), "n": value}
        return {"own": PerRank(held), "thing": Thing(value)}

    checkpointer = make()
    checkpointer.save(1, state(7.0)).wait()
    target: Any = state(0.0)
    inner: dict[str, Any] = dict(target["own"].value)
    checkpointer.restore_into(target)
    assert isinstance(target["own"], PerRank)
    own: Any = target["own"].value
    assert all(own[name] is inner[name] for name in ("piece", "plain"))
    assert own["n"] == 7.0
    assert inner["piece"].tensor.tolist() == [7.0, 7.0]
    assert target["thing"].state["piece"].value.tensor.tolist() == [7.0, 7.0]
    rows = [Tracking().collect(each).layout.rows for each in (state(7.0), target)]
    assert rows[0] == rows[1]
