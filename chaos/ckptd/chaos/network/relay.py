"""TCP proxies of a run's network, as a process: doors that pass connections on, hold what is lost, and reset.

Run by `proxy_way`, and by `netns_way` as the store's door. Owns: doors, the connections through them, and whose they are. A
loss is what TCP makes of one: bytes do not come, nobody is told, and what was on its way comes when the loss is over. A
connection that is made meanwhile is accepted and hears nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptd.chaos.network import namespaces, sockets
from ckptd.chaos.network.control import arguments, serve
from ckptd.chaos.network.flows import Flows
from ckptd.chaos.store_proxy.ledger import Ledger
from ckptd.chaos.store_proxy.proxy import reset

_READ_BYTES = 1 << 16
# What is late of one connection, at most; then the sender waits, as on a long fat wire.
_MOST_LATE_PIECES = 256
_LOOK_S = 0.02
_BACKLOG = 128


@dataclass(eq=False, kw_only=True, slots=True)
class _Connection:
    source: str
    to: str
    ends: list[asyncio.StreamWriter] = field(default_factory=list)

    def reset(self) -> None:
        for end in self.ends:
            if isinstance(end.transport, asyncio.Transport) and not end.transport.is_closing():
                reset(end.transport)


class Relay:
    """The doors. For one event loop.

    Args:
        flows: What is lost or late.
    """

    def __init__(self, flows: Flows) -> None:
        self._flows = flows
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._agents: dict[int, str] = {}
        self._servers: list[asyncio.Server] = []

    async def answer(self, command: Mapping[str, Any]) -> Mapping[str, object]:
        """Do a command: door, node, agent, fault, heal, counts."""
        match command:
            case {"do": "door", "name": str(name), "source": str(source), "listen": str(listen), "to": [host, port]}:
                listener = _listener(listen, 0, command.get("namespace"))
                await self._open(listener, name, source, (str(host), int(port)))
                return {"port": listener.getsockname()[1]}
            case {"do": "node", "name": str(name), "listen": str(listen), "advertise": str(advertise)}:
                self._spawn(self._follow(name, listen, advertise))
                return {}
            case {"do": "agent", "name": str(name), "pid": int(pid)}:
                self._agents[pid] = name
                return {}
            case {"do": "fault", "kind": "reset"}:
                return {"struck": self._reset(command)}
            case {"do": "fault"}:
                self._flows.begin(command, lambda _fault: None)
                return {}
            case {"do": "heal"}:
                return {"struck": self._flows.heal()}
            case {"do": "counts"}:
                return {"counts": self._flows.counts()}
            case _:
                raise ValueError("unknown command; allowed: door, node, agent, fault, heal, counts")

    async def close(self) -> None:
        """Close doors and connections."""
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, name: str, listen: str, advertise: str) -> None:
        """Open a door at a node's advertised address for each port that its agent listens on at its own one.

        Which port that is nobody says in advance: a coordinator takes any that is free.
        """
        doors: dict[int, asyncio.Server] = {}
        while True:
            listening = sockets.listening_ports(listen)
            for port in listening - doors.keys():
                with suppress(OSError):
                    doors[port] = await self._open(_listener(advertise, port, None), name, "", (listen, port))
            for port in doors.keys() - listening:
                # Connections are refused again, as they are by a node where nobody listens.
                doors.pop(port).close()
            await asyncio.sleep(_LOOK_S)

    async def _open(self, listener: socket.socket, name: str, source: str, to: tuple[str, int]) -> asyncio.Server:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            if task is not None:
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            try:
                caller = source or self._caller(writer)
                await self._pass(_Connection(source=caller, to=name, ends=[writer]), reader, to)
            except asyncio.CancelledError:
                pass
            finally:
                writer.transport.abort()

        server = await asyncio.start_server(accepted, sock=listener, backlog=_BACKLOG)
        self._servers.append(server)
        return server

    def _caller(self, writer: asyncio.StreamWriter) -> str:
        """Return the node whose agent made a connection; empty where it is nobody's."""
        address = writer.get_extra_info("peername")
        pid = sockets.owner(address[0], address[1], self._agents) if address else None
        return self._agents[pid] if pid is not None else ""

    async def _pass(self, connection: _Connection, reader: asyncio.StreamReader, to: tuple[str, int]) -> None:
        self._connections.add(connection)
        try:
            there, back = connection.source, connection.to
            if self._flows.look(there, back, 0).lost:
                await self._flows.until_free(there, back)
            far_reader, far = await asyncio.open_connection(*to)
            connection.ends.append(far)
            near = connection.ends[0]
            pumps = [
                asyncio.ensure_future(self._pump(reader, far, there, back)),
                asyncio.ensure_future(self._pump(far_reader, near, back, there)),
            ]
            try:
                # An end in order ends one direction, a break both.
                await asyncio.gather(*pumps)
            finally:
                for pump in pumps:
                    pump.cancel()
        except OSError:
            connection.reset()
        finally:
            self._connections.discard(connection)
            for end in connection.ends:
                end.transport.abort() if end.transport.is_closing() else end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str, to: str) -> None:
        """Pass one direction on until its end, which is passed on too.

        Raises:
            OSError: One of the ends broke.
        """
        loop = asyncio.get_running_loop()
        late: deque[tuple[float, bytes]] = deque()
        there_is_more, there_is_room = asyncio.Event(), asyncio.Event()

        async def write() -> None:
            while True:
                while not late:
                    there_is_more.clear()
                    await there_is_more.wait()
                due, piece = late[0]
                await asyncio.sleep(max(0.0, due - loop.time()))
                await self._flows.until_free(source, to)
                late.popleft()
                there_is_room.set()
                if not piece:
                    writer.write_eof()
                    return
                writer.write(piece)
                await writer.drain()

        writing = asyncio.ensure_future(write())
        try:
            while not writing.done():
                piece = await reader.read(_READ_BYTES)
                fate = self._flows.look(source, to, len(piece))
                late.append((loop.time() + fate.delay_s, piece))
                there_is_more.set()
                if not piece:
                    break
                while len(late) >= _MOST_LATE_PIECES and not writing.done():
                    there_is_room.clear()
                    await asyncio.wait(
                        [writing, asyncio.ensure_future(there_is_room.wait())], return_when="FIRST_COMPLETED"
                    )
            await writing
        finally:
            writing.cancel()

    def _reset(self, order: Mapping[str, Any]) -> int:
        fault = self._flows.begin(order, lambda _fault: None)
        for connection in [one for one in self._connections if fault.is_of(one.source, one.to)]:
            self._flows.count(fault, connection.source, connection.to, 0)
            connection.reset()
        self._flows.finish(fault)
        return fault.struck

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _listener(host: str, port: int, namespace: str | None) -> socket.socket:
    """Return a bound TCP socket, in a namespace where one is named."""

    def bound() -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        return listener

    return bound() if namespace is None else namespaces.inside(namespace, bound)


async def _serve(control: Path, ledger_path: Path) -> None:
    ledger = Ledger(ledger_path)
    flows = Flows(ledger, "proxy")
    relay = Relay(flows)
    await serve(control, relay.answer)
    await relay.close()
    flows.close()
    ledger.close()


def main() -> None:
    """Serve."""
    told = arguments("TCP proxies that lose, delay and reset.")
    os.umask(0o077)
    asyncio.run(_serve(told.control, told.ledger))


if __name__ == "__main__":
    main()
