"""Promises that hold in every scenario: one cut, nothing acknowledged lost, one decision a step, no mystery.

Each function is pure and gives one finding.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from ckptd.chaos.checkers.case import Case
from ckptd.chaos.root import DecisionFact, RootFacts
from ckptd.chaos.verdict import FailureClass, Finding


def finished(case: Case) -> Finding:
    """The script came to its end, within the deadlines."""
    if not case.performance.finished:
        text = f"the hurt run did not finish: {case.performance.why}"
        return Finding.failed("finished", FailureClass.HARD_FAIL, text)
    return Finding.passed("finished", f"after {case.performance.launches} launches")


def no_hang(case: Case) -> Finding:
    """Every wait of the harness ended within its deadline, and every agent that was asked to end did."""
    late = case.performance.history.of("deadline", source="harness")
    if late:
        text = "; ".join(f"{e.fields.get('what')} did not come within {e.fields.get('seconds')} s" for e in late)
        return Finding.failed("no_hang", FailureClass.HARD_FAIL, text)
    stubborn = [source for source, code in case.performance.agent_ends.items() if code is None]
    if stubborn:
        text = f"{', '.join(stubborn)} did not end on SIGTERM and had to be killed"
        return Finding.failed("no_hang", FailureClass.HARD_FAIL, text)
    times = sorted(event.t for event in case.performance.history)
    pause = max((later - earlier for earlier, later in pairwise(times)), default=0.0)
    return Finding.passed("no_hang", f"no deadline was reached; the longest silence was {pause:.1f} s")


def faults_fired(case: Case) -> Finding:
    """Every fault was really done, and within its window; one that was not makes the run prove nothing."""
    missing = [f"{a.kind} {a.target} at {a.moment}: {a.note}" for a in case.accounts if not a.fired]
    missed = "did not fire: " + "; ".join(missing)
    if missing and not case.scenario.expect.may_miss:
        return Finding.failed("faults_fired", FailureClass.FAULT_MISSED, missed)
    if not case.accounts:
        return Finding.unknown("faults_fired", "nothing was to be done")
    late = [f"{a.kind} {a.target}: {a.late}" for a in case.accounts if a.late]
    if late:
        return Finding.unknown("faults_fired", "too late: " + "; ".join(late))
    fired = "; ".join(f"{a.kind} {a.target} at {a.moment}" for a in case.accounts if a.fired)
    if not fired:
        return Finding.unknown("faults_fired", f"nothing was done to the job: {missed}")
    return Finding.passed("faults_fired", f"{fired}; {missed}" if missing else fired)


def deaths_explained(case: Case) -> Finding:
    """No agent and no launch died but by a fault."""
    died = case.performance.history.of("agent_died", "exited", source="harness")
    for event in died:
        if not event.fields.get("by_fault"):
            what = f"agent {event.fields.get('agent')}" if event.kind == "agent_died" else "the job"
            code = event.fields.get("code", event.fields.get("codes"))
            text = f"{what} died by itself, exit {code}: {event.fields.get('text', '')}"
            return Finding.failed("deaths_explained", FailureClass.HARD_FAIL, text)
    return Finding.passed("deaths_explained", f"{len(died)} deaths, all by a fault")


def one_cut(case: Case) -> Finding:
    """Every listed step is whole: of one step and timeline, from all ranks, each byte with its digest."""
    roots = [("undisturbed", case.undisturbed.root), ("hurt", case.hurt.root)]
    looked = [(name, root) for name, root in roots if root is not None]
    problems = [f"{name} run: {problem}" for name, root in looked for problem in root.problems]
    if problems:
        text = problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
        return Finding.failed("one_cut", FailureClass.TORN_SNAPSHOT, text)
    steps = sum(len(root.listed) for _, root in looked)
    return Finding.passed(
        "one_cut", f"{steps} listed steps, {sum(root.checked_bytes for _, root in looked)} bytes read"
    )


def acknowledged_kept(case: Case) -> Finding:
    """Each acknowledged step is listed in the end (unless retention dropped it), and no restart went back behind it."""
    root = case.hurt.root
    history = case.performance.history
    acknowledged = [e for e in history.of("acknowledged", source="agent") if e.fields.get("committed") is not False]
    steps = {(event.step, str(event.fields.get("timeline"))) for event in acknowledged if event.step is not None}
    if root is not None and (lost := sorted(required(steps, root) - set(root.listed))):
        step, timeline = lost[0]
        text = f"step {step} of {timeline} was acknowledged and is not listed"
        return Finding.failed("acknowledged_kept", FailureClass.LOST_WORK, text)
    for event in history.of("restored", source="script"):
        launch = next(e for e in history.of("launched") if f"script {e.fields['launch']}" == event.source)
        before = max((e.step or 0 for e in acknowledged if e.t < launch.t), default=0)
        if (event.step or 0) < before:
            text = (
                f"launch {launch.fields['launch']} went on from step {event.step}, but step {before} was acknowledged"
            )
            return Finding.failed("acknowledged_kept", FailureClass.LOST_WORK, text)
    return Finding.passed("acknowledged_kept", f"{len(steps)} acknowledged steps")


def required(steps: set[tuple[int, str]], root: RootFacts) -> set[tuple[int, str]]:
    """Return the acknowledged steps that retention cannot have dropped."""
    if root.keep_last == 0:
        return steps
    newest = set(sorted(root.listed)[-root.keep_last :])
    oldest = min(newest, default=(0, ""))
    return {s for s in steps if s >= oldest or (root.keep_every and s[0] % root.keep_every == 0)}


def one_decision(case: Case) -> Finding:
    """No step of a timeline is both committed and aborted, or committed with two states; none is listed twice."""
    root = case.hurt.root
    if root is None:
        return Finding.passed("one_decision", "no root was read")
    told: dict[tuple[int, str], set[tuple[bool, str]]] = {}
    for fact in root.decisions:
        if not _is_word_of_the_fenced(fact, case, root):
            told.setdefault((fact.step, fact.timeline), set()).add((fact.committed, fact.state_digest))
    for (step, timeline), answers in sorted(told.items()):
        if len(answers) > 1:
            text = f"step {step} of {timeline} has {len(answers)} different decisions"
            return Finding.failed("one_decision", FailureClass.SPLIT_HISTORY, text)
    twice = [step for step, count in Counter(step for step, _ in root.listed).items() if count > 1]
    if twice:
        return Finding.failed("one_decision", FailureClass.SPLIT_HISTORY, f"step {twice[0]} is listed in two timelines")
    return Finding.passed("one_decision", f"{len(told)} decisions")


def _is_word_of_the_fenced(fact: DecisionFact, case: Case, root: RootFacts) -> bool:
    """Whether a marker of abort was put when a newer timeline had adopted the step, and nobody was told so.

    Whoever puts one looks at the claims before telling it: a fenced coordinator learns there that its marker decides nothing.
    """
    if fact.committed:
        return False
    adopted = any(
        other.committed
        and (other.step, other.timeline) == (fact.step, fact.timeline)
        and other.record.startswith("log/")
        and other.record.removeprefix("log/").partition(".")[0] > fact.timeline
        for other in root.decisions
    )
    was_told = case.performance.history.of(
        "acknowledged",
        source="agent",
        where=lambda event: (
            event.step == fact.step
            and event.fields.get("timeline") == fact.timeline
            and event.fields.get("committed") is False
        ),
    )
    return adopted and not was_told
