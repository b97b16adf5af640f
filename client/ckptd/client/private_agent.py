"""An agent for one reader or one import: started for it, used by nobody else, and gone when it is done.

Owns: its process and its folders, socket, identity and shared memory among them. Does not own: the node's agent
(`embedded`), which serves jobs and outlives them. Invariant: whatever ends the owner, the agent ends: on `close`, at
the interpreter's end, and by itself when its owner was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

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
        folder = _short_folder()
        self.socket = folder / "run" / _SOCKET
        self.memory = Path(tempfile.mkdtemp(prefix="ckptd-private-", dir=_roomy(room)))
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
    folder = Path(tempfile.mkdtemp(prefix="ckptd-"))
    if len(os.fsencode(folder / "run" / _SOCKET)) > MAX_SOCKET_PATH_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="ckptd-", dir="/tmp"))
    return folder


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
