"""Faults from the field: quiet streams, and agents that are told to end with a call open."""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import grpc
import pytest
from fixtures.agents import AgentProcess, Agents
from fixtures.raw_job import Job, state_of
from fixtures.raw_rank import RawRank

from ckptd.daemon import rpc
from ckptd.protos import agent_pb2
from ckptd.protos.agent_pb2 import Event
from ckptd.protos.agent_pb2_grpc import AgentStub

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
QUIET_S = 8.0
HASTY = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
"""Eight pings in a silence of eight seconds: five more than gRPC's own servers forgive."""


def test_s115_keepalive_has_one_home_and_the_server_forgives_what_the_client_sends() -> None:
    """Both ends take the same list; no ping can come sooner than the server allows, and none is ever counted as too many."""
    settings = dict(rpc._OPTIONS)
    assert settings["grpc.http2.min_ping_interval_without_data_ms"] < settings["grpc.keepalive_time_ms"]
    assert settings["grpc.http2.max_ping_strikes"] == 0
    assert settings["grpc.http2.max_pings_without_data"] == 0
    homes = [
        path.relative_to(ROOT)
        for folder in ("client", "daemon", "protos", "storage_backends", "chaos")
        for path in (ROOT / folder).rglob("*.py")
        if "grpc.keepalive_" in path.read_text() or "grpc.http2." in path.read_text()
    ]
    assert homes == [Path("daemon/ckptd/daemon/rpc.py")]


def silent_server() -> tuple[grpc.Server, int]:
    """Start a server of gRPC's own defaults whose stream says nothing for a while, then one thing."""

    def stream(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        del context
        time.sleep(QUIET_S)
        yield b"still here"

    handler = grpc.unary_stream_rpc_method_handler(stream)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Silent", {"Listen": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


def test_s115_a_quiet_stream_and_an_idle_channel_outlive_hasty_pings(agents: Agents, tmp_path: Path) -> None:
    """Pings each second for eight quiet seconds break a stream of gRPC's default server, and none of an agent's.

    Scaled from 60 s of silence: a server sends GOAWAY at its third ping too many, so 8 pings show what 60 would.
    """
    server, port = silent_server()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=HASTY) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream("/test.Silent/Listen")(b""))
        assert "many pings" in str(caught.value), "the control must show the fault"
    server.stop(grace=None)

    agent = agents.new()
    with mock.patch("fixtures.raw_rank.grpc.insecure_channel", functools.partial(grpc.insecure_channel, options=HASTY)):
        job = Job(f"file://{tmp_path}/root", [agent], 1)
    [rank] = job.ranks
    job.restored()
    idle = grpc.insecure_channel(f"unix:{agent.socket}", options=HASTY)
    hello = agent_pb2.HelloRequest(min_version=1, max_version=1)
    AgentStub(idle).Hello(hello, timeout=30)
    states: list[grpc.ChannelConnectivity] = []
    idle.subscribe(states.append)
    quiet = threading.Event()
    quiet.wait(QUIET_S)  # the silence itself
    assert rank.save(1, state_of(1, 0), {"rng": b"r1.0"}).go
    rank.event("step", state=Event.COMMITTED, step=1)
    assert grpc.ChannelConnectivity.TRANSIENT_FAILURE not in states
    AgentStub(idle).Hello(hello, timeout=30)
    idle.close()
    job.detach()


class Stalled:
    """A client that has sent a part of its slot and says nothing more."""

    def __init__(self, rank: RawRank, step: int, reply: agent_pb2.BeginReply) -> None:
        self._release = threading.Event()
        self._sent = threading.Event()

        def parts() -> Iterator[agent_pb2.SlotBytes]:
            yield agent_pb2.SlotBytes(
                session=rank.session, step=step, slot=reply.slot, offset=reply.data_offset, data=b"x"
            )
            self._sent.set()
            self._release.wait(120)

        self._thread = threading.Thread(target=self._call, args=(rank, parts()), daemon=True)
        self._thread.start()
        assert self._sent.wait(30)

    def _call(self, rank: RawRank, parts: Iterator[agent_pb2.SlotBytes]) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError):
            rank.stub.WriteSlot(parts)

    def end(self) -> None:
        """Let it go."""
        self._release.set()
        self._thread.join(30)


@pytest.fixture
def busy(agents: Agents, tmp_path: Path) -> Iterator[Callable[[str], AgentProcess]]:
    """Makes an agent with an upload that hangs and an open stream whose client has stalled; takes its drain_s."""
    made: list[Stalled] = []
    jobs: list[Job] = []

    def make(drain_s: str) -> AgentProcess:
        agent = agents.new(start=False, is_forked=False)  # signals and exit codes are those of a Python of its own
        agent.start("--drain-s", drain_s, env={"CKPTD_FAILPOINTS": "uploader.before_put=delay:120"})
        job = Job(f"file://{tmp_path}/root", [agent], 1)
        jobs.append(job)
        [rank] = job.ranks
        job.restored()
        state = state_of(1, 0)
        assert rank.save(1, state, {}).go
        reply = rank.begin(2, rank.put_layout(state))
        assert reply.go
        made.append(Stalled(rank, 2, reply))
        return agent

    yield make
    for one in made:
        one.end()
    for job in jobs:
        job.die()


def answer_to_hello(agent: AgentProcess) -> grpc.StatusCode:
    """Return how a new call ends."""
    with grpc.insecure_channel(f"unix:{agent.socket}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            AgentStub(channel).Hello(agent_pb2.HelloRequest(min_version=1, max_version=1), timeout=5)
        except grpc.RpcError as failure:
            return failure.code()
    return grpc.StatusCode.OK


def test_s117_an_agent_with_an_open_upload_stops_accepting_drains_and_ends(busy: Callable[[str], AgentProcess]) -> None:
    """SIGTERM: no new call is taken, what runs gets its grace, and then the exit code says that not all was done."""
    agent = busy("3")
    assert agent.process is not None
    agent.process.send_signal(signal.SIGTERM)
    agent.wait_event("stopping")
    assert answer_to_hello(agent) is grpc.StatusCode.UNAVAILABLE
    assert agent.process.poll() is None, "it must still drain"
    assert agent.process.wait(timeout=30) == 3
    assert agent.wait_event("stopped")["flushed"] is False


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_s117_a_second_signal_ends_it_at_once(busy: Callable[[str], AgentProcess], second: signal.Signals) -> None:
    """Of ten minutes of grace nothing is waited for."""
    agent = busy("600")
    assert agent.process is not None
    agent.process.send_signal(signal.SIGTERM)
    agent.wait_event("stopping")
    with pytest.raises(subprocess.TimeoutExpired):
        agent.process.wait(timeout=1.5)
    agent.process.send_signal(second)
    assert agent.process.wait(timeout=30) == 3
    assert agent.events("stopped") == []
