"""What one scenario expects besides the promises: where it went on from, what got committed, who was fenced."""

from __future__ import annotations

from collections.abc import Iterator

from ckptd.chaos.checkers.case import Case
from ckptd.chaos.checkers.promises import required
from ckptd.chaos.verdict import FailureClass, Finding


def expected_restores(case: Case) -> Finding:
    """The launch after the first fault went on from the tier and the step that the scenario names."""
    expect = case.scenario.expect
    first = case.accounts[0] if case.accounts else None
    if first is None or (not expect.restored_from and expect.restored_step is None):
        return Finding.passed("expected_restores", "nothing special expected")
    if not first.relaunched:
        return Finding.failed(
            "expected_restores", FailureClass.UNEXPECTED_COURSE, "the job was not started again after the first fault"
        )
    if expect.restored_step == "fault":
        if first.step is None:
            text = "which step was in flight at the fault cannot be told"
            return Finding.unknown("expected_restores", text)
        # A script that saves faster than the harness strikes may have staged a newer one: that is more, not less.
        if (first.restored_step or 0) < first.step:
            text = f"went on from step {first.restored_step}, not from step {first.step}, which was in flight"
            return Finding.failed("expected_restores", FailureClass.LOST_WORK, text)
    if expect.restored_from and first.restored_from not in expect.restored_from:
        text = f"restored from {first.restored_from}, not from {' or '.join(expect.restored_from)}"
        return Finding.failed("expected_restores", FailureClass.UNEXPECTED_COURSE, text)
    return Finding.passed("expected_restores", f"step {first.restored_step} from {first.restored_from}")


def expected_commit(case: Case) -> Finding:
    """The step in flight at the first fault is listed, saved by the timeline that it was in flight in."""
    if case.scenario.expect.committed is None:
        return Finding.passed("expected_commit", "nothing special expected")
    if case.scenario.expect.committed == "after":
        return _commit_after(case)
    first = case.accounts[0] if case.accounts else None
    if first is None or first.step is None or case.hurt.root is None:
        text = "which step was in flight at the fault, or what the root lists, cannot be told"
        return Finding.unknown("expected_commit", text)
    begun = [
        str(event.fields.get("timeline"))
        for event in case.performance.history.of("begun", "staged", source="agent")
        if event.step == first.step
    ]
    if not begun:
        text = f"no agent tells the timeline of step {first.step}"
        return Finding.unknown("expected_commit", text)
    if not required({(first.step, begun[0])}, case.hurt.root):
        return Finding.passed(
            "expected_commit", f"step {first.step} of {begun[0]} would have been dropped by retention"
        )
    if (first.step, begun[0]) not in case.hurt.root.listed:
        text = f"step {first.step} of {begun[0]} was in flight and is not listed"
        return Finding.failed("expected_commit", FailureClass.LOST_WORK, text)
    return Finding.passed("expected_commit", f"step {first.step} of {begun[0]} is listed")


def _commit_after(case: Case) -> Finding:
    """A step that was begun when the last fault was over is listed."""
    history = case.performance.history
    over = history.last("fault", "lifted", source="harness")
    if over is None or case.hurt.root is None:
        return Finding.unknown(
            "expected_commit", "when the last fault was over, or what the root lists, cannot be told"
        )
    begun = {(e.step, str(e.fields.get("timeline"))) for e in history.of("begun", source="agent", after=over.t)}
    listed = sorted(begun & set(case.hurt.root.listed), key=str)
    if not begun:
        return Finding.unknown("expected_commit", "no step was begun after the last fault was over")
    if not listed:
        text = f"none of the {len(begun)} steps that were begun after the last fault was over is listed"
        return Finding.failed("expected_commit", FailureClass.LOST_WORK, text)
    return Finding.passed("expected_commit", f"{len(listed)} steps begun after the last fault are listed")


def expected_relaunches(case: Case) -> Finding:
    """The job was started again as often as the scenario says."""
    count = case.performance.launches - 1
    if case.scenario.expect.relaunches is None:
        return Finding.passed("expected_relaunches", f"{count}, nothing special expected")
    fewest, most = case.scenario.expect.relaunches
    if not fewest <= count <= most:
        return Finding.failed(
            "expected_relaunches", FailureClass.UNEXPECTED_COURSE, f"{count} relaunches, not {fewest}..{most}"
        )
    return Finding.passed("expected_relaunches", f"{count}")


def expected_fencing(case: Case) -> Finding:
    """A woken zombie says that it is fenced, acknowledges nothing, and the newest record is not its own."""
    if not case.scenario.expect.fenced:
        return Finding.passed("expected_fencing", "nothing special expected")
    history = case.performance.history
    woken = history.of("fault", source="harness", where=lambda e: e.fields.get("do") in ("continue", "network"))
    # Of several faults of the network the last one lets it speak again.
    replaced = history.of("node_replaced", source="harness")
    if not woken or not replaced:
        return Finding.unknown("expected_fencing", "no zombie was woken")
    zombie, since = f"agent {replaced[0].fields['node']}", woken[-1].t
    if str(woken[-1].fields.get("target")).startswith("partition"):
        # Cut off for good: it may speak of what it has decided until another one takes over.
        others = history.of("claimed", source="agent", after=since, where=lambda e: e.source != zombie)
        since = others[0].t if others else since
    for wrong in _zombie_sins(case, zombie, since):
        return Finding.failed("expected_fencing", FailureClass.SPLIT_HISTORY, wrong)
    return Finding.passed("expected_fencing", f"{zombie} was fenced")


def _zombie_sins(case: Case, zombie: str, since: float) -> Iterator[str]:
    history = case.performance.history
    for event in history.of("acknowledged", source=zombie, after=since):
        yield f"{zombie} acknowledged step {event.step} after it was woken"
    if not history.of("fenced", source=zombie, after=since):
        yield f"{zombie} was woken and never said that it is fenced"
    claimed = history.of("claimed", source=zombie)
    root = case.hurt.root
    if claimed and root is not None and str(claimed[-1].fields.get("timeline")) in root.newest:
        yield f"the newest record {root.newest} is the zombie's"
