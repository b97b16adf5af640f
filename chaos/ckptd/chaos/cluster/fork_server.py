"""A Python that has imported what its children need, and forks one for each process that is asked for.

Run as `python -m ckptd.chaos.cluster.fork_server SOCKET MODULE...`. Owns: forking, and a leash around each child. Does
not own: which processes there are (`forked`). A matrix starts some thousand agents and ranks; importing torch takes seconds,
a fork milliseconds. Invariants: the server imports and nothing else, so that it has one thread and no connection when it
forks; each child is held by a leash of its own, and all of them die with the server, whose own leash the harness holds.
"""

from __future__ import annotations

import array
import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

from ckptd.chaos.cluster import leash
from ckptd.chaos.planted import sitecustomize

TAG = "CKPTD_CHAOS_TAG"
_PR_SET_NAME = 15
# What an interpreter finds at its start, and what it makes of it. SIGPIPE: a broken connection is an error, never the end.
_AT_START: Mapping[signal.Signals, Callable[[int, FrameType | None], Any] | signal.Handlers] = {
    signal.SIGCHLD: signal.SIG_DFL,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGPIPE: signal.SIG_IGN,
}


def process_name(tag: str) -> str:
    """Return the name (comm) of every process of the cluster `tag`: the environment of a fork cannot be seen from outside."""
    return f"ckptd-{tag}"[:15]


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Be the process that `command` (a Python command line: `-m MODULE` or a script) would be; never returns."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        name = ctypes.create_string_buffer(process_name(environment.get(TAG, "fork")).encode())
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
        sitecustomize.install()
        arguments = list(command[1:])
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(arguments[0]))  # noqa: PTH120 - as Python itself does
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if isinstance(ended.code, str):
            sys.stderr.write(ended.code + "\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _finish(code)


def _finish(code: int) -> NoReturn:
    """End like an interpreter: atexit, threads, buffers."""
    try:
        import atexit  # noqa: PLC0415 - only here
        import threading  # noqa: PLC0415 - only here

        threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - what the interpreter calls at its end
        atexit._run_exitfuncs()  # noqa: SLF001 - same
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _handle_signals_as_at_start() -> None:
    signal.set_wakeup_fd(-1)
    for number, handler in _AT_START.items():
        signal.signal(number, handler)


def fork_command(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Fork a child that runs a command; return its pid."""
    pid = os.fork()
    if pid == 0:
        _handle_signals_as_at_start()
        run_command(command, environment)
    return pid


def _keep(request: Mapping[str, Any], line: int, output: int, errors: int) -> NoReturn:
    """Be the leash of one process: a fork of the server."""
    code = 127
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(errors, 2)

        def start() -> int:
            pid = os.fork()
            if pid == 0:
                _handle_signals_as_at_start()
                for descriptor in (line, output, errors):
                    os.close(descriptor)
                run_command(request["command"], request["environment"])
            return pid

        code = leash.hold(line, start)
        os.write(line, b"exit %d\n" % code)
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        os._exit(code)


def main(argv: list[str]) -> int:
    """Import the modules, listen on SOCKET, and fork until its one user is gone."""
    path, *modules = argv
    for module in modules:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leashes are reaped by the kernel: they tell their codes themselves
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(1)
        user, _ = listener.accept()
        while True:
            data, ancillary, _, _ = user.recvmsg(1 << 20, socket.CMSG_LEN(3 * 4))
            if not data:
                return 0
            descriptors = array.array("i")
            for _level, _kind, found in ancillary:
                descriptors.frombytes(found[: len(found) - len(found) % descriptors.itemsize])
            pid = os.fork()
            if pid == 0:
                listener.close()
                user.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _keep(json.loads(data), *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            user.send(b"%d" % pid)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
