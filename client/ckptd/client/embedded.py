"""Starting an agent where none listens: so that a package and a script are enough.

Owns: one start per node among all its ranks, and what to say when it fails. Does not own: the agent, which is a
program of its own and outlives the trainer: nothing of it is imported here. Invariant: the agent runs in a session of
its own, holds none of the trainer's files, and ends by itself when it has been idle.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptd.protos import error_pb2
from ckptd.storage_backends import file_locks

from .errors import InvalidRequest, Unavailable

IDLE_EXIT_S = 300
"""An embedded agent ends after so many seconds without ranks and uploads: long enough for a job to be restarted."""
_POLL_S = 0.05
_LOG_TAIL_BYTES = 2000


class _Detached(subprocess.Popen[bytes]):
    """A process that is meant to outlive this one: no warning that it still runs."""

    def __del__(self) -> None:
        """Leave it alone."""


_started: list[_Detached] = []
"""Agents this process has started; kept, so that one that ended is reaped and not left a zombie."""


def start_agent(folder: Path, socket: Path, *, deadline: float, is_listening: Callable[[], bool]) -> None:
    """Start the node's agent, unless another rank does; return when one listens.

    Args:
        folder: Its run folder; made (0700) if it is not there.
        socket: Where it will listen.
        deadline: On `time.monotonic`, seconds.
        is_listening: Says whether one listens now.

    Raises:
        Unavailable: it did not come up in time, or ended; shows the end of its log.
        InvalidRequest: the folder belongs to somebody else.
    """
    _prepare(folder)
    with _locked(folder / "start.lock", deadline, is_listening) as is_mine:
        if not is_mine or is_listening():
            return
        process = _spawn(folder)
        while not is_listening():
            code = process.poll()
            if code is not None or time.monotonic() >= deadline:
                how = f"ended with exit code {code}" if code is not None else "did not come up in time"
                raise Unavailable(
                    f"the agent that was started for this node {how}; it should listen on {socket}{_log_tail(folder)}",
                    hint=f"see {folder / 'agent.log'}, or run `ckptd agent --run-dir {folder}` by hand",
                    key=str(folder),
                    phase="register",
                )
            time.sleep(_POLL_S)


def reap() -> None:
    """Take note of agents that have ended, so that they do not stay as zombies."""
    for process in list(_started):
        if process.poll() is not None:
            with contextlib.suppress(ValueError):
                _started.remove(process)


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise InvalidRequest(
            f"the folder for an agent cannot be made: {error}", hint="set CKPTD_RUN_DIR", key=str(folder)
        ) from error
    # Somebody else's folder under a name that can be guessed would hand this job's state to his agent.
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise InvalidRequest(
            f"{folder} can be written by other users",
            reason=error_pb2.REASON_NOT_ALLOWED,
            hint="set CKPTD_RUN_DIR to a folder of your own with mode 0700",
            key=str(folder),
        )


@contextlib.contextmanager
def _locked(path: Path, deadline: float, is_listening: Callable[[], bool]) -> Iterator[bool]:
    """Hold the lock; yields False when an agent came up (or the time went) while another rank held it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                file_locks.take(handle)
            except BlockingIOError:
                if is_listening() or time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(_POLL_S)
            else:
                yield True
                return
    finally:
        os.close(handle)


def _spawn(folder: Path) -> _Detached:
    command = [sys.executable, "-m", "ckptd.daemon.cli", "agent"]
    command += ["--run-dir", os.fspath(folder.absolute()), "--idle-exit-s", str(IDLE_EXIT_S)]
    with (folder / "agent.log").open("ab") as log:
        process = _Detached(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Its own folder: -m puts the working folder first on the module path, and the trainer's may hold anything.
            cwd=folder,
            # A session of its own: signals to the trainer's group (a launcher that ends its workers) do not reach it.
            start_new_session=True,
        )
    _started.append(process)
    return process


def _log_tail(folder: Path) -> str:
    with contextlib.suppress(OSError):
        text = (folder / "agent.log").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return f"; its log ends with:\n{text}" if text else ""
    return ""
