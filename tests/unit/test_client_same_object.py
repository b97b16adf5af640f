"""Live things that are one object, or are tied, and were stored otherwise: each gets what was stored for it, or a refusal."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_mesh import fake_mesh
from fixtures.tracked_things import Counter, named
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ckptd.client import InvalidRequest
from ckptd.client.stored import Stored
from ckptd.client.targets import Targets
from ckptd.client.tracking import Tracking
from ckptd.daemon.layouts import layouts_of
from ckptd.daemon.tensors import stored_tensors
from ckptd.protos.snapshot_pb2 import RankSection

__all__ = ["fake_agent", "make"]


def ones(value: float) -> torch.Tensor:
    return torch.full((2,), value)


def tied(ties: str, value: float) -> dict[str, torch.Tensor]:
    """Return tensors by name, from texts as "a b c=a": each name has a value of its own, or is tied."""
    made: dict[str, torch.Tensor] = {}
    for number, text in enumerate(ties.split()):
        name, _, owner = text.partition("=")
        made[name] = made[owner] if owner else ones(value and value + number)
    return made


OTHERWISE = {
    "to another owner": ("a b c=a", "a b c=b", "c", "b"),
    "to a stranger, after an alias": ("o x y=x", "o y x=o", "x", "o"),
    "stored apart": ("a b", "a b=a", "b", "a"),
    "to nothing stored": ("b", "a b=a", "b", "a"),
    "its owner not stored": ("b c=b", "a b c=a", "c", "a"),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", OTHERWISE)
def test_a_tie_to_what_was_another_tensor_is_refused(make: Make, kind: str, strict: bool) -> None:
    """By the name of the tied one and of its owner here, with a way out that works; nothing is touched."""
    there, here, name, owner = OTHERWISE[kind]
    live = tied(here, 0)
    checkpointer = make(audit="off")
    checkpointer.save(1, {"m": named(**tied(there, 1))}).wait()
    with pytest.raises(InvalidRequest, match=rf"m/{name} \(stored .*here tied to m/{owner}") as caught:
        checkpointer.restore_into({"m": named(**live)}, strict=strict)
    assert not any(tensor.any() for tensor in live.values())
    assert f"drop=('m/{name}', 'm/{owner}')" in caught.value.hint
    checkpointer.restore_into({"m": named(**live)}, strict=False, drop=(f"m/{name}", f"m/{owner}"))
    assert not live[name].any()


def test_ties_that_agree_are_restored_in_any_order(make: Make) -> None:
    """The name that comes first here may be an alias there; and what was tied may stand apart here."""
    stored = ones(3)
    checkpointer = make(audit="off")
    checkpointer.save(1, {"m": named(x=stored, y=stored, z=stored)}).wait()
    live, alone = ones(0), ones(0)
    checkpointer.restore_into({"m": named(z=live, x=live, y=alone)})
    assert live.tolist() == alone.tolist() == [3, 3]


def test_ties_of_pieces_are_stored_where_there_are_elements() -> None:
    """Two rows on four ranks: whoever holds none stores neither of two tied names, and restores all the same."""
    sections: dict[int, RankSection] = {}
    for rank in range(4):
        with fake_mesh(rank, 4) as mesh:
            local = torch.ones(1 if rank < 2 else 0, 3)
            scale = nn.Parameter(
                DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([2, 3]), stride=(3, 1))
            )
            tracking = Tracking()
            tracking.add("m", nn.ParameterDict({"a": scale, "b": scale}))
            layout = tracking.collect(None).layout
            aliases = dict(zip(layout.aliases.alias, layout.aliases.target, strict=True))
            restoring = tracking.restoring(Stored(layout.rows, ["rng"], aliases), None)
            assert restoring.targets.check(strict=True, step=1) == ((), ())
            assert len(restoring.targets.wanted) == len(layout.rows) == (rank < 2)
        writer = [rank] * len(layout.rows)
        sections[rank] = RankSection(
            rank=rank, coordinate=[rank], shards=layout.table, aliases=layout.aliases, writer=writer
        )
    assert layouts_of(sections).tensors == 1
    shown = stored_tensors(sections, ("rank",))
    assert {str(key): (tensor.alias_of, tensor.ranks) for key, tensor in shown.items()} == {
        "m/a": ("", [0, 1]),
        "m/b": ("m/a", [0, 1]),
    }


def test_one_container_in_two_places_gets_each_its_value(make: Make) -> None:
    """Two values: two containers. One value: it stays one object."""
    checkpointer = make(audit="off")
    for step, val in ((1, 2.0), (2, 1.0)):
        checkpointer.save(
            step,
            {
                "best": {"train": {"loss": 1.0}, "val": {"loss": val}},
                "seen": {"a": [1], "b": [2, 3] if step == 1 else [1]},
                "other": {"loss": 5.0 if step == 1 else 1.0},
            },
        ).wait()
    best: dict[str, Any] = {}
    seen: list[int] = []
    state: dict[str, Any] = {"best": {"train": best, "val": best}, "seen": {"a": seen, "b": seen}, "other": best}
    checkpointer.restore_into(state, step=1)
    assert state["best"] == {"train": {"loss": 1.0}, "val": {"loss": 2.0}}
    assert state["seen"] == {"a": [1], "b": [2, 3]}
    assert state["other"] == {"loss": 5.0}
    assert state["best"]["train"] is best
    best, seen = {}, []
    state = {"best": {"train": best, "val": best}, "seen": {"a": seen, "b": seen}, "other": best}
    checkpointer.restore_into(state, step=2)
    assert state["best"]["train"] is state["best"]["val"] is state["other"] is best
    assert (best, state["seen"]["a"]) == ({"loss": 1.0}, [1])
    assert state["seen"]["a"] is state["seen"]["b"]


def test_equal_containers_with_tensors_of_their_own_are_compared_by_bits(make: Make) -> None:
    """-0.0 equals 0.0, and yet the containers are two; the live one is one."""
    checkpointer = make(audit="off")
    checkpointer.save(1, {"v": {"a": {"t": torch.zeros(1), "n": 0.0}, "b": {"t": torch.zeros(1), "n": -0.0}}}).wait()
    one: dict[str, Any] = {}
    state: dict[str, Any] = {"v": {"a": one, "b": one}}
    checkpointer.restore_into(state)
    assert (str(state["v"]["a"]["n"]), str(state["v"]["b"]["n"])) == ("0.0", "-0.0")


def test_a_container_that_holds_itself_is_restored(make: Make) -> None:
    """What is stored ends, so the live one does too."""
    checkpointer = make(audit="off")
    checkpointer.save(1, {"v": {"self": {"n": 1}, "n": 2}}).wait()
    live: dict[str, Any] = {"n": 0}
    live["self"] = live
    checkpointer.restore_into({"v": live})
    assert live == {"self": {"n": 1}, "n": 2}


@pytest.mark.parametrize("kind", ["stateful", "generator", "optimizer"])
def test_one_object_is_not_two_stored_ones(make: Make, kind: str) -> None:
    """Tracked under two names here: refused where the stored values differ, before anything is touched."""

    def thing(value: int) -> Any:
        if kind == "stateful":
            return Counter(value)
        if kind == "generator":
            return torch.Generator().manual_seed(value)
        return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=float(value))

    def value_of(thing: Any) -> Any:
        if kind == "stateful":
            return thing.at
        return thing.initial_seed() if kind == "generator" else thing.param_groups[0]["lr"]

    checkpointer = make(audit="off")
    checkpointer.save(1, {"a": thing(1), "b": thing(2)}).wait()
    checkpointer.save(2, {"a": thing(3), "b": thing(3)}).wait()
    one = thing(7)
    with pytest.raises(InvalidRequest, match="b: stored apart from a and with other values, here one object is both"):
        checkpointer.restore_into({"a": one, "b": one}, step=1)
    assert value_of(one) == 7
    checkpointer.restore_into({"a": one, "b": one}, step=2)
    checkpointer.restore_into({"a": one, "b": one}, step=1, drop=("b",))


def test_state_of_an_optimizer_whose_groups_are_not_stored_is_left_alone(make: Make) -> None:
    """As `names` may leave it: whole or not at all, and told."""

    def made(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(net.parameters(), lr=value)
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
        return net, optimizer

    net, old = made(1.0)
    checkpointer = make(audit="off")
    checkpointer.save(1, {"net": net, "old": old}).wait()
    here, optimizer = made(2.0)
    before = {key: value.clone() for key, value in optimizer.state[here.weight].items()}  # type: ignore[index]

    def renamed(name: str) -> str:
        return f"opt/{name.removeprefix('old/')}" if name.startswith("old/") else name

    state = {"net": here, "opt": optimizer}
    restored = checkpointer.restore_into(state, names=renamed, strict=False)
    assert restored is not None
    assert all(torch.equal(optimizer.state[here.weight][key], value) for key, value in before.items())  # type: ignore[index]
    assert restored.missing == ("opt",)
    assert "opt/state/weight/exp_avg" in restored.unexpected
    with pytest.raises(InvalidRequest, match="1 missing in the snapshot: opt;"):
        checkpointer.restore_into(state, names=renamed)


def test_memory_for_new_state_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where live tensors share memory, so that all is asked for a second time."""

    def job(step: bool) -> Tracking:
        base, net = torch.zeros(4), nn.Linear(2, 2)
        optimizer = torch.optim.Adam(net.parameters())
        if step:
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        tracking = Tracking()
        for name, thing in {"net": net, "shared": named(a=base, b=base[:2]), "optimizer": optimizer}.items():
            tracking.add(name, thing)
        return tracking

    held = job(step=True).collect(None)
    stored = Stored(held.layout.rows, [name for name, _ in held.objects], {})
    alive: list[weakref.ref[torch.Tensor]] = []
    most, fresh = [0], Targets.fresh

    def counted(self: Targets, name: str, **how: Any) -> torch.Tensor | None:
        made = fresh(self, name, **how)
        if made is not None:
            alive.append(weakref.ref(made))
        most[0] = max(most[0], sum(ref() is not None for ref in alive))
        return made

    monkeypatch.setattr(Targets, "fresh", counted)
    gc.disable()
    try:
        restoring = job(step=False).restoring(stored, None)
    finally:
        gc.enable()
    assert len(alive) == 12, "two passes over three tensors of two parameters"
    assert most == [6]
    assert len(restoring.targets.wanted) == 10
