"""From a schedule that failed to the shortest that still fails: every try is a real run.

Owns: what counts as the same failure, how often a run is repeated, and the file of what is left. Does not own: the search
(`shrinking`). A failure that does not come each time is looked for that many times in every try, and said to be flaky.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from ckptd.chaos.record import load_record
from ckptd.chaos.report import Report
from ckptd.chaos.reports.write import write_text
from ckptd.chaos.scenario import Scenario
from ckptd.chaos.scenario_writer import to_toml
from ckptd.chaos.soak.parts import Part, assembled, parts_of, simpler
from ckptd.chaos.soak.running import Soak, failed_checks
from ckptd.chaos.soak.shrinking import Enough, shrink

SHRUNK_FILE = "shrunk.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """How much may be tried.

    Attributes:
        tries: Schedules.
        time: No try begins later.
        repeats: How often the failure and what is left of it are run again, to tell a steady one from a flaky one.
    """

    tries: int = 40
    time: timedelta = timedelta(minutes=20)
    repeats: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """What came of a schedule that failed.

    Attributes:
        schedule: Name of what failed.
        checks: Which checks failed; a try counts when one of them fails again.
        again: How often it failed again before anything was changed, and of how many runs.
        faults: Number of faults at first, and of what is left.
        shrunk: How often what is left failed in the end, and of how many runs.
        is_minimal: Nothing more can be left out or made simpler; False when a bound came first.
        tries: Schedules that were tried.
        file: The scenario that is left; empty when the failure did not come again.
        replay: The line that runs it; empty as above.
    """

    schedule: str
    checks: tuple[str, ...]
    again: tuple[int, int]
    faults: tuple[int, int]
    shrunk: tuple[int, int] = (0, 0)
    is_minimal: bool = False
    tries: int = 0
    file: str = ""
    replay: str = ""

    @property
    def text(self) -> str:
        """What came of it, in a sentence."""
        (seen, of), (before, after) = self.again, self.faults
        if not self.file:
            return f"{', '.join(self.checks)} failed once and in none of {of} runs of the same schedule: flaky"
        steady = "steady" if seen == of else f"flaky ({seen} of {of} runs)"
        least = "nothing more can be left out" if self.is_minimal else "the bound on tries came first"
        left = f"{after} of {before} faults are left after {self.tries} tries; {least}"
        return f"{steady}: {left}; failed in {self.shrunk[0]} of {self.shrunk[1]} runs in the end"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"text": self.text}


def reproduce(
    soak: Soak,
    report: Report,
    *,
    replay: str,
    bounds: Bounds = Bounds(),
    tell: Callable[[str], None] = lambda _line: None,
) -> Reproduction:
    """Shrink the schedule of a run that failed; what is left is in `shrunk.toml` beside its evidence.

    Args:
        soak: Runs the tries.
        report: Of the run; its evidence is there.
        replay: The line that runs a scenario; "{file}" is replaced by the path of its file.
        bounds: How much may be tried.
        tell: Hears of every try, in a line.

    Raises:
        EvidenceError: The evidence of the run cannot be read.
        OSError: Evidence or file cannot be written.
    """
    return _Reproducing(soak, report, replay, bounds, tell).perform()


class _Reproducing:
    def __init__(self, soak: Soak, report: Report, replay: str, bounds: Bounds, tell: Callable[[str], None]) -> None:
        self._soak, self._report, self._replay, self._bounds, self._tell = soak, report, replay, bounds, tell
        self._wanted = failed_checks(report)
        self._scenario = load_record(report.out).scenario
        self._end = time.monotonic() + bounds.time.total_seconds()
        self._runs = self._tries = 0

    def perform(self) -> Reproduction:
        """See `reproduce`."""
        repeats = self._bounds.repeats
        seen = self._seen(self._scenario, of=repeats)
        count = len(self._scenario.faults)
        told = Reproduction(
            schedule=self._report.scenario,
            checks=tuple(sorted(self._wanted)),
            again=(seen, repeats),
            faults=(count, count),
        )
        if not seen:
            return told
        attempts = 1 if seen == repeats else repeats
        shrunk = shrink(
            parts_of(self._scenario),
            lambda parts: self._fails(parts, attempts),
            simpler=simpler,
            most=self._bounds.tries,
        )
        left = assembled(shrunk.parts, self._scenario)
        left = replace(left, title=f"What is left of {self._report.scenario}: {', '.join(sorted(self._wanted))} fails")
        file = self._report.out / SHRUNK_FILE
        write_text(file, to_toml(left))
        return replace(
            told,
            faults=(count, len(left.faults)),
            shrunk=(self._seen(left, of=repeats), repeats),
            is_minimal=shrunk.is_minimal,
            tries=self._tries,
            file=str(file),
            replay=self._replay.replace("{file}", shlex.quote(str(file))),
        )

    def _seen(self, scenario: Scenario, *, of: int) -> int:
        return sum(self._failed(scenario) for _ in range(of))

    def _fails(self, parts: tuple[Part, ...], attempts: int) -> bool:
        if time.monotonic() > self._end:
            raise Enough
        scenario = assembled(parts, self._scenario)
        if not scenario.faults:
            # Delays alone: what would fail then is another failure.
            return False
        self._tries += 1
        return any(self._failed(scenario) for _ in range(attempts))

    def _failed(self, scenario: Scenario) -> bool:
        self._runs += 1
        report = self._soak.run(
            scenario,
            store=self._report.store,
            seed=self._report.seed,
            name=f"{self._report.scenario}-try-{self._runs:03d}",
            replay=self._replay,
        )
        self._soak.remove(report)
        is_same = bool(failed_checks(report) & self._wanted)
        what = "fails" if is_same else str(report.verdict)
        faults = "; ".join(f"{account.kind} {account.target} at {account.moment}" for account in report.accounts)
        self._tell(f"try {self._runs}: {what} ({report.seconds:.1f} s): {faults}")
        return is_same
