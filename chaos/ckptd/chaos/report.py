"""The report of a trial: for people (rich) and for programs (JSON).

Owns: how a verdict is told. Invariant: every report holds the seed and the line that runs the same trial again.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ckptd.chaos import fitness
from ckptd.chaos.accounts import Account
from ckptd.chaos.diagnosis import Diagnosis
from ckptd.chaos.figures import Figure
from ckptd.chaos.verdict import FailureClass, Finding, Verdict, failure_counts, worst

UNDISTURBED = "undisturbed"
"""Name of a report over what all scenarios of a preset share, where that is in their way."""
_COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.UNKNOWN: "yellow"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A trial and its verdict.

    Attributes:
        scenario: Name.
        title: Its title.
        nnodes: Number of nodes.
        nproc: Ranks on each.
        store: "local" or "s3".
        seed: What decided the open choices.
        command: Script and arguments as given.
        out: Folder of the evidence.
        findings: One per check.
        accounts: One per fault.
        launches: How often the hurt job was started.
        verdict: Over all findings.
        seconds: The whole trial took.
        proves: The promise that is at stake.
        begun: When it began, seconds since the epoch.
        versions: Of what ran.
        diagnosis: Where the hurt run diverged first, and advice; None if it did not.
        network: What was asked for of `--network`.
        figures: Distributions of stall, durability lag, restore and recovery time.
        source: The file that the scenario was read from; empty: it is one of the package's.
        told_replay: The line that runs the same again; empty: that of `ckptd chaos run`.
        unfit: The `fitness.Reason` why the script cannot be judged; empty if it can.
        preset: The preset that the trial is a part of; empty if none.
        cached_at: When the undisturbed runs were done, where they were kept from before (`Undisturbed`); else 0.
    """

    scenario: str
    title: str
    nnodes: int
    nproc: int
    store: str
    seed: int
    command: tuple[str, ...]
    out: Path
    findings: tuple[Finding, ...] = ()
    accounts: tuple[Account, ...] = ()
    launches: int = 0
    verdict: Verdict = Verdict.UNKNOWN
    seconds: float = 0.0
    proves: str = ""
    begun: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    figures: tuple[Figure, ...] = ()
    source: str = ""
    told_replay: str = ""
    network: str = "auto"
    unfit: str = ""
    preset: str = ""
    cached_at: float = 0.0

    @property
    def exit_code(self) -> int:
        """The command's exit status: 0 pass, 1 fail, 3 unknown, 4 unknown because of the script."""
        return fitness.EXIT_CODE if self.unfit and self.verdict is Verdict.UNKNOWN else self.verdict.exit_code

    @property
    def replay(self) -> str:
        """The command line that runs the same trial again."""
        if self.told_replay:
            return self.told_replay
        only = ["--only", self.scenario] if self.scenario != UNDISTURBED else []
        what = ["--preset", self.preset, *only] if self.preset else [self.source or self.scenario]
        options = ["--nnodes", str(self.nnodes), "--nproc", str(self.nproc), "--store", self.store]
        options += ["--seed", str(self.seed)]
        options += ["--network", self.network] if self.network != "auto" else []
        return shlex.join(["ckptd", "chaos", "run", *what, *options, "--", *self.command])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON; failed checks by class are added as `failures`."""
        told = asdict(self) | {"out": str(self.out), "command": list(self.command), "replay": self.replay}
        told["failures"] = {str(failure): count for failure, count in self.failures().items()}
        told["headline"] = self.headline()
        told["cached"] = self.cached()
        return told

    def failures(self) -> dict[FailureClass, int]:
        """Return how many checks failed, by class, the worst class first."""
        return failure_counts(self.findings)

    def cached(self) -> str:
        """Return from when the undisturbed runs are, where they were not done for this trial; else ""."""
        return cached_words(self.cached_at)

    def headline(self) -> str:
        """Return in one sentence what broke and where; for a pass, what was hurt."""
        first = worst(self.findings)
        if first is None:
            count = sum(account.fired for account in self.accounts)
            return f"{count} fault{'s' * (count != 1)}, {self.launches} launches, every check passed"
        return f"{first.failure or 'nothing proved'}: {first.text}"


def cached_words(cached_at: float) -> str:
    """Return the words for undisturbed runs that were done at `cached_at` and not for this trial; "" where it is 0."""
    if not cached_at:
        return ""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(cached_at))
    return f"undisturbed run of {when} taken from the cache; --no-cache runs it anew"


def exit_code(reports: Sequence[Report]) -> int:
    """Return the exit status over several trials: 1 for a failure, else 4 for an unfit script, else 3 for an unknown, else 0."""
    codes = {report.exit_code for report in reports} or {Verdict.UNKNOWN.exit_code}
    return next(code for code in (1, fitness.EXIT_CODE, 3, 0) if code in codes)


def render(report: Report, console: Console) -> None:
    """Print a report for people."""
    size = f"{report.nnodes} x {report.nproc} ranks, {report.store}, seed {report.seed}"
    console.print(f"[bold]{escape(report.scenario)}[/bold]: {escape(report.title)}  [dim]({size})[/dim]")
    for account in report.accounts:
        console.print(f"  {_account_line(account)}")
    table = Table(box=None, show_header=False, padding=(0, 1))
    for finding in report.findings:
        colour = _COLOURS[finding.verdict]
        text = escape(finding.text if finding.failure is None else f"{finding.failure}: {finding.text}")
        table.add_row(f"[{colour}]{finding.verdict}[/{colour}]", finding.check, text)
    console.print(table)
    if report.diagnosis is not None:
        console.print(f"likely: {report.diagnosis.cause}: {report.diagnosis.advice}", markup=False, highlight=False)
    if report.cached_at:
        console.print(f"note: {report.cached()}", soft_wrap=True, markup=False, highlight=False)
    colour = _COLOURS[report.verdict]
    console.print(f"[bold {colour}]{report.verdict}[/bold {colour}] in {report.seconds:.0f} s; evidence: {report.out}")
    if report.verdict is not Verdict.PASS:
        console.print(f"again: {escape(report.replay)}", soft_wrap=True)


def render_line(report: Report, console: Console) -> None:
    """Print a report as one of many: a pass in a line, everything else with what is red and what is likely missing."""
    colour = _COLOURS[report.verdict]
    text = (
        f"[bold {colour}]{report.verdict}[/bold {colour}] {escape(report.scenario)} [dim]{report.seconds:.0f} s[/dim]"
    )
    console.print(f"{text}  {escape(report.headline())}", soft_wrap=True, highlight=False)
    if report.verdict is Verdict.PASS:
        return
    for finding in report.findings[1:] if len(report.findings) == 1 else report.findings:
        if finding.verdict is not Verdict.PASS:
            console.print(f"  {finding.check}: {finding.text}", markup=False, highlight=False, soft_wrap=True)
    if report.diagnosis is not None:
        text = f"  likely: {report.diagnosis.cause}: {report.diagnosis.advice}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"  again: {report.replay}", markup=False, highlight=False, soft_wrap=True)


def _account_line(account: Account) -> str:
    if not account.fired:
        return f"[red]did not fire[/red]: {account.kind} {account.target} at {account.moment}: {escape(account.note)}"
    text = f"{account.kind} {account.target} at {account.moment} (step {account.step})"
    if account.restored_from is not None:
        text += f" → step {account.restored_step} from {account.restored_from}, {account.lost_steps} steps lost"
    elif account.relaunched:
        text += " → began anew"
    if account.recovery_s is not None:
        text += f", training again after {account.recovery_s:.1f} s"
    return escape(text)
