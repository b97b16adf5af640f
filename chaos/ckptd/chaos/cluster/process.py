"""Processes of the harness, each on a leash.

Owns: starting, signalling and ending one process tree. Does not own: what the process is for. Invariant: whatever
ends the harness, even SIGKILL, ends the tree too (see `leash`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol, Self, TypeAlias

from ckptd.chaos.cluster import leash

_LEASH = [sys.executable, "-S", "-E", str(Path(leash.__file__))]
_START_DEADLINE = timedelta(seconds=20)
_END_DEADLINE = timedelta(seconds=20)


class Tree(Protocol):
    """One process and everything it starts; `Leashed` and `forked.Forked` are such."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit code, 128 + n after signal n, or None while it runs."""
        ...

    def wait(self, timeout: timedelta) -> int | None:
        """Wait for its end; None when it has not come by then."""
        ...

    def tree(self) -> list[int]:
        """Return the living processes, itself first."""
        ...

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to it alone; False when it has ended before."""
        ...

    def kill(self) -> int:
        """Kill all of it at once; idempotent. Return its exit code."""
        ...


Spawn: TypeAlias = Callable[..., Tree]
"""Starts a process: command, environment=, stdout=, stderr=, as `Leashed` takes them."""


class ProcessError(Exception):
    """A process could not be started, or would not end."""


class Leashed:
    """One command and everything it starts.

    For one thread. A context manager: the tree is dead on exit.

    Args:
        command: Program and arguments; looked up on PATH. Empty: nothing runs, the leash only wipes.
        environment: The whole environment of the command.
        stdout: File the output is appended to.
        stderr: Same for errors; None joins them with the output.
        cwd: Working folder; None keeps ours.
        wipe: Folders that are removed when the tree is killed or the harness dies; not when the command just ends.

    Raises:
        ProcessError: The program cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: Path = Path(os.devnull),
        stderr: Path | None = None,
        cwd: Path | None = None,
        wipe: Iterable[Path] = (),
    ) -> None:
        self._line, theirs = socket.socketpair()
        options = ["--line", str(theirs.fileno())]
        options += [part for folder in wipe for part in ("--wipe", str(folder))]
        with ExitStack() as stack:
            stack.enter_context(theirs)
            output = stack.enter_context(stdout.open("ab"))
            errors = output if stderr is None else stack.enter_context(stderr.open("ab"))
            self._popen = subprocess.Popen(
                [*_LEASH, *options, "--", *command] if command else [*_LEASH, *options],
                env=dict(environment),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._child_pid(command[0], stderr or stdout) if command else self._popen.pid
        """The command's own process, not the leash's."""

    def _child_pid(self, program: str, log: Path) -> int:
        self._line.settimeout(_START_DEADLINE.total_seconds())
        try:
            told = self._line.recv(64)
        except (TimeoutError, ConnectionResetError):
            told = b""
        if not told:
            self.kill()
            raise ProcessError(f"{program} did not start; see {log}")
        return int(told)

    def poll(self) -> int | None:
        """Return the command's exit code, 128 + n after signal n, or None while it runs."""
        return self._popen.poll()

    def wait(self, timeout: timedelta) -> int | None:
        """Wait for the command to end; None when it has not by then."""
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(timeout.total_seconds())
        return None

    def tree(self) -> list[int]:
        """Return the living processes of the command, itself first; without the leash."""
        return leash.descendants(self._popen.pid) if self.poll() is None else []

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to the command alone; False when it has ended before."""
        if self.poll() is not None:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False

    def terminate(self, grace: timedelta) -> int:
        """Ask with SIGTERM, then kill the tree after `grace`; return the exit code."""
        if self.signal(signal.SIGTERM):
            self.wait(grace)
        return self.kill()

    def kill(self) -> int:
        """Kill the whole tree, at once, and remove the folders to wipe; idempotent. Return the exit code.

        Raises:
            ProcessError: Something of it cannot be killed.
        """
        self._line.close()
        code = self.wait(_END_DEADLINE)
        if code is None:
            raise ProcessError(f"the process tree of pid {self.pid} cannot be killed: {self.tree()}")
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
