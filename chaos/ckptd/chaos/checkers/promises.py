"""Promises that hold in every scenario: one cut, nothing acknowledged lost, one decision a step, no leak, no mystery.

Each function is pure and gives one finding.
"""

from __future__ import annotations

from collections import Counter

from ckptd.chaos.checkers.case import Case
from ckptd.chaos.root import RootFacts
from ckptd.chaos.verdict import Finding, Verdict


def finished(case: Case) -> Finding:
    """The script came to its end, within the deadlines."""
    why = case.performance.why
    if not case.performance.finished:
        return _finding("finished", f"the hurt run did not finish: {why}")
    return _finding("finished", "", f"after {case.performance.launches} launches")


def faults_fired(case: Case) -> Finding:
    """Every fault was really done, and within its window; one that was not makes the run prove nothing."""
    missing = [f"{a.kind} {a.target} at {a.moment}: {a.note}" for a in case.accounts if not a.fired]
    if missing:
        return _finding("faults_fired", "did not fire: " + "; ".join(missing))
    if not case.accounts:
        return Finding(check="faults_fired", verdict=Verdict.UNKNOWN, text="nothing was to be done")
    late = [f"{a.kind} {a.target}: {a.late}" for a in case.accounts if a.late]
    if late:
        return Finding(check="faults_fired", verdict=Verdict.UNKNOWN, text="too late: " + "; ".join(late))
    return _finding("faults_fired", "", "; ".join(f"{a.kind} {a.target} at {a.moment}" for a in case.accounts))


def deaths_explained(case: Case) -> Finding:
    """No agent and no launch died but by a fault."""
    died = case.performance.history.of("agent_died", "exited", source="harness")
    for event in died:
        if not event.fields.get("by_fault"):
            what = f"agent {event.fields.get('agent')}" if event.kind == "agent_died" else "the job"
            code = event.fields.get("code", event.fields.get("codes"))
            return _finding("deaths_explained", f"{what} died by itself, exit {code}: {event.fields.get('text', '')}")
    return _finding("deaths_explained", "", f"{len(died)} deaths, all by a fault")


def one_cut(case: Case) -> Finding:
    """Every listed step is whole: of one step and timeline, from all ranks, each byte with its digest."""
    roots = [("undisturbed", case.undisturbed.root), ("hurt", case.hurt.root)]
    looked = [(name, root) for name, root in roots if root is not None]
    problems = [f"{name} run: {problem}" for name, root in looked for problem in root.problems]
    if problems:
        return _finding("one_cut", f"{problems[0]}" + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))
    steps = sum(len(root.listed) for _, root in looked)
    return _finding("one_cut", "", f"{steps} listed steps, {sum(root.checked_bytes for _, root in looked)} bytes read")


def acknowledged_kept(case: Case) -> Finding:
    """Each acknowledged step is listed in the end (unless retention dropped it), and no restart went back behind it."""
    root = case.hurt.root
    history = case.performance.history
    acknowledged = [e for e in history.of("acknowledged", source="agent") if e.fields.get("committed") is not False]
    steps = {(event.step, str(event.fields.get("timeline"))) for event in acknowledged if event.step is not None}
    if root is not None and (lost := sorted(_required(steps, root) - set(root.listed))):
        step, timeline = lost[0]
        return _finding("acknowledged_kept", f"step {step} of {timeline} was acknowledged and is not listed")
    for event in history.of("restored", source="script"):
        launch = next(e for e in history.of("launched") if f"script {e.fields['launch']}" == event.source)
        before = max((e.step or 0 for e in acknowledged if e.t < launch.t), default=0)
        if (event.step or 0) < before:
            text = (
                f"launch {launch.fields['launch']} went on from step {event.step}, but step {before} was acknowledged"
            )
            return _finding("acknowledged_kept", text)
    return _finding("acknowledged_kept", "", f"{len(steps)} acknowledged steps")


def _required(steps: set[tuple[int, str]], root: RootFacts) -> set[tuple[int, str]]:
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
        return _finding("one_decision", "", "no root was read")
    told: dict[tuple[int, str], set[tuple[bool, str]]] = {}
    for fact in root.decisions:
        told.setdefault((fact.step, fact.timeline), set()).add((fact.committed, fact.state_digest))
    for (step, timeline), answers in sorted(told.items()):
        # A marker of abort may be outvoted by nothing: it stands alone or not at all.
        if len(answers) > 1:
            return _finding("one_decision", f"step {step} of {timeline} has {len(answers)} different decisions")
    twice = [step for step, count in Counter(step for step, _ in root.listed).items() if count > 1]
    if twice:
        return _finding("one_decision", f"step {twice[0]} is listed in two timelines")
    return _finding("one_decision", "", f"{len(told)} decisions")


def no_leaks(case: Case) -> Finding:
    """Agents end when asked, with 0; no process and no shared memory stays behind."""
    stubborn = [source for source, code in case.performance.agent_ends.items() if code is None]
    if stubborn:
        return _finding("no_leaks", f"{', '.join(stubborn)} did not end on SIGTERM and had to be killed")
    bad = [f"{source} (exit {code})" for source, code in case.performance.agent_ends.items() if code]
    if bad:
        return _finding("no_leaks", f"ended badly on SIGTERM: {', '.join(bad)}")
    if case.performance.leaks:
        return _finding("no_leaks", f"left behind: {'; '.join(case.performance.leaks)}")
    return _finding("no_leaks", "", "no process, no shared memory")


def _finding(check: str, wrong: str, right: str = "") -> Finding:
    if wrong:
        return Finding(check=check, verdict=Verdict.FAIL, text=wrong)
    return Finding(check=check, verdict=Verdict.PASS, text=right)
