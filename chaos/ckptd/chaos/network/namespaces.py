"""Network namespaces without names: each is a file descriptor of one process, and gone when the last of its processes is.

Owns: making and entering them, and running `ip` in them. Nothing is mounted and nothing is seen in the host's namespace, so
that nothing can stay there. Needs CAP_SYS_ADMIN, `ip` (iproute2) and `nsenter` (util-linux).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_COMMAND_S = 30
_OWN = Path("/proc/thread-self/ns/net")
_TUN = Path("/dev/net/tun")

_Value = TypeVar("_Value")


def missing() -> str:
    """Return why there can be no such network here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            return f"there is no {program} ({package})"
    if not _TUN.exists():
        return f"there is no {_TUN}"
    try:
        _in_thread(_try)
    except OSError as error:
        return f"network namespaces are not allowed here: {error}"
    return ""


def cannot_reset() -> str:
    """Return why standing TCP connections cannot be broken from outside here; empty if they can."""
    if shutil.which("ss") is None:
        return "there is no ss (iproute2)"
    descriptor = make()
    try:
        path = path_of(descriptor)
        run("ip", "link", "set", "lo", "up", namespace=path)
        with (
            inside(path, lambda: socket.create_server(("127.0.0.1", 0))) as server,
            inside(path, lambda: socket.create_connection(server.getsockname())),
        ):
            killed = run("ss", "--kill", "--no-header", "--tcp", "dst", "127.0.0.1", namespace=path)
        return "" if killed.strip() else "this kernel does not break connections (CONFIG_INET_DIAG_DESTROY)"
    except OSError as error:
        return f"connections cannot be broken here: {error}"
    finally:
        os.close(descriptor)


def path_of(descriptor: int) -> str:
    """Return a path by which other processes find a namespace of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def move_here() -> None:
    """Put this whole process into a namespace of its own; only while it has one thread.

    Raises:
        OSError: It may not.
    """
    _call("unshare", _CLONE_NEWNET)


def make() -> int:
    """Return a new namespace, with nothing in it but a loopback interface that is down.

    Raises:
        OSError: It may not be made.
    """
    return _in_thread(_fresh)


def inside(namespace: str, work: Callable[[], _Value]) -> _Value:
    """Call `work` in the namespace of this path, in a thread of its own; sockets it makes stay there.

    Raises:
        OSError: It may not be entered.
    """

    def entered() -> _Value:
        with Path(namespace).open("rb") as file:
            _call("setns", file.fileno(), _CLONE_NEWNET)
        return work()

    return _in_thread(entered)


def entering(namespace: str) -> tuple[str, ...]:
    """Return the words before a command that make it run in a namespace; the process is replaced by the command."""
    return (shutil.which("nsenter") or "nsenter", f"--net={namespace}", "--")


def run(*command: str, namespace: str | None = None) -> str:
    """Run a command, here or in a namespace; return what it printed.

    Raises:
        OSError: It failed; the message holds what it said.
    """
    words = [*(entering(namespace) if namespace is not None else ()), *command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_COMMAND_S)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def set_kernel(name: str, value: str) -> None:
    """Set a parameter of this namespace, by its name under /proc/sys/net.

    Raises:
        OSError: It may not be set.
    """
    (Path("/proc/sys/net") / name).write_text(value, encoding="ascii")


def open_tun(name: str) -> int:
    """Return a TUN interface of this namespace: whole IP packets are read and written. Not blocking.

    Raises:
        OSError: There is none to be had.
    """
    descriptor = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _try() -> None:
    """Do once what a router needs: a namespace, forwarding (which a container may forbid), a TUN interface."""
    for descriptor in (_fresh(), open_tun("try")):
        os.close(descriptor)
    set_kernel("ipv4/ip_forward", "1")


def _fresh() -> int:
    _call("unshare", _CLONE_NEWNET)
    return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _in_thread(work: Callable[[], _Value]) -> _Value:
    """Call `work` in a thread that ends with it: its namespace is the thread's alone."""
    results: list[_Value] = []
    failures: list[BaseException] = []

    def call() -> None:
        try:
            results.append(work())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
