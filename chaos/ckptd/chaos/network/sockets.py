"""Whose sockets are whose on this machine, from /proc: for proxies that must know who called them. Linux only."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTEN = "0A"
_MAPPED = "0000000000000000FFFF0000"
"""What stands before an IPv4 address that an IPv6 socket uses, as gRPC's do."""


def listening_ports(address: str) -> set[int]:
    """Return the TCP ports on which somebody listens at exactly this IPv4 address."""
    wanted = _hex(address)
    return {
        int(port, 16)
        for local, _remote, state, _inode in _sockets()
        for host, _, port in [local.partition(":")]
        if host == wanted and state == _LISTEN
    }


def owner(address: str, port: int, pids: Iterable[int]) -> int | None:
    """Return which of the processes holds the socket with this local address; None if none does."""
    wanted = f"{_hex(address)}:{port:04X}"
    inodes = {f"socket:[{inode}]" for local, _remote, _state, inode in _sockets() if local == wanted}
    if not inodes:
        return None
    for pid in pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if str(entry.readlink()) in inodes:
                        return pid
    return None


def _sockets() -> Iterator[tuple[str, str, str, str]]:
    for table in _TABLES:
        # A kernel may do without IPv6.
        for line in table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else ():
            words = line.split()
            yield words[1].removeprefix(_MAPPED), words[2].removeprefix(_MAPPED), words[3], words[9]


def _hex(address: str) -> str:
    # The kernel prints the four bytes as one number of the machine's byte order.
    return f"{struct.unpack('=I', socket.inet_aton(address))[0]:08X}"
