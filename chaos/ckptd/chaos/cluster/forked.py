"""Processes of the harness that are forked from a Python which has imported everything already.

Owns: the server's life, and each process's as `process.Leashed` has it: start, signals, the end of the whole tree.
Does not own: forking itself (`fork_server`). Invariant: as there, whatever ends the harness ends all of them.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from json import dumps
from pathlib import Path
from typing import Self

from ckptd.chaos.cluster import leash
from ckptd.chaos.cluster.process import Leashed, ProcessError
from ckptd.chaos.watch import read_tail, wait_until

_START_DEADLINE = timedelta(seconds=300)
_END_DEADLINE = timedelta(seconds=20)
_POLL_S = 0.005


class Forked:
    """One process and everything it starts; see `process.Leashed`, whose methods these are. For one thread.

    Args:
        line: Its other end is the leash's.
        leash_pid: Of the leash.
    """

    def __init__(self, line: socket.socket, leash_pid: int) -> None:
        self._line, self._leash = line, leash_pid
        self._told = b""
        self._code: int | None = None
        self._line.settimeout(_END_DEADLINE.total_seconds())
        while b"\n" not in self._told:
            found = self._line.recv(64)
            if not found:
                raise ProcessError("a forked process did not start")
            self._told += found
        first, _, self._told = self._told.partition(b"\n")
        self.pid = int(first)
        self._line.setblocking(False)

    def poll(self) -> int | None:
        """Return the exit code, 128 + n after signal n, or None while it runs."""
        if self._code is None:
            with suppress(BlockingIOError):
                while True:
                    found = self._receive()
                    self._told += found
                    if not found or b"\n" in self._told:
                        told = self._told.removeprefix(b"exit ").strip()
                        # Without a word the leash itself was killed.
                        self._code = int(told) if told else 128 + signal.SIGKILL
                        self._line.close()
                        break
        return self._code

    def _receive(self) -> bytes:
        try:
            return self._line.recv(64)
        except ConnectionResetError:
            return b""

    def wait(self, timeout: timedelta) -> int | None:
        """Wait for the end; None when it has not come by then."""
        end = time.monotonic() + timeout.total_seconds()
        while self.poll() is None and time.monotonic() < end:
            time.sleep(_POLL_S)
        return self._code

    def tree(self) -> list[int]:
        """Return the living processes, the first one first; without the leash."""
        return leash.descendants(self._leash) if self.poll() is None else []

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to the first process alone; False when it has ended before."""
        if self.poll() is not None:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False

    def kill(self) -> int:
        """Kill the whole tree, at once; idempotent. Return the exit code.

        Raises:
            ProcessError: Something of it cannot be killed.
        """
        if self.poll() is None:
            with suppress(OSError):
                self._line.shutdown(socket.SHUT_WR)
        code = self.wait(_END_DEADLINE)
        if code is None:
            raise ProcessError(f"the process tree of pid {self.pid} cannot be killed: {self.tree()}")
        return code


class ForkServer:
    """Forks processes of Python commands. A context manager; for one thread.

    Args:
        modules: What it imports before the first fork.
        environment: Its own, and that of every import.

    Raises:
        ProcessError: It does not start; the message ends with what it printed.
    """

    def __init__(self, *modules: str, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ckptd-fork-")
        path, log = Path(self._folder.name) / "socket", Path(self._folder.name) / "log"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server = Leashed(
            [sys.executable, "-m", "ckptd.chaos.cluster.fork_server", str(path), *modules],
            environment=environment,
            stdout=log,
            wipe=[Path(self._folder.name)],
        )
        if not self._connected_in_time(path):
            text = read_tail(log)
            self.close()
            raise ProcessError(f"the fork server did not start: {text}")

    def _connected_in_time(self, path: Path) -> bool:
        is_settled = wait_until(
            lambda: self._connected(path) or self._server.poll() is not None, within=_START_DEADLINE
        )
        return is_settled and self._server.poll() is None

    def _connected(self, path: Path) -> bool:
        with suppress(FileNotFoundError, ConnectionRefusedError):
            self._socket.connect(str(path))
            return True
        return False

    def spawn(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: Path = Path(os.devnull),
        stderr: Path | None = None,
    ) -> Forked:
        """Start what a Python command line would: `[python, "-m", module, ...]` or `[python, script, ...]`.

        Raises:
            ProcessError: It did not start.
        """
        ours, theirs = socket.socketpair()
        with ExitStack() as stack:
            stack.enter_context(theirs)
            output = stack.enter_context(stdout.open("ab"))
            errors = output if stderr is None else stack.enter_context(stderr.open("ab"))
            request = dumps({"command": list(command), "environment": dict(environment)}).encode()
            try:
                socket.send_fds(self._socket, [request], [theirs.fileno(), output.fileno(), errors.fileno()])
                pid = int(self._socket.recv(64) or b"0")
            except OSError as failure:
                raise ProcessError(f"the fork server is gone: {failure}") from failure
        if not pid:
            raise ProcessError("the fork server is gone")
        return Forked(ours, pid)

    def close(self) -> None:
        """End the server and everything it forked; idempotent."""
        self._socket.close()
        self._server.kill()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
