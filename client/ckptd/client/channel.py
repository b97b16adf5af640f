"""A connection to the agent of this node that has agreed on a protocol version.

Owns: the gRPC channel, Hello, the proof that shared memory works, and how a status becomes an error of the client.
Does not own: sessions (`link`) or starting an agent (`embedded`). Invariant: a channel that is handed out has said
Hello.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import socket
import struct
import time
from pathlib import Path

import grpc

from ckptd.protos import error_pb2, limits
from ckptd.protos.agent_pb2 import HelloReply, HelloRequest
from ckptd.protos.agent_pb2_grpc import AgentStub
from ckptd.protos.error_pb2 import Error
from ckptd.protos.failpoints import failpoint

from .config import Config
from .embedded import start_agent
from .errors import CkptdError, InvalidRequest, Unavailable, from_wire

MIN_VERSION, MAX_VERSION = 1, 1
SHARED_MEMORY = "shm"
ERROR_METADATA = "ckptd-error-bin"
CKPTD_VERSION = importlib.metadata.version("ckptd")

_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # http_proxy in the environment would catch calls to a local agent
    ("grpc.use_local_subchannel_pool", 1),  # several Checkpointers must not share a broken connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # the longest time one attempt may take; pauses are the other two
    ("grpc.max_reconnect_backoff_ms", 1_000),
    *limits.MESSAGE_OPTIONS,
]
_POLL_S = 0.05
_HELLO_S = 5.0


class AgentChannel:
    """One channel. Safe to use from any thread of the process that made it.

    Attributes:
        stub: The agent's RPCs.
        hello: What the agent said.
        shared_memory: Whether the agent's shared memory can be mapped here.
        shares_pids: Whether the agent sees this process under the same number.
    """

    def __init__(self, channel: grpc.Channel, hello: HelloReply, *, shared_memory: bool, shares_pids: bool) -> None:
        self._channel = channel
        self.stub = AgentStub(channel)
        self.hello = hello
        self.shared_memory = shared_memory
        self.shares_pids = shares_pids

    def close(self) -> None:
        """End the connection; idempotent."""
        self._channel.close()


def error_of(failure: grpc.RpcError, *, phase: str) -> CkptdError:
    """Return the error that a failed call stands for."""
    code = failure.code() if isinstance(failure, grpc.Call) else grpc.StatusCode.UNKNOWN
    metadata = failure.trailing_metadata() if isinstance(failure, grpc.Call) else None
    for key, value in metadata or ():
        if key == ERROR_METADATA:
            found = from_wire(Error.FromString(value))
            found.phase = found.phase or phase
            return found
    details = failure.details() if isinstance(failure, grpc.Call) else str(failure)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unavailable(
            "the agent did not answer within the deadline", reason=error_pb2.REASON_DEADLINE_EXCEEDED, phase=phase
        )
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Unavailable(f"the agent cannot be reached: {details}", phase=phase)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidRequest(
            f"the agent does not know this call: {details}",
            reason=error_pb2.REASON_VERSION_MISMATCH,
            hint="install versions of ckptd that are at most one apart",
            phase=phase,
        )
    return CkptdError(f"the agent failed: {code.name}: {details}", phase=phase)


def was_answered(failure: grpc.RpcError) -> bool:
    """Say whether it is the agent that answered with an error, as opposed to gRPC on this side."""
    metadata = failure.trailing_metadata() if isinstance(failure, grpc.Call) else None
    return any(key == ERROR_METADATA for key, _ in metadata or ())


def is_lost(failure: grpc.RpcError) -> bool:
    """Say whether the connection broke, as opposed to the agent answering with an error."""
    if not isinstance(failure, grpc.Call):
        return True
    return not was_answered(failure) and failure.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def listener_pid(path: Path) -> int | None:
    """Return the number by which the listener on `path` is seen here: 0 if it is not, None if nobody listens.

    Raises:
        InvalidRequest: somebody may listen, but this user may not connect.
    """
    if not hasattr(socket, "AF_UNIX"):
        # A TCP port in place of the socket would be open to every user of the machine.
        raise InvalidRequest(
            "an agent is reached over a Unix socket, and this system has none",
            reason=error_pb2.REASON_NOT_ALLOWED,
            hint="run agents and trainers on Linux or macOS; on Windows in WSL 2",
            key=str(path),
            phase="register",
        )
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(os.fspath(path))
        except PermissionError as error:
            raise InvalidRequest(
                f"the agent's socket {path} may not be used by this user",
                reason=error_pb2.REASON_PERMISSION_DENIED,
                hint="run the agent as the same user",
                key=str(path),
            ) from error
        except (TimeoutError, BlockingIOError):
            return 0  # it listens, and is busy
        except OSError:
            return None
        if not hasattr(socket, "SO_PEERCRED"):
            return 0
        size = struct.calcsize("3i")
        pid: int = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0]
        return pid


def connect(config: Config, *, deadline: float) -> AgentChannel:
    """Return a channel to this node's agent, starting an embedded one where that is allowed.

    Args:
        config: Where the agent is.
        deadline: On `time.monotonic`, seconds.

    Raises:
        Unavailable: nobody listens and nobody came up in time; says where.
        InvalidRequest: no protocol version in common, or the socket may not be used.
    """
    path = config.socket_path
    while True:
        pid = listener_pid(path)
        if pid is not None:
            channel = grpc.insecure_channel(f"unix:{path}", options=_OPTIONS)
            try:
                return _greeted(channel, config, pid, deadline)
            except Unavailable:
                channel.close()
                if time.monotonic() >= deadline:
                    raise
            except BaseException:
                channel.close()
                raise
        elif config.may_start_agent:
            start_agent(config.agent_dir, path, deadline=deadline, is_listening=lambda: listener_pid(path) is not None)
            continue
        if time.monotonic() >= deadline:
            raise Unavailable(
                f"no agent listens on {path}",
                hint="start `ckptd agent`, or unset CKPTD_SOCKET so that an agent is started by itself",
                key=str(path),
                phase="register",
            )
        time.sleep(_POLL_S)


def _greeted(channel: grpc.Channel, config: Config, pid: int, deadline: float) -> AgentChannel:
    offered = [] if config.transport == "stream" else [SHARED_MEMORY]
    request = HelloRequest(
        min_version=MIN_VERSION, max_version=MAX_VERSION, capabilities=offered, ckptd_version=CKPTD_VERSION
    )
    timeout = max(0.1, min(_HELLO_S, deadline - time.monotonic()))
    failpoint("client.before_Hello")
    try:
        hello: HelloReply = AgentStub(channel).Hello(request, timeout=timeout, wait_for_ready=True)
    except grpc.RpcError as failure:
        raise error_of(failure, phase="register") from failure
    failpoint("client.after_Hello")
    if not MIN_VERSION <= hello.version <= MAX_VERSION:
        raise InvalidRequest(
            f"the agent (ckptd {hello.ckptd_version}) chose protocol version {hello.version}; this client "
            f"(ckptd {CKPTD_VERSION}) speaks {MIN_VERSION} to {MAX_VERSION}",
            reason=error_pb2.REASON_VERSION_MISMATCH,
            hint="install versions of ckptd that are at most one apart",
            phase="register",
        )
    works = SHARED_MEMORY in hello.capabilities and _probe(hello)
    if config.transport == "shm" and not works:
        raise InvalidRequest(
            f"shared memory with the agent does not work: {hello.shm_probe_path or 'it offers none'}",
            hint="mount the agent's shm_dir into the trainer's container, or set transport to auto",
            key=hello.shm_probe_path,
            phase="register",
        )
    return AgentChannel(channel, hello, shared_memory=works, shares_pids=pid != 0 and pid == hello.pid)


def _probe(hello: HelloReply) -> bool:
    """Say whether the file the agent names can be read here and is the agent's: then its slots can be mapped too."""
    with contextlib.suppress(OSError):
        path = Path(hello.shm_probe_path)
        return bool(hello.shm_probe_token) and os.access(path, os.W_OK) and path.read_bytes() == hello.shm_probe_token
    return False
