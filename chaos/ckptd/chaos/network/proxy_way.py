"""The way of proxies, for machines without root: what others reach a node's agent at is a door that the harness holds.

Owns: addresses, and the harness's end of the doors (`relay`). A fault strikes what agents say to coordinators and to the store.
It does not strike what ranks say to one another: torchrun and gloo find one another without us.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from ckptd.chaos.cluster.fabric import Loopback, NodeNetwork
from ckptd.chaos.cluster.process import ProcessError
from ckptd.chaos.network.control import Commanded
from ckptd.chaos.network.way import AGENT_SETTINGS, STORE_ENDPOINT, HelperNetwork

_TRIES = 50
_MARK_PORT = 47_911


class ProxyNetwork(HelperNetwork):
    """A network of doors. For one thread; close it when the run is over.

    Args:
        folder: Evidence of the run.
        store: Variables by which a process reaches the store.

    Raises:
        ProcessError: It did not start.
    """

    way = "proxy"

    def __init__(self, folder: Path, store: Mapping[str, str]) -> None:
        self._mark = _claim_range()
        self._range = ".".join(self._mark.getsockname()[0].split(".")[:2])
        self._store = store.get(STORE_ENDPOINT)
        self._loopback = Loopback()
        try:
            super().__init__(Commanded("ckptd.chaos.network.relay", folder))
        except BaseException:
            self._mark.close()
            raise

    def join(self, index: int, name: str) -> NodeNetwork:
        """Give a node two addresses: its own, and the one that others know: see `Fabric`."""
        generation = int(name.partition(".")[2] or 0)
        listen, advertise = (f"{self._range}.{index + 1}.{2 * generation + at}" for at in (1, 2))
        self.helper.ask("node", name=name, listen=listen, advertise=advertise)
        environment = dict(AGENT_SETTINGS)
        if self._store is not None:
            url = urlsplit(self._store)
            told = self.helper.ask("door", name="store", source=name, listen=advertise, to=[url.hostname, url.port])
            environment[STORE_ENDPOINT] = f"{url.scheme}://{advertise}:{told['port']}"
        return NodeNetwork(listen=listen, advertise=advertise, environment=environment)

    def agent_started(self, name: str, pid: int) -> None:
        """Let the doors know whose connections are whose: see `Fabric`."""
        self.helper.ask("agent", name=name, pid=pid)

    def address(self, index: int) -> str:
        """Return the address of the node's ranks, which no fault strikes."""
        return self._loopback.address(index)

    @property
    def services(self) -> tuple[tuple[str, ...], str]:
        """What is shared runs on this machine."""
        return self._loopback.services

    def close(self) -> None:
        """End the doors; idempotent."""
        super().close()
        self._mark.close()


def _claim_range() -> socket.socket:
    """Return a socket that holds a range of loopback addresses, 127.N.0.0/16, against other harnesses of this machine."""
    for _ in range(_TRIES):
        mark = socket.socket()
        try:
            mark.bind((f"127.{2 + secrets.randbelow(250)}.0.1", _MARK_PORT))
        except OSError:
            mark.close()
            continue
        return mark
    raise ProcessError("no free range of loopback addresses was found")
