"""Nothing is left: no process, no socket, no shared memory of a dead agent, no temporary file, no object nobody needs."""

from __future__ import annotations

from collections.abc import Sequence

from ckptd.chaos.checkers.case import Case
from ckptd.chaos.out_of_reach import cut_off_agents
from ckptd.chaos.verdict import FailureClass, Finding
from ckptd.daemon.serve import EXIT_UNFLUSHED


def no_leaks(case: Case) -> Finding:
    """Agents end when asked, with 0; no process, socket, folder or foreign file in shared memory stays behind."""
    stubborn = [source for source, code in case.performance.agent_ends.items() if code is None]
    if stubborn:
        text = f"{', '.join(stubborn)} did not end on SIGTERM and had to be killed"
        return Finding.failed("no_leaks", FailureClass.HARD_FAIL, text)
    cut_off = cut_off_agents(case.performance.history)
    bad = [
        f"{source} (exit {code})"
        for source, code in case.performance.agent_ends.items()
        # Nobody can flush to a store that is out of reach; it says so, and ends.
        if code and not (code == EXIT_UNFLUSHED and source in cut_off)
    ]
    if bad:
        return Finding.failed("no_leaks", FailureClass.HARD_FAIL, f"ended badly on SIGTERM: {', '.join(bad)}")
    left = [*case.performance.leaks]
    left += [f"{path} of node {node}" for node, paths in case.performance.left_files.items() for path in paths]
    if left:
        return Finding.failed("no_leaks", FailureClass.LEAK, f"left behind: {_first(left)}")
    return Finding.passed("no_leaks", "no process, no socket, no shared memory")


def objects_accounted(case: Case) -> Finding:
    """After a sweep with no writer, the root holds exactly what the newest record needs: nothing more, nothing less."""
    root = case.hurt.root
    if root is None:
        return Finding.passed("objects_accounted", "no root was read")
    if root.sweep_takes_needed:
        text = f"a sweep would delete {_first(root.sweep_takes_needed)}, which the newest record needs"
        return Finding.failed("objects_accounted", FailureClass.LOST_WORK, text)
    if root.unaccounted:
        text = f"no record needs {_first(root.unaccounted)}, and no sweep deletes it"
        return Finding.failed("objects_accounted", FailureClass.LEAK, text)
    if root.sweep_error:
        return Finding.unknown("objects_accounted", f"the root cannot be swept: {root.sweep_error}")
    text = f"{root.objects} objects, {root.garbage} of them garbage that a sweep deletes, all others needed"
    return Finding.passed("objects_accounted", text)


def _first(names: Sequence[str]) -> str:
    return "; ".join(names[:3]) + (f" (and {len(names) - 3} more)" if len(names) > 3 else "")
