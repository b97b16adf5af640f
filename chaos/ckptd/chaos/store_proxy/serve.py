"""The proxy's process: its port, its commands, its end.

Run by `handle` as `python -m ckptd.chaos.store_proxy.serve`. Owns: the listening socket, which closes during an outage so that
connections are refused while the port stays ours; the Unix socket on which commands come, one JSON line each, answered
by one JSON line. Whoever may open that socket may command: it lies in a folder of the user's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from ckptd.chaos.store_proxy.ledger import Ledger
from ckptd.chaos.store_proxy.orders import OrderError, from_json
from ckptd.chaos.store_proxy.proxy import READ_BYTES, Proxy, reset
from ckptd.storage_backends.fault_script import Fault, FaultKind

_BACKLOG = 512
# How long requests in flight may take at the end; to aiohttp none at all would mean for ever.
_SHUTDOWN_S = 0.1


class Front:
    """The port that clients see. For one event loop.

    Args:
        proxy: Serves what comes.
        ledger: Is told of outages.
    """

    def __init__(self, proxy: Proxy, ledger: Ledger) -> None:
        self._ledger = ledger
        self._server = web.Server(
            proxy.handle, handler_cancellation=True, access_log=None, read_bufsize=READ_BYTES, lingering_time=60
        )
        # Bound and never listening: it keeps the port from everybody else while the other one is closed.
        self._placeholder = _bound(0)
        self.port: int = self._placeholder.getsockname()[1]
        self._listening: asyncio.Server | None = None
        self._outage: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()

    async def open(self) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._server, sock=_bound(self.port), backlog=_BACKLOG)

    async def begin_outage(self, fault: Fault, number: int) -> None:
        """Refuse connections from now on, for the fault's time; those that stand are reset. `number` is the order's.

        Raises:
            OrderError: There is an outage already, or the fault is choosy.
        """
        if fault.op is not None or fault.prefix or fault.nth != 1 or fault.probability != 1.0:
            raise OrderError("an outage strikes every request at once; for some of them use reset with for_s")
        if self._outage is not None:
            raise OrderError("there is an outage already")
        if self._listening is not None:
            self._listening.close()
        broken = 0
        for connection in self._server.connections:
            if connection.transport is not None:
                reset(connection.transport)
                broken += 1
        self._ledger.say(FaultKind.OUTAGE, order=number, begins=True, for_s=fault.for_s, connections_broken=broken)
        self._is_over = asyncio.Event()
        self._outage = asyncio.create_task(self._end_outage(fault.for_s or 0.0))

    async def clear(self) -> None:
        """End an outage now."""
        if self._outage is not None:
            self._is_over.set()
            await self._outage

    async def close(self) -> None:
        """Refuse and break everything."""
        await self.clear()
        if self._listening is not None:
            self._listening.close()
        await self._server.shutdown(_SHUTDOWN_S)
        self._placeholder.close()

    async def _end_outage(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_over.wait(), seconds)
        await self.open()
        self._outage = None
        self._ledger.say(FaultKind.OUTAGE, begins=False)


class Commands:
    """Does what comes over the control socket."""

    def __init__(self, proxy: Proxy, front: Front, ledger: Ledger) -> None:
        self._proxy, self._front, self._ledger = proxy, front, ledger

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the commands of one connection."""
        try:
            while line := await reader.readline():
                writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> Mapping[str, object]:
        try:
            command = json.loads(line)
            match command:
                case {"do": "port"}:
                    return {"port": self._front.port}
                case {"do": "add", "fault": dict(order)}:
                    fault = from_json(order)
                    number = self._ledger.number(fault)
                    if fault.kind is FaultKind.OUTAGE:
                        await self._front.begin_outage(fault, number)
                    else:
                        self._proxy.add(fault)
                    return {"order": number}
                case {"do": "clear"}:
                    self._proxy.clear()
                    await self._front.clear()
                    return {}
                case _:
                    return {"error": "unknown command; allowed: port, add, clear"}
        except ValueError as error:
            return {"error": str(error)}


async def serve(store: str, control: Path, ledger_path: Path, seed: int) -> None:
    """Serve until SIGTERM."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    ledger = Ledger(ledger_path)
    async with Proxy(store, ledger, seed=seed) as proxy:
        front = Front(proxy, ledger)
        await front.open()
        commands = await asyncio.start_unix_server(Commands(proxy, front, ledger).serve, control)
        await ended.wait()
        commands.close()
        await front.close()
    ledger.close()


def _bound(port: int) -> socket.socket:
    """Return a TCP socket on a port of the loopback address; 0 lets the kernel choose."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    return listener


def main() -> None:
    """Read the command line, and serve."""
    parser = argparse.ArgumentParser(description="A proxy before an S3 store that injects faults.")
    parser.add_argument("--store", required=True, help="base URL of the S3 service")
    parser.add_argument("--control", required=True, type=Path, help="Unix socket to be made for commands")
    parser.add_argument("--ledger", required=True, type=Path, help="file that gets a JSON line per fault done")
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    asyncio.run(serve(told.store, told.control, told.ledger, told.seed))


if __name__ == "__main__":
    main()
