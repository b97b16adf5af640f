"""Checkers: pure functions from what was seen to findings; a checker that crashes is an unknown, never a pass."""

from __future__ import annotations

from collections.abc import Callable

from ckptd.chaos.checkers import bits, expectations, promises
from ckptd.chaos.checkers.case import Case
from ckptd.chaos.verdict import Finding, Verdict

CHECKS: tuple[Callable[[Case], Finding], ...] = (
    promises.finished,
    promises.faults_fired,
    bits.same_end,
    bits.same_losses,
    bits.same_digests,
    bits.same_state_digests,
    promises.one_cut,
    promises.acknowledged_kept,
    promises.one_decision,
    promises.deaths_explained,
    promises.no_leaks,
    expectations.expected_restores,
    expectations.expected_commit,
    expectations.expected_relaunches,
    expectations.expected_fencing,
)


def check(case: Case) -> list[Finding]:
    """Return a finding of every check, in the order of CHECKS, and whether anything was compared at all."""
    findings = [_guarded(checker, case) for checker in CHECKS]
    return [*findings, bits.something_was_compared(findings)]


def _guarded(checker: Callable[[Case], Finding], case: Case) -> Finding:
    try:
        return checker(case)
    except Exception as error:
        text = f"the checker itself failed: {error!r}"
        return Finding(check=checker.__name__, verdict=Verdict.UNKNOWN, text=text)
