"""The network of one run, by one of two ways, and which of its faults were really done.

Owns: what both ways have in common for the harness: faults in, proof out. Does not own: how it is done (`netns_way`,
`proxy_way`). Invariant: a fault that struck nothing is not one that was done; a way is never changed in the midst of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckptd.chaos.cluster.fabric import Fabric
from ckptd.chaos.network import namespaces
from ckptd.chaos.network.control import Commanded
from ckptd.chaos.network.words import NODES, WAYS, NetworkFault
from ckptd.chaos.schedule import PlannedFault, ScheduleError

if TYPE_CHECKING:
    from ckptd.chaos.nemesis.injector import Struck

AGENT_SETTINGS = {"CKPTD_NODE_GRACE_S": "10"}
"""The end of a wait for a lost node is part of what is tried; by default it comes after a minute."""
STORE_ENDPOINT = "AWS_ENDPOINT_URL"


class Network(Fabric, Protocol):
    """What the harness asks of a network that can be hurt."""

    way: str
    """One of WAYS."""

    def order(self, fault: NetworkFault, number: int, names: Mapping[str, str]) -> int | None:
        """Do a fault; `names` are the present names of its ends.

        Return how many connections a reset broke, or how many faults a heal ended; None for other kinds.

        Raises:
            ProcessError: It cannot be done.
        """
        ...

    def proved(self, struck: Sequence[Struck]) -> tuple[Struck, ...]:
        """Return the fates, those of network faults that struck nothing as not done."""
        ...

    def close(self) -> None:
        """End everything of it; idempotent."""
        ...


class HelperNetwork:
    """Faults in, proof out, by a helper process that knows `fault` and `counts`."""

    way = ""

    def __init__(self, helper: Commanded) -> None:
        self.helper = helper

    def order(self, fault: NetworkFault, number: int, names: Mapping[str, str]) -> int | None:
        """Do a fault: see `Network`."""
        if fault.kind == "heal":
            return int(self.helper.ask("heal")["struck"])
        one, other = ([names[end]] if end != NODES else None for end in fault.between)
        told = self.helper.ask(
            "fault",
            number=number,
            kind=fault.kind,
            one=one,
            other=other,
            for_s=fault.for_s,
            delay_s=fault.delay_ms / 1000,
        )
        return int(told["struck"]) if fault.kind == "reset" else None

    def proved(self, struck: Sequence[Struck]) -> tuple[Struck, ...]:
        """Return the fates as they were proved: see `Network`."""
        if not any(fate.fired and fate.fault.network is not None for fate in struck):
            return tuple(struck)
        counts = self.helper.ask("counts")["counts"]
        return tuple(self._proved(fate, counts) for fate in struck)

    def _proved(self, fate: Struck, counts: Mapping[str, Sequence[int]]) -> Struck:
        if fate.fault.network is None:
            return fate
        told = replace(fate, fault=replace(fate.fault, network=replace(fate.fault.network, way=self.way)))
        if fate.fired and fate.fault.network.kind != "heal" and not counts.get(str(fate.fault.index), (0, 0))[0]:
            return replace(told, fired=False, note="nothing was sent that it could strike")
        return told

    def close(self) -> None:
        """End the helper; idempotent."""
        self.helper.close()


class NotRunError(Exception):
    """A network of this kind cannot be had here; the text says why."""


def require_sense(asked: str, faults: Sequence[PlannedFault], *, has_endpoint: bool) -> None:
    """Check what the faults of a run ask of the network, whatever machine it is; arguments as for `choose_way`.

    Raises:
        ScheduleError: It makes no sense anywhere.
    """
    wanted = [fault.network for fault in faults if fault.network is not None]
    if wanted and asked not in ("auto", *WAYS):
        raise ScheduleError(f"--network is {asked!r}; allowed: auto, {', '.join(WAYS)}")
    if any(fault.needs_store for fault in wanted) and not has_endpoint:
        raise ScheduleError("the network to the store is to be hurt, but local files need none; say --store s3")


def choose_way(asked: str, faults: Sequence[PlannedFault], *, has_endpoint: bool) -> str:
    """Return the way that the faults of a run take; empty where none of them is the network's.

    Args:
        asked: "auto" or one of WAYS.
        faults: Of the run.
        has_endpoint: Whether the store is reached by network.

    Raises:
        ScheduleError: It makes no sense; see `require_sense`.
        NotRunError: The way that was asked for cannot be had here.
    """
    require_sense(asked, faults, has_endpoint=has_endpoint)
    wanted = [fault.network for fault in faults if fault.network is not None]
    if not wanted:
        return ""
    if asked == "proxy":
        return "proxy"
    why = namespaces.missing()
    if not why and any(fault.kind == "reset" for fault in wanted):
        why = namespaces.cannot_reset()
    if asked == "netns" and why:
        raise NotRunError(f"network faults were not run: {why}; --network proxy needs no root")
    return "proxy" if why else "netns"


def open_network(asked: str, folder: Path, store: Mapping[str, str], faults: Sequence[PlannedFault]) -> Network | None:
    """Start the network that the faults of a run need; None when none of them is the network's.

    Args:
        asked: "auto" or one of WAYS.
        folder: Evidence of the run: gets the record and the log.
        store: Variables by which a process reaches the store.
        faults: Of the run.

    Raises:
        ProcessError: It did not start.
        NotRunError: As for `choose_way`.
    """
    way = choose_way(asked, faults, has_endpoint=STORE_ENDPOINT in store)
    if not way:
        return None
    if way == "netns":
        from ckptd.chaos.network.netns_way import NamespaceNetwork  # noqa: PLC0415 - it imports this module

        return NamespaceNetwork(folder, store)
    from ckptd.chaos.network.proxy_way import ProxyNetwork  # noqa: PLC0415 - as above

    return ProxyNetwork(folder, store)
