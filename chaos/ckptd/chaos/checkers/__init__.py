"""Checkers: pure functions from what was seen to findings; a checker that crashes is an unknown, never a pass."""

from __future__ import annotations

from collections.abc import Callable

from ckptd.chaos.checkers import after_restore, bits, bounds, cut_off, expectations, fencing, leaks, promises, restores
from ckptd.chaos.checkers.case import Case
from ckptd.chaos.verdict import Finding

CHECKS: tuple[Callable[[Case], Finding], ...] = (
    bits.deterministic,
    promises.finished,
    promises.no_hang,
    promises.faults_fired,
    bits.same_end,
    bits.same_losses,
    bits.same_digests,
    bits.same_state_digests,
    after_restore.compared_after_restore,
    promises.one_cut,
    promises.acknowledged_kept,
    restores.restored_newest,
    promises.one_decision,
    fencing.zombie_without_effect,
    cut_off.cut_off_ended,
    promises.deaths_explained,
    leaks.no_leaks,
    leaks.objects_accounted,
    bounds.lost_work,
    bounds.recovery_time,
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
        return Finding.unknown(checker.__name__, f"the checker itself failed: {error!r}")
