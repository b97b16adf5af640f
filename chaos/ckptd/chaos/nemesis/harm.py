"""What a fault did, and the two things that all harm to processes needs.

Owns: the value, and signals to processes that really live. Does not own: which deed does what (`process`, `local`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckptd.chaos.cluster.leash import start_time
from ckptd.chaos.cluster.node import Node


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
        is_hung: As before, and the scheduler has to find that out: no step comes any more.
        is_alive: The processes that were hit live on.
        may_end_launch: Ranks may die of it, or not.
        rebooted: Nodes that come back with their disk and nothing else.
        undo: Takes the fault back; None where that is another fault's matter, or nobody's.
        what: The fault in words, where it can be taken back.
        undo_after_s: When that is to be done, seconds; None: when the job is done.
        blocks_start: While it lasts, a launch that starts may die of it: its first record needs the store's disk, and what it
            restores a place in shared memory.
    """

    pids: tuple[int, ...]
    replace: tuple[Node, ...] = ()
    ends_launch: bool = False
    is_silent: bool = False
    is_hung: bool = False
    is_alive: bool = False
    may_end_launch: bool = False
    rebooted: tuple[Node, ...] = ()
    undo: Callable[[], None] | None = None
    what: str = ""
    undo_after_s: float | None = None
    blocks_start: bool = False


def agent_of(node: Node) -> list[int]:
    """Return the agent's process.

    Raises:
        NemesisError: It does not live.
    """
    if node.agent is None or node.agent.poll() is not None:
        raise NemesisError(f"{node.source} does not live")
    return [node.agent.pid]


def send(pids: Sequence[int], number: int) -> tuple[int, ...]:
    """Send a signal to those that live; return them.

    Raises:
        NemesisError: Nobody does.
    """
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
