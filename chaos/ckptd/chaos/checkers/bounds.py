"""What a fault may cost: steps trained again, and time until training goes on. Judged only where a scenario bounds it."""

from __future__ import annotations

from ckptd.chaos.checkers.case import Case
from ckptd.chaos.verdict import FailureClass, Finding


def lost_work(case: Case) -> Finding:
    """No fault made the job train more steps again than the scenario allows."""
    lost = [(a, a.lost_steps) for a in case.accounts if a.fired and a.relaunched]
    total = sum(steps or 0 for _, steps in lost)
    most = case.scenario.expect.lost_steps_max
    if most is None:
        return Finding.passed("lost_work", f"{total} steps trained again, no bound given")
    for account, steps in lost:
        if steps is None:
            return Finding.unknown("lost_work", f"after {account.kind} {account.target} no step was trained")
        if steps > most:
            text = f"after {account.kind} {account.target} {steps} steps were trained again, at most {most} may be"
            return Finding.failed("lost_work", FailureClass.LOST_WORK, text)
    return Finding.passed("lost_work", f"{total} steps trained again, at most {most} allowed after each fault")


def recovery_time(case: Case) -> Finding:
    """After each fault training went on within the time that the scenario allows."""
    fired = [account for account in case.accounts if account.fired]
    slowest = max((a.recovery_s for a in fired if a.recovery_s is not None), default=None)
    most = case.scenario.expect.recovery_s_max
    took = "nothing to recover from" if slowest is None else f"training again after {slowest:.1f} s at most"
    if most is None:
        return Finding.passed("recovery_time", f"{took}, no bound given")
    for account in fired:
        if account.recovery_s is None:
            return Finding.unknown("recovery_time", f"after {account.kind} {account.target} no step was trained")
        if account.recovery_s > most:
            text = f"training went on {account.recovery_s:.1f} s after {account.kind} {account.target}, not within {most} s"
            return Finding.failed("recovery_time", FailureClass.SLOW_RECOVERY, text)
    return Finding.passed("recovery_time", f"{took}, {most} s allowed")
