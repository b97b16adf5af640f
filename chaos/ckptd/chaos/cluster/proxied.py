"""A run's store behind a proxy that can make it fail, and the proof that it did.

Owns: the proxy of one run, and which of the run's faults it has really done. Does not own: when they are ordered
(`nemesis`). Invariant: a fault that struck no request is not one that was done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptd.chaos.cluster.store import Store
from ckptd.chaos.schedule import PlannedFault
from ckptd.chaos.store_proxy.handle import StoreProxy
from ckptd.chaos.store_proxy.orders import from_json

if TYPE_CHECKING:
    from ckptd.chaos.nemesis.injector import Struck

_ENDPOINT = "AWS_ENDPOINT_URL"


class ProxiedStore:
    """The store of one run, with its faults on demand. For one thread; close it when the run is over.

    Args:
        endpoint: URL of the S3 service itself.
        folder: Evidence of the run: gets the proxy's record and log.
        prefix: The root's prefix in its bucket, with a slash at the end.

    Raises:
        ProcessError: The proxy did not start.
    """

    def __init__(self, endpoint: str, folder: Path, prefix: str) -> None:
        self._prefix = prefix
        self._proxy = StoreProxy(endpoint, folder)
        self._orders: dict[int, int] = {}
        """Number of the proxy's order, by index of the fault."""

    def environment(self) -> Mapping[str, str]:
        """Return the variables by which a process comes to the store through the proxy."""
        return {_ENDPOINT: self._proxy.endpoint}

    def order(self, fault: PlannedFault) -> None:
        """Let the store fail from now on, as the fault says."""
        order: dict[str, Any] = asdict(fault.store) if fault.store is not None else {}
        if order["kind"] != "outage":
            order["prefix"] = self._prefix + order["prefix"]
        self._orders[fault.index] = self._proxy.add(from_json(order))

    def proved(self, struck: Sequence[Struck]) -> tuple[Struck, ...]:
        """Return the fates, those of store faults that struck no request as not done."""
        done = {line.get("order") for line in self._proxy.done()}
        return tuple(
            replace(fate, fired=False, note="no request came that it could strike")
            if fate.fired and fate.fault.store is not None and self._orders.get(fate.fault.index) not in done
            else fate
            for fate in struck
        )

    def close(self) -> None:
        """End the proxy; idempotent."""
        self._proxy.close()


def proxied_store(store: Store, folder: Path, root: str, faults: Sequence[PlannedFault]) -> ProxiedStore | None:
    """Start the proxy that the faults of a run need; None when none of them is the store's.

    Raises:
        ProcessError: It did not start.
        KeyError: The store is not S3.
    """
    if not any(fault.store is not None for fault in faults):
        return None
    return ProxiedStore(store.environment()[_ENDPOINT], folder, root.split("/", 3)[3] + "/")
