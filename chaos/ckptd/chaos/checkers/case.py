"""What a checker looks at: one run that was hurt beside one that was not."""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.chaos.accounts import Account
from ckptd.chaos.conductor import Performance
from ckptd.chaos.evidence import Evidence
from ckptd.chaos.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Everything a verdict rests on.

    Attributes:
        scenario: What was meant to happen.
        undisturbed: Evidence of the run nobody hurt.
        hurt: Evidence of the other one.
        performance: How that one went.
        accounts: Its faults and what each cost.
        repeat: Evidence of a second run nobody hurt; None where it was done once.
    """

    scenario: Scenario
    undisturbed: Evidence
    hurt: Evidence
    performance: Performance
    accounts: tuple[Account, ...]
    repeat: Evidence | None = None
