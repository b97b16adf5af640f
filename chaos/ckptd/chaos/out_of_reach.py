"""The end of nodes that were cut off for good and lived on: whoever gets hold of the machine at last ends its ranks.

Owns: that, giving the agent time to say what became of them, and reading what it said. Does not own: judgement
(`checkers.cut_off`), nor the end of the agent itself, which is asked to end as all others are (`Cluster.end_agents`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta

from ckptd.chaos.cluster.cluster import Cluster
from ckptd.chaos.history import History
from ckptd.chaos.watch import wait_until

_TERM_GRACE = timedelta(seconds=3)
_RANK_ENDS = ("rank_lost", "rank_detached")
_RUN_ENDS = ("run_ended", "fenced")


def end_cut_off_ranks(cluster: Cluster, history: History, notice: Callable[[], object], *, within: timedelta) -> None:
    """End the ranks of nodes that were cut off, SIGTERM first; return when their agents have said so, or the time is up.

    Args:
        cluster: Its job is done.
        history: What is seen.
        notice: Takes in what is new.
        within: Bound of the wait.
    """
    nodes = cluster.cut_off()
    running = [node.ranks for node in nodes if node.ranks is not None and node.ranks.poll() is None]
    for ranks in running:
        ranks.signal(signal.SIGTERM)
    wait_until(lambda: all(ranks.poll() is not None for ranks in running), within=_TERM_GRACE)
    for ranks in running:
        ranks.kill()

    def have_said() -> bool:
        notice()
        return not any(ranks_without_end(history, node.source) for node in nodes)

    wait_until(have_said, within=within)


def cut_off_agents(history: History) -> list[str]:
    """Return the agents of nodes that were replaced because nobody reached them, in order."""
    replaced = history.of("node_replaced", source="harness", where=lambda event: event.fields.get("cut_off") is True)
    return [f"agent {event.fields['node']}" for event in replaced]


def ranks_without_end(history: History, source: str) -> list[int]:
    """Return the ranks that an agent's event log leaves waiting: attached, and not told what came of it, nor gone."""
    waiting: dict[int, bool] = {}
    for event in history.of("attached_local", *_RANK_ENDS, *_RUN_ENDS, source=source):
        if event.kind in _RUN_ENDS:
            waiting = dict.fromkeys(waiting, False)
        elif event.rank is not None:
            waiting[event.rank] = event.kind == "attached_local"
    return sorted(rank for rank, waits in waiting.items() if waits)
