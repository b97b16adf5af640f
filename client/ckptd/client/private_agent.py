"""An agent for one reader or one import: started for it, used by nobody else, and gone when it is done.

Owns: its process and its folders, socket, identity and shared memory among them. Does not own: the node's agent
(`embedded`), which serves jobs and outlives them. Invariant: whatever ends the owner, the agent ends: on `close`, at
the interpreter's end, and by itself when its owner was killed. What killed ones leave, the next one removes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

from ckptd.storage_backends import file_locks

from .channel import listener_pid
from .config import MAX_SOCKET_PATH_BYTES
from .errors import Unavailable

ORPHANED_S = 30
"""Without its owner it ends after so many seconds."""
_END_S = 20.0
_POLL_S = 0.02
_LOG_TAIL_BYTES = 2000
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - folders below it are made with random names and mode 0700
_SOCKET = "agent.sock"
_PREFIX = "ckptd-private-"
_MEMORY = "memory"
"""File that says where an agent's shared memory is."""
_STALE_S = 60.0
"""Folders older than so many seconds, without a running agent, are what a killed one has left."""


class PrivateAgent:
    """A running agent.

    Args:
        room: Bytes of shared memory it will need; where /dev/shm has less free, files in the temporary folder are
            mapped instead.
        deadline: On `time.monotonic`, seconds: it must listen by then.

    Attributes:
        socket: Where it listens.
        pid: Its process.
        memory: Its folder of shared memory.

    Raises:
        Unavailable: it did not come up; shows the end of its log.
    """

    def __init__(self, *, room: int, deadline: float) -> None:
        _sweep()
        folder = _short_folder()
        self.socket = folder / "run" / _SOCKET
        self.memory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_roomy(room)))
        (folder / _MEMORY).write_text(os.fspath(self.memory))
        process = _spawn(folder, self.memory)
        self.pid = process.pid
        self._end = weakref.finalize(self, _ended, os.getpid(), process, folder, self.memory)
        try:
            self._wait(process, folder, deadline)
        except BaseException:
            self.close()
            raise

    def _wait(self, process: subprocess.Popen[bytes], folder: Path, deadline: float) -> None:
        while listener_pid(self.socket) is None:
            code = process.poll()
            if code is not None or time.monotonic() >= deadline:
                how = f"ended with exit code {code}" if code is not None else "did not come up in time"
                with contextlib.suppress(OSError):
                    how += (
                        f"; its log ends with:\n{(folder / 'agent.log').read_text(errors='replace')[-_LOG_TAIL_BYTES:]}"
                    )
                raise Unavailable(f"the agent that was started for this {how}", phase="register")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the agent and remove its folders; idempotent."""
        self._end()


def _short_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    if len(os.fsencode(folder / "run" / _SOCKET)) > MAX_SOCKET_PATH_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    return folder


def _sweep() -> None:
    """Remove what this user's agents have left that were killed together with their owners."""
    for folder in {*Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"), *Path("/tmp").glob(f"{_PREFIX}*")}:  # noqa: S108
        with contextlib.suppress(OSError):
            about = folder.lstat()
            if (
                about.st_uid != os.getuid()
                or not stat.S_ISDIR(about.st_mode)
                or time.time() - about.st_mtime < _STALE_S
            ):
                continue
            handle = os.open(folder / "run" / "agent.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                file_locks.take(handle)  # an agent that runs holds it
                memory = Path((folder / _MEMORY).read_text())
                if memory.name.startswith(_PREFIX):
                    shutil.rmtree(memory, ignore_errors=True)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def _roomy(room: int) -> str:
    """Return a folder with so many bytes free: in memory where there is one, on disk otherwise."""
    with contextlib.suppress(OSError):
        if os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free >= room:
            return os.fspath(_SHARED_MEMORY)
    return tempfile.gettempdir()


def _spawn(folder: Path, memory: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ckptd.daemon.cli", "agent"]
    command += ["--run-dir", os.fspath(folder / "run"), "--data-dir", os.fspath(folder / "data")]
    command += ["--shm-dir", os.fspath(memory), "--idle-exit-s", str(ORPHANED_S), "--drain-s", "0"]
    # Beside an agent of the node: none of its addresses, and no line in its log.
    command += ["--listen", "127.0.0.1", "--port", "0", "--advertise", "127.0.0.1"]
    environment = {name: value for name, value in os.environ.items() if name != "CKPTD_EVENT_LOG"}
    with (folder / "agent.log").open("ab") as log:
        # Its own session: an interrupt from the terminal ends the owner first, which then ends the agent.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )


def _ended(owner: int, process: subprocess.Popen[bytes], *folders: Path) -> None:
    if os.getpid() != owner:
        return  # a forked child: the agent is its parent's
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
