"""What a writer may write and say, its readers take: sizes of records, messages and labels."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fixtures.coordinated import Play, Run
from fixtures.raw_rank import run_credentials

from ckptd.client import channel as client_channel
from ckptd.client.arguments import checked_metrics, checked_tags
from ckptd.client.errors import InvalidRequest
from ckptd.daemon import log_reader, records, rpc
from ckptd.daemon.errors import TooLargeError
from ckptd.daemon.keys import parse_key
from ckptd.protos import agent_pb2_grpc, coordinator_pb2_grpc, error_pb2, limits
from ckptd.protos.agent_pb2 import HelloReply, HelloRequest
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeMessage
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import StepRef

ROOT = Path(__file__).parents[2]
TIMELINE = "00000003-9f2ca1b04d7e"
STEPS = 100_000
LARGE = "x" * (9 << 20)
"""More than twice what gRPC takes unless told otherwise."""


class Echo(agent_pb2_grpc.AgentServicer, coordinator_pb2_grpc.CoordinatorServicer):
    """Says what it is told."""

    async def Hello(self, request: HelloRequest, context: Any) -> HelloReply:  # noqa: N802 - the name in the .proto
        return HelloReply(ckptd_version=request.ckptd_version)

    async def Session(  # noqa: N802 - the name in the .proto
        self, messages: AsyncIterator[NodeMessage], context: Any
    ) -> AsyncIterator[CoordinatorMessage]:
        async for message in messages:
            error = Error(message=message.hello.hostname)
            yield CoordinatorMessage(refused=error)


def test_both_ends_of_a_session_take_what_a_record_may_hold() -> None:
    """Agent and coordinator tell each other of 100,000 steps, in full, and more, over the channel and server that they use."""

    async def play() -> list[CoordinatorMessage]:
        credentials = run_credentials()
        server = rpc.new_server()
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(Echo(), server)  # type: ignore[abstract]
        port = server.add_secure_port("127.0.0.1:0", rpc.server_credentials(credentials))
        await server.start()

        async def said() -> AsyncIterator[NodeMessage]:
            yield NodeMessage(hello=NodeMessage.NodeHello(hostname=LARGE))

        try:
            async with rpc.pinned_channel(f"127.0.0.1:{port}", credentials.certificate) as channel:
                stub: Any = coordinator_pb2_grpc.CoordinatorStub(channel)
                return [message async for message in stub.Session(said(), timeout=60)]
        finally:
            await server.stop(None)

    assert [message.refused.message == LARGE for message in asyncio.run(play())] == [True]


def test_both_ends_of_a_rank_s_calls_take_what_a_record_may_hold() -> None:
    """The same between a rank and its agent."""

    async def play(folder: str) -> str:
        server = rpc.new_server()
        agent_pb2_grpc.add_AgentServicer_to_server(Echo(), server)  # type: ignore[abstract]
        server.add_insecure_port(f"unix:{folder}/s")
        await server.start()

        def call() -> str:
            with grpc.insecure_channel(f"unix:{folder}/s", options=client_channel._OPTIONS) as channel:
                request = HelloRequest(ckptd_version=LARGE)
                reply: HelloReply = agent_pb2_grpc.AgentStub(channel).Hello(request, timeout=60)
                return reply.ckptd_version

        try:
            return await asyncio.to_thread(call)
        finally:
            await server.stop(None)

    with tempfile.TemporaryDirectory() as folder:
        assert asyncio.run(play(folder)) == LARGE


def test_every_channel_and_server_is_made_where_the_limits_are() -> None:
    """No other place of the packages opens one, so none has gRPC's defaults."""
    made = re.compile(r"(?:grpc|aio)\.(?:insecure_channel|secure_channel|server)\(")
    sources = [path for folder in ("client", "daemon", "chaos", "protos") for path in (ROOT / folder).rglob("*.py")]
    found = {path.name for path in sources if not path.name.endswith("_pb2_grpc.py") and made.search(path.read_text())}
    assert found == {"rpc.py", "channel.py"}
    for options in (rpc._OPTIONS, client_channel._OPTIONS):
        assert set(limits.MESSAGE_OPTIONS) <= set(options)
    assert limits.MAX_MESSAGE_BYTES > limits.MAX_RECORD_BYTES == records.MAX_RECORD_BYTES


def test_a_node_hears_of_every_listed_step_in_few_bytes() -> None:
    """100,000 steps make a message that also an older agent takes, and name every step by what a node looks at."""
    run = Play().run().attach()
    run.save(1)
    run.settle()
    run.state.listed.keeps = [
        StepRef(step=step, timeline=TIMELINE, record_key=f"log/{TIMELINE}.{step:012d}.json", record_blake3="a" * 64)
        for step in range(STEPS)
    ]
    run.hello(0)
    started = run.last("started")
    assert started.ByteSize() < 4 << 20
    assert len(started.started.keeps) == STEPS
    assert started.started.keeps[-1] == StepRef(step=STEPS - 1, timeline=TIMELINE)
    # The same message to each node that comes back, until another record counts.
    run.hello(1)
    assert run.said[-1][1] is started
    run.state.listed.keeps = run.state.listed.keeps[-2:]
    run.hello(1)
    assert [ref.step for ref in run.said[-1][1].started.keeps] == [STEPS - 2, STEPS - 1]


# ---------------------------------------------------------------- records


def readable(run: Run) -> list[int]:
    """Return what the store lists, each object under log/ having been read."""
    for info in run.store.list("log/"):
        if "claim" not in info.key:
            records.parse_record(run.store.get(info.key), info.key)
        assert parse_key(info.key) is not None
    _, newest = log_reader.read_newest(run.store)
    assert newest is not None
    return [ref.step for ref in newest.listed]


def test_a_decision_that_nobody_could_read_is_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step whose record would be too large is aborted, saying why and the way out; nothing unreadable is put."""
    run = Play().run().attach()
    run.save(1)
    run.settle()
    size = max(len(run.store.get(info.key)) for info in run.store.list("log/"))
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", size + 600)  # an entry has some 250 bytes
    last = 1
    while run.outcomes()[last]:
        last += 1
        assert last < 20
        run.save(last)
        run.settle()
    why = run.last("outcome").outcome.aborted
    assert (why.reason, why.step) == (error_pb2.REASON_NOT_ALLOWED, last)
    assert f"it lists {last} steps" in why.message
    assert "keep_last" in why.hint
    assert readable(run) == list(range(1, last))
    # Nothing of the record that was not written is left: the next step has the newest as its base.
    run.begin(last + 1)
    run.settle()
    assert run.last("begin").begin.base.step == last - 1


def test_a_start_record_that_nobody_could_read_refuses_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is refused with the way out, and history stays as it was."""
    play = Play()
    before = play.run().attach()
    for step in range(1, 6):
        before.save(step)
        before.settle()
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1300)
    monkeypatch.setattr(records, "_parse", _unlimited(records._parse))
    run = play.run().attach()
    run.begin(6)
    run.settle()
    refused = run.last("refused").refused
    assert refused.reason == error_pb2.REASON_NOT_ALLOWED
    assert "ckptd retain" in refused.hint
    monkeypatch.undo()
    assert readable(run) == [1, 2, 3, 4, 5]


def _unlimited(parse: Any) -> Any:
    """Read what was written under another limit."""

    def read(data: bytes, kind: Any, where: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(records, "MAX_RECORD_BYTES", limits.MAX_RECORD_BYTES)
            return parse(data, kind, where)

    return read


def test_a_record_as_large_as_readers_take_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit itself is allowed, a byte more is not, and names the object."""
    job = records.job_bytes("name", created_at="", version="")
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", len(job))
    assert records.parse_job(records.job_bytes("name", created_at="", version="")).job == "name"
    with pytest.raises(TooLargeError, match="the job to write has"):
        records.job_bytes("name-", created_at="", version="")


# ---------------------------------------------------------------- labels


def test_labels_of_a_step_are_bounded_together() -> None:
    """1 MiB of names and texts is taken, and a byte more refused, naming the largest, its size and the limit."""
    limit = limits.MAX_LABEL_BYTES
    tags = {"why": "test", "config": "é" * ((limit - len("whytestconfig")) // 2)}
    assert checked_tags(tags) == tags
    with pytest.raises(
        InvalidRequest, match=rf"tags\['config'\] has 10485\d\d bytes, and all 3 tags .* {limit}"
    ) as caught:
        checked_tags({**tags, "b": "12"})
    assert caught.value.key == "config"
    assert checked_metrics({"loss": 1}) == {"loss": 1.0}
    with pytest.raises(InvalidRequest, match=r"metrics\['mmm.*…'\] has") as caught:
        checked_metrics({"loss": 1.0, "m" * limit: 2.0})
    assert len(str(caught.value)) < 500


def test_what_a_rank_says_went_wrong_is_cut_before_it_is_told_or_written() -> None:
    """A text of any length leaves an abort marker and a message of kilobytes."""
    error = rpc.cut(Error(reason=error_pb2.REASON_RANK_FAILED, message="m" * (8 << 20), hint="h" * (8 << 20)))
    assert error.reason == error_pb2.REASON_RANK_FAILED
    assert error.ByteSize() < 128 << 10
    whole = Error(message="m" * 10_000, hint="h" * 10_000)
    assert rpc.cut(whole) == whole
