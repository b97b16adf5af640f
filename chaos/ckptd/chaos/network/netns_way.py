"""The way of namespaces: each node has a network stack of its own, and the kernel's packets between them are lost.

Owns: addresses, and the harness's end of the router (`hub`). Agents and ranks of a node run inside of its namespace, so
that a fault strikes all they say: to the coordinator, to one another, to the store. The rendezvous and the store's door
are in a namespace of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from ckptd.chaos.cluster.fabric import NodeNetwork
from ckptd.chaos.network import namespaces
from ckptd.chaos.network.control import Commanded
from ckptd.chaos.network.hub import LINK, SERVICES, STORE_ADDRESS
from ckptd.chaos.network.way import AGENT_SETTINGS, STORE_ENDPOINT, HelperNetwork

# 10.77.101.11, …: of equal length, and sorted by number of the node first.
_FIRST_NODE, _FIRST_GENERATION, _LAST_GENERATION = 101, 11, 99


class NamespaceNetwork(HelperNetwork):
    """A network of namespaces. For one thread; close it when the run is over.

    Args:
        folder: Evidence of the run.
        store: Variables by which a process reaches the store.

    Raises:
        ProcessError: It did not start.
    """

    way = "netns"

    def __init__(self, folder: Path, store: Mapping[str, str]) -> None:
        super().__init__(Commanded("ckptd.chaos.network.hub", folder))
        self._doors: Commanded | None = None
        self._addresses: dict[int, str] = {}
        self._environment = {"GLOO_SOCKET_IFNAME": LINK, **AGENT_SETTINGS}
        try:
            told = self.helper.ask("join", name="services", addresses=[SERVICES, STORE_ADDRESS])
            self._services = str(told["namespace"])
            if STORE_ENDPOINT in store:
                self._environment[STORE_ENDPOINT] = self._open_door(folder, store[STORE_ENDPOINT])
        except BaseException:
            self.close()
            raise

    def join(self, index: int, name: str) -> NodeNetwork:
        """Make a namespace for a node: see `Fabric`."""
        generation = _FIRST_GENERATION + int(name.partition(".")[2] or 0)
        if generation > _LAST_GENERATION:
            raise ValueError(f"node {index} was replaced too often")
        address = f"10.77.{_FIRST_NODE + index}.{generation}"
        namespace = str(self.helper.ask("join", name=name, addresses=[address])["namespace"])
        self._addresses[index] = address
        return NodeNetwork(
            listen=address,
            advertise=address,
            inside=namespaces.entering(namespace),
            environment=self._environment,
        )

    def agent_started(self, name: str, pid: int) -> None:
        """Packets say by their addresses whose they are."""

    def address(self, index: int) -> str:
        """Return the present node's address: see `Fabric`."""
        return self._addresses[index]

    @property
    def services(self) -> tuple[tuple[str, ...], str]:
        """What is shared runs in a namespace of its own."""
        return namespaces.entering(self._services), SERVICES

    def close(self) -> None:
        """End the router and the store's door; the namespaces end with the nodes' processes. Idempotent."""
        if self._doors is not None:
            self._doors.close()
        super().close()

    def _open_door(self, folder: Path, endpoint: str) -> str:
        """Let the store be reached from the services' namespace; return its URL there."""
        self._doors = Commanded("ckptd.chaos.network.relay", folder / "store-door")
        url = urlsplit(endpoint)
        told = self._doors.ask(
            "door",
            namespace=self._services,
            listen=STORE_ADDRESS,
            to=[url.hostname, url.port],
            source="nodes",
            name="store",
        )
        return f"{url.scheme}://{STORE_ADDRESS}:{told['port']}"
