"""What comes back is what was saved, bit for bit, whatever it was made of."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_agent import FakeAgent
from fixtures.fake_mesh import fake_mesh
from fixtures.script_job import Job
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ckptd.client import PerRank, Sharded

__all__ = ["fake_agent", "make"]


@pytest.mark.parametrize("transport", ["shm", "stream"])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("kind", ["adamw", "fused", "tensor-lr", "sgd", "adafactor", "nadam", "lbfgs"])
def test_s027_a_restored_job_goes_on_bit_for_bit(
    make: Make, fake_agent: FakeAgent, kind: str, transport: str, pieces: int
) -> None:
    """Every loss after the restore equals the one of the run that nobody disturbed, twice in a row, into fresh objects."""
    fake_agent.pieces = pieces
    job = Job(1, kind)
    checkpointer = make(transport=transport)
    job.track(checkpointer)
    assert checkpointer.restore() is None
    for _ in range(3):
        job.step()
    checkpointer.save(3, metrics={"loss": 0.5}, tags={"why": "test"}).wait()
    at_save = job.bits()
    expected = [job.step() for _ in range(4)]
    checkpointer.close()
    for round_number in range(2):
        other = Job(100 + round_number, kind)
        random.seed(round_number)
        np.random.seed(round_number)  # noqa: NPY002
        again = make(transport=transport)
        other.track(again)
        restored = again.restore(required=True)
        assert restored is not None
        assert (restored.step, restored.tier, restored.metrics, restored.tags) == (
            3,
            "memory",
            {"loss": 0.5},
            {"why": "test"},
        )
        assert other.bits() == at_save
        assert other.net.head.weight is other.net.embed.weight
        assert [other.step() for _ in range(4)] == expected
        assert list(other.optimizer.state_dict()["state"]) == list(job.optimizer.state_dict()["state"])
        again.close()


def test_restoring_into_a_living_job_undoes_its_steps(make: Make) -> None:
    """State that was not saved goes away: a fresh optimizer's snapshot leaves a used one fresh."""
    job = Job(1)
    checkpointer = make()
    job.track(checkpointer)
    checkpointer.save(0).wait()
    fresh = job.bits()
    first = [job.step() for _ in range(3)]
    checkpointer.save(3).wait()
    pointer = job.net.embed.weight.data_ptr()
    moment = job.optimizer.state[job.net.embed.weight]["exp_avg"]
    job.step()
    checkpointer.restore()
    assert job.optimizer.state[job.net.embed.weight]["exp_avg"] is moment
    job.optimizer.state[job.net.embed.weight]["later"] = torch.ones(1)
    checkpointer.restore(step=3)
    assert "later" not in job.optimizer.state[job.net.embed.weight]
    assert checkpointer.restore(step=0) is not None
    assert job.bits() == fresh
    assert not job.optimizer.state
    assert job.net.embed.weight.data_ptr() == pointer
    assert [job.step() for _ in range(3)] == first


def test_s089_partial_state_and_frozen_parameters_come_back_as_they_were(make: Make) -> None:
    """State of parameters frozen later is kept; parameters without state stay without."""
    net = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])
    optimizer = torch.optim.Adam(net.parameters())
    for layer in (0, 1):
        optimizer.zero_grad()
        net[layer](torch.ones(2)).sum().backward()
        optimizer.step()
    net[0].weight.requires_grad_(False)
    checkpointer = make()
    checkpointer.track(model=net, optimizer=optimizer)
    checkpointer.save(1).wait()
    saved = {id_: {k: v.clone() for k, v in state.items()} for id_, state in optimizer.state_dict()["state"].items()}
    checkpointer.close()
    other = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])
    fresh = torch.optim.Adam(other.parameters())
    again = make()
    again.track(model=other, optimizer=fresh)
    again.restore()
    assert fresh.state_dict()["state"].keys() == saved.keys() == {0, 1}
    for key, state in fresh.state_dict()["state"].items():
        assert all(torch.equal(value, saved[key][word]) for word, value in state.items())


def test_s019_what_is_saved_is_the_state_at_the_call(make: Make, fake_agent: FakeAgent) -> None:
    """S020 too: tensors, 0-dim counters, arrays and lists changed right after the call are stored as they were."""
    fake_agent.hold.set()
    counter, array, words = torch.zeros(()), np.zeros(3), [1, 2]
    big = torch.zeros(100_000)
    checkpointer = make()
    state: dict[str, Any] = {"counter": counter, "nested": {"array": array, "words": words, "big": big}}
    handle = checkpointer.save(1, state)
    for tensor in (counter, big):
        tensor.add_(1)
    array += 1
    words.append(3)
    fake_agent.decide(1)
    handle.wait()
    target: dict[str, Any] = {
        "counter": torch.ones(()),
        "nested": {"array": None, "words": [], "big": torch.ones(100_000)},
    }
    live = target["nested"]["big"]
    assert checkpointer.restore_into(target) is not None
    assert float(target["counter"]) == 0
    assert target["nested"]["array"].tolist() == [0, 0, 0]
    assert target["nested"]["words"] == [1, 2]
    assert target["nested"]["big"] is live
    assert not live.any()


def test_a_state_may_hold_everything_that_can_be_tracked(make: Make) -> None:
    """Modules, optimizers and stateful things at its top level, Sharded and PerRank anywhere."""
    job = Job(1)
    job.step()
    checkpointer = make()
    state: dict[str, Any] = {
        "model": job.net,
        "optimizer": job.optimizer,
        "loader": job.loader,
        "part": Sharded(torch.ones(2), (4,), (0,)),
        "mine": PerRank(torch.ones(1)),
        "plain": 5,
    }
    checkpointer.save(1, state).wait()
    other = Job(2)
    target: dict[str, Any] = {
        "model": other.net,
        "optimizer": other.optimizer,
        "loader": other.loader,
        "part": Sharded(torch.zeros(2), (4,), (0,)),
        "mine": PerRank(torch.zeros(1)),
        "plain": 0,
    }
    sharded = target["part"]
    checkpointer.restore_into(target)
    assert other.bits() == job.bits()
    assert target["plain"] == 5
    assert target["part"] is sharded
    assert sharded.tensor.tolist() == [1, 1]
    assert target["mine"].value.tolist() == [1]


def test_the_keys_of_an_optimizers_state_keep_their_order(make: Make, fake_agent: FakeAgent) -> None:
    """Where there is none yet, and where it stands: so the next save has the layout of the one before, and its chunks."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters(), amsgrad=True)
    step_of(net, optimizer)
    checkpointer = make()
    checkpointer.track(model=net, optimizer=optimizer)
    checkpointer.save(1).wait()
    checkpointer.close()
    for trained in (False, True):
        other = nn.Linear(2, 2)
        other_optimizer = torch.optim.AdamW(other.parameters(), amsgrad=True)
        if trained:
            step_of(other, other_optimizer)
        again = make()
        again.track(model=other, optimizer=other_optimizer)
        again.restore()
        assert list(other_optimizer.state[other.weight]) == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        again.save(2 + trained).wait()
        again.close()
    assert fake_agent.begun[1].layout_digest == fake_agent.begun[2].layout_digest == fake_agent.begun[0].layout_digest


def step_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_hook_may_change_what_is_loaded(make: Make) -> None:
    """For data that was saved by an older script."""
    checkpointer = make()
    checkpointer.save(1, {"old": {"position": 3}}).wait()
    checkpointer.on_load("old", lambda value: {"at": value["position"] + 1})  # type: ignore[index]
    state: dict[str, Any] = {"old": {}}
    checkpointer.restore_into(state)
    assert state == {"old": {"at": 4}}


def test_s022_a_restore_during_a_pending_save_gives_a_whole_step(make: Make, fake_agent: FakeAgent) -> None:
    """The agent's answer decides; the handle in flight is not disturbed."""
    net = nn.Linear(1, 1)
    checkpointer = make()
    checkpointer.track(model=net)
    checkpointer.save(1).wait()
    fake_agent.hold.set()
    handle = checkpointer.save(2)
    assert checkpointer.restore(step=1) is not None
    fake_agent.decide(2)
    handle.wait()


def test_s094_many_long_names_pass_default_message_limits(make: Make, fake_agent: FakeAgent) -> None:
    """1,600 tensors with names of 3,000 characters: 5 MB of names travel in parts, out and back."""
    state: dict[str, Any] = {f"{number:05d}{'n' * 3_000}": torch.full((), number) for number in range(1_600)}
    checkpointer = make()
    checkpointer.save(1, {"many": state}).wait()
    target: dict[str, Any] = {"many": {name: torch.zeros((), dtype=torch.int64) for name in state}}
    assert checkpointer.restore_into(target) is not None
    assert all(torch.equal(value, target["many"][name]) for name, value in state.items())


def test_a_default_device_changes_nothing(make: Make) -> None:
    """Scratch memory and fresh tensors are on the host, whatever the script's default device is."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    checkpointer = make()
    checkpointer.track(model=net, optimizer=optimizer)
    other = nn.Linear(2, 2)
    fresh = torch.optim.AdamW(other.parameters())
    torch.set_default_device("meta")
    try:
        checkpointer.save(1, {"loose": torch.ones(3, device="cpu")}).wait()
        checkpointer.close()
        again = make()
        again.track(model=other, optimizer=fresh)
        state: dict[str, Any] = {"loose": None}
        again.restore_into(state)
    finally:
        torch.set_default_device(None)
    assert torch.equal(net.weight, other.weight)
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[net.weight]["exp_avg"])
    assert state["loose"].tolist() == [1, 1, 1]


def test_a_tensor_in_two_places_of_a_value_is_stored_once_and_tied_again(make: Make, fake_agent: FakeAgent) -> None:
    """In a state and in what an object gives; live tensors stay the same ones, and tensors that are only equal stay apart."""

    class Holder:
        def __init__(self, value: float) -> None:
            shared = torch.full((3,), value)
            self.state: dict[str, Any] = {"one": shared, "deep": [{"two": shared.view(3)}], "apart": shared.clone()}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    def value(fill: float) -> dict[str, Any]:
        shared = torch.full((3,), fill)
        return {"a": shared, "b": {"c": shared, "mine": PerRank(shared)}, "tail": shared[1:]}

    checkpointer = make()
    checkpointer.track(holder=Holder(1.0))
    checkpointer.save(1, {"x": value(1.0)}).wait()
    checkpointer.close()
    assert sorted(fake_agent.kept[1].names()) == ["holder/apart", "holder/one", "x/a", "x/tail"]
    holder, state = Holder(2.0), {"x": value(2.0)}
    live = state["x"]["a"]
    again = make()
    again.track(holder=holder)
    restored = again.restore_into(state)
    assert restored is not None
    assert (restored.missing, restored.unexpected) == ((), ())
    assert state["x"]["a"] is live
    assert state["x"]["b"]["c"] is live
    assert (live.tolist(), state["x"]["tail"].tolist()) == ([1, 1, 1], [1, 1])
    assert holder.state["one"] is holder.state["deep"][0]["two"]
    assert holder.state["apart"] is not holder.state["one"]
    assert holder.state["one"].tolist() == holder.state["apart"].tolist() == [1, 1, 1]
    again.save(2, state).wait()
    assert fake_agent.begun[1].layout_digest == fake_agent.begun[0].layout_digest


def test_tensors_that_become_untied_are_stored_apart(make: Make, fake_agent: FakeAgent) -> None:
    """From one save to the next; each restore gives what that save saw."""
    shared = torch.ones(2)
    state: dict[str, Any] = {"x": [shared, shared]}
    checkpointer = make()
    checkpointer.save(1, state).wait()
    state["x"] = [shared, shared + 1]
    checkpointer.save(2, state).wait()
    for step, wanted in ((1, [[1, 1], [1, 1]]), (2, [[1, 1], [2, 2]])):
        here: dict[str, Any] = {"x": [torch.zeros(2), torch.zeros(2)]}
        make().restore_into(here, step=step, rollback=True)
        assert [tensor.tolist() for tensor in here["x"]] == wanted
        assert (here["x"][0] is here["x"][1]) == (step == 1)


def test_state_of_shards_without_elements_is_made_again(make: Make) -> None:
    """A rank that holds nothing of a parameter has no row for its moments, but the optimizer needs them to step."""
    with fake_mesh(1, 2) as mesh:

        def made() -> tuple[nn.Parameter, torch.optim.Optimizer]:
            local, shape = torch.empty(0, 2), torch.Size([1, 2])
            held = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(2, 1))
            parameter = nn.Parameter(held)
            return parameter, torch.optim.Adam([parameter])

        parameter, optimizer = made()
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        group = dist.new_group([1])
        checkpointer = make(process_group=group)
        checkpointer.track(model=nn.ParameterDict({"p": parameter}), optimizer=optimizer)
        checkpointer.save(1, {"held": [optimizer.state[parameter]["exp_avg"]]}).wait()
        checkpointer.close()
        other, fresh = made()
        again = make(process_group=group)
        again.track(model=nn.ParameterDict({"p": other}), optimizer=fresh)
        state: dict[str, Any] = {"held": [torch.zeros_like(other)]}
        again.restore_into(state)
        assert list(fresh.state[other]) == ["step", "exp_avg", "exp_avg_sq"]
        assert fresh.state[other]["exp_avg"].to_local().shape == (0, 2)
        assert isinstance(state["held"][0], DTensor)
        other.grad = torch.zeros_like(other)
        fresh.step()
