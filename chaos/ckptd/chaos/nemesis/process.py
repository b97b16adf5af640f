"""Harm to processes: killed, stopped, woken, lost with their machine.

Owns: how a deed is done to a target of a cluster. Does not own: when (`injector`). Invariant: what is returned was
really done; a target that was not there raises. Deeds of `local_faults` are done by `local`.
"""

from __future__ import annotations

import signal

from ckptd.chaos.cluster.cluster import Cluster
from ckptd.chaos.cluster.node import Node
from ckptd.chaos.local_faults import LOCAL_DEEDS
from ckptd.chaos.nemesis.harm import Harm, NemesisError, agent_of, send
from ckptd.chaos.nemesis.local import strike_local
from ckptd.chaos.schedule import PlannedFault

__all__ = ["Harm", "NemesisError", "strike"]

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}


def strike(fault: PlannedFault, cluster: Cluster, *, coordinator: Node) -> Harm:
    """Do what the fault says, at once.

    Args:
        fault: What to do to whom.
        cluster: Where.
        coordinator: The node that plays the coordinator now.

    Raises:
        NemesisError: The target does not live.
    """
    if fault.store is not None:
        if cluster.proxied is None:
            raise NemesisError("there is no proxy before the store")
        cluster.proxied.order(fault)
        return Harm(pids=())
    if fault.do in LOCAL_DEEDS:
        return strike_local(fault, cluster, coordinator=coordinator)
    if fault.do == "continue":
        return _wake(fault, cluster)
    if fault.kind == "rank" and fault.which is not None:
        pid = cluster.rank_pids().get(fault.which)
        if pid is None:
            raise NemesisError(f"rank {fault.which} does not live")
        is_kill = fault.do == "kill"
        return Harm(pids=send([pid], _SIGNALS[fault.do]), ends_launch=is_kill, is_alive=not is_kill)
    if fault.kind == "all":
        return _end_nodes(cluster.nodes, lose=fault.do == "lose")
    node = coordinator if fault.kind == "coordinator" else cluster.nodes[fault.which or 0]
    # The coordinator is a role of an agent; only when it is stopped, its machine is meant: a paused agent whose ranks
    # run on would be a hung agent, not a zombie.
    if fault.do == "kill" and fault.kind in ("agent", "coordinator"):
        return Harm(pids=send(agent_of(node), signal.SIGKILL))
    if fault.do == "stop" and fault.kind == "agent":
        return Harm(pids=send(agent_of(node), signal.SIGSTOP), is_alive=True)
    if fault.do == "stop":
        node.is_paused = True
        pids = tuple(node.signal_all(signal.SIGSTOP))
        return Harm(pids=pids, replace=(node,), ends_launch=True, is_silent=True)
    return _end_nodes([node], lose=fault.do == "lose")


def _end_nodes(nodes: list[Node], *, lose: bool) -> Harm:
    # All get the signal before anyone is waited for: at once means at once.
    pids = [pid for node in nodes for pid in node.signal_all(signal.SIGKILL)]
    for node in nodes:
        if lose:
            node.lose()
        else:
            node.kill()
    return Harm(pids=tuple(pids), replace=tuple(nodes) if lose else (), ends_launch=True)


def _wake(fault: PlannedFault, cluster: Cluster) -> Harm:
    paused = [node for node in [*cluster.gone, *cluster.nodes] if node.is_paused]
    if fault.kind in ("node", "coordinator") and paused:
        pids = [pid for node in paused for pid in node.signal_all(signal.SIGCONT)]
        for node in paused:
            node.is_paused = False
        return Harm(pids=tuple(pids), is_alive=True)
    if fault.kind == "agent":
        return Harm(pids=send(agent_of(cluster.nodes[fault.which or 0]), signal.SIGCONT), is_alive=True)
    if fault.kind == "rank" and fault.which in (ranks := cluster.rank_pids()):
        return Harm(pids=send([ranks[fault.which]], signal.SIGCONT), is_alive=True)
    raise NemesisError(f"{fault.target} is not stopped")
