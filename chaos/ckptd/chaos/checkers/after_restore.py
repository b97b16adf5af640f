"""Whether anything was compared that came after a restore: what is equal before the fault proves nothing about it."""

from __future__ import annotations

from ckptd.chaos.checkers.case import Case
from ckptd.chaos.checkers.saved_states import saved_by_step
from ckptd.chaos.launches import Told, told_by_launch
from ckptd.chaos.verdict import Finding


def compared_after_restore(case: Case) -> Finding:
    """Of the last launch that went on from a step, a loss, a list or a saved state of a later time was compared."""
    told = told_by_launch(case.performance.history, case.hurt.digests)
    resumed = [one for one in told if one.launch > 1 and one.restored is not None]
    if not resumed:
        return Finding.passed("compared_after_restore", "no launch went on from a step")
    last = resumed[-1]
    count = _compared(case, last)
    if not count:
        text = (
            f"nothing that came after launch {last.launch} went on from step {last.restored} could be compared: train more "
            "steps, or save more often"
        )
        return Finding.unknown("compared_after_restore", text)
    return Finding.passed(
        "compared_after_restore", f"{count} losses, lists and saved states after step {last.restored}"
    )


def _compared(case: Case, told: Told) -> int:
    restored = told.restored or 0
    losses = {step for step, _ in case.undisturbed.losses}
    lists = {(entry.step, entry.rank) for entry in case.undisturbed.digests if entry.when == "step"}
    states = saved_by_step(case.undisturbed).keys() & saved_by_step(case.hurt).keys()
    return (
        sum(step in losses for step, _ in told.losses)
        + sum((entry.step, entry.rank) in lists for entry in (*told.restores, *told.steps))
        + sum(step > restored for step in states)
    )
