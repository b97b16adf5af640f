"""What the audit finds, what it leaves alone, and generators that are tracked by themselves."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_agent import FakeAgent
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from ckptd.client import Audit, Checkpointer, InvalidRequest, PerRank
from ckptd.client.audit import _SAYS, audit
from ckptd.client.reachable import LIMIT, reachable
from ckptd.client.state import Collector

__all__ = ["fake_agent", "make"]


def found(*, world: int = 1, per_rank: tuple[str, ...] = (), **things: object) -> list[tuple[str, str]]:
    made = audit(things, scope_of=Collector(per_rank).scope_of, world=world)
    return [(finding.kind, finding.name) for finding in made.findings]


class Loader:
    """Holds a torch DataLoader, as scripts do, and saves its own position."""

    def __init__(self, **loader: Any) -> None:
        self.loader: DataLoader[int] = DataLoader(list(range(8)), **loader)  # type: ignore[arg-type] # any list will do
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Forgetful(nn.Module):
    """Every way to have state that no state_dict shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("absent", None, persistent=False)
        self.average = torch.zeros(2)
        self.hidden = [nn.Linear(2, 2), nn.ReLU()]
        self.harmless = [nn.ReLU(), self.layer]
        self.meter = Loader()
        self.dropout_generator = torch.Generator()


def test_a_module_that_hides_state_is_told_of_it() -> None:
    """Plain tensors, lists of modules, stateful objects, non-persistent buffers, generators; and nothing else."""
    assert found(model=Forgetful()) == [
        ("unsaved_tensor", "model.average"),
        ("unsaved_module", "model.hidden[0]"),
        ("unsaved_object", "model.meter"),
        ("non_persistent_buffer", "model/cache"),
        ("untracked_generator", "model.dropout_generator"),
    ]


def test_what_is_tracked_by_itself_is_not_missed() -> None:
    """The same module with everything tracked leaves only what cannot be."""
    model = Forgetful()
    things: dict[str, Any] = {"hidden": model.hidden[0], "meter": model.meter, "generator": model.dropout_generator}
    assert [kind for kind, _ in found(model=model, **things)] == ["unsaved_tensor", "non_persistent_buffer"]


def compiled(module: nn.Module) -> nn.Module:
    wrapped: nn.Module = torch.compile(module, backend="eager")  # type: ignore[assignment] # a module again
    return wrapped


@pytest.mark.parametrize("wrap", [lambda module: module, compiled], ids=["plain", "compiled"])
def test_an_ordinary_job_has_no_findings(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Layers of all kinds, after a step, with their optimizer and schedule: a warning there would be noise."""
    model = nn.Sequential(nn.Embedding(4, 4), nn.LSTM(4, 4, batch_first=True))
    other = wrap(
        nn.ModuleDict({"a": nn.TransformerEncoderLayer(4, 2), "b": nn.BatchNorm1d(4), "c": nn.Conv1d(4, 4, 1)})
    )
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    parts = nn.ModuleList([model, other, normed])
    optimizer = torch.optim.AdamW(parts.parameters())
    for parameter in parts.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    other.get_submodule("b" if wrap is not compiled else "_orig_mod.b")(torch.ones(2, 4))
    assert found(model=[model, other, normed], optimizer=optimizer, scheduler=scheduler, loader=Loader()) == []


def test_parameters_without_an_owner_and_owners_without_a_module() -> None:
    """Both directions; what is frozen needs no optimizer, and no optimizer at all is a choice."""
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    one.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    partial = torch.optim.SGD([one.weight], lr=0.1)
    assert found(model=one, optimizer=optimizer) == [
        ("untracked_parameter", "optimizer/#2"),
        ("untracked_parameter", "optimizer/#3"),
    ]
    assert found(one=one, two=PerRank(two), optimizer=partial) == [
        ("unowned_parameter", "two/weight"),
        ("unowned_parameter", "two/bias"),
    ]
    assert found(one=one, two=two) == []


def test_a_schedule_of_an_optimizer_that_is_not_tracked() -> None:
    """It would go on with an optimizer that starts anew."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert found(scheduler=scheduler) == [("untracked_optimizer", "scheduler.optimizer")]


@pytest.mark.parametrize(
    ("loader", "where"),
    [
        ({"generator": torch.Generator()}, "loader.loader.generator"),
        ({"sampler": RandomSampler(range(8), generator=torch.Generator())}, "loader.loader.sampler.generator"),
    ],
)
def test_generators_of_loaders_and_samplers_are_found(loader: dict[str, Any], where: str) -> None:
    """They decide the order of data, and nobody saves them."""
    tracked = Loader(**loader)
    assert ("untracked_generator", where) in found(loader=tracked)
    generator = loader.get("generator") or loader["sampler"].generator
    assert found(loader=tracked, generator=generator) == []


def generators() -> list[Any]:
    twister = np.random.Generator(np.random.MT19937(5))
    return [torch.Generator().manual_seed(5), np.random.default_rng(5), twister, random.Random(5)]


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random())


@pytest.mark.parametrize("number", range(4))
def test_a_generator_that_its_holder_saves_is_not_reported(number: int) -> None:
    """Its state is looked for in what `state_dict()` gives, in the forms that scripts use."""

    class Holder:
        def __init__(self, *, saves: bool) -> None:
            self.generator, self.saves = generators()[number], saves

        def state_dict(self) -> dict[str, Any]:
            if not self.saves:
                return {}
            if isinstance(self.generator, torch.Generator):
                return {"deep": [{"state": self.generator.get_state()}]}
            if isinstance(self.generator, np.random.Generator):
                return {"deep": [{"state": self.generator.bit_generator.state}]}
            return {"deep": [{"state": self.generator.getstate()}]}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    assert found(holder=Holder(saves=True)) == []
    assert found(holder=Holder(saves=False)) == [("untracked_generator", "holder.generator")]


def test_of_two_generators_the_one_that_is_not_saved_is_named() -> None:
    """Both have states of one form, and one such state is saved."""

    class Two(Loader):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.lost = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)

        def state_dict(self) -> dict[str, Any]:
            return {"kept": self.kept.get_state()}

    assert found(holder=Two()) == [("untracked_generator", "holder.lost")]


def test_generators_of_the_process_are_tracked_already() -> None:
    """A holder of the default generators is no finding."""

    class Holder(Loader):
        def __init__(self) -> None:
            super().__init__()
            self.held = [torch.default_generator, random._inst]

    assert found(holder=Holder()) == []


def test_statistics_that_ranks_do_not_share() -> None:
    """Only with several ranks, and not where they are shared or said to be each rank's own."""
    model = nn.Sequential(
        nn.Linear(2, 2), nn.BatchNorm1d(2), nn.SyncBatchNorm(2), nn.BatchNorm1d(2, track_running_stats=False)
    )
    expected = [("per_rank_statistics", "model/1.running_mean")]
    assert found(model=model) == []
    assert found(model=model, world=2) == expected
    assert found(model=model, world=2, per_rank=("model/*.running_*",)) == []
    assert found(model=PerRank(model), world=2) == []


def test_an_audit_draws_nothing_and_runs_no_property() -> None:
    """Generators and things are as before."""

    class Touchy(Loader):
        @property
        def bomb(self) -> int:
            raise AssertionError

    held = generators()
    state = held[0].get_state()
    before = (random.getstate(), torch.get_rng_state().clone())
    tracked = Touchy()
    tracked.held = held  # type: ignore[attr-defined]
    assert len(found(loader=tracked)) == len(held)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.equal(held[0].get_state(), state)
    assert draw(held[3]) == draw(generators()[3])


def test_the_walk_is_bounded() -> None:
    """A loader that holds its data set does not make the first save slow, and a loop ends."""

    class Node:
        def __init__(self) -> None:
            self.next: list[Node] = []

    root = Node()
    for _ in range(200):
        root.next.append(Node())
        root.next[-1].next += [Node() for _ in range(150)]
    root.next.append(root)
    root.data = list(range(10**6))  # type: ignore[attr-defined]
    assert len(list(reachable("root", root))) == LIMIT


def test_the_first_save_warns_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """One record with kinds, names and ways out; `audit()` gives the same at any time."""
    checkpointer = make()
    checkpointer.track(model=Forgetful())
    report = checkpointer.audit()
    assert isinstance(report, Audit)
    assert [finding.name for finding in report.of("unsaved_tensor")] == ["model.average"]
    assert all(finding.hint and finding.text for finding in report.findings)
    with caplog.at_level(logging.WARNING, "ckptd.client"):
        checkpointer.save(1).wait()
        checkpointer.save(2).wait()
    records = [record.getMessage() for record in caplog.records]
    assert len(records) == 1
    assert "1 buffers that are not persistent: model/cache" in records[0]
    assert "track(name=generator)" in records[0]


def test_a_state_given_to_save_counts(make: Make) -> None:
    """An optimizer in the state owns parameters."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = make()
    checkpointer.track(scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer))
    assert checkpointer.audit().findings
    assert checkpointer.audit({"model": model, "optimizer": optimizer}).findings == ()


def test_findings_can_fail_the_save_or_be_ignored(
    make: Make, fake_agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """With "raise" nothing is staged, all ranks are told, and what was mended is saved; with "off" nobody looks."""
    generator = torch.Generator()
    checkpointer = make(audit="raise")
    checkpointer.track(loader=Loader(generator=generator))
    with pytest.raises(InvalidRequest, match="1 random number generators that are not tracked") as caught:
        checkpointer.save(1)
    assert caught.value.key == "loader.loader.generator"
    assert fake_agent.failed[0].step == 1
    assert not fake_agent.begun
    checkpointer.track(generator=generator)
    checkpointer.save(2).wait()
    checkpointer.close()
    quiet = make(audit="off")
    quiet.track(model=Forgetful())
    with caplog.at_level(logging.WARNING, "ckptd.client"):
        quiet.save(3).wait()
    assert not caplog.records


def test_an_audit_that_fails_stops_no_save(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The second call of `state_dict()` raises: the save has its own first one."""

    class Once(Loader):
        calls: Iterator[int] = iter([1])

        def state_dict(self) -> dict[str, Any]:
            if self.calls is not None and next(self.calls, 0):
                raise RuntimeError("not yet")
            return super().state_dict()

    checkpointer = make()
    checkpointer.track(loader=Once(generator=torch.Generator()))
    with caplog.at_level(logging.WARNING, "ckptd.client"):
        checkpointer.save(1).wait()
    assert "the audit of what is tracked failed" in caplog.text


def tracked(make: Make, **things: Any) -> Checkpointer:
    checkpointer = make()
    checkpointer.track(**things)
    return checkpointer


@pytest.mark.parametrize("number", range(4))
def test_a_generator_is_tracked_by_itself(make: Make, number: int) -> None:
    """It goes on with the number that would have come next, although what is loaded before it draws from it."""
    generator = generators()[number]

    class Draws(Loader):
        def __init__(self, held: Any) -> None:
            super().__init__()
            self.held = held

        def load_state_dict(self, state: dict[str, Any]) -> None:
            draw(self.held)

    draw(generator)
    checkpointer = tracked(make, generator=generator, late=Draws(generator))
    checkpointer.save(1).wait()
    expected = [draw(generator) for _ in range(3)]
    checkpointer.close()
    other = generators()[number]
    again = tracked(make, generator=other, late=Draws(other))
    again.restore()
    assert [draw(other) for _ in range(3)] == expected


def test_a_state_of_another_kind_of_generator_is_refused(make: Make) -> None:
    """By name, with both kinds."""
    tracked(make, generator=np.random.default_rng(1)).save(1).wait()
    with pytest.raises(InvalidRequest, match=r"generator: stored is the state of numpy PCG64, here is random\.Random"):
        tracked(make, generator=random.Random(1)).restore()


def test_every_kind_is_documented() -> None:
    """docs/client.md lists what a script may compare with."""
    page = (Path(__file__).parents[2] / "docs" / "client.md").read_text()
    assert [kind for kind in _SAYS if f"`{kind}`" not in page] == []
