"""The leash: starts one command and ends its whole process tree when the harness is gone.

Run as a script of its own (`python -S -E leash.py …`), with nothing but the standard library. Owns: the death of
everything it started. Does not own: when that is wanted; closing the line says so. The line is a socket whose other
end only the harness holds, so the kernel closes it whatever ends the harness, SIGKILL included. Invariant: when the
leash has ended, no process of its tree lives, also not one that made a session of its own or lost its parent (ranks
of torchrun do both): the leash is the tree's subreaper.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

_PR_SET_CHILD_SUBREAPER = 36
_MNT_DETACH = 2
_KILL_DEADLINE_S = 10.0
_POLL_S = 0.005
# How long a folder is wiped again: those who wrote into it die at the same moment as we learn of it.
_WIPE_DEADLINE_S = 3.0


def descendants(root: int) -> list[int]:
    """Return the living processes below `root`, parents before children; zombies are left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - without pathlib: this starts in 10 ms
        if not entry.isdigit():
            continue
        state = _state(int(entry))
        if state is not None and state[0] != "Z":
            children.setdefault(state[1], []).append(int(entry))
    found, rest = [], [root]
    while rest:
        below = children.get(rest.pop(), [])
        found += below
        rest += below
    return found


def _state(pid: int) -> tuple[str, int, str] | None:
    """Return (state letter, parent, start time) of a process, None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:  # noqa: PTH123 - as above
            # The name stands in parentheses and may hold anything.
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), fields[19]


def start_time(pid: int) -> str | None:
    """Return what tells this process from a later one of the same pid; None if there is none, or a zombie."""
    state = _state(pid)
    return None if state is None or state[0] == "Z" else state[2]


def kill_tree(root: int) -> None:
    """SIGKILL everything below `root` until nothing is left, within a deadline. Reaps own children."""
    end = time.monotonic() + _KILL_DEADLINE_S
    while (found := descendants(root)) and time.monotonic() < end:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(_POLL_S)
    _reap()


def _reap() -> dict[int, int]:
    """Collect ended children: pid to exit code, 128 + n for a death by signal n."""
    ended = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return ended


def _become_subreaper() -> None:
    import ctypes  # noqa: PLC0415 - only here

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _unmount_below(folders: list[str]) -> None:
    """Unmount file systems of the harness's own in these folders: a mount cannot be removed."""
    with open("/proc/self/mounts", encoding="utf-8") as mounts:  # noqa: PTH123 - as above
        found = [line.split(" ")[1] for line in mounts]
    below = [path for path in found if any(path.startswith(f"{folder}/") for folder in folders)]
    if below:
        import ctypes  # noqa: PLC0415 - only here

        for path in reversed(below):
            ctypes.CDLL(None).umount2(os.fsencode(path), _MNT_DETACH)


def _wipe(folders: list[str]) -> None:
    # Gone already: their owner ended in order.
    left = [folder for folder in folders if os.path.exists(folder)]  # noqa: PTH110 - as above
    if not left:
        return
    import shutil  # noqa: PLC0415 - only here

    _unmount_below(left)
    end = time.monotonic() + _WIPE_DEADLINE_S
    while time.monotonic() < end:
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_WIPE_DEADLINE_S / 15)


def main(argv: list[str]) -> int:
    """Run `--line FD [--wipe DIR]... [-- COMMAND...]`; return the command's exit code.

    With a command: start it, write its pid to the line, and end when it ends or the line does. Without one: wait for
    the end of the line. Then kill what is left and, only at the end of the line, remove the folders `--wipe`.
    """
    options, _, command = _split(argv)
    line = int(options["--line"][0])

    def start() -> int:
        defaults = (signal.SIGPIPE, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        return os.posix_spawnp(
            command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_CLOSE, line)], setsigdef=defaults
        )

    try:
        return hold(line, start if command else None, wipe=options.get("--wipe", []))
    except OSError as failure:
        sys.stderr.write(f"cannot start {command[0]}: {failure.strerror}\n")
        return 127


def hold(
    line: int,
    start: Callable[[], int] | None,
    *,
    wipe: list[str] | None = None,
) -> int:
    """Be the leash of what `start` starts (it returns a pid); see `main`. For a process with nothing else to do.

    Raises:
        OSError: `start` raised it.
    """
    _become_subreaper()
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    stopped: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: stopped.append(got))

    child = -1
    if start is not None:
        child = start()
        with suppress(BrokenPipeError):
            os.write(line, b"%d\n" % child)
    os.set_inheritable(line, False)

    poller = select.poll()
    poller.register(line, select.POLLIN)
    poller.register(wake, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll()}
        if wake in ready:
            os.read(wake, 4096)
            code = _reap().get(child)
            if code is not None:
                kill_tree(os.getpid())
                return code
        if stopped or (line in ready and not _read(line)):
            kill_tree(os.getpid())
            _wipe(wipe or [])
            return 128 + signal.SIGKILL


def _read(line: int) -> bytes:
    try:
        return os.read(line, 4096)
    except ConnectionResetError:
        return b""


def _split(argv: list[str]) -> tuple[dict[str, list[str]], str, list[str]]:
    options: dict[str, list[str]] = {}
    while argv and argv[0] != "--":
        options.setdefault(argv[0], []).append(argv[1])
        argv = argv[2:]
    return options, "--", argv[1:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
