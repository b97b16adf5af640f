"""Runs an agent as a process: socket, signals, readiness, the end.

Owns: the order of start and end, and the exit code. Does not own: what the agent does. Start: lock, socket, ready file, then
adopting what an agent before left staged (in the background: the store may be away). End: no new calls, running uploads get
`drain_s`, then out; a second signal ends at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from ckptd.daemon import rpc
from ckptd.daemon.agent import Agent
from ckptd.daemon.agent_service import AgentService
from ckptd.daemon.config import AgentConfig
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.node_files import write_ready_file
from ckptd.daemon.shared_files import prepare_folder
from ckptd.daemon.telemetry import EventLog
from ckptd.protos import agent_pb2_grpc, error_pb2
from ckptd.storage_backends import file_locks

EXIT_OK = 0
EXIT_UNFLUSHED = 3
"""The agent ended with uploads that were not done; what was staged lies in shared memory for the next agent."""
SOCKET_NAME = "agent.sock"
_IDLE_LOOK_S = 0.5


def run(config: AgentConfig) -> NoReturn:
    """Run an agent until it is told to end or, where `idle_exit_s` is set, has had nothing to do for that long.

    Ends the process: with 0, or 3 when uploads were not done.

    Raises:
        DaemonError: it cannot start: a folder, the socket or the address cannot be used.
    """
    if not hasattr(socket, "AF_UNIX") or not hasattr(os, "getuid"):
        # A TCP port in place of the socket would be open to every user of the machine.
        raise DaemonError.of(
            f"an agent needs Unix sockets and users, which {sys.platform} does not have",
            reason=error_pb2.REASON_NOT_ALLOWED,
            hint="run agents and trainers on Linux or macOS; on Windows in WSL 2",
        )
    check_listen(config)
    check_port(config)
    os.umask(0o077)
    with _usage_errors():
        prepare_folder(config.run_dir)
        lock = _lock(config.run_dir / "agent.lock")
    try:
        asyncio.run(_serve(config))
    finally:
        os.close(lock)


async def _serve(config: AgentConfig) -> NoReturn:
    loop = asyncio.get_running_loop()
    path = config.run_dir / SOCKET_NAME
    rpc.prepare_socket(path)
    with _usage_errors():
        log = EventLog(config.event_log)
        agent = Agent(config, log)
    server = rpc.new_server()
    agent_pb2_grpc.add_AgentServicer_to_server(AgentService(agent), server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    path.chmod(0o600)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop)
    write_ready_file(config.run_dir, socket=path, node=agent.node)
    log.emit("listening", node=agent.node, pid=os.getpid(), socket=str(path))
    adopting = loop.create_task(agent.adopt())
    idle = await _until_stopped(agent, stop, config.idle_exit_s)
    log.emit("stopping", node=agent.node, idle=idle)
    await server.stop(grace=0.5)
    flushed = await agent.drain(config.drain_s)
    adopting.cancel()
    await agent.close(forget=idle)
    path.unlink(missing_ok=True)
    log.emit("stopped", node=agent.node, flushed=flushed)
    log.close()
    # Not by returning: threads may still hang in the store, and the interpreter would wait for them. All that is to be kept
    # is: what is staged stays in shared memory for the next agent.
    os._exit(EXIT_OK if flushed else EXIT_UNFLUSHED)


async def _until_stopped(agent: Agent, stop: asyncio.Event, idle_exit_s: float) -> bool:
    """Wait for the signal, or for idleness: True when it was idleness."""
    while True:
        try:
            async with asyncio.timeout(_IDLE_LOOK_S if idle_exit_s else None):
                await stop.wait()
        except TimeoutError:
            if idle_exit_s and agent.idle_for() >= idle_exit_s:
                return True
        else:
            return False


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(EXIT_UNFLUSHED)
    stop.set()


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Say of a folder or file that cannot be used that it is so; it is no bug."""
    try:
        yield
    except OSError as failure:
        raise DaemonError.of(
            f"{failure.filename or 'a folder of the agent'} cannot be used: {failure.strerror}",
            reason=error_pb2.REASON_INVALID_ARGUMENT,
            hint=f"run_dir, data_dir, shm_dir and event_log must be places that user {os.geteuid()} can write to",
            object=str(failure.filename or ""),
        ) from failure


def check_listen(config: AgentConfig) -> None:
    """Refuse to listen on every interface by accident: TLS is always on, but the address should be meant.

    Raises:
        DaemonError: NOT_ALLOWED; INVALID_ARGUMENT where `listen` names no address.
    """
    name = config.listen.removeprefix("[").removesuffix("]") if config.listen.endswith("]") else config.listen
    try:
        # What gRPC will make of it: "0", "::0" and "*" are every interface, too.
        entries = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        found = [ipaddress.ip_address(entry[4][0]) for entry in entries]
    except (OSError, ValueError) as failure:
        raise DaemonError.of(
            f"listen = {config.listen!r} is no address of a host: {failure}",
            reason=error_pb2.REASON_INVALID_ARGUMENT,
            hint="name an address without a port, such as 10.0.0.7; the port is set by --port",
            object="listen",
        ) from failure
    if any(_is_unspecified(address) for address in found) and not config.insecure:
        raise DaemonError.of(
            f"listen = {config.listen!r} would listen on every interface",
            reason=error_pb2.REASON_NOT_ALLOWED,
            hint="name the address of one interface, or pass --insecure if every one is meant",
            object="listen",
        )


def check_port(config: AgentConfig) -> None:
    """Refuse a port that somebody listens on: the first run would find it taken, hours later.

    It is not kept: a coordinator binds it when a run starts, and two agents that do so at once are told then.

    Raises:
        DaemonError: UNAVAILABLE; names address and port.
    """
    if config.port == 0:
        return
    host = config.listen.removeprefix("[").removesuffix("]")
    family, _, _, _, address = socket.getaddrinfo(host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    try:
        with socket.socket(family) as probe:
            # What a dead listener left (connections in TIME_WAIT) does not count; a living one does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as failure:
        raise DaemonError.of(
            f"cannot listen on {rpc.endpoint_of(host, config.port)}: {failure.strerror}",
            reason=error_pb2.REASON_UNAVAILABLE,
            hint="another agent may have this --port; choose another one, or 0 for any",
            object=str(config.port),
        ) from failure


def _is_unspecified(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address.is_unspecified or (mapped is not None and mapped.is_unspecified)


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        file_locks.take(fd)
    except BlockingIOError:
        os.close(fd)
        raise DaemonError.of(
            f"another agent runs in {path.parent}",
            reason=error_pb2.REASON_NOT_ALLOWED,
            hint="one agent serves a node; end that one, or set CKPTD_RUN_DIR",
            object=str(path),
        ) from None
    return fd
