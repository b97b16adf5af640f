"""Restoring a part, under other names, in another dtype, on another mesh; and what only all ranks together can tell."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.agents import AgentProcess, running_agents
from fixtures.client_job import ClientJob, config_of
from torch import nn

from ckptd.client import CkptdError, InvalidRequest, PerRank, Restored, SaveHandle
from ckptd.client.checkpointer import Checkpointer
from ckptd.protos import error_pb2

pytestmark = [pytest.mark.integration, pytest.mark.mesh]

WIDTH = 4


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[AgentProcess]]:
    """Two agents for all tests here."""
    with running_agents() as agents:
        yield [agents.new(), agents.new()]


@pytest.fixture
def agent(nodes: list[AgentProcess]) -> AgentProcess:
    """Return the first of them."""
    return nodes[0]


@pytest.fixture
def root(agent: AgentProcess) -> str:
    """Return a root that nobody has used."""
    return f"file://{agent.folder}/root{next(_roots)}"


_roots = itertools.count()


def log_of(root: str) -> list[str]:
    """Return the names of all records under a root: start records and decisions, but no claims."""
    folder = Path(root.removeprefix("file://")) / "log"
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and ".claim." not in path.name)


class Extra(nn.Linear):
    """A layer with extra state, some of it a tensor."""

    def __init__(self, value: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.note: dict[str, Any] = {"calls": value, "seen": torch.full((2,), float(value))}

    def get_extra_state(self) -> dict[str, Any]:
        return self.note

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.note = state


class Wrapped(nn.Module):
    """Adds a component to the name of everything in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Loader:
    """A position, with a tensor."""

    def __init__(self, at: int) -> None:
        self.at, self.own = at, torch.full((2,), at)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "own": self.own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.own = state["at"], state["own"]


def net(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Extra(seed))


def trained(module: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for number, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, 0.25 * (number + 1))
    optimizer.step()
    return optimizer


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def saved(agent: AgentProcess, root: str, *, mesh: dict[str, int] | None = None, **things: Any) -> None:
    """Save step 1 on a mesh of one rank."""
    with Checkpointer(config=config_of(root, agent), mesh=mesh or {"dp": 1, "tp": 1}) as ckpt:
        ckpt.track(**things)
        ckpt.save(1).wait()


def opened(agent: AgentProcess, root: str, **things: Any) -> Checkpointer:
    """Return a Checkpointer on another mesh."""
    made = Checkpointer(config=config_of(root, agent), mesh={"world": 1})
    made.track(**things)
    return made


def test_a_part_under_another_name_and_dtype(agent: AgentProcess, root: str) -> None:
    """As on the mesh that saved: names first, then the choice, floating dtypes last; the rest is left out by name."""
    module = net(1)
    saved(agent, root, model=Wrapped(module), optimizer=trained(module), loader=Loader(1))
    here, loader = net(2).to(torch.bfloat16), Loader(2)
    kept = here.get_parameter("1.weight").clone()
    with opened(agent, root, model=here, loader=loader) as ckpt:
        restored = ckpt.restore(only=["model/0"], names={"model/inner.": "model/"}, cast=True)
    assert restored is not None
    assert torch.equal(here[0].weight, module[0].weight.to(torch.bfloat16))
    assert torch.equal(here[1].weight, kept)
    assert (here[1].note["calls"], loader.at) == (2, 2)
    assert {"model/1.weight", "loader", "loader/own", "optimizer", "rng"} <= set(restored.left_out)
    assert not any(name.startswith("model/0") for name in restored.left_out)
    assert (restored.missing, restored.unexpected) == ((), ())


def test_names_are_mapped_for_parameters_optimizer_and_objects(agent: AgentProcess, root: str) -> None:
    """All of it, each rank's own tensors of extra state and of a loader too; training goes on bit for bit."""
    module = net(1)
    optimizer = trained(module)
    saved(agent, root, net=Wrapped(module), opt=optimizer, data=Loader(1))
    generator = torch.get_rng_state()
    here, loader = net(2), Loader(2)
    other = torch.optim.AdamW(here.parameters(), lr=0.5)
    with opened(agent, root, model=here, optimizer=other, loader=loader) as ckpt:
        restored = ckpt.restore(
            names={"net/inner.": "model/", "net/": "model/", "opt/": "optimizer/", "data/": "loader/"}
        )
    assert restored is not None
    assert same(here, module)
    assert torch.equal(torch.get_rng_state(), generator), "one rank to one rank keeps its generators"
    assert (loader.at, loader.own.tolist()) == (1, [1, 1])
    assert (here[1].note["calls"], here[1].note["seen"].tolist()) == (1, [1, 1])
    assert other.param_groups[0]["lr"] == 0.1
    for mine, theirs in zip(here.parameters(), module.parameters(), strict=True):
        assert list(other.state[mine]) == list(optimizer.state[theirs])
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(other.state[mine][key], value)


def test_an_optimizer_alone_and_cast(agent: AgentProcess, root: str) -> None:
    """Its state follows the parameters that are here; with a cast, their dtype."""
    module = net(1)
    optimizer = trained(module)
    saved(agent, root, model=module, optimizer=optimizer)
    here = net(2)
    other = torch.optim.AdamW(here.parameters(), lr=0.5)
    before = [parameter.clone() for parameter in here.parameters()]
    with opened(agent, root, model=here, optimizer=other) as ckpt:
        restored = ckpt.restore(only="optimizer")
        assert restored is not None
        assert all(torch.equal(a, b) for a, b in zip(before, here.parameters(), strict=True))
        assert torch.equal(other.state[here[0].weight]["exp_avg"], optimizer.state[module[0].weight]["exp_avg"])
        assert {"model/0.weight", "model", "model/1._extra_state/seen"} <= set(restored.left_out)
        half = net(3).to(torch.float16)
        half_optimizer = torch.optim.AdamW(half.parameters())
    with opened(agent, root, model=half, optimizer=half_optimizer) as ckpt:
        with pytest.raises(InvalidRequest, match="different: model/0") as caught:
            ckpt.restore()
        assert "cast=True" in caught.value.hint
        ckpt.restore(cast=True)
    held = half_optimizer.state[half[0].weight]["exp_avg"]
    assert torch.equal(held, optimizer.state[module[0].weight]["exp_avg"].to(torch.float16))


def normed(value: float) -> Any:
    """Return a model whose running statistics are each rank's own."""
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.fill_(value)
    return made


def mean(pieces: Any, _here: Any) -> torch.Tensor:
    """Return the mean over all ranks."""
    stacked = torch.stack([piece.value for piece in pieces]).to(torch.float64)
    return stacked.mean(0).to(pieces[0].value.dtype)


STATISTICS = ("model/*.running_*", "model/*.num_batches_tracked")


def one_for_all(error: list[CkptdError]) -> CkptdError:
    """Return the error that all ranks had."""
    assert len({(each.message, each.reason) for each in error}) == 1, [each.message for each in error]
    return error[0]


def refused(rank: Checkpointer, **asked: Any) -> CkptdError:
    with pytest.raises(CkptdError) as caught:
        rank.restore(**asked)
    return caught.value


def test_own_tensors_of_a_module_need_a_hook_or_are_dropped(agent: AgentProcess, root: str) -> None:
    """Two ranks become three: refused by name before any record; a hook gets all values with their places."""
    models = [normed(rank + 1) for rank in range(2)]
    models[1][0].load_state_dict(models[0][0].state_dict())  # the linear layer and the affine part are replicas
    with torch.no_grad():
        models[1][1].weight.fill_(1)
        models[1][1].bias.fill_(1)
    with ClientJob(root, [agent], 2, per_rank=STATISTICS) as job:
        job.each(lambda rank: rank.track(model=models[rank.rank]))
        job.wait(job.each(lambda rank: rank.save(1)))
    before = log_of(root)
    here = [normed(9) for _ in range(3)]
    with ClientJob(root, [agent], 3, per_rank=STATISTICS) as job:
        job.each(lambda rank: rank.track(model=here[rank.rank]))
        error = one_for_all(job.each(refused))
        assert "3 different: model/1.running_mean (stored as each rank's own by 2 ranks" in error.message
        assert 'on_reshard("model/1.running_mean", hook)' in error.hint
        assert log_of(root) == before
        assert {tensor.flatten()[0].item() for one in here for tensor in one.state_dict().values()} == {9}
        [dropped, *_] = job.each(lambda rank: rank.restore(drop=STATISTICS))
        assert dropped is not None
        assert dropped.unexpected == ()
        assert [(one[0].weight[0, 0].item(), one[1].running_mean[0].item()) for one in here] == [(1, 9)] * 3
        seen: list[Any] = []

        def where(pieces: Any, place: Any) -> torch.Tensor:
            seen.append(([dict(piece.coordinate) for piece in pieces], dict(place)))
            return torch.tensor(10 * place["dp"] + len(pieces))

        def hooked(rank: Checkpointer) -> None:
            rank.on_reshard("model/*.running_*", mean)
            rank.on_reshard("model/1.num_batches_tracked", where)
            rank.restore()

        job.each(hooked)
        assert [one[1].running_mean.tolist() for one in here] == [[1.5] * WIDTH] * 3
        assert [one[1].num_batches_tracked.item() for one in here] == [2, 12, 22]
        assert sorted(place["dp"] for _, place in seen) == [0, 1, 2]
        assert all(places == [{"dp": 0}, {"dp": 1}] for places, _ in seen)
        job.wait(job.each(lambda rank: rank.save(2)))


def test_a_hooks_tensor_that_does_not_fit_touches_nothing(agent: AgentProcess, root: str) -> None:
    """Named with what it gave and what is here."""
    saved(agent, root, model=PerRank(normed(1)))
    here = normed(2)
    with opened(agent, root, model=PerRank(here)) as ckpt:
        ckpt.on_reshard("model/*", lambda pieces, _: pieces[0].value)
        ckpt.on_reshard("model/1.running_var", lambda _pieces, _here: torch.zeros(1))
        with pytest.raises(
            InvalidRequest, match=r"model/1\.running_var: the hook .* gave float32\[1\], here is float32\[4\]"
        ):
            ckpt.restore()
        assert {tensor.flatten()[0].item() for tensor in here.state_dict().values()} == {2}
        ckpt.on_reshard("model/1.running_var", lambda pieces, _: pieces[0].value + 4)
        ckpt.restore()
    assert {name: tensor.flatten()[0].item() for name, tensor in here.state_dict().items()} == {
        name: 5 if name == "1.running_var" else 1 for name in here.state_dict()
    }


def test_own_state_of_an_optimizer_comes_by_a_hook(agent: AgentProcess, root: str) -> None:
    """Of a parameter in no tracked module only its place is known; into live state, and where there is none yet."""
    mine = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([mine], lr=0.1, momentum=0.9)
    mine.grad = torch.full((3,), 2.0)
    optimizer.step()
    saved(agent, root, optimizer=optimizer)
    for fresh in (True, False):
        there = nn.Parameter(torch.ones(3))
        other = torch.optim.SGD([there], lr=0.5, momentum=0.9)
        if not fresh:
            there.grad = torch.ones(3)
            other.step()
        live = other.state[there]["momentum_buffer"] if not fresh else None
        with opened(agent, root, optimizer=other) as ckpt:
            with pytest.raises(InvalidRequest, match=r"different: optimizer/state/#0/momentum_buffer"):
                ckpt.restore()
            ckpt.on_reshard("optimizer/state/*", lambda pieces, _: pieces[0].value * 3)
            ckpt.restore()
        assert other.state[there]["momentum_buffer"].tolist() == [6, 6, 6]
        assert fresh or other.state[there]["momentum_buffer"] is live
        assert other.param_groups[0]["lr"] == 0.1


def test_an_object_declared_each_ranks_own_is_refused_before_any_record(agent: AgentProcess, root: str) -> None:
    """With one stored rank too; the extra state of a module is an object like any other."""
    saved(agent, root, loader=PerRank(Loader(1)), model=PerRank(Extra(1)))
    before = log_of(root)
    loader, model = Loader(2), Extra(2)
    with opened(agent, root, loader=PerRank(loader), model=PerRank(model)) as ckpt:
        ckpt.on_reshard("model/*", lambda pieces, _: pieces[0].value)
        with pytest.raises(InvalidRequest, match=r"model: step 1 .* is declared to be each rank's own"):
            ckpt.restore()
        ckpt.on_reshard("model", lambda pieces, _: {key: {"calls": -1} for key in pieces[0].value})
        with pytest.raises(InvalidRequest, match=r"loader: step 1 .* is declared to be each rank's own"):
            ckpt.restore()
        assert log_of(root) == before
        assert ckpt.restore(drop=("loader",)) is not None
    assert (loader.at, model.note) == (2, {"calls": -1})


class Staged(nn.Module):
    """A stage of a pipeline: one layer, with extra state."""

    def __init__(self, stage: int, value: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(stage): Extra(value)})


def staged(agent: AgentProcess, root: str) -> list[Any]:
    """Save two stages on two ranks, the second of which has a table that nobody will know."""
    torch.manual_seed(1)
    made: list[Any] = [Staged(stage, 10 + stage) for stage in range(2)]
    made[1].register_buffer("table", torch.ones(3))
    with ClientJob(root, [agent], 2, mesh={"pp": 2}) as job:
        job.each(lambda rank: rank.track(model=made[rank.rank]))
        job.wait(job.each(lambda rank: rank.save(1)))
    return made


def test_a_name_no_rank_asks_for_is_one_error_before_any_record(nodes: list[AgentProcess], root: str) -> None:
    """Other names are asked for by one stage each. Nothing is touched; the next restore may take what fits."""
    stored = staged(nodes[0], root)
    before = log_of(root)
    with ClientJob(root, nodes, 2, mesh={"pp": 2, "dp": 2}) as job:
        here: list[Any] = [Staged(rank // 2, 99) for rank in range(4)]
        kept = [one.layers[str(rank // 2)].weight.detach().clone() for rank, one in enumerate(here)]
        job.each(lambda rank: rank.track(model=here[rank.rank]))
        error = one_for_all(job.each(refused))
        assert "step 1 does not fit what is tracked: 1 only in the snapshot" in error.message
        assert "asked for by no rank: model/table" in error.message
        assert (error.reason, error.key, error.rank) == (error_pb2.REASON_LAYOUT_MISMATCH, "model/table", None)
        assert log_of(root) == before
        for rank, one in enumerate(here):
            assert torch.equal(one.layers[str(rank // 2)].weight, kept[rank])
        answers: list[Restored | None] = job.each(lambda rank: rank.restore(strict=False))
        assert [answer.unexpected for answer in answers if answer is not None] == [("model/table",)] * 4
        for rank, one in enumerate(here):
            layer, there = one.layers[str(rank // 2)], stored[rank // 2].layers[str(rank // 2)]
            assert torch.equal(layer.weight, there.weight)
            # Extra state goes by submodule: each stage held its own.
            assert (layer.note["calls"], layer.note["seen"].tolist()) == (10 + rank // 2, [10 + rank // 2] * 2)
    assert len(log_of(root)) == len(before) + 1


def test_a_choice_is_one_for_all_ranks(agent: AgentProcess, root: str) -> None:
    """A part on one rank and all on another is an error; a part that only one stage has is none."""
    staged(agent, root)
    before = log_of(root)
    with ClientJob(root, [agent], 4, mesh={"pp": 2, "dp": 2}) as job:
        here: list[Any] = [Staged(rank // 2, 99) for rank in range(4)]
        job.each(lambda rank: rank.track(model=here[rank.rank]))
        error = one_for_all(job.each(lambda rank: refused(rank, only="model", cast=rank.rank == 2)))
        assert (
            "ranks choose differently (strict, only, names, cast or drop): ranks [0, 1, 3]; ranks [2]" in error.message
        )
        assert (error.reason, error.ranks) == (error_pb2.REASON_RANKS_DISAGREE, (2,))
        mapped = job.each(
            lambda rank: refused(rank, names=lambda name: name if rank.rank else f"x{name}", strict=False)
        )
        assert one_for_all(mapped).reason == error_pb2.REASON_RANKS_DISAGREE
        error = one_for_all(job.each(lambda rank: refused(rank, only=["model/layers.2"])))
        assert (error.key, error.reason) == ("model/layers.2", error_pb2.REASON_INVALID_ARGUMENT)
        assert "near it: model/layers.1, model/layers.0" in error.hint
        assert log_of(root) == before
        answers = job.each(lambda rank: rank.restore(only={"model/layers.1", "rng"}))
        assert [answer.left_out for answer in answers if answer is not None] == [
            ("model/layers.0._extra_state/seen", "model/layers.0.bias", "model/layers.0.weight", "model/table")
        ] * 4
        assert [one.layers[str(rank // 2)].note["calls"] for rank, one in enumerate(here)] == [99, 99, 11, 11]


def test_the_same_layout_on_another_mesh_is_saved_at_its_own_places(agent: AgentProcess, root: str) -> None:
    """The agent remembers how a rank's slot is laid out, and that a run of another mesh stands elsewhere on it."""

    def model() -> Any:
        made = nn.Linear(WIDTH, WIDTH)
        for parameter in made.parameters():  # the ranks are threads of one process, and share its generator
            nn.init.constant_(parameter, 0.5)
        return made

    def save(rank: Checkpointer, step: int) -> SaveHandle:
        return rank.save(step, {"who": rank.rank + 10 * step})

    meshes = [{"a": 1, "b": 2}, {"b": 2, "a": 1}]
    for step, mesh in enumerate(meshes):
        with ClientJob(root, [agent], 2, mesh=mesh) as job:
            job.each(lambda rank: rank.track(model=model()))
            job.each(lambda rank: rank.restore(strict=False))
            job.wait(job.each(partial(save, step=step)))
    with ClientJob(root, [agent], 2, mesh=meshes[1]) as job:
        job.each(lambda rank: rank.track(model=model()))
        states: list[dict[str, Any]] = [{"who": -1}, {"who": -1}]
        job.each(lambda rank: rank.restore_into(states[rank.rank]))
    assert [state["who"] for state in states] == [10, 11]
