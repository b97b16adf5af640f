"""The protocol's code under any schedule that a state machine comes up with, as it is and with each rule switched off.

With all rules on, P1 to P9 hold after every write, delete and word. With one rule off, the same machine must find the schedule
that breaks a property of its own: else it would prove nothing. Seeds are fixed, so that a run is the same everywhere.

`PROTOCOL_SCHEDULES=20000` runs more of them, `PROTOCOL_SHRINK=1` shrinks each counterexample and prints it (with -s),
`PROTOCOL_ALL=1` also looks for those whose number of schedules was not measured yet.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest
from fixtures.protocol_machine import ProtocolMachine, staged
from fixtures.protocol_properties import BrokenError
from fixtures.rules_off import RULES_OFF
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

pytestmark = pytest.mark.timeout(1200)

SEED = 1
SCHEDULES = int(os.environ.get("PROTOCOL_SCHEDULES", "100"))
MOST_TO_FIND = 600
"""Schedules in which a rule that is off must be found; most take fewer than 60."""
TURNS = 40
SHRINKS = os.environ.get("PROTOCOL_SHRINK") == "1"

HAPPENS = (
    "acked",
    "told aborted",
    "fenced",
    "adopted",
    "adopted offline",
    "restarted",
    "quarantined",
    "answer lost",
    "landed late",
    "broom changed something",
    "stopped: a higher claim",
    "waiting_for_uploads",
)
"""What must really have happened in a run of the machine."""


def played(schedules: int, *, shrinks: bool = False) -> None:
    """Run the machine; raise what it finds."""
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]
    chosen = settings(
        max_examples=schedules,
        stateful_step_count=TURNS,
        database=None,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(SEED)(type("Machine", (ProtocolMachine,), {})), settings=chosen)


def test_every_property_holds_after_every_turn() -> None:
    """P1 to P9, whoever acts, sleeps or dies between any two operations, whatever answer is lost; and all of it happened."""
    begun = time.monotonic()
    with staged() as seen:
        played(SCHEDULES)
        happened = Counter(seen)
    rate = 60 * happened["schedules"] / (time.monotonic() - begun)
    print(f"seed {SEED}: {dict(happened)}; {rate:.0f} schedules a minute")  # noqa: T201 - shown with -s
    assert [kind for kind in HAPPENS if not happened[kind]] == [], happened


@pytest.mark.parametrize("name", RULES_OFF)
def test_a_rule_that_is_off_is_found(name: str) -> None:
    """One rule of docs/protocol.md off in the real code, and the machine finds the property that it is there for."""
    off = RULES_OFF[name]
    if not off.is_measured and os.environ.get("PROTOCOL_ALL") != "1":
        pytest.skip("how many schedules it takes is not measured; PROTOCOL_ALL=1 looks for it")
    with staged(off.plant, ends="P8" in off.broken) as seen:
        with pytest.raises(BrokenError) as found:
            played(MOST_TO_FIND, shrinks=SHRINKS)
        schedules = seen["schedules"]
    text = str(found.value)
    print(f"{off.rule} off, {name}: schedule {schedules}: {text}")  # noqa: T201 - shown with -s
    if SHRINKS:
        print("\n".join(found.value.__notes__))  # noqa: T201 - same
    assert text[:2] in off.broken, text


def test_every_rule_is_switched_off_somewhere() -> None:
    """R1 to R8: none is left out of the table."""
    assert {off.rule for off in RULES_OFF.values()} == {f"R{number}" for number in range(1, 9)}
