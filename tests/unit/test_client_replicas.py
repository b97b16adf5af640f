"""What a rank reads, stages and exchanges of replicas, and of layouts that did not change."""

from __future__ import annotations

import pytest
import torch
import xxhash
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_agent import FakeAgent
from fixtures.script_job import Job
from torch import nn

from ckptd.client import CkptdError, InvalidRequest
from ckptd.client.staging import plain_bytes
from ckptd.protos import segmented

__all__ = ["fake_agent", "make"]


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
