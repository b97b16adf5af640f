"""Makes the pages of saved evidence anew: of one trial, or of all trials below a folder and their index.

Owns: finding trials. Does not own: judgement (`judging`). Nothing is run, and evidence is only read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptd.chaos.evidence import EvidenceError
from ckptd.chaos.judging import judge
from ckptd.chaos.record import FOLDER, is_trial, load_record
from ckptd.chaos.report import Report
from ckptd.chaos.reports.summary import overall_verdict, write_summary
from ckptd.chaos.reports.write import PAGE, write_report
from ckptd.chaos.verdict import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilt:
    """What was written.

    Attributes:
        page: The page to open: the trial's, or the index.
        reports: One per trial, in the order of their folders.
        verdict: Over all.
    """

    page: Path
    reports: tuple[Report, ...]
    verdict: Verdict


def rebuild(folder: Path) -> Rebuilt:
    """Judge the trial in `folder`, or else all trials in folders below it, and write their pages.

    Raises:
        EvidenceError: There is no trial, or one that cannot be read.
        OSError: As the file system says.
    """
    if is_trial(folder):
        report = _rebuilt(folder)
        return Rebuilt(page=report.out / PAGE, reports=(report,), verdict=report.verdict)
    found = [path.parent.parent for path in sorted(folder.rglob(f"{FOLDER}/trial.json"))] if folder.is_dir() else []
    if not found:
        raise EvidenceError(f"there is no trial in {folder}: no {FOLDER}/trial.json there or below")
    reports = tuple(_rebuilt(path) for path in found)
    return Rebuilt(page=write_summary(reports, folder), reports=reports, verdict=overall_verdict(reports))


def _rebuilt(folder: Path) -> Report:
    record = load_record(folder)
    report = judge(record, folder.resolve())
    write_report(report, record)
    return report
