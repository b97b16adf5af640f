"""Writes the report of one trial beside its evidence: report.json, junit.xml and report.html. Each is whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

from ckptd.chaos.record import Record
from ckptd.chaos.report import Report
from ckptd.chaos.reports.junit import junit
from ckptd.chaos.reports.page import FILES, page

PAGE, JUNIT, JSON = "report.html", "junit.xml", "report.json"


def write_report(report: Report, record: Record) -> Path:
    """Write all forms of a report into its folder; return the page's path.

    Raises:
        OSError: As the file system says.
    """
    history = None if record.performance is None else record.performance.history
    write_text(report.out / JSON, json.dumps(report.to_dict(), indent=1) + "\n")
    write_text(report.out / JUNIT, junit([report]))
    files = [path for path in FILES if (report.out / path).exists()]
    write_text(report.out / PAGE, page(report, history, files))
    return report.out / PAGE


def write_text(path: Path, text: str) -> None:
    """Write a file in one step."""
    draft = path.with_name(f"{path.name}.draft")
    # What a run printed may hold halves of surrogate pairs.
    draft.write_text(text, encoding="utf-8", errors="replace")
    draft.replace(path)
