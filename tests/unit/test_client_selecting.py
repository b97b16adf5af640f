"""Restoring in part, under other names, and in another dtype, against an agent in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_agent import FakeAgent
from torch import nn

from ckptd.client import Checkpointer, InvalidRequest, PerRank
from ckptd.client.mapping import RenamedStored, Renaming
from ckptd.client.stored import Stored
from ckptd.protos.shard_table import ShardRow

__all__ = ["fake_agent", "make"]

SIZE = 3


class Extra(nn.Linear):
    """A layer with extra state, some of it a tensor."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        self.note: dict[str, Any] = {"calls": 0, "seen": torch.zeros(2)}

    def get_extra_state(self) -> dict[str, Any]:
        return self.note

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.note = state


class Wrapped(nn.Module):
    """Adds a component to the name of everything in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(SIZE, SIZE), Extra(), nn.LayerNorm(SIZE))
    extra = made[1]
    assert isinstance(extra, Extra)
    extra.note = {"calls": seed, "seen": torch.full((2,), float(seed))}
    return made


def adam(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=0.1)


def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, 0.25 * (number + 1))
    optimizer.step()
    optimizer.zero_grad()


def trained(seed: int, wrap: Callable[[nn.Module], nn.Module] = lambda module: module) -> tuple[nn.Module, Any]:
    module = net(seed)
    optimizer = adam(module)
    train(module, optimizer)
    return wrap(module), optimizer


def bits(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[bytes]:
    found = [tensor.detach().clone() for tensor in module.parameters()]
    for parameter in module.parameters():
        state = optimizer.state[parameter] if optimizer is not None and parameter in optimizer.state else {}
        found += [state[key] for key in sorted(state)]
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in found]


def saved(make: Make, **things: Any) -> None:
    checkpointer = make()
    checkpointer.track(**things)
    checkpointer.save(5).wait()
    checkpointer.close()


def tracking(make: Make, **things: Any) -> Checkpointer:
    checkpointer = make()
    checkpointer.track(**things)
    return checkpointer


def test_the_model_alone_leaves_all_else_as_it_was(make: Make, fake_agent: FakeAgent) -> None:
    """Optimizer, generators and scheduler keep their state and are reported; only the model's bytes are asked for."""
    module, optimizer = trained(1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    saved(make, model=module, optimizer=optimizer, scheduler=scheduler)
    other, other_optimizer = trained(2)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other_optimizer, 1)
    before, rng = bits(other, other_optimizer)[6:], torch.get_rng_state()
    scheduler_before = other_scheduler.state_dict()
    again = tracking(make, model=other, optimizer=other_optimizer, scheduler=other_scheduler)
    restored = again.restore(only="model")
    assert restored is not None
    assert bits(other) == bits(module)
    extra = other[1]  # type: ignore[index] # a Sequential
    assert extra.note["calls"] == 1
    assert torch.equal(extra.note["seen"], torch.ones(2))
    assert bits(other, other_optimizer)[6:] == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert other_scheduler.state_dict() == scheduler_before
    assert {"optimizer", "rng", "scheduler"} < set(restored.left_out)
    assert all(not name.startswith("model") for name in restored.left_out)
    assert (restored.missing, restored.unexpected) == ((), ())


@pytest.mark.parametrize(
    ("only", "taken"),
    [
        (["model/0"], {"0.weight", "0.bias"}),
        (["model/0."], {"0.weight", "0.bias"}),
        (["model/*.bias"], {"0.bias", "1.bias", "2.bias"}),
        (["model/0.bias", "model/1.weight"], {"0.bias", "1.weight"}),
        (["model/*"], {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"}),
    ],
)
def test_tensors_of_a_module_can_be_chosen_singly(make: Make, only: list[str], taken: set[str]) -> None:
    """By name, beginning or pattern; strict speaks of what is chosen only."""
    module, optimizer = trained(1)
    saved(make, model=module, optimizer=optimizer)
    other = net(2)
    before = {name: tensor.clone() for name, tensor in other.named_parameters()}
    restored = tracking(make, model=other).restore(only=only)
    assert restored is not None
    want = dict(module.named_parameters())
    for name, tensor in other.named_parameters():
        assert torch.equal(tensor, (want if name in taken else before)[name]), name
    assert {f"model/{name}" for name in before} - set(restored.left_out) == {f"model/{name}" for name in taken}


def test_an_optimizer_alone_keeps_the_parameters(make: Make) -> None:
    """Its state is found by the names of parameters that are not restored themselves."""
    module, optimizer = trained(1)
    saved(make, model=module, optimizer=optimizer)
    other = net(2)
    other_optimizer, before = adam(other), bits(other)
    restored = tracking(make, model=other, optimizer=other_optimizer).restore(only=["optimizer"])
    assert restored is not None
    assert bits(other) == before
    assert bits(other, other_optimizer)[6:] == bits(module, optimizer)[6:]


@pytest.mark.parametrize(
    ("only", "message"),
    [
        (["modle"], "nothing is tracked as 'modle'"),
        (["optimizer/state/0.weight"], "restored as a whole or not at all"),
        ([], "names nothing"),
        ([""], "names nothing"),
    ],
)
def test_a_choice_of_nothing_is_refused(make: Make, fake_agent: FakeAgent, only: list[str], message: str) -> None:
    """A slip of the pen must not look like a restore."""
    module, optimizer = trained(1)
    saved(make, model=module, optimizer=optimizer)
    other, other_optimizer = trained(2)
    before = bits(other, other_optimizer)
    with pytest.raises(InvalidRequest, match=message):
        tracking(make, model=other, optimizer=other_optimizer).restore(only=only)
    assert bits(other, other_optimizer) == before


@pytest.mark.parametrize(
    ("only", "near"),
    [
        ("model/1.wieght", "model/1.weight, model/2.weight, model/0.weight"),
        ("model/*.bais", "model/2.bias, model/1.bias, model/0.bias"),
        ("model/7", "model/2, model/1, model/0"),
        ("modl*", "model"),
    ],
)
def test_a_text_that_fits_nothing_is_an_error_with_names_near_it(
    make: Make, fake_agent: FakeAgent, only: str, near: str
) -> None:
    """Though the thing it begins with is tracked, and other texts fit; strict=False changes nothing about it."""
    module = net(1)
    saved(make, model=module)
    other = net(2)
    before = bits(other)
    again = tracking(make, model=other)
    with pytest.raises(InvalidRequest, match="fits no name that is stored or tracked, on any rank") as caught:
        again.restore(only=["model/0", only], strict=False)
    assert repr(only) in caught.value.message
    assert caught.value.hint == f"near it: {near}"
    assert bits(other) == before
    assert fake_agent.calls.count("RestoreDone") == 0


def test_tied_names_are_chosen_together(make: Make) -> None:
    """One memory under two names cannot be restored and kept at once."""

    def tied() -> nn.Module:
        made = nn.ModuleDict({"a": nn.Linear(SIZE, SIZE, bias=False), "b": nn.Linear(SIZE, SIZE, bias=False)})
        made["b"].weight = made["a"].weight
        return made

    module = tied()
    saved(make, model=module)
    other = tied()
    with pytest.raises(InvalidRequest, match=r"shares memory with model/a\.weight"):
        tracking(make, model=other).restore(only=["model/b"])
    assert tracking(make, model=other).restore(only=["model/a", "model/b"])
    assert bits(other) == bits(module)


def test_what_is_chosen_must_be_stored(make: Make) -> None:
    """Strict names what is missing of the choice, and nothing else."""
    saved(make, model=net(1))
    other = nn.ModuleDict({"0": nn.Linear(SIZE, SIZE), "new": nn.Linear(SIZE, SIZE)})
    again = tracking(make, model=other, optimizer=adam(other))
    with pytest.raises(
        InvalidRequest, match=r"tracked: 2 missing in the snapshot: model/new\.weight, model/new\.bias \["
    ):
        again.restore(only=["model/new"])
    restored = again.restore(only=["model/0", "model/new"], strict=False)
    assert restored is not None
    assert restored.missing == ("model/new.weight", "model/new.bias")
    assert restored.unexpected == ()


def test_s091_a_snapshot_without_the_optimizer_restores_all_else(make: Make) -> None:
    """Schedule, values and generators come back; the optimizer is reported as absent, or not asked for."""
    module = net(1)
    optimizer = adam(module)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (epoch + 1))
    train(module, optimizer)
    scheduler.step()
    checkpointer = tracking(make, model=module, scheduler=scheduler)
    rng = torch.get_rng_state()
    checkpointer.save(5, {"epoch": 3}).wait()
    checkpointer.close()
    for asked in ({"strict": False}, {"only": ["model", "scheduler", "epoch", "rng"]}):
        other = net(2)
        other_optimizer = adam(other)
        train(other, other_optimizer)
        before = bits(other, other_optimizer)[6:]
        other_scheduler = torch.optim.lr_scheduler.LambdaLR(other_optimizer, lambda epoch: 1.0 / (epoch + 1))
        again = tracking(make, model=other, optimizer=other_optimizer, scheduler=other_scheduler)
        state: dict[str, Any] = {"epoch": 0}
        restored = again.restore_into(state, **asked)
        assert restored is not None
        assert (restored.step, state, other_scheduler.last_epoch) == (5, {"epoch": 3}, 1)
        assert torch.equal(torch.get_rng_state(), rng)
        assert bits(other) == bits(module)
        assert bits(other, other_optimizer)[6:] == before
        assert restored.missing == (("optimizer",) if "strict" in asked else ())
        again.close()


@pytest.mark.parametrize(
    "names",
    [
        {"model/inner.": "model/"},
        {"model/inner.": "model/", "optimizer/state/inner.": "optimizer/state/"},
        lambda name: name.replace("inner.", ""),
    ],
)
@pytest.mark.parametrize("back", [False, True])
def test_s083_names_are_mapped_for_parameters_and_optimizer_state(make: Make, names: Any, back: bool) -> None:
    """A job whose wrapper went goes on bit for bit; so does one that gained a wrapper. Extra state follows too."""
    wrap: list[Callable[[nn.Module], nn.Module]] = [Wrapped, lambda module: module]
    if back:
        wrap.reverse()
        if callable(names):
            names = lambda name: name.replace("model/", "model/inner.") if "/" in name else name  # noqa: E731
        else:
            names = {new: old for old, new in names.items()}
    module, optimizer = trained(1, wrap[0])
    saved(make, model=module, optimizer=optimizer)
    inner = net(2)
    other, other_optimizer = wrap[1](inner), adam(inner)
    again = tracking(make, model=other, optimizer=other_optimizer)
    restored = again.restore(names=names)
    assert restored is not None
    assert bits(other, other_optimizer) == bits(module, optimizer)
    extra = inner[1]
    assert isinstance(extra, Extra)
    assert extra.note["calls"] == 1
    train(module, optimizer)
    train(other, other_optimizer)
    assert bits(other, other_optimizer) == bits(module, optimizer)


def test_s083_without_a_mapping_the_error_gives_it(make: Make) -> None:
    """What the hint says can be passed on as it is."""
    module, _ = trained(1, Wrapped)
    saved(make, model=module)
    again = tracking(make, model=nn.Sequential(nn.Linear(SIZE, SIZE)))
    with pytest.raises(InvalidRequest) as caught:
        again.restore()
    assert "names={'model/inner.': 'model/'} maps them" in caught.value.hint


def test_things_can_be_tracked_under_other_names(make: Make) -> None:
    """Objects, the tensors they refer to, and an optimizer's name change together."""

    class Loader:
        def __init__(self, value: float) -> None:
            self.state: dict[str, Any] = {"served": torch.full((2,), value), "at": int(value)}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    module, optimizer = trained(1)
    saved(make, net=module, opt=optimizer, data=Loader(4.0))
    other = net(2)
    other_optimizer, loader = adam(other), Loader(0.0)
    again = tracking(make, model=other, optimizer=other_optimizer, loader=loader)
    again.restore(names={"net/": "model/", "opt/": "optimizer/", "data/": "loader/"})
    assert bits(other, other_optimizer) == bits(module, optimizer)
    assert loader.state["at"] == 4
    assert torch.equal(loader.state["served"], torch.full((2,), 4.0))


def test_two_names_never_become_one(make: Make, fake_agent: FakeAgent) -> None:
    """Or one tensor would silently win."""
    module, _ = trained(1)
    saved(make, model=module)
    again = tracking(make, model=net(2))
    with pytest.raises(InvalidRequest, match=r"maps both 'model/0\.bias' and 'model/0\.weight' to 'model/x'"):
        again.restore(names=lambda name: "model/x" if name.startswith("model/0") else name)
    assert fake_agent.refused


@pytest.mark.parametrize("names", [3, {"a": 1}])
def test_a_mapping_is_of_texts(make: Make, names: Any) -> None:
    """Anything else is refused before an agent is asked."""
    with pytest.raises(InvalidRequest, match="names="):
        tracking(make, model=net(2)).restore(names=names)
    with pytest.raises(InvalidRequest, match="is no name"):
        Renaming(lambda _: "")("x")


def test_the_longest_beginning_is_replaced_once() -> None:
    """Whatever order the rules stand in."""
    rename = Renaming({"a/": "b/", "a/x": "c/x", "b/": "d/"})
    assert [rename(name) for name in ("a/y", "a/x1", "b/z", "a", "ab/")] == ["b/y", "c/x1", "d/z", "b", "ab/"]


def test_a_parameter_that_may_be_two_is_refused() -> None:
    """A rule that sends one name of two modules to two parameters of one optimizer needs to be more exact."""
    rows = [
        ShardRow(name=name, dtype="float32", global_shape=(1,), offset=(0,), length=(1,), scope=1, nbytes=4, group=0)
        for name in ("a/w", "b/w", "opt/state/w/exp_avg")
    ]
    rename = Renaming({"a/w": "m/p", "b/w": "m/q"})
    with pytest.raises(InvalidRequest, match="'w' to several: p, q"):
        RenamedStored(Stored(rows, ["opt"], {}), rename, {"opt": {"m/p": "p", "m/q": "q"}})


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(("stored", "here"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float64)])
def test_dtypes_are_cast_when_asked_only(make: Make, stored: torch.dtype, here: torch.dtype, fresh: bool) -> None:
    """Parameters and the state of their dtype are converted as `Tensor.to` does; without asking it is an error."""
    module = net(1).to(stored)
    optimizer = adam(module)
    train(module, optimizer)
    saved(make, model=module, optimizer=optimizer)
    other = net(2).to(here)
    other_optimizer = adam(other)
    if not fresh:
        train(other, other_optimizer)
    again = tracking(make, model=other, optimizer=other_optimizer)
    before = bits(other, other_optimizer)
    with pytest.raises(InvalidRequest, match=r"different: model/0\.weight") as caught:
        again.restore()
    assert "cast=True" in caught.value.hint
    assert bits(other, other_optimizer) == before
    again.restore(cast=True)
    for mine, theirs in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(here))
        held = other_optimizer.state[mine]
        assert held["exp_avg"].dtype == here
        assert torch.equal(held["exp_avg"], optimizer.state[theirs]["exp_avg"].to(here))
        assert held["step"].dtype == torch.float32
    train(other, other_optimizer)


def test_state_kept_in_another_dtype_than_its_parameter_keeps_it(make: Make) -> None:
    """Moments in float32 beside parameters in bfloat16 are no accident."""
    module = nn.Linear(SIZE, SIZE).to(torch.bfloat16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.ones(parameter.shape)
    saved(make, model=module, optimizer=optimizer)
    other = nn.Linear(SIZE, SIZE).to(torch.float16)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    tracking(make, model=other, optimizer=other_optimizer).restore(cast=True)
    assert other_optimizer.state[other.weight]["momentum_buffer"].dtype == torch.float32


class Flat(nn.Module):
    """Two parameters that begin at one address: a whole buffer, and its first half."""

    def __init__(self, whole: torch.dtype, half: torch.dtype) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.arange(4.0).to(whole))
        first = self.whole.detach().view(torch.uint8)[: 2 * half.itemsize].view(half)
        self.front = nn.Parameter(first if whole == half else torch.ones(2, dtype=half))


def test_state_is_cast_with_its_own_parameter_and_no_other_at_its_address(make: Make) -> None:
    """A view that keeps its dtype keeps its state's too, whatever was cast where it begins."""

    def optimizer_of(module: nn.Module) -> torch.optim.SGD:
        made = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for parameter in module.parameters():
            made.state[parameter]["momentum_buffer"] = torch.ones(parameter.shape)
        return made

    module = Flat(torch.float32, torch.bfloat16)
    saved(make, model=module, optimizer=optimizer_of(module))
    other = Flat(torch.bfloat16, torch.bfloat16)
    assert other.whole.data_ptr() == other.front.data_ptr()
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    tracking(make, model=other, optimizer=other_optimizer).restore(cast=True)
    assert other_optimizer.state[other.whole]["momentum_buffer"].dtype == torch.bfloat16
    assert other_optimizer.state[other.front]["momentum_buffer"].dtype == torch.float32


class Spread(nn.Module):
    """A parameter whose elements share memory, another tied to it by memory alone, and two without elements."""

    def __init__(self, value: float, dtype: torch.dtype, empty: torch.dtype) -> None:
        super().__init__()
        self.spread = nn.Parameter(torch.full((1,), value, dtype=dtype).expand(3))
        self.tied = nn.Parameter(self.spread.detach())
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=dtype))
        self.none = nn.Parameter(torch.empty(0, 3, dtype=empty))


@pytest.mark.parametrize("name", ["spread", "tied"])
def test_state_of_overlapping_tied_and_empty_parameters_is_cast_with_them(make: Make, name: str) -> None:
    """Their memory is fetched elsewhere first, is another name's, or has no address."""

    def parameters_of(module: Spread) -> list[nn.Parameter]:
        return [module.get_parameter(each) for each in (name, "nothing", "none")]

    module = Spread(1.0, torch.float32, torch.float16)
    optimizer = torch.optim.SGD(parameters_of(module), lr=0.1, momentum=0.9)
    for parameter in parameters_of(module):
        optimizer.state[parameter]["momentum_buffer"] = torch.ones(parameter.shape)
    saved(make, model=module, optimizer=optimizer)
    other = Spread(2.0, torch.bfloat16, torch.float16)
    other_optimizer = torch.optim.SGD(parameters_of(other), lr=0.1, momentum=0.9)
    tracking(make, model=other, optimizer=other_optimizer).restore(cast=True)
    assert other.spread.tolist() == other.tied.tolist() == [1, 1, 1]
    held = [other_optimizer.state[one]["momentum_buffer"].dtype for one in parameters_of(other)]
    assert held == [torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize(("stored", "here"), [(torch.int64, torch.float32), (torch.float32, torch.int32)])
def test_only_floating_dtypes_are_cast(make: Make, stored: torch.dtype, here: torch.dtype) -> None:
    """Between others the value itself may change."""
    first, second = nn.Module(), nn.Module()
    first.register_buffer("x", torch.ones(2, dtype=stored))
    second.register_buffer("x", torch.zeros(2, dtype=here))
    saved(make, model=PerRank(first))
    with pytest.raises(InvalidRequest, match="1 different"):
        tracking(make, model=PerRank(second)).restore(cast=True)
    assert not second.get_buffer("x").any()


def test_part_name_and_dtype_at_once(make: Make) -> None:
    """The three do not disturb each other: `only` speaks of names here."""
    module, optimizer = trained(1, Wrapped)
    saved(make, model=module, optimizer=optimizer)
    other = net(2).to(torch.bfloat16)
    before = other.get_parameter("1.weight").clone()
    restored = tracking(make, model=other, optimizer=adam(other)).restore(
        only=["model/0"], names={"model/inner.": "model/"}, cast=True
    )
    assert restored is not None
    assert torch.equal(other.get_parameter("0.weight"), module.get_parameter("inner.0.weight").to(torch.bfloat16))
    assert torch.equal(other.get_parameter("1.weight"), before)
    assert "model/1.weight" in restored.left_out


def test_s083_state_that_is_no_tensor_follows_its_parameter_too(make: Make) -> None:
    """Numbers that an optimizer keeps beside its moments stand in the object, under the parameter's name."""
    module, optimizer = trained(1, Wrapped)
    for number, parameter in enumerate(module.parameters()):
        optimizer.state[parameter]["seen"] = number
    saved(make, model=module, optimizer=optimizer)
    other = net(2)
    other_optimizer = adam(other)
    tracking(make, model=other, optimizer=other_optimizer).restore(names={"model/inner.": "model/"})
    assert [other_optimizer.state[one]["seen"] for one in other.parameters()] == list(range(6))
