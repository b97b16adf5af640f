"""What hooks see of a stored value: final bytes, before anything live was touched; and what becomes of what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_mesh import fake_mesh
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ckptd.client.reshard_hooks import StoredPiece
from ckptd.client.sharding import PerRank, Sharded
from ckptd.client.stored import Elsewhere, Stored
from ckptd.client.tracking import Tracking

__all__ = ["fake_agent", "make"]


@pytest.fixture(autouse=True)
def no_luck() -> Iterator[None]:
    """Fresh memory holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=before)


class Mean:
    """A running mean."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["t"]


def test_a_hook_reads_the_tensors_of_a_stateful_thing(make: Make) -> None:
    """What it makes of them is made of the stored bytes."""
    checkpointer = make(audit="off")
    checkpointer.save(1, {"mean": Mean(torch.tensor([5.0]))}).wait()
    checkpointer.on_load("mean", lambda value: {**value, "t": value["t"].double()})  # type: ignore[dict-item,index]
    here = Mean(torch.tensor([0.0]))
    checkpointer.restore_into({"mean": here})
    assert (here.held.dtype, here.held.tolist()) == (torch.float64, [5.0])


def piece(leaf: torch.Tensor) -> Sharded:
    return Sharded(leaf, (2,), (0,))


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("wrap", [lambda leaf: leaf, PerRank, piece], ids=["plain", "own", "piece"])
def test_a_hook_reads_stored_tensors_and_not_the_live_ones(make: Make, wrap: Callable[[Any], Any], cast: bool) -> None:
    """Of a plain value that stands here with other elements: cast first where that was asked, and nothing live is touched."""
    stored = torch.float64 if cast else torch.float32
    checkpointer = make(audit="off")
    checkpointer.save(1, {"v": {"w": wrap(torch.tensor([7.0, 8.0], dtype=stored))}}).wait()
    live = torch.zeros(2)
    seen: list[list[float]] = []

    def one_more(value: Any) -> Any:
        leaf = value["w"]
        inner: Any = leaf.value if isinstance(leaf, PerRank) else leaf.tensor if isinstance(leaf, Sharded) else leaf
        seen.append(live.tolist())
        return {"w": inner + 1}

    checkpointer.on_load("v", one_more)
    state: dict[str, Any] = {"v": {"w": wrap(live)}}
    checkpointer.restore_into(state, cast=cast)
    assert state["v"]["w"].tolist() == [8.0, 9.0]
    assert seen == [[0.0, 0.0]]


HOOKS: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "as it is": (lambda value: value, [7.0, 8.0]),
    "another key": (lambda value: {"new": value["w"]}, [7.0, 8.0]),
    "in a tuple": (lambda value: {"deep": [(value["w"], 1)]}, [7.0, 8.0]),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("make_live", [lambda: torch.zeros(2), lambda: torch.zeros(1).expand(2)], ids=["", "expanded"])
def test_what_a_hook_passes_on_is_still_restored_in_place(
    make: Make, kind: str, make_live: Callable[[], torch.Tensor]
) -> None:
    """The live tensor is the same object, and holds the stored value."""
    hook, expected = HOOKS[kind]
    checkpointer = make(audit="off")
    checkpointer.save(1, {"v": {"w": torch.tensor([7.0, 8.0])}}).wait()
    checkpointer.on_load("v", hook)
    live = make_live()
    state: dict[str, Any] = {"v": {"w": live}}
    checkpointer.restore_into(state)
    assert live.tolist() == expected
    assert any(item is live for item in tensors(state["v"]))


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors(item)]


def test_a_hook_may_change_what_it_gets_in_place(make: Make) -> None:
    """The live tensor gets what the hook left in it; one that it does not return stays as it is."""

    def changed(value: Any) -> Any:
        value["w"].add_(1)
        return {"w": value["w"]}

    checkpointer = make(audit="off")
    checkpointer.save(1, {"v": {"w": torch.tensor([7.0]), "gone": torch.tensor([3.0])}}).wait()
    checkpointer.on_load("v", changed)
    live, gone = torch.zeros(1), torch.zeros(1)
    state: dict[str, Any] = {"v": {"w": live, "gone": gone}}
    checkpointer.restore_into(state)
    assert (live.item(), gone.item(), list(state["v"])) == (8.0, 0.0, ["w"])
    assert state["v"]["w"] is live


def test_a_hook_that_raises_leaves_everything_as_it_is(make: Make) -> None:
    """It runs before anything live is touched."""

    def broken(_value: object) -> object:
        raise ValueError("no")

    checkpointer = make(audit="off")
    checkpointer.save(1, {"m": nn.Linear(1, 1), "v": {"w": torch.tensor([7.0])}}).wait()
    checkpointer.on_load("v", broken)
    live, net = torch.zeros(1), nn.Linear(1, 1)
    before = net.weight.detach().clone()
    with pytest.raises(ValueError, match="no"):
        checkpointer.restore_into({"m": net, "v": {"w": live}})
    assert live.item() == 0
    assert torch.equal(net.weight, before)


class Scaled(nn.Linear):
    """Has a tensor in its extra state."""

    def __init__(self, scale: float) -> None:
        super().__init__(1, 1)
        self.scale = torch.tensor([scale])

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


def test_a_hook_reads_extra_state(make: Make) -> None:
    """Of a module, by the key of the submodule."""
    checkpointer = make(audit="off")
    checkpointer.save(1, {"net": Scaled(3.0)}).wait()
    checkpointer.on_load("net", lambda value: {"_extra_state": {"scale": value["_extra_state"]["scale"] * 2}})  # type: ignore[index]
    here = Scaled(0.0)
    checkpointer.restore_into({"net": here})
    assert here.scale.tolist() == [6.0]


def test_a_hook_reads_what_an_optimizer_keeps(make: Make) -> None:
    """Hyperparameters that are tensors, and state below the first level, in a fresh optimizer."""
    seen: list[Any] = []

    def look(value: Any) -> Any:
        seen.append(value["param_groups"][0]["lr"].item())
        seen.append(value["state"]["0"]["history"][0].tolist())
        return value

    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.25))
    optimizer.state[parameter] = {"history": [torch.tensor([1.0, 2.0])]}
    checkpointer = make(audit="off")
    checkpointer.save(1, {"net": nn.ParameterList([parameter]), "optimizer": optimizer}).wait()
    checkpointer.on_load("optimizer", look)
    other = nn.Parameter(torch.zeros(2))
    fresh = torch.optim.Adam([other], lr=torch.tensor(0.5))
    checkpointer.restore_into({"net": nn.ParameterList([other]), "optimizer": fresh})
    assert seen == [0.25, [1.0, 2.0]]
    assert fresh.param_groups[0]["lr"].item() == 0.25


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one."""
    with fake_mesh(0, 1) as made:
        yield made


@pytest.mark.parametrize("is_stateful", [False, True])
def test_a_reshard_hook_reads_global_tensors(mesh: DeviceMesh, is_stateful: bool) -> None:
    """Of a step of another mesh: a DTensor and a piece in a thing's value are final when its hook is asked."""

    def leaf(value: float) -> dict[str, Any]:
        whole = DTensor.from_local(torch.full((2,), value), mesh, [Replicate()], run_check=False)
        return {"whole": whole, "piece": piece(torch.full((2,), value))}

    saving = Tracking()
    held = saving.collect({"v": Mean(leaf(7.0)) if is_stateful else leaf(7.0)})
    ranks = {rank: [name for name, _ in held.objects] for rank in range(2)}
    elsewhere = Elsewhere(
        coordinates={0: {"dp": 0}, 1: {"dp": 1}}, objects=ranks, own_rows={}, step=7, here={"dp": 0}, world=1
    )
    seen: list[float] = []

    def hook(pieces: Sequence[StoredPiece], _here: object) -> Any:
        value = pieces[1].value["t"] if is_stateful else pieces[1].value
        seen.extend([*value["whole"].to_local().tolist(), *value["piece"].tensor.tolist()])
        return pieces[0].value

    again, live = Tracking(), leaf(0.0)
    again.on_reshard("v", hook)
    state: dict[str, Any] = {"v": Mean(live) if is_stateful else live}
    restoring = again.restoring(Stored(held.layout.rows, (), {}, elsewhere), state, drop=("rng",))
    views = dict(zip([row.name for row in held.layout.rows], held.views, strict=True))
    objects = dict(held.objects)

    def fill(*, fresh: bool) -> None:
        with torch.no_grad():
            for wanted in restoring.targets.wanted:
                if wanted.is_fresh == fresh:
                    wanted.view.copy_(views[wanted.row.name])

    fill(fresh=True)
    restoring.decode({key: objects[key[0]] for key in restoring.targets.objects})
    assert seen == [7.0] * 4
    assert live["whole"].to_local().tolist() == [0.0, 0.0]
    restoring.targets.check_shared()
    fill(fresh=False)
    restoring.load()
    here = state["v"].held if is_stateful else state["v"]
    assert here["whole"].to_local().tolist() == here["piece"].tensor.tolist() == [7.0, 7.0]
    assert is_stateful or here["whole"] is live["whole"]
