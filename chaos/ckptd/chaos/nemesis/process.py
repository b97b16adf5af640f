"""Harm to processes: killed, stopped, woken, lost with their machine.

Owns: how a deed is done to a target of a cluster. Does not own: when (`injector`). Invariant: what is returned was
really done; a target that was not there raises.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass

from ckptd.chaos.cluster.cluster import Cluster
from ckptd.chaos.cluster.leash import start_time
from ckptd.chaos.cluster.node import Node
from ckptd.chaos.schedule import PlannedFault

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}


class NemesisError(Exception):
    """A fault could not be done: the target is not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Harm:
    """What a fault did.

    Attributes:
        pids: Processes that were hit.
        replace: Nodes whose place somebody else must take: lost, or paused where nobody reaches them.
        ends_launch: The job cannot go on.
        is_silent: It cannot go on, but no process of it will end by itself: the scheduler gives the node up.
        is_pause: The processes only stand still, or go on: nobody dies, and the job is the same.
        may_end_launch: Ranks may die of it, or not.
    """

    pids: tuple[int, ...]
    replace: tuple[Node, ...] = ()
    ends_launch: bool = False
    is_silent: bool = False
    is_pause: bool = False
    may_end_launch: bool = False


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
    if fault.do == "continue":
        return _wake(fault, cluster)
    if fault.kind == "rank" and fault.which is not None:
        pid = cluster.rank_pids().get(fault.which)
        if pid is None:
            raise NemesisError(f"rank {fault.which} does not live")
        is_kill = fault.do == "kill"
        return Harm(pids=_signal([pid], _SIGNALS[fault.do]), ends_launch=is_kill, is_pause=not is_kill)
    if fault.kind == "all":
        return _end_nodes(cluster.nodes, lose=fault.do == "lose")
    node = coordinator if fault.kind == "coordinator" else cluster.nodes[fault.which or 0]
    # The coordinator is a role of an agent; only when it is stopped, its machine is meant: a paused agent whose ranks
    # run on would be a hung agent, not a zombie.
    if fault.do == "kill" and fault.kind in ("agent", "coordinator"):
        return Harm(pids=_signal(_agent(node), signal.SIGKILL))
    if fault.do == "stop" and fault.kind == "agent":
        return Harm(pids=_signal(_agent(node), signal.SIGSTOP), is_pause=True)
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
        return Harm(pids=tuple(pids))
    if fault.kind == "agent":
        return Harm(pids=_signal(_agent(cluster.nodes[fault.which or 0]), signal.SIGCONT), is_pause=True)
    if fault.kind == "rank" and fault.which in (ranks := cluster.rank_pids()):
        return Harm(pids=_signal([ranks[fault.which]], signal.SIGCONT), is_pause=True)
    raise NemesisError(f"{fault.target} is not stopped")


def _agent(node: Node) -> list[int]:
    if node.agent is None or node.agent.poll() is not None:
        raise NemesisError(f"{node.source} does not live")
    return [node.agent.pid]


def _signal(pids: list[int], number: signal.Signals) -> tuple[int, ...]:
    reached = []
    for pid in pids:
        # A zombie takes signals too, and proves nothing.
        if start_time(pid) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                reached.append(pid)
    if not reached:
        raise NemesisError(f"process {pids} had ended before it could be hit")
    return tuple(reached)
