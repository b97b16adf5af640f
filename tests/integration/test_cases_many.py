"""Faults from the field: tensors around and above message limits, hostile messages, and very many tensors."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import psutil
import pytest
import torch
from fixtures.agents import Agents
from fixtures.client_job import ClientJob
from fixtures.stored_root import objects_of, unproved
from fixtures.two_nodes import TwoNodes

from ckptd.client import Checkpointer, SaveHandle
from ckptd.client.link import Link
from ckptd.client.stored import Stored
from ckptd.protos.agent_pb2 import HelloRequest
from ckptd.protos.agent_pb2_grpc import AgentStub

pytestmark = pytest.mark.integration

MIB = 1 << 20
FEWER, MANY, RANKS = 8_000, 50_000, 8
NAMES, NAME_CHARS = 20_000, 300


def calls_counted() -> tuple[Counter[str], Any]:
    """Return a count of what a client asks of its agent, and the patch that counts."""
    counted: Counter[str] = Counter()
    call, stream = Link.call, Link.stream

    def counting(real: Any) -> Any:
        def made(self: Link, attachment: Any, verb: str, *rest: Any, **more: Any) -> Any:
            counted[verb] += 1
            return real(self, attachment, verb, *rest, **more)

        return made

    return counted, mock.patch.multiple(Link, call=counting(call), stream=counting(stream))


@pytest.mark.parametrize("transport", ["shm", "stream"])
def test_s094_tensors_around_the_message_limit(two_nodes: TwoNodes, tmp_path: Path, transport: str) -> None:
    """4 MiB - 1, 4 MiB, 4 MiB + 1, 0 bytes, a Python value above it, and 6 MB of names: default limits, from the store."""
    torch.manual_seed(1)
    sizes = (4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 0)
    state: dict[str, Any] = {f"t{size}": torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes}
    state["blob"] = {"bytes": bytes(4 * MIB + 1), "text": "x" * (4 * MIB)}
    counters = torch.arange(NAMES)
    state["names"] = {f"{number:05d}{'n' * NAME_CHARS}": counters[number] for number in range(NAMES)}
    two_nodes.saved(tmp_path, state, transport=transport)
    got: dict[str, Any] = dict.fromkeys(state)
    two_nodes.restored(tmp_path, got, transport=transport)
    assert got.pop("blob") == state.pop("blob")
    assert list(got["names"]) == list(state.pop("names"))
    assert torch.equal(torch.stack(list(got.pop("names").values())), counters)
    assert all(torch.equal(got[name], tensor) for name, tensor in state.items())


def test_s093_a_hostile_message_is_refused_and_the_agent_stays(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """Far above the limit: the caller hears so; the agent keeps its memory and serves the next save of 96 MiB in parts."""
    assert two_nodes.first.process is not None
    agent = psutil.Process(two_nodes.first.process.pid)
    before = agent.memory_info().rss
    with grpc.insecure_channel(
        f"unix:{two_nodes.first.socket}", options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        stub = AgentStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Hello(HelloRequest(ckptd_version="x" * (192 * MIB)), timeout=30)
    assert caught.value.code() in {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
    assert two_nodes.first.process.poll() is None
    assert agent.memory_info().rss - before < 64 * MIB
    large = torch.arange(24.0 * MIB)
    two_nodes.saved(tmp_path, {"large": large}, transport="stream")
    # The slot is the agent's memory too; beside it, a few messages.
    info = agent.memory_full_info()
    assert info.rss - getattr(info, "shared", 0) - before < 128 * MIB
    got: dict[str, Any] = {"large": None}
    two_nodes.restored(tmp_path, got, transport="stream")
    assert torch.equal(got["large"], large)


# So many as in the field take half a minute, and what is asserted does not hang on the number.
@pytest.mark.parametrize("many", [FEWER, pytest.param(MANY, marks=pytest.mark.long)])
def test_s096_many_small_tensors_are_coordinated_once_and_packed(agents: Agents, tmp_path: Path, many: int) -> None:
    """So many tensors on 8 ranks, three saves: the second and third exchange digests only; objects stay few; all come back."""
    torch.manual_seed(2)
    root, nodes = f"file://{tmp_path}/root", [agents.new(), agents.new()]
    each = many // RANKS
    flat = torch.rand(many, 4)

    def state(rank: int, values: torch.Tensor) -> dict[str, Any]:
        numbers = range(rank * each, (rank + 1) * each)
        return {"many": {f"block.{number}.weight": values[number] for number in numbers}}

    def saved(step: int, ckpt: Checkpointer) -> SaveHandle:
        return ckpt.save(step, state(ckpt.rank, flat))

    counted, patch = calls_counted()
    exchanged = []
    with patch, ClientJob(root, nodes, RANKS // 2) as job:
        for step in (1, 2, 3):
            counted.clear()
            flat += 1
            job.wait(job.each(functools.partial(saved, step)))
            exchanged.append({verb: count for verb, count in counted.items() if verb != "Heartbeat"})
    assert exchanged[0] == {"PutLayout": RANKS, "Begin": RANKS, "GetPlan": RANKS, "Staged": RANKS}
    assert exchanged[1] == exchanged[2] == {"Begin": RANKS, "Staged": RANKS}
    for step in (1, 2, 3):
        # One chunk of tensors a rank, and one of objects where they changed.
        assert RANKS <= len(objects_of(tmp_path / "root", step, "chunks")) <= 2 * RANKS
        assert len(objects_of(tmp_path / "root", step, "index")) == len(nodes)
    into = torch.zeros_like(flat)
    with ClientJob(root, nodes, RANKS // 2) as job:
        got = [state(rank, into) for rank in range(RANKS)]
        job.each(lambda ckpt: ckpt.restore_into(got[ckpt.rank], required=True))
    assert torch.equal(into, flat)
    assert [list(one["many"]) for one in got] == [list(state(rank, flat)["many"]) for rank in range(RANKS)]


def test_s096_a_rank_is_told_of_its_own_part_only(agents: Agents, tmp_path: Path) -> None:
    """Four ranks with other names each, on two nodes: no rank hears another's names, and every node puts one index."""
    root, nodes = f"file://{tmp_path}/root", [agents.new(), agents.new()]
    flat = torch.arange(4 * 500.0).reshape(4, 500)

    def state(rank: int, values: torch.Tensor) -> dict[str, Any]:
        return {"own": {f"r{rank}.{number}": value for number, value in enumerate(values[rank])}}

    with ClientJob(root, nodes, 2) as job:
        job.wait(job.each(lambda ckpt: ckpt.save(1, state(ckpt.rank, flat))))
    assert len(objects_of(tmp_path / "root", 1, "index")) == 2
    assert len(objects_of(tmp_path / "root", 1, "chunks")) == 2 * 4
    heard: list[Stored] = []

    def hears(*parts: Any) -> Stored:
        heard.append(Stored(*parts))
        return heard[-1]

    into = torch.zeros_like(flat)
    with ClientJob(root, nodes, 2) as job, mock.patch("ckptd.client.stored.Stored", side_effect=hears):

        def restored(ckpt: Checkpointer) -> None:
            ckpt.restore_into(state(ckpt.rank, into), required=True)

        job.each(restored)
    assert torch.equal(into, flat)
    told = sorted(sorted({name.split("/")[1].split(".")[0] for name in one.rows}) for one in heard)
    assert told == [["r0"], ["r1"], ["r2"], ["r3"]]
    assert unproved(root) == []
