"""Many trials at a glance: an index page, one JUnit file and one JSON file. See `write_summary`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptd.chaos.report import Report
from ckptd.chaos.reports.junit import NOT_DONE, junit
from ckptd.chaos.reports.markup import Markup, join, tag
from ckptd.chaos.reports.page import document
from ckptd.chaos.reports.sections import NONE, chip, duration, headline, table
from ckptd.chaos.reports.write import JSON, JUNIT, PAGE, write_text
from ckptd.chaos.verdict import FailureClass, Verdict, worst

INDEX = "index.html"
_RED_FIRST = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS)


def write_summary(trials: Sequence[Report], folder: Path, *, still_open: Sequence[str] = ()) -> Path:
    """Write index.html, junit.xml and report.json over many trials into `folder`; return the index's path.

    Rows link to each trial's own page where it is there; links are relative, so that the folder can be moved with them.

    Args:
        trials: What is judged.
        folder: Where.
        still_open: Scenarios that are not done yet, or never will be: nothing is proved of them, and each report says so.

    Raises:
        OSError: As the file system says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / JSON, json.dumps(summary(trials, still_open=still_open), indent=1) + "\n")
    write_text(folder / JUNIT, junit(trials, still_open=still_open))
    write_text(folder / INDEX, _index(trials, folder, still_open))
    return folder / INDEX


def overall_verdict(trials: Sequence[Report], *, still_open: Sequence[str] = ()) -> Verdict:
    """Return fail if a trial failed, unknown if one is unknown or open or there is none, else pass."""
    verdicts = {report.verdict for report in trials} | ({Verdict.UNKNOWN} if still_open else set())
    return next((verdict for verdict in _RED_FIRST if verdict in verdicts), Verdict.UNKNOWN)


def summary(trials: Sequence[Report], *, still_open: Sequence[str] = ()) -> dict[str, Any]:
    """Return totals by verdict and class, every trial's report, and which scenarios are open, as plain values."""
    verdicts = Counter(report.verdict for report in trials)
    classes = _classes(trials)
    return {
        "verdict": str(overall_verdict(trials, still_open=still_open)),
        "trials": len(trials),
        "verdicts": {str(verdict): verdicts[verdict] for verdict in Verdict},
        "failures": {str(failure): count for failure, count in classes.items()},
        "seconds": round(sum(report.seconds for report in trials), 3),
        "open": list(still_open),
        "reports": [report.to_dict() for report in trials],
    }


def _classes(trials: Sequence[Report]) -> dict[FailureClass, int]:
    """Return in how many trials each class was seen, the worst class first."""
    counts = Counter(failure for report in trials for failure in report.failures())
    return {failure: counts[failure] for failure in FailureClass if failure in counts}


def _index(trials: Sequence[Report], folder: Path, still_open: Sequence[str]) -> str:
    verdict = overall_verdict(trials, still_open=still_open)
    counts = Counter(report.verdict for report in trials)
    said = ", ".join(f"{counts[one]} {one}" for one in _RED_FIRST if counts[one]) or "no trial"
    said += f", {len(still_open)} not done" if still_open else ""
    seconds = sum(report.seconds for report in trials)
    hero = tag(
        "section",
        tag("div", verdict, class_=f"verdict {verdict}"),
        tag("h1", f"{len(trials)} trial{'s' * (len(trials) != 1)}"),
        tag("p", f"{said}; {duration(seconds)} in all", class_="say"),
        *(tag("p", words, class_="where") for words in dict.fromkeys(report.cached() for report in trials) if words),
        tag("p", *(join((chip(f"{failure}: {count}", "fail"), " ")) for failure, count in _classes(trials).items())),
        class_=f"card hero {verdict}",
    )
    order = sorted(range(len(trials)), key=lambda i: (_RED_FIRST.index(trials[i].verdict), _severity(trials[i]), i))
    rows = [_row(trials[i], folder) for i in order] + [_open_row(name) for name in still_open]
    heads = ("", "trial", "size", "seed#", "what", "steps trained again#", "recovery#", "took#")
    body = tag("section", tag("h2", "Trials, red first"), table(heads, rows), class_="card", id="trials")
    return document(f"{verdict}: {len(trials)} trials", [hero, body])


def _open_row(name: str) -> Markup:
    return tag(
        "tr",
        tag("td", chip("open", Verdict.UNKNOWN)),
        tag("td", name),
        tag("td"),
        tag("td"),
        tag("td", NOT_DONE, class_="say"),
        *(tag("td") for _ in range(3)),
    )


def _severity(report: Report) -> int:
    first = worst(report.findings)
    classes = list(FailureClass)
    return len(classes) if first is None or first.failure is None else classes.index(first.failure)


def _row(report: Report, folder: Path) -> Markup:
    path = report.out / PAGE
    name: object = report.scenario
    if path.is_file():
        name = tag("a", report.scenario, href=Path(os.path.relpath(path, folder)).as_posix())
    recovery = max((a.recovery_s for a in report.accounts if a.recovery_s is not None), default=None)
    others = list(report.failures())[1:]
    lost = sum(account.lost_steps or 0 for account in report.accounts)
    return tag(
        "tr",
        tag("td", chip(report.verdict, report.verdict)),
        tag("td", name),
        tag("td", f"{report.nnodes} x {report.nproc}, {report.store}", data_label="size"),
        tag("td", report.seed, data_label="seed", class_="num"),
        tag("td", headline(report), *(join((" ", chip(failure, "fail"))) for failure in others), class_="say"),
        tag("td", lost, data_label="steps trained again", class_="num"),
        tag("td", NONE if recovery is None else duration(recovery), data_label="recovery", class_="num"),
        tag("td", duration(report.seconds), data_label="took", class_="num"),
    )
