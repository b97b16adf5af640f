"""Where a node stands in the network: how its processes are started there, and how others find it.

Owns: the value and the default, the loopback of this machine. Does not own: other networks (`network`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeNetwork:
    """A node's place in the network.

    Attributes:
        listen: Address that its agent listens on.
        advertise: Address that others know it by.
        inside: Words before a command that make it run there.
        environment: Variables of its processes, over all others.
    """

    listen: str = "127.0.0.1"
    advertise: str = "127.0.0.1"
    inside: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Fabric(Protocol):
    """A network that nodes and launchers live in."""

    def join(self, index: int, name: str) -> NodeNetwork:
        """Give the node `name`, with the number `index`, a place."""
        ...

    def agent_started(self, name: str, pid: int) -> None:
        """An agent process was started on the node `name`."""
        ...

    def address(self, index: int) -> str:
        """Return the address by which ranks of the present node `index` find one another; they sort as numbers do."""
        ...

    @property
    def services(self) -> tuple[tuple[str, ...], str]:
        """Words before the command of what all nodes share, and the address they find it at."""
        ...


class Loopback:
    """This machine alone: what a run has whose network is not hurt."""

    # 127.0.0.101, …: of equal length, so that they sort as numbers do.
    _FIRST_ADDRESS = 101

    def join(self, index: int, name: str) -> NodeNetwork:
        """Give the loopback address to everybody."""
        del index, name
        return NodeNetwork()

    def agent_started(self, name: str, pid: int) -> None:
        """Nobody needs to know."""

    def address(self, index: int) -> str:
        """Return a loopback address of the node's own."""
        return f"127.0.0.{self._FIRST_ADDRESS + index}"

    @property
    def services(self) -> tuple[tuple[str, ...], str]:
        """What is shared runs here."""
        return (), "127.0.0.1"
