"""The protocol's code under any schedule that a walk or Hypothesis comes up with, as it is and with each rule switched off.

With all rules on, P1 to P9 hold after every write, delete and word. With one rule off, the same walk must find the schedule
that breaks a property of its own: else it would prove nothing. Seeds are fixed, so that a run is the same everywhere.

`PROTOCOL_SCHEDULES=20000` runs more of them, `PROTOCOL_SEED=2` others, `PROTOCOL_SHRINK=1` shrinks what is found with a rule
off and prints it as a play (with -s).
"""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest
from fixtures.protocol_found import FOUND
from fixtures.protocol_machine import Counterexample, ProtocolMachine, as_play, replay, shrink, staged, walk
from fixtures.rules_off import RULES_OFF
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

pytestmark = pytest.mark.timeout(1200)

SEED = int(os.environ.get("PROTOCOL_SEED", "1"))
SCHEDULES = int(os.environ.get("PROTOCOL_SCHEDULES", "100"))
OF_HYPOTHESIS = max(10, SCHEDULES // 10)
MOST_TO_FIND = 200
"""Schedules in which a rule that is off must be found; most take fewer than twenty (`rules_off` says what each took)."""
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
"""What must really have happened in a run of walks."""


def first_broken(schedules: int) -> tuple[int, Counterexample] | None:
    """Walk; return what is found first, and after how many schedules."""
    for number in range(schedules):
        found = walk(f"{SEED}/{number}", TURNS)
        if found is not None:
            return number + 1, found
    return None


def test_every_property_holds_after_every_turn() -> None:
    """P1 to P9, whoever acts, sleeps or dies between any two operations, whatever answer is lost; and all of it happened."""
    begun = time.monotonic()
    with staged() as seen:
        found = first_broken(SCHEDULES)
        happened = Counter(seen)
        rate = 60 * happened["schedules"] / (time.monotonic() - begun)
        print(f"seed {SEED}: {dict(happened)}; {rate:.0f} schedules a minute")  # noqa: T201 - shown with -s
        assert found is None, f"seed {SEED}, schedule {found[0]}\n{as_play(shrink(found[1]))}"
    assert [kind for kind in HAPPENS if not happened[kind]] == [], happened


def test_hypothesis_finds_nothing_either() -> None:
    """The same moves, chosen by a state machine of Hypothesis, which varies what it has played and shrinks what it finds."""
    chosen = settings(
        max_examples=OF_HYPOTHESIS,
        stateful_step_count=TURNS,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with staged() as seen:
        run_state_machine_as_test(seed(SEED)(type("Machine", (ProtocolMachine,), {})), settings=chosen)
    assert seen["acked"] > 0
    assert seen["fenced"] > 0


@pytest.mark.parametrize("name", RULES_OFF)
def test_a_rule_that_is_off_is_found(name: str) -> None:
    """One rule of docs/protocol.md off in the real code, and a walk finds the property that it is there for."""
    off = RULES_OFF[name]
    with staged(off.plant, ends="P8" in off.broken):
        found = first_broken(MOST_TO_FIND)
        assert found is not None, f"seed {SEED}: not found in {MOST_TO_FIND} schedules"
        schedules, play = found
        print(f"{off.rule} off, {name}: schedule {schedules}: {play.broken}")  # noqa: T201 - shown with -s
        if SHRINKS:
            print(as_play(shrink(play)))  # noqa: T201 - same
    assert play.broken[:2] in off.broken, play.broken


@pytest.mark.parametrize("name", RULES_OFF)
def test_a_schedule_that_was_found(name: str) -> None:
    """It breaks a property of the rule that is off, in its last turn; with the rule on, it breaks nothing."""
    off = RULES_OFF[name]
    opening, turns = FOUND[name]
    with staged(off.plant, ends="P8" in off.broken):
        found = replay(opening, turns)
    assert found is not None
    assert found.broken[:2] in off.broken, found.broken
    assert found.turns == turns
    with staged():
        assert replay(opening, turns) is None


def test_what_is_found_is_shrunk_to_the_turns_it_needs() -> None:
    """A schedule of many turns becomes one of a few that breaks the same, and none of those can be left out."""
    off = RULES_OFF["a step is acknowledged before its record is durable"]
    with staged(off.plant, ends=False):
        found = first_broken(MOST_TO_FIND)
        assert found is not None
        short = shrink(found[1])
        assert short.broken[:2] == found[1].broken[:2]
        assert len(short.turns) < TURNS / 3, short.turns
        for at in range(len(short.turns)):
            fewer = replay(short.opening, short.turns[:at] + short.turns[at + 1 :])
            assert fewer is None or fewer.broken[:2] != short.broken[:2], short.turns[at]
        assert as_play(short).splitlines()[-1].startswith(short.broken[:2])


def test_every_rule_is_switched_off_somewhere() -> None:
    """R1 to R8: none is left out of the table."""
    assert {off.rule for off in RULES_OFF.values()} == {f"R{number}" for number in range(1, 9)}
