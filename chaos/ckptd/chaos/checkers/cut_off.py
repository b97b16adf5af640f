"""An agent that nobody reaches any more does not wait for ever.

The one that leads is fenced by what it finds in the store (`expectations`). Any other hears nothing more from its coordinator:
what it waits for ends with its ranks, and it ends when it is asked to.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptd.chaos.checkers.case import Case
from ckptd.chaos.out_of_reach import cut_off_agents, ranks_without_end
from ckptd.chaos.verdict import FailureClass, Finding


def cut_off_ended(case: Case) -> Finding:
    """The agent of a node that was cut off for good ends when asked, and its event log says what became of its ranks."""
    agents = cut_off_agents(case.performance.history)
    # A fault that came later may have killed it: then there was nobody to be asked.
    asked = [source for source in agents if source in case.performance.agent_ends]
    for source in asked:
        for text in _waits(case, source):
            return Finding.failed("cut_off_ended", FailureClass.HARD_FAIL, text)
    if not agents:
        return Finding.passed("cut_off_ended", "no node was cut off for good")
    return Finding.passed("cut_off_ended", f"waits ended: {', '.join(asked) or 'nobody lived on'}")


def _waits(case: Case, source: str) -> Iterator[str]:
    history = case.performance.history
    if case.performance.agent_ends[source] is None:
        yield f"{source} was cut off, and did not end on SIGTERM when its ranks had ended"
    for rank in ranks_without_end(history, source):
        yield f"{source} was cut off, and its event log does not say what became of rank {rank}"
    if not history.of("stopped", source=source):
        yield f"{source} was cut off and asked to end, and its event log does not say that it did"
