"""Verdicts: pass, fail, unknown; and how several make one.

Invariant: unknown is never green. What could not be looked at was not proved.
"""

from __future__ import annotations

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: Its name.
        verdict: Its answer.
        text: Why; for a pass, what was looked at.
        compared: Things that were found equal (or not), where the check compares.
    """

    check: str
    verdict: Verdict
    text: str
    compared: int = 0


def overall(findings: Iterable[Finding]) -> Verdict:
    """Return fail if anything failed, else unknown if anything is unknown or nothing was checked, else pass."""
    verdicts = {finding.verdict for finding in findings}
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    return Verdict.PASS if verdicts == {Verdict.PASS} else Verdict.UNKNOWN
