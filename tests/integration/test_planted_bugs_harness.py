"""Bugs planted in agents and ranks of real trials: the harness must say fail, and of which class; without the bug it must pass.

The small job of the matrix, real agents, a real store. Each bug has a schedule of its own in which it bites
(`planted_schedules`), and leaves a mark whenever it acts: a trial in which it did not act proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures.planted_schedules import SCHEDULES
from fixtures.planted_trials import Judged, Schedule, Trials

from ckptd.chaos.verdict import Verdict, overall, worst

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    """One pair of fork servers for the module, and one undisturbed run for each course."""
    with Trials(tmp_path_factory.mktemp("planted")) as running:
        yield running


def told(judged: Judged) -> str:
    """Return all that is not green, and where the evidence is."""
    lines = [
        f"{f.check}: {f.verdict} {f.failure or ''}: {f.text}" for f in judged.findings if f.verdict is not Verdict.PASS
    ]
    return "\n".join([*lines, f"marks: {judged.marks}", f"evidence: {judged.folder}"])


@pytest.mark.parametrize("bug", SCHEDULES)
def test_the_harness_sees(trials: Trials, bug: str) -> None:
    """The planted code acted, the verdict is fail, by the check and of the class that docs/chaos.md says."""
    planted = SCHEDULES[bug]
    judged = trials.judge(planted.schedule, bug)
    assert judged.marks, f"the bug did not act, so nothing is proved\n{told(judged)}"
    assert overall(judged.findings) is Verdict.FAIL, told(judged)
    red = {finding.check for finding in judged.findings if finding.verdict is Verdict.FAIL}
    assert planted.checks <= red, told(judged)
    first = worst(judged.findings)
    assert first is not None
    assert first.failure in planted.failure, told(judged)


CONTROLS: dict[tuple[Schedule, str], str] = {
    (planted.schedule, planted.control): bug for bug, planted in SCHEDULES.items()
}
"""What two bugs share is run once."""


@pytest.mark.parametrize(("schedule", "control"), CONTROLS, ids=CONTROLS.values())
def test_the_same_schedule_without_the_bug_passes(trials: Trials, schedule: Schedule, control: str) -> None:
    """Else red would say nothing of the bug. A twin that is only slow must have been slow."""
    judged = trials.judge(schedule, control)
    assert overall(judged.findings) is Verdict.PASS, told(judged)
    assert bool(judged.marks) == (control != "none"), told(judged)
