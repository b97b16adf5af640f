"""Harm to the network between nodes: orders a fault, and says what follows for the job.

Owns: which nodes the ends of a fault are now. Does not own: how it is done (`network`). Invariant: as for `process`.
"""

from __future__ import annotations

from ckptd.chaos.cluster.cluster import Cluster
from ckptd.chaos.cluster.node import Node
from ckptd.chaos.cluster.process import ProcessError
from ckptd.chaos.nemesis.process import Harm, NemesisError
from ckptd.chaos.network.words import ALL, STORE, NetworkFault


def cut(fault: NetworkFault, number: int, cluster: Cluster, *, coordinator: Node) -> Harm:
    """Do what the fault says from now on.

    Args:
        fault: What the network does.
        number: Its position in the schedule.
        cluster: Where.
        coordinator: The node that plays the coordinator now.

    Raises:
        NemesisError: It cannot be done, or there is nothing that it could be done to.
    """
    network = cluster.network
    if network is None:
        raise NemesisError("there is no network that could be hurt")
    nodes = {f"node {node.index}": node for node in cluster.nodes} | {"coordinator": coordinator}
    names = {STORE: STORE, ALL: ALL} | {end: nodes[end].place.name for end in fault.between if end in nodes}
    if len(ends := {names[end] for end in fault.between if end in names}) < sum(end in names for end in fault.between):
        raise NemesisError(f"both ends are node {ends.pop()}")
    try:
        broken = network.order(fault, number, names)
    except ProcessError as error:
        raise NemesisError(str(error)) from error
    if broken == 0:
        raise NemesisError("there was nothing to heal" if fault.kind == "heal" else "there was no connection to reset")
    if fault.replaced:
        node = nodes[fault.between[0]]
        node.is_cut_off = True
        return Harm(pids=(), replace=(node,), ends_launch=True, is_silent=True)
    # Proxies stand between agents only; in namespaces the ranks' own words are struck too.
    return Harm(
        pids=(),
        may_end_launch=network.way == "netns" and fault.kind not in ("delay", "heal") and STORE not in fault.between,
    )
