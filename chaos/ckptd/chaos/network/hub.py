"""The router of a run's network, as a process: every node and the services are namespaces at its end of a veth pair.

Run by `netns_way`. Owns: the namespaces (they live as long as this process or one of theirs), addresses, routes, and the gate.
Undisturbed packets are forwarded by the kernel. Those of a faulty flow are routed to the gate, a TUN interface that this
process reads: there they are lost without a word, or written back later, and counted.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from ckptd.chaos.network import namespaces
from ckptd.chaos.network.control import arguments, serve
from ckptd.chaos.network.flows import Flows, Ordered
from ckptd.chaos.network.words import ALL, NODES, STORE
from ckptd.chaos.store_proxy.ledger import Ledger

LINK = "eth0"
NODES_PREFIX = "10.77.0.0/16"
SERVICES, STORE_ADDRESS = "10.78.0.11", "10.78.0.12"
_ROUTER = "169.254.1.1"
_GATE, _GATE_TABLE = "gate", "100"
_PACKET_BYTES = 65536
_IPV4 = 4
# At most so many late packets; more are lost, as in any queue.
_MOST_LATE = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    namespace: int
    addresses: tuple[str, ...]


class Hub:
    """The network. For one event loop; the process has moved to a namespace of its own before.

    Args:
        flows: What is lost or late.
    """

    def __init__(self, flows: Flows) -> None:
        self._flows = flows
        self._members: dict[str, _Member] = {}
        self._names: dict[bytes, str] = {}
        self._late = 0
        namespaces.set_kernel("ipv4/ip_forward", "1")
        for name in ("all", "default"):
            # Late packets come back by another way than they went.
            namespaces.set_kernel(f"ipv4/conf/{name}/rp_filter", "0")
            namespaces.set_kernel(f"ipv4/conf/{name}/send_redirects", "0")
        self._gate = namespaces.open_tun(_GATE)
        for command in (
            f"link set {_GATE} up",
            f"route add default dev {_GATE} table {_GATE_TABLE}",
            f"rule add pref 10 iif {_GATE} lookup main",
        ):
            namespaces.run("ip", *command.split())
        asyncio.get_running_loop().add_reader(self._gate, self._read_gate)

    async def answer(self, command: Mapping[str, Any]) -> Mapping[str, object]:
        """Do a command: join, fault, heal, counts."""
        match command:
            case {"do": "join", "name": str(name), "addresses": [*addresses]}:
                return {"namespace": self._join(name, tuple(map(str, addresses)))}
            case {"do": "fault", "kind": "reset"}:
                return {"struck": self._reset(command)}
            case {"do": "fault"}:
                self._begin(command)
                return {}
            case {"do": "heal"}:
                return {"struck": self._flows.heal()}
            case {"do": "counts"}:
                return {"counts": self._flows.counts()}
            case _:
                raise ValueError("unknown command; allowed: join, fault, heal, counts")

    def _join(self, name: str, addresses: tuple[str, ...]) -> str:
        """Make a namespace with these addresses, connected to all others; return its path."""
        if name in self._members:
            raise ValueError(f"{name} has joined before")
        descriptor = namespaces.make()
        path = namespaces.path_of(descriptor)
        port = f"port{len(self._members)}"
        outer = [f"link add {port} type veth peer name {LINK} netns {path}", f"address add {_ROUTER}/32 dev {port}"]
        outer += [f"link set {port} up", *(f"route add {address}/32 dev {port}" for address in addresses)]
        inner = ["link set lo up", *(f"address add {address}/32 dev {LINK}" for address in addresses)]
        inner += [f"link set {LINK} up", f"route add {_ROUTER} dev {LINK} scope link"]
        inner += [f"route add default via {_ROUTER} src {addresses[0]}"]
        for command in outer:
            namespaces.run("ip", *command.split())
        for command in inner:
            namespaces.run("ip", *command.split(), namespace=path)
        self._members[name] = _Member(namespace=descriptor, addresses=addresses)
        for address in addresses:
            # The services' second address is the store, an end of its own.
            self._names[IPv4Address(address).packed] = STORE if address == STORE_ADDRESS else name
        return path

    def _begin(self, order: Mapping[str, Any]) -> None:
        fault = self._flows.begin(order, self._release)
        try:
            for source, to in self._routes(fault):
                preference = str(1000 + fault.number)
                rule = ("rule", "add", "pref", preference, "from", source, "to", to, "lookup", _GATE_TABLE)
                namespaces.run("ip", *rule)
        except OSError:
            self._release(fault)
            self._flows.finish(fault)
            raise

    def _release(self, fault: Ordered) -> None:
        for _ in self._routes(fault):
            with suppress(OSError):
                namespaces.run("ip", "rule", "delete", "pref", str(1000 + fault.number))

    def _routes(self, fault: Ordered) -> list[tuple[str, str]]:
        """Return from which address to which the fault's packets go; what does not fit is let through at the gate."""
        ends = [self._address(name) for name in sorted(fault.one)]
        others = self._others(fault)
        there = [(source, to) for source in ends for to in others]
        return there if fault.kind == "one-way" else there + [(to, source) for source, to in there]

    def _others(self, fault: Ordered) -> list[str]:
        """Return the addresses of a fault's second end."""
        if fault.other is None:
            return [NODES_PREFIX]
        if ALL in fault.other:
            return [NODES_PREFIX, STORE_ADDRESS]
        return [self._address(name) for name in sorted(fault.other)]

    def _address(self, name: str) -> str:
        if name == STORE:
            return STORE_ADDRESS
        if name not in self._members:
            raise ValueError(f"there is no {name}; there are: {', '.join(self._members)}")
        return self._members[name].addresses[0]

    def _reset(self, order: Mapping[str, Any]) -> int:
        """Break the standing connections of a flow on its first end; the kernel tells the other one by RST."""
        fault = self._flows.begin(order, lambda _fault: None)
        for name in sorted(fault.one):
            holder = self._members[name if name != STORE else "services"]
            for to in self._others(fault):
                words = ("ss", "--kill", "--no-header", "--tcp", "state", "established", "dst", to)
                killed = namespaces.run(*words, namespace=namespaces.path_of(holder.namespace)).splitlines()
                if killed:
                    self._flows.count(fault, name, NODES if to == NODES_PREFIX else to, 0, struck=len(killed))
        self._flows.finish(fault)
        return fault.struck

    def _read_gate(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(BlockingIOError):
            while packet := os.read(self._gate, _PACKET_BYTES):
                # The kernel's own IPv6 chatter has no end here.
                if packet[0] >> 4 != _IPV4:
                    continue
                source, to = self._names.get(packet[12:16], ""), self._names.get(packet[16:20], "")
                fate = self._flows.look(source, to, len(packet))
                if fate.lost or self._late >= _MOST_LATE:
                    continue
                if fate.delay_s:
                    self._late += 1
                    loop.call_later(fate.delay_s, self._write_late, packet)
                else:
                    self._write(packet)

    def _write_late(self, packet: bytes) -> None:
        self._late -= 1
        self._write(packet)

    def _write(self, packet: bytes) -> None:
        # A packet that does not fit is lost, as on any wire.
        with suppress(OSError):
            os.write(self._gate, packet)


async def _serve(control: Path, ledger_path: Path) -> None:
    ledger = Ledger(ledger_path)
    flows = Flows(ledger, "netns")
    await serve(control, Hub(flows).answer)
    flows.close()
    ledger.close()


def main() -> None:
    """Move to a namespace of one's own, and serve."""
    told = arguments("The router of a run's network, which loses and delays packets.")
    namespaces.move_here()
    asyncio.run(_serve(told.control, told.ledger))


if __name__ == "__main__":
    main()
