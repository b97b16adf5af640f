"""Tells a soak as it goes, and sums it up: lines for people, values for programs.

Owns: wording. Does not own: the pages (`reports`). Output only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from ckptd.chaos.history import Event
from ckptd.chaos.report import Report
from ckptd.chaos.reports.summary import overall_verdict, summary
from ckptd.chaos.soak.reproducing import Reproduction
from ckptd.chaos.soak.running import fired
from ckptd.chaos.verdict import Verdict

_COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.UNKNOWN: "yellow"}


class Telling:
    """Shows what happens. For one thread.

    Args:
        console: Where; the present step is shown only where it is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._name, self._launch = "", 0

    def begin(self, name: str) -> None:
        """A run begins."""
        self._name, self._launch = name, 0
        if self._console.is_terminal:
            if self._status is None:
                self._status = self._console.status("")
                self._status.start()
            self._status.update(escape(name))

    def see(self, run: str, event: Event) -> None:
        """Take in an event of a run."""
        if event.kind == "cached":
            self.say(f"    {event.fields.get('note')}")
        if event.kind == "launched":
            self._launch = int(event.fields.get("launch", 0))
        if self._status is not None and event.kind in ("launched", "step", "fault"):
            what = f"step {event.step}" if event.kind == "step" else event.kind
            self._status.update(escape(f"{self._name}: {run}: launch {self._launch}: {what}"))

    def end(self, report: Report) -> None:
        """A run is judged."""
        colour = _COLOURS[report.verdict]
        done, planned = fired([report])
        self._console.print(
            f"[{colour}]{report.verdict}[/{colour}] {escape(report.scenario)} [dim]{done} of {planned} faults, "
            f"{report.launches} launches, {report.seconds:.1f} s[/dim]",
            soft_wrap=True,
            highlight=False,
        )
        for finding in report.findings:
            if finding.verdict is not Verdict.PASS:
                self.say(f"    {finding.check}: {finding.text}")
        if report.verdict is not Verdict.PASS:
            self.say(f"    evidence: {report.out}")
            self.say(f"    again: {report.replay}")

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def reproduced(self, told: Reproduction, plain: str) -> None:
        """A failure was shrunk; `plain` is the line of `ckptd chaos run` for what is left."""
        self.say(f"    {told.text}")
        if told.replay:
            self.say(f"    shrunk: {told.replay}")
            self.say(f"    or:     {plain}")

    def close(self) -> None:
        """Remove the moving line; idempotent."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def sum_up(self, reports: Sequence[Report], *, broken_off: bool) -> None:
        """Print totals."""
        verdict = overall_verdict(reports)
        counts = Counter(report.verdict for report in reports)
        done, planned = fired(reports)
        missed = f"; the moment of {planned - done} never came, which proves nothing" if done < planned else ""
        totals = ", ".join(f"{counts[one]} {one}" for one in Verdict if counts[one]) or "no schedule was run to its end"
        colour = _COLOURS[verdict]
        self._console.print(
            f"[bold {colour}]{verdict}[/bold {colour}]{' so far, broken off' if broken_off else ''}: {totals}; "
            f"{done} of {planned} faults were done{missed}",
            soft_wrap=True,
            highlight=False,
        )


def as_plain(reports: Sequence[Report], shrunk: Sequence[Reproduction], *, broken_off: bool) -> dict[str, Any]:
    """Return everything as plain values for JSON."""
    done, planned = fired(reports)
    return summary(reports) | {
        "broken_off": broken_off,
        "faults": {"planned": planned, "fired": done, "by_kind": _by_kind(reports)},
        "shrunk": [one.to_dict() for one in shrunk],
    }


def _by_kind(reports: Sequence[Report]) -> Mapping[str, Mapping[str, int]]:
    planned: Counter[str] = Counter()
    done: Counter[str] = Counter()
    for report in reports:
        for account in report.accounts:
            # "rank 3" is a rank, and "store: error put" a fault of the store.
            kind = f"{account.kind} {account.target.split()[0].rstrip(':,')}"
            planned[kind] += 1
            done[kind] += account.fired
    return {kind: {"planned": planned[kind], "fired": done[kind]} for kind in sorted(planned)}
