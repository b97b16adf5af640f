"""A process of the network on a leash, and the Unix socket over which it is commanded: one JSON line each way.

Owns: both ends of that line. Does not own: the commands (`hub`, `relay`). Whoever may open the socket may command: it
lies in a folder of the user's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from ckptd.chaos.cluster.process import Leashed, ProcessError
from ckptd.chaos.watch import read_tail, wait_until

LEDGER = "network-faults.jsonl"
_LOG = "network.log"
_START_DEADLINE = timedelta(seconds=60)
_ANSWER_DEADLINE = timedelta(seconds=60)
_END_GRACE = timedelta(seconds=5)


class Commanded:
    """A running helper process. For one thread.

    Args:
        module: What runs; its `main` calls `serve`.
        folder: Gets the ledger and the log.

    Raises:
        ProcessError: It did not start; the message ends with its log.
    """

    def __init__(self, module: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / _LOG
        # A short path: that of a Unix socket has at most 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="ckptd-net-"))
        self._control = self._folder / "control"
        self._process = Leashed(
            [sys.executable, "-m", module, "--control", str(self._control), "--ledger", str(folder / LEDGER)],
            environment={name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")},
            stdout=self.log,
            wipe=[self._folder],
        )
        self.pid = self._process.pid
        is_up = wait_until(lambda: self._listens() or self._process.poll() is not None, within=_START_DEADLINE)
        if not is_up or self._process.poll() is not None:
            self.close()
            raise ProcessError(f"the network did not start:\n{read_tail(self.log, most=2000)}")

    def ask(self, do: str, **what: object) -> dict[str, Any]:
        """Command, and return the answer.

        Raises:
            ProcessError: It refuses, and says why, or does not answer.
        """
        try:
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(_ANSWER_DEADLINE.total_seconds())
                line.connect(str(self._control))
                line.sendall(json.dumps({"do": do, **what}).encode() + b"\n")
                with line.makefile("rb") as answers:
                    answer: dict[str, Any] = json.loads(answers.readline())
        except (OSError, ValueError) as error:
            raise ProcessError(f"the network does not answer to {do}: {error!r}; {read_tail(self.log)}") from error
        if "error" in answer:
            raise ProcessError(f"the network refuses {do}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End it; idempotent."""
        self._process.terminate(_END_GRACE)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as line, suppress(OSError):
            line.connect(str(self._control))
            return True
        return False


Answer = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, object]]]
"""Does a command and returns what to answer; ValueError and OSError refuse it."""


def arguments(description: str) -> argparse.Namespace:
    """Read the command line that `Commanded` makes: `control` and `ledger`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--control", required=True, type=Path, help="Unix socket to be made for commands")
    parser.add_argument("--ledger", required=True, type=Path, help="file that gets a JSON line per fault done")
    return parser.parse_args()


async def serve(control: Path, answer: Answer) -> None:
    """Answer commands until SIGTERM."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(json.dumps(await _answer(line, answer)).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(converse, control)
    await ended.wait()
    server.close()


async def _answer(line: bytes, answer: Answer) -> Mapping[str, object]:
    try:
        command = json.loads(line)
        if not isinstance(command, dict):
            return {"error": "a command is an object"}
        return await answer(command)
    except (ValueError, KeyError, TypeError, OSError) as error:
        return {"error": str(error) or repr(error)}
