"""Verdicts: pass, fail, unknown; what kind of failure it is; and how several make one.

Invariant: unknown is never green. What could not be looked at was not proved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The three answers a check can give."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    UNKNOWN = "unknown"

    @property
    def exit_code(self) -> int:
        """The command's exit status: 0, 1 or 3 (2 is a usage error)."""
        return {"pass": 0, "fail": 1, "unknown": 3}[self.value]


class FailureClass(StrEnum):
    """What kind of failure a failed check is; the worst one first (docs/chaos.md says how it is chosen)."""

    SILENT_DIVERGENCE = "silent divergence"
    WRONG_REPLICA = "wrong replica"
    STALE_CONTENT = "stale content"
    TORN_SNAPSHOT = "torn snapshot"
    SPLIT_HISTORY = "split history"
    LOST_WORK = "lost work"
    HARD_FAIL = "hard fail"
    LEAK = "leak"
    SLOW_RECOVERY = "slow recovery"
    UNEXPECTED_COURSE = "unexpected course"
    FAULT_MISSED = "fault missed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: Its name.
        verdict: Its answer.
        text: Why; for a pass, what was looked at.
        compared: Things that were found equal (or not), where the check compares.
        failure: What kind of failure it is; None unless the verdict is fail.
    """

    check: str
    verdict: Verdict
    text: str
    compared: int = 0
    failure: FailureClass | None = None

    def __post_init__(self) -> None:
        assert (self.failure is not None) == (self.verdict is Verdict.FAIL), f"{self.check}: a failure has a class"

    @classmethod
    def passed(cls, check: str, text: str, compared: int = 0) -> Finding:
        """Return a pass; `text` says what was looked at."""
        return cls(check=check, verdict=Verdict.PASS, text=text, compared=compared)

    @classmethod
    def failed(cls, check: str, failure: FailureClass, text: str, compared: int = 0) -> Finding:
        """Return a failure; `text` says what is wrong and where."""
        return cls(check=check, verdict=Verdict.FAIL, text=text, compared=compared, failure=failure)

    @classmethod
    def unknown(cls, check: str, text: str) -> Finding:
        """Return an unknown; `text` says what could not be looked at."""
        return cls(check=check, verdict=Verdict.UNKNOWN, text=text)


def overall(findings: Iterable[Finding]) -> Verdict:
    """Return fail if anything failed, else unknown if anything is unknown or nothing was checked, else pass."""
    verdicts = {finding.verdict for finding in findings}
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    return Verdict.PASS if verdicts == {Verdict.PASS} else Verdict.UNKNOWN


def failure_counts(findings: Iterable[Finding]) -> dict[FailureClass, int]:
    """Return how many checks failed, by class, the worst class first."""
    counts = Counter(finding.failure for finding in findings if finding.failure is not None)
    return {failure: counts[failure] for failure in FailureClass if failure in counts}


def worst(findings: Iterable[Finding]) -> Finding | None:
    """Return the finding that is told first: the worst class of failure, else an unknown; None if all passed."""
    order = list(FailureClass)
    red = [finding for finding in findings if finding.verdict is not Verdict.PASS]
    return min(
        red, key=lambda finding: len(order) if finding.failure is None else order.index(finding.failure), default=None
    )
