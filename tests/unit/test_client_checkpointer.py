"""The Checkpointer against an agent in this process: round trips, failures, reports, restarts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash
from fixtures.fake_agent import FakeAgent, running_agent
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.client import (
    Aborted,
    BadStep,
    Checkpointer,
    CkptdError,
    Fenced,
    InvalidRequest,
    PerRank,
    SaveHandle,
    Sharded,
    SnapshotCorrupt,
    SnapshotNotFound,
    Unavailable,
)
from ckptd.client.staging import plain_bytes
from ckptd.protos import error_pb2, segmented
from ckptd.protos.agent_pb2 import Event
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Quarantined, StepRef

Make = Callable[..., Checkpointer]


@pytest.fixture
def fake_agent() -> Iterator[FakeAgent]:
    """An agent in this process."""
    with running_agent() as agent:
        yield agent


@pytest.fixture
def make(fake_agent: FakeAgent) -> Iterator[Make]:
    """Makes Checkpointers of one agent, and closes them."""
    made: list[Checkpointer] = []

    def new(**settings: Any) -> Checkpointer:
        settings = {"connect_timeout_s": 5.0, "begin_timeout_s": 5.0, "commit_timeout_s": 10.0, **settings}
        checkpointer = Checkpointer("file:///nowhere", job="job", socket=fake_agent.socket, **settings)
        made.append(checkpointer)
        return checkpointer

    yield new
    fake_agent.hold.clear()
    for checkpointer in made:
        checkpointer.close(timeout=0)


class Net(nn.Module):
    """Tied, frozen, with a buffer and all kinds of dtypes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.middle = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.get_parameter("middle.2.bias").requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("odd", torch.randint(-9, 9, (3, 2), dtype=torch.int16).t())
        self.register_buffer("brief", torch.randn(3, dtype=torch.bfloat16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.get_buffer("seen").add_(1)
        hidden: torch.Tensor = self.head(self.middle(self.embed(tokens)))
        return hidden


class Loader:
    """Counts, shuffles with its own generator, and keeps a tensor."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.served = torch.zeros(3)
        self.position = 0

    def next(self) -> torch.Tensor:
        self.position += 1
        self.served = self.served + 1
        return torch.from_numpy(self.generator.integers(0, 5, 6))

    def state_dict(self) -> dict[str, Any]:
        state = self.generator.bit_generator.state
        return {"position": self.position, "generator": state, "served": self.served}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.served = state["position"], state["served"]
        self.generator.bit_generator.state = state["generator"]
        # Building an iterator often draws: generators must be restored after that.
        random.random()
        torch.rand(1)


class Job:
    """A training job whose every step draws from all generators."""

    def __init__(self, seed: int, kind: str = "adamw") -> None:
        self.net = Net(seed)
        parameters = list(self.net.parameters())
        kinds: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "adamw": lambda: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
            "fused": lambda: torch.optim.AdamW(parameters, lr=0.1, fused=True),
            "tensor-lr": lambda: torch.optim.Adam(parameters, lr=torch.tensor(0.1), capturable=False),
            "sgd": lambda: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
            "adafactor": lambda: torch.optim.Adafactor(parameters, lr=0.01),
            "nadam": lambda: torch.optim.NAdam(parameters, lr=0.01),
            "lbfgs": lambda: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
        }
        self.optimizer = kinds[kind]()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.loader = Loader(seed)

    def track(self, checkpointer: Checkpointer) -> None:
        checkpointer.track(scheduler=self.scheduler, optimizer=self.optimizer, model=self.net, loader=self.loader)

    def step(self) -> str:
        tokens = self.loader.next()

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.net(tokens).square().mean() * (1 + random.random()) + float(np.random.rand())  # noqa: NPY002
            loss.backward()
            return cast("torch.Tensor", loss)

        loss: Any = self.optimizer.step(cast("Any", closure))
        self.scheduler.step()
        return float(loss.detach()).hex()

    def bits(self) -> dict[str, bytes]:
        found = {
            name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for name, tensor in self.net.state_dict().items()
        }
        for number, state in self.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                found[f"{number}/{key}"] = (
                    repr(value).encode()
                    if not isinstance(value, torch.Tensor)
                    else value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )
        return found


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


def test_replicas_that_others_write_are_fingerprinted_and_not_staged(make: Make, fake_agent: FakeAgent) -> None:
    """Their rows stand in the trailer, with xxh3-128 of the bytes at the cut."""
    fake_agent.not_written = lambda name: name.endswith("bias")
    net = nn.Linear(3, 2)
    checkpointer = make()
    checkpointer.track(model=net)
    checkpointer.save(1).wait()
    kept = fake_agent.kept[1]
    assert kept.names() == ["model/weight", "model/bias"]
    assert kept.tensor("model/weight") == net.weight.detach().numpy().tobytes()
    assert list(kept.trailer.replica_row) == [1]
    assert kept.trailer.replica_fingerprints == xxhash.xxh3_128_digest(net.bias.detach().numpy().tobytes())
    assert dict(kept.trailer.versions).keys() == {"ckptd", "torch"}


@pytest.mark.parametrize("threads", [1, 3])
def test_replicas_are_not_read_where_begin_says_so(
    make: Make, fake_agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """No tensor of theirs is fingerprinted, and the trailer says that this was meant; the next step has all of them."""
    read: list[torch.Tensor] = []

    def counted(tensor: torch.Tensor) -> memoryview:
        read.append(tensor)
        return plain_bytes(tensor)

    monkeypatch.setattr("ckptd.client.staging.plain_bytes", counted)
    fake_agent.not_written = lambda name: name.endswith("large")
    net = nn.Linear(3, 2)
    net.register_buffer("large", torch.arange(100_000.0))
    checkpointer = make(copy_threads=threads)
    checkpointer.track(model=net)
    for step, left in ((1, False), (2, True), (3, False)):
        read.clear()
        fake_agent.leave_uncompared = left
        checkpointer.save(step).wait()
        trailer = fake_agent.kept[step].trailer
        assert trailer.uncompared is left
        assert list(trailer.replica_row) == ([] if left else [2])
        digest = xxhash.xxh3_128_digest(net.get_buffer("large").numpy().tobytes())
        assert trailer.replica_fingerprints == (b"" if left else digest)
        assert len(read) == (0 if left else 1)


@pytest.mark.parametrize("where", ["auto", "host", "in-place"])
def test_replicas_are_fingerprinted_by_what_begin_names(make: Make, fake_agent: FakeAgent, where: str) -> None:
    """It knows the segmented function and prefers it where tensors lie in place; what counts is the answer."""
    fake_agent.not_written = lambda name: name.endswith("large")
    net = nn.Linear(3, 2)
    net.register_buffer("large", torch.arange(100_000.0))
    checkpointer = make(hash_replicas=where)
    checkpointer.track(model=net)
    data = net.get_buffer("large").numpy().tobytes()
    for step, algorithm in ((1, ""), (2, segmented.ALGORITHM), (3, "")):
        fake_agent.segmented_algorithm = algorithm
        checkpointer.save(step).wait()
        trailer = fake_agent.kept[step].trailer
        assert list(trailer.replica_row) == [2]
        assert trailer.segmented_algorithm == algorithm
        assert trailer.segmented_fingerprints == (segmented.digest(data) if algorithm else b"")
        assert trailer.replica_fingerprints == (b"" if algorithm else xxhash.xxh3_128_digest(data))
    assert {tuple(one.segmented_algorithms) for one in fake_agent.begun} == {segmented.KNOWN}
    assert {one.prefers_segmented for one in fake_agent.begun} == {where == "in-place"}


def test_fingerprints_by_a_function_that_was_not_offered_end_the_step(make: Make, fake_agent: FakeAgent) -> None:
    """An agent that asks for one has a bug: every rank hears of it, and nothing is staged."""
    fake_agent.segmented_algorithm = "sha256"
    checkpointer = make()
    checkpointer.track(model=nn.Linear(3, 2))
    with pytest.raises(CkptdError, match="'sha256', which was not offered"):
        checkpointer.save(1).wait()
    assert [one.step for one in fake_agent.failed] == [1]
    assert not fake_agent.kept


def test_the_policy_travels_with_the_run_and_is_checked_here(
    make: Make, fake_agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Argument, variable, default; what is none of them is refused with what there is."""
    make()
    make(verify_replicas="every:7")
    monkeypatch.setenv("CKPTD_VERIFY_REPLICAS", "first")
    make()
    assert [one.options.verify_replicas for one in fake_agent.attached] == ["always", "every:7", "first"]
    assert [one.options.verify_replicas for one in fake_agent.led] == ["always", "every:7", "first"]
    for text in ("never", "every:0", "every:07", "every:1000000", "First", "first\n"):
        with pytest.raises(InvalidRequest, match=r"verify_replicas.*always, first, every:N"):
            make(verify_replicas=text)


def test_unchanged_layouts_exchange_nothing(make: Make, fake_agent: FakeAgent) -> None:
    """The first save puts the layout and asks for the plan; later ones begin and stage."""
    job = Job(1)
    job.step()
    checkpointer = make()
    job.track(checkpointer)
    checkpointer.save(1).wait()
    fake_agent.calls.clear()
    job.step()
    checkpointer.save(2).wait()
    assert fake_agent.calls == ["Begin", "Staged"]
    job.net.register_buffer("more", torch.ones(1))
    checkpointer.save(3).wait()
    assert fake_agent.calls[2:] == ["PutLayout", "Begin", "GetPlan", "Staged"]


@pytest.mark.parametrize("step", [-1, 10**12, 1.5, "3", True, None])
def test_s013_steps_that_are_none_are_refused(make: Make, fake_agent: FakeAgent, step: Any) -> None:
    """Before anything else happens; the next proper save works."""
    checkpointer = make()
    with pytest.raises(InvalidRequest) as caught:
        checkpointer.save(step)
    assert caught.value.reason_name == "INVALID_STEP"
    assert "Begin" not in fake_agent.calls
    checkpointer.save(0).wait()


@pytest.mark.parametrize(
    "arguments",
    [{"metrics": {"loss": "high"}}, {"tags": {"a": 1}}, {"timeout": -1.0}, {"timeout": float("nan")}],
)
def test_arguments_are_checked(make: Make, arguments: dict[str, Any]) -> None:
    """By name."""
    with pytest.raises(InvalidRequest):
        make().save(1, **arguments)


def test_a_state_that_cannot_be_stored_fails_the_step_on_all_ranks(make: Make, fake_agent: FakeAgent) -> None:
    """The agent is told with rank and key, nothing was staged, and the next save works."""
    checkpointer = make()
    with pytest.raises(InvalidRequest, match=r"rank 0: bad/0: .*object") as caught:
        checkpointer.save(4, {"bad": [object()]})
    assert (caught.value.key, caught.value.step, caught.value.rank) == ("bad/0", 4, 0)
    assert [(request.step, request.error.rank) for request in fake_agent.failed] == [(4, 0)]
    assert "Begin" not in fake_agent.calls
    checkpointer.save(5, {"good": [1]}).wait()


def test_s033_a_rank_that_raises_while_its_state_is_read_tells_all(make: Make, fake_agent: FakeAgent) -> None:
    """The text has the rank and the message; the cause is kept."""

    class Broken:
        def state_dict(self) -> dict[str, int]:
            raise ValueError("boom")

        def load_state_dict(self, state: object) -> None: ...

    checkpointer = make()
    checkpointer.track(loader=Broken())
    with pytest.raises(Aborted, match=r"rank 0.*loader.*boom") as caught:
        checkpointer.save(4)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.reason_name == "RANK_FAILED"
    assert "boom" in fake_agent.failed[0].error.message


def test_a_save_that_is_lost_does_not_stop_training(
    make: Make, fake_agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """The handle comes back failed, its wait raises, and the next call reports it if nobody waited."""
    checkpointer = make()
    fake_agent.begin_with = Error(reason=error_pb2.REASON_RANKS_MISSING, message="rank 3 did not come", rank=3)
    first, second = checkpointer.save(1), checkpointer.save(2)
    with pytest.raises(Unavailable, match="rank 3 did not come"):
        first.wait()
    assert second.state == "failed"
    fake_agent.begin_with = None
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ckptd.client"):
        checkpointer.save(3).wait()
    assert [record.getMessage()[:25] for record in caplog.records] == ["the save of step 2 failed"]


@pytest.mark.parametrize("reason", ["INVALID_STEP", "RANKS_DISAGREE", "LAYOUT_MISMATCH", "COVERAGE"])
def test_a_call_that_is_wrong_raises_at_once(make: Make, fake_agent: FakeAgent, reason: str) -> None:
    """Repeating it would not help."""
    checkpointer = make()
    fake_agent.begin_with = Error(reason=error_pb2.Reason.Value(f"REASON_{reason}"), message="wrong")
    with pytest.raises(InvalidRequest) as caught:
        checkpointer.save(1)
    assert caught.value.reason_name == reason
    fake_agent.begin_with = None
    checkpointer.save(2).wait()


def test_max_failed_saves_makes_failures_an_error(make: Make, fake_agent: FakeAgent) -> None:
    """Of the class of the last one; on_failure hears of each."""
    seen: list[tuple[int, str]] = []

    def on_failure(handle: SaveHandle, error: CkptdError) -> None:
        seen.append((handle.step, error.reason_name))

    checkpointer = make(max_failed_saves=2, on_failure=on_failure)
    fake_agent.abort_with = Error(reason=error_pb2.REASON_STORE_FAILED, message="the store is full")
    for step in (1, 2):
        with contextlib.suppress(Aborted):
            checkpointer.save(step).wait()
    with pytest.raises(Aborted, match=r"2 saves in a row.*the store is full"):
        checkpointer.save(3)
    assert seen == [(1, "STORE_FAILED"), (2, "STORE_FAILED")]


def test_s024_a_skipped_save_is_no_failure(make: Make, fake_agent: FakeAgent, caplog: pytest.LogCaptureFixture) -> None:
    """It says so, wait raises Aborted with BUSY, and nothing is logged."""
    checkpointer = make(max_failed_saves=1)
    fake_agent.skip = True
    handle = checkpointer.save(1)
    assert handle.skipped
    with pytest.raises(Aborted) as caught:
        handle.wait()
    assert caught.value.reason_name == "BUSY"
    fake_agent.skip = False
    checkpointer.save(2).wait()
    assert not caplog.records


def test_fenced_reaches_handles_and_every_later_call(make: Make, fake_agent: FakeAgent) -> None:
    """This process is a zombie; its exit code is documented."""
    fake_agent.hold.set()
    checkpointer = make()
    handle = checkpointer.save(1)
    fake_agent.tell(Event(fenced=Error(reason=error_pb2.REASON_FENCED, message="timeline 2 has taken over")))
    with pytest.raises(Fenced, match="timeline 2"):
        handle.wait()
    with pytest.raises(Fenced):
        checkpointer.save(2)
    with pytest.raises(Fenced):
        checkpointer.restore()
    assert Fenced.exit_code == 7


def test_an_agent_that_restarts_is_attached_again(make: Make, fake_agent: FakeAgent) -> None:
    """The same run leads and attaches again as the same process; layouts are put again; the handle in flight hears its end."""
    checkpointer = make(begin_timeout_s=20.0)
    checkpointer.track(model=nn.Linear(2, 2))
    fake_agent.hold.set()
    first = checkpointer.save(1)
    fake_agent.restart()
    fake_agent.hold.clear()
    second = checkpointer.save(2)
    second.wait()
    assert [request.run_id for request in fake_agent.led] == [fake_agent.led[0].run_id] * 2
    assert len({(request.process, request.run_id, request.endpoint) for request in fake_agent.attached}) == 1
    assert fake_agent.calls.count("PutLayout") >= 2
    fake_agent.decide(1)
    first.wait()


def test_an_agent_that_is_gone_fails_the_save_by_its_deadline(make: Make, fake_agent: FakeAgent) -> None:
    """And says where it should be; nothing hangs."""
    checkpointer = make(connect_timeout_s=0.5)
    fake_agent.stop()
    handle = checkpointer.save(1, timeout=0.5)
    with pytest.raises(Unavailable, match=r"agent"):
        handle.wait()
    with pytest.raises(Unavailable):
        checkpointer.restore(timeout=0.5)


def test_s111_no_agent_is_an_error_that_names_the_socket(make: Make, fake_agent: FakeAgent) -> None:
    """At construction, within the deadline."""
    fake_agent.stop()
    with pytest.raises(Unavailable, match="no agent listens") as caught:
        make(connect_timeout_s=0.2)
    assert str(fake_agent.socket) in str(caught.value)
    with pytest.raises(InvalidRequest, match="107"):
        Checkpointer("file:///x", job="j", socket="/tmp/" + "x" * 150)  # type: ignore[arg-type]


def test_s138_no_version_in_common_is_an_error_with_both(make: Make, fake_agent: FakeAgent) -> None:
    """Before anything else is said."""
    fake_agent.version = 9
    with pytest.raises(InvalidRequest, match="version 9") as caught:
        make()
    assert caught.value.reason_name == "VERSION_MISMATCH"


def test_a_refused_run_raises_where_it_is_made(make: Make, fake_agent: FakeAgent) -> None:
    """The agent's words and reason come through."""
    fake_agent.refuse_with = Error(
        reason=error_pb2.REASON_JOB_MISMATCH, message="the root belongs to 'other'", hint="choose another root"
    )
    with pytest.raises(InvalidRequest, match="the root belongs to 'other'") as caught:
        make()
    assert caught.value.hint == "choose another root"


def test_a_run_that_is_refused_later_fails_every_call(make: Make, fake_agent: FakeAgent) -> None:
    """Another run is alive, say."""
    checkpointer = make()
    fake_agent.hold.set()
    handle = checkpointer.save(1)
    fake_agent.tell(Event(failed=Error(reason=error_pb2.REASON_JOB_ALIVE, message="another run is alive")))
    with pytest.raises(InvalidRequest, match="another run is alive"):
        handle.wait()
    with pytest.raises(InvalidRequest, match="another run is alive"):
        checkpointer.save(2)


def test_s017_nothing_to_restore_is_none_and_one_line(
    make: Make, fake_agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """S016: unless it is required, or a step is named; then the error lists what there is."""
    checkpointer = make()
    with caplog.at_level(logging.INFO, "ckptd.client"):
        assert checkpointer.restore() is None
    assert len(caplog.records) == 1
    with pytest.raises(SnapshotNotFound, match="file:///nowhere"):
        checkpointer.restore(required=True)
    checkpointer.save(10).wait()
    with pytest.raises(SnapshotNotFound, match=r"\[10\]"):
        checkpointer.restore(step=50)


def test_s140_what_does_not_fit_is_one_error_with_everything_in_it(make: Make, fake_agent: FakeAgent) -> None:
    """Counts, first five names, both sides; targets are unchanged and the other ranks are told."""
    checkpointer = make()
    saved = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
    checkpointer.track(model=saved)
    checkpointer.save(1).wait()
    checkpointer.close()
    other = nn.ModuleList([*(nn.Linear(3, 2) for _ in range(3)), nn.Linear(2, 2).to(torch.float64), nn.Linear(1, 1)])
    before = [parameter.detach().clone() for parameter in other.parameters()]
    again = make()
    again.track(model=other)
    state = torch.get_rng_state()
    with pytest.raises(InvalidRequest) as caught:
        again.restore()
    text = str(caught.value)
    assert caught.value.reason_name == "LAYOUT_MISMATCH"
    assert "2 missing in the snapshot: model/4.weight, model/4.bias" in text
    assert "5 different: model/0.weight (stored float32[2, 2], here float32[2, 3])" in text
    assert "model/3.weight (stored float32[2, 2], here float64[2, 2])" in text
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert fake_agent.refused[0].reason == error_pb2.REASON_LAYOUT_MISMATCH


def test_s090_strict_is_about_names_on_both_sides(make: Make) -> None:
    """With strict=False both lists come back, and what is not stored keeps its value."""
    checkpointer = make()
    checkpointer.track(model=nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}))
    checkpointer.save(1, {"extra": 1}).wait()
    checkpointer.close()
    other = nn.ModuleDict({"a": nn.Linear(1, 1), "c": nn.Linear(1, 1)})
    kept = other.get_parameter("c.weight").detach().clone()
    again = make()
    again.track(model=other)
    with pytest.raises(InvalidRequest, match=r"2 missing.*model/c.weight.*3 only in the snapshot: extra, model/b"):
        again.restore()
    restored = again.restore(strict=False)
    assert restored is not None
    assert restored.missing == ("model/c.weight", "model/c.bias")
    assert restored.unexpected == ("extra", "model/b.bias", "model/b.weight")
    assert torch.equal(other.get_parameter("c.weight"), kept)


def test_s083_other_prefixes_are_pointed_out(make: Make) -> None:
    """When every name differs by its beginning only."""
    checkpointer = make()
    checkpointer.track(model=nn.ModuleDict({"inner": nn.Linear(1, 1)}))
    checkpointer.save(1).wait()
    checkpointer.close()
    again = make()
    again.track(model=nn.Linear(1, 1))
    with pytest.raises(InvalidRequest) as caught:
        again.restore()
    assert "begin with 'model/inner.'" in caught.value.hint


@pytest.mark.parametrize("strict", [True, False])
def test_other_param_groups_are_refused_before_anything_is_touched(
    make: Make, fake_agent: FakeAgent, strict: bool
) -> None:
    """The restore is told as failed, and the model keeps its values; without strict too, and drop is the way out."""
    net = nn.Linear(1, 1)
    checkpointer = make()
    checkpointer.track(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    checkpointer.save(1).wait()
    checkpointer.close()
    other = nn.Linear(1, 1)
    before = other.weight.detach().clone()
    again = make()
    groups: list[dict[str, Any]] = [{"params": [other.weight]}, {"params": [other.bias]}]
    again.track(model=other, optimizer=torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(InvalidRequest, match="1 param_groups, the optimizer 2") as caught:
        again.restore(strict=strict)
    assert 'drop=("optimizer",)' in caught.value.hint
    assert torch.equal(before, other.weight)
    assert fake_agent.done[-1].HasField("error")
    assert again.restore(strict=strict, drop=("optimizer",)) is not None
    assert torch.equal(net.weight, other.weight)


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


def test_another_mesh_is_refused(make: Make) -> None:
    """With both meshes in the message."""
    checkpointer = make(mesh={"dp": 1, "tp": 1})
    checkpointer.save(1).wait()
    checkpointer.close()
    with pytest.raises(InvalidRequest, match=r"dp 1 x tp 1.*world 1"):
        make().restore()


def test_s136_bytes_that_are_no_object_are_refused(make: Make, fake_agent: FakeAgent) -> None:
    """A pickle in an object's place runs nothing, and no tensor is touched."""
    net = nn.Linear(1, 1)
    checkpointer = make()
    checkpointer.track(model=net)
    checkpointer.save(1).wait()
    kept = fake_agent.kept[1]
    kept.tail = b"\x80\x04" + b"K" * (len(kept.tail) - 2)
    with torch.no_grad():
        net.weight += 1
    before = net.weight.detach().clone()
    with pytest.raises(SnapshotCorrupt, match="rng: unexpected format"):
        checkpointer.restore()
    assert torch.equal(net.weight, before)


def test_a_restore_that_is_superseded_asks_again(
    make: Make, fake_agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """And says which steps were left, once, with why (S006)."""
    checkpointer = make()
    checkpointer.save(1).wait()
    fake_agent.superseded = 2
    fake_agent.fell_back_from = [
        Quarantined(step=StepRef(step=2, timeline="t"), why=Error(reason=error_pb2.REASON_CORRUPT, message="chunk x"))
    ]
    with caplog.at_level(logging.WARNING, "ckptd.client"):
        restored = checkpointer.restore()
    assert restored is not None
    assert restored.fell_back_from == (BadStep(step=2, timeline="t", why="chunk x"),)
    assert fake_agent.calls.count("Restore") == 3
    assert [record.getMessage() for record in caplog.records] == ["step 2 was left for step 1: chunk x"]


def test_a_hook_may_change_what_is_loaded(make: Make) -> None:
    """For data that was saved by an older script."""
    checkpointer = make()
    checkpointer.save(1, {"old": {"position": 3}}).wait()
    checkpointer.on_load("old", lambda value: {"at": value["position"] + 1})  # type: ignore[index]
    state: dict[str, Any] = {"old": {}}
    checkpointer.restore_into(state)
    assert state == {"old": {"at": 4}}


def test_forked_children_are_told_and_the_parent_goes_on(make: Make) -> None:
    """S113: every call in the child raises at once, closing does nothing, and the parent's save commits."""
    checkpointer = make()
    checkpointer.save(1).wait()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                checkpointer.save(2)
            except InvalidRequest as error:
                os.write(writer, str(error).encode())
                checkpointer.close()
                code = 0
        os._exit(code)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    text = os.read(reader, 10_000).decode()
    os.close(reader)
    assert os.waitstatus_to_exitcode(status) == 0
    assert "was forked" in text
    checkpointer.save(2).wait()


def test_only_one_call_at_a_time(make: Make, fake_agent: FakeAgent) -> None:
    """Two saves at once have no order."""
    inside, go = threading.Event(), threading.Event()

    class Slow:
        def state_dict(self) -> dict[str, int]:
            inside.set()
            assert go.wait(10)
            return {}

        def load_state_dict(self, state: object) -> None: ...

    checkpointer = make()
    checkpointer.track(slow=Slow())
    thread = threading.Thread(target=checkpointer.save, args=(1,))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(InvalidRequest, match="another thread"):
        checkpointer.restore()
    go.set()
    thread.join(10)


def test_close_waits_then_detaches_and_later_calls_raise(
    make: Make, fake_agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """What is not durable by the deadline is named."""
    checkpointer = make()
    fake_agent.hold.set()
    checkpointer.save(1)
    with caplog.at_level(logging.WARNING, "ckptd.client"):
        checkpointer.close(timeout=0.01)
    assert "before step 1 was durable" in caplog.text
    assert fake_agent.calls[-1] == "Detach"
    checkpointer.close(timeout=0.01)
    with pytest.raises(InvalidRequest, match="closed"):
        checkpointer.save(2)


def test_an_exception_in_the_with_block_is_no_orderly_end(make: Make, fake_agent: FakeAgent) -> None:
    """The stream ends without Detach: the other ranks hear of a death."""
    with pytest.raises(RuntimeError), make():
        raise RuntimeError("training failed")
    assert "Detach" not in fake_agent.calls


def test_several_checkpointers_are_independent(make: Make, fake_agent: FakeAgent) -> None:
    """Each has a run of its own; closing one leaves the other."""
    one = make()
    run = fake_agent.led[-1].run_id
    one.close()
    two = make()
    assert fake_agent.led[-1].run_id != run
    two.save(1).wait()


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


def test_an_interrupt_while_copying_fails_the_step(
    make: Make, fake_agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is torn: the other ranks are told, the interrupt goes on its way, and the next save works."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    checkpointer = make()
    with monkeypatch.context() as patch:
        patch.setattr("ckptd.client.copying.Copier.copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1)
        patch.setattr("ckptd.client.copying.Copier.copy", lambda *_: 1 / 0)
        with pytest.raises(Aborted, match=r"rank 0: copying.*division") as caught:
            checkpointer.save(2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert [request.step for request in fake_agent.failed] == [1, 2]
    assert "Staged" not in fake_agent.calls
    checkpointer.save(3).wait()


def test_events_are_logged_where_asked(make: Make, tmp_path: Path) -> None:
    """One JSON line for each save and restore, and one for what the first save found around it."""
    log = tmp_path / "events.jsonl"
    checkpointer = make(client_event_log=log)
    checkpointer.save(1).wait()
    checkpointer.restore()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["kind"], line["step"], line["rank"], line["job"]) for line in lines] == [
        ("audited", 1, 0, "job"),
        ("save_returned", 1, 0, "job"),
        ("restored", 1, 0, "job"),
    ]


def test_what_was_each_ranks_own_is_not_taken_for_a_global_tensor(make: Make) -> None:
    """Nor the other way round: the error says which is which."""
    checkpointer = make()
    checkpointer.track(model=PerRank(nn.Linear(1, 1)))
    checkpointer.save(1).wait()
    checkpointer.close()
    again = make()
    again.track(model=nn.Linear(1, 1))
    with pytest.raises(InvalidRequest, match="stored as each rank's own, here a piece of a global tensor"):
        again.restore()


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


def test_an_answer_that_leaves_a_tensor_out_touches_nothing(make: Make, fake_agent: FakeAgent) -> None:
    """It would leave old values among restored ones."""
    net = nn.Linear(1, 1)
    checkpointer = make()
    checkpointer.track(model=net)
    checkpointer.save(1).wait()
    with torch.no_grad():
        net.weight += 1
    before = net.weight.detach().clone()
    fake_agent.left_out = "model/bias"
    with pytest.raises(CkptdError, match="model/bias"):
        checkpointer.restore()
    assert torch.equal(net.weight, before)


def test_state_of_shards_without_elements_is_made_again(make: Make) -> None:
    """A rank that holds nothing of a parameter has no row for its moments, but the optimizer needs them to step."""
    store = FakeStore()
    dist.init_process_group("fake", rank=1, world_size=2, store=store)
    try:
        mesh = DeviceMesh("cpu", [0, 1])

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
    finally:
        dist.destroy_process_group()
