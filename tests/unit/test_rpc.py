"""Errors cross gRPC whole, tokens are checked, and a socket is taken over from the dead alone."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from fixtures.raw_rank import run_credentials

from ckptd.chaos.network.flows import Flows
from ckptd.chaos.network.relay import Relay
from ckptd.chaos.store_proxy.ledger import Ledger
from ckptd.daemon import rpc
from ckptd.daemon.errors import DaemonError, FencedError, make_error
from ckptd.protos import agent_pb2, agent_pb2_grpc, coordinator_pb2_grpc, error_pb2
from ckptd.protos.agent_pb2 import HelloRequest
from ckptd.protos.coordinator_pb2 import PingReply, PingRequest
from ckptd.protos.error_pb2 import Error

DEADLINE_S = 10.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    made = Path(f"/tmp/ckptd-u-{secrets.token_hex(3)}")
    made.mkdir(mode=0o700)
    yield made
    shutil.rmtree(made)


class Failing(agent_pb2_grpc.AgentServicer):
    """Raises what it was given."""

    def __init__(self, failure: BaseException) -> None:
        self.failure = failure

    @rpc.guarded
    async def Hello(self, request: HelloRequest, context: Any) -> agent_pb2.HelloReply:  # noqa: N802 - the name in the .proto
        raise self.failure

    @rpc.guarded_stream
    async def GetPlan(self, request: Any, context: Any) -> AsyncIterator[agent_pb2.PlanPart]:  # noqa: N802 - same
        yield agent_pb2.PlanPart(writer=[1])
        raise self.failure


def status_of(folder: Path, failure: BaseException, call: Callable[[Any], Awaitable[Any]]) -> grpc.aio.AioRpcError:
    """Let a server fail so, and return what its client gets."""

    async def play() -> grpc.aio.AioRpcError:
        server = rpc.new_server()
        agent_pb2_grpc.add_AgentServicer_to_server(Failing(failure), server)  # type: ignore[abstract]
        server.add_insecure_port(f"unix:{folder}/s")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"unix:{folder}/s") as channel:
                await call(agent_pb2_grpc.AgentStub(channel))
        except grpc.aio.AioRpcError as status:
            return status
        finally:
            await server.stop(None)
        raise AssertionError("the call did not fail")

    return asyncio.run(play())


async def hello(stub: Any) -> None:
    await stub.Hello(HelloRequest(), timeout=DEADLINE_S)


async def plan(stub: Any) -> None:
    parts = aiter(stub.GetPlan(agent_pb2.PlanRequest(), timeout=DEADLINE_S))
    assert list((await anext(parts)).writer) == [1]
    await anext(parts)


@pytest.mark.parametrize("call", [hello, plan])
def test_an_error_crosses_a_call_with_every_field(folder: Path, call: Callable[[Any], Awaitable[Any]]) -> None:
    """Reason, message, hint, step, ranks, node, object and phase arrive as they were raised, in a unary call and a stream."""
    error = make_error(
        error_pb2.REASON_COVERAGE,
        "Tensor 'größe' has a hole",
        hint="fix it",
        step=7,
        rank=0,
        ranks=[3, 1],
        node="n",
        object="größe",
        phase="begin",
    )
    assert rpc.error_of(status_of(folder, DaemonError(error), call)) == error
    assert list(error.ranks) == [1, 3]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (error_pb2.REASON_INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
        (error_pb2.REASON_PERMISSION_DENIED, grpc.StatusCode.PERMISSION_DENIED),
        (error_pb2.REASON_NO_SPACE, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (error_pb2.REASON_CORRUPT, grpc.StatusCode.DATA_LOSS),
        (error_pb2.REASON_FENCED, grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_a_reason_has_a_status_that_other_tools_understand(
    folder: Path, reason: error_pb2.Reason.ValueType, code: grpc.StatusCode
) -> None:
    """Whoever knows only gRPC sees a code that fits, and the sentence."""
    status = status_of(folder, DaemonError.of("a sentence", reason=reason), hello)
    assert (status.code(), status.details()) == (code, "a sentence")


def test_an_unforeseen_exception_is_an_internal_error_that_names_it(folder: Path) -> None:
    """A bug is told as one, never as a broken connection."""
    error = rpc.error_of(status_of(folder, KeyError("lost"), hello))
    assert (error.reason, error.message) == (error_pb2.REASON_INTERNAL, "KeyError: 'lost'")


@pytest.mark.parametrize(
    "error",
    [
        make_error(error_pb2.REASON_RANKS_MISSING, f"ranks {list(range(9000))} are late", ranks=range(9000), step=4),
        make_error(error_pb2.REASON_LAYOUT_MISMATCH, "模型" * 9000, object="模型" * 9000, hint="出路" * 9000, step=4),
    ],
    ids=["ranks", "text"],
)
def test_an_error_too_long_for_grpc_is_cut_and_keeps_its_reason(folder: Path, error: Error) -> None:
    """Beyond 8 KiB gRPC drops a status, reason and all: what is long is shortened, what is short stays."""
    found = rpc.error_of(status_of(folder, DaemonError(error), hello))
    assert (found.reason, found.step) == (error.reason, 4)
    assert found.message[:100] == error.message[:100]
    assert found.message.endswith("…")
    assert list(found.ranks) == list(error.ranks)[: len(found.ranks)]
    assert bool(found.ranks) == bool(error.ranks)


def test_an_error_of_this_process_is_taken_as_it_is() -> None:
    """`error_of` gives a daemon's error back unchanged, of whatever class."""
    assert rpc.error_of(FencedError.of("taken over")).reason == error_pb2.REASON_FENCED


def test_a_token_is_accepted_only_when_it_is_the_runs_own() -> None:
    """Missing, empty, shorter, longer and different tokens are refused, and text where bytes belong."""

    class Context:
        def __init__(self, *metadata: tuple[str, bytes | str]) -> None:
            self._metadata = metadata or None

        def invocation_metadata(self) -> Any:
            return self._metadata

    token = secrets.token_bytes(32)
    name = rpc.TOKEN_METADATA
    assert rpc.has_token(Context((name, token)), token)
    flipped = bytes([token[0] ^ 1]) + token[1:]
    for shown in ([], [(name, b"")], [(name, token[:-1])], [(name, token + b"\0")], [(name, flipped)], [(name, "ü")]):
        assert not rpc.has_token(Context(*shown), token), shown


def test_a_certificates_digest_does_not_depend_on_how_its_pem_is_wrapped() -> None:
    """What a TLS server shows and what a claim names are compared by DER."""
    one, other = run_credentials().certificate, run_credentials().certificate
    assert rpc.certificate_sha256(one) == rpc.certificate_sha256(b"\n" + one.replace(b"\n", b"\r\n"))
    assert rpc.certificate_sha256(one) != rpc.certificate_sha256(other)


# ---------------------------------------------------------------- sockets


def test_a_socket_path_that_is_too_long_is_refused_with_its_length(folder: Path) -> None:
    """107 bytes fit and are bound; one more is refused, with both numbers and the way out. Bytes count, not letters."""
    fits = folder / ("s" * (rpc.MAX_SOCKET_PATH - len(os.fsencode(folder)) - 1))
    rpc.prepare_socket(fits)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(fits))
    for long in (Path(f"{fits}x"), Path(f"{os.fspath(fits)[:-1]}ü")):
        with pytest.raises(
            DaemonError, match=rf"has {rpc.MAX_SOCKET_PATH + 1} bytes.*allow 107.*CKPTD_RUN_DIR"
        ) as caught:
            rpc.prepare_socket(long)
        assert caught.value.error.reason == error_pb2.REASON_INVALID_ARGUMENT


def test_a_dead_agents_socket_is_removed(folder: Path) -> None:
    """A socket nobody listens on makes way; where there is none, nothing happens."""
    path = folder / "agent.sock"
    rpc.prepare_socket(path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))
    assert stat.S_ISSOCK(path.lstat().st_mode)
    rpc.prepare_socket(path)
    assert not path.exists()


def test_a_living_agents_socket_is_refused_and_left(folder: Path) -> None:
    """Whoever answers a connection keeps its socket, also when its queue is full."""
    path = folder / "agent.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))
        server.listen(1)
        with pytest.raises(DaemonError, match="another agent listens on") as caught:
            rpc.prepare_socket(path)
        assert caught.value.error.reason == error_pb2.REASON_NOT_ALLOWED
        with socket.socket(socket.AF_UNIX) as still:
            still.connect(os.fspath(path))


def test_what_is_no_socket_is_never_removed(folder: Path) -> None:
    """A file or a link in the way is refused by name and stays."""
    for name in ("file", "link"):
        path = folder / name
        if name == "file":
            path.write_text("precious")
        else:
            path.symlink_to(folder / "file")
        with pytest.raises(DaemonError, match=f"{name} is in the way"):
            rpc.prepare_socket(path)
        assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("host", "endpoint"), [("10.0.0.1", "10.0.0.1:7"), ("::1", "[::1]:7"), ("[::1]", "[::1]:7"), ("node3", "node3:7")]
)
def test_an_endpoint_is_one_that_can_be_taken_apart_again(host: str, endpoint: str) -> None:
    """An IPv6 address gets the brackets without which its port cannot be told from it."""
    assert rpc.endpoint_of(host, 7) == endpoint


class _Pinged(coordinator_pb2_grpc.CoordinatorServicer):
    async def Ping(self, request: Any, context: Any) -> PingReply:  # noqa: N802 - the name in the .proto
        del request, context
        return PingReply(run_id="far away")


def test_a_handshake_over_a_slow_line_is_waited_for(tmp_path: Path) -> None:
    """Half a second there and back, or a host that answers as late: TCP and TLS together take longer, and are waited for."""

    async def play() -> str:
        credentials, server = run_credentials(), rpc.new_server()
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(_Pinged(), server)  # type: ignore[abstract]
        port = server.add_secure_port("127.0.0.1:0", rpc.server_credentials(credentials))
        await server.start()
        ledger = Ledger(tmp_path / "faults.jsonl")
        flows = Flows(ledger, "proxy")
        relay = Relay(flows)
        door = {"do": "door", "name": "0", "source": "1", "listen": "127.0.0.1", "to": ["127.0.0.1", port]}
        outside = (await relay.answer(door))["port"]
        await relay.answer({"do": "fault", "number": 0, "kind": "delay", "one": ["1"], "other": None, "delay_s": 0.25})
        try:
            async with rpc.pinned_channel(f"127.0.0.1:{outside}", credentials.certificate) as channel:
                stub: Any = coordinator_pb2_grpc.CoordinatorStub(channel)
                answer: PingReply = await stub.Ping(PingRequest(), timeout=DEADLINE_S)
                assert flows.counts()["0"][0] > 4, "the line was not slow"
                return answer.run_id
        finally:
            await relay.close()
            await server.stop(None)
            flows.close()
            ledger.close()

    assert asyncio.run(play()) == "far away"


def test_a_peer_that_is_stopped_is_noticed_though_its_kernel_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP, or a host that hangs: TCP acknowledges for it, only pings tell. All times of a ping scaled to a twentieth.

    Unless both of gRPC's limits are set, the longer one, a minute, would hold the connection beyond the deadline.
    """
    scaled = [
        (name, value // 20 if "keepalive_t" in name or "ping_timeout" in name else value)
        for name, value in rpc._OPTIONS
    ]
    monkeypatch.setattr(rpc, "_OPTIONS", scaled)

    async def play() -> bytes:
        server = rpc.new_server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
            )  # and an empty SETTINGS
            return await asyncio.wait_for(reader.read(), DEADLINE_S)  # until the end of the connection
        finally:
            writer.close()
            await server.stop(None)

    said = asyncio.run(play())
    assert bytes([0, 0, 8, 6, 0]) in said, "it was never pinged"
