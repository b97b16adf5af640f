"""From the record of a trial to its report. Pure: nothing is read, written or run.

Owns: the order of judgement. Does not own: the checks (`checkers`). The same record always gives the same report.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckptd.chaos import fitness
from ckptd.chaos.accounts import accounts
from ckptd.chaos.checkers import check
from ckptd.chaos.checkers.bits import self_difference
from ckptd.chaos.checkers.case import Case
from ckptd.chaos.checkers.saved_states import saved_by_step
from ckptd.chaos.diagnosis import diagnose
from ckptd.chaos.figures import figures
from ckptd.chaos.record import Record
from ckptd.chaos.report import Report
from ckptd.chaos.restore_diagnosis import diagnose_restore
from ckptd.chaos.saved_diagnosis import diagnose_saved
from ckptd.chaos.verdict import Finding, Verdict, overall


def judge(record: Record, out: Path) -> Report:
    """Return the report of a trial whose evidence lies in `out`."""
    base = Report(
        scenario=record.scenario.name,
        title=record.scenario.title,
        proves=record.scenario.proves,
        nnodes=record.nnodes,
        nproc=record.nproc,
        store=record.store,
        seed=record.seed,
        command=record.command,
        out=out,
        begun=record.begun,
        seconds=record.seconds,
        network=record.network,
        versions=record.versions,
        source=record.scenario.source,
        told_replay=record.replay,
        unfit=record.unfit,
        preset=record.preset,
        cached_at=record.cached_at,
    )
    return _with_findings(base, record)


def nondeterminism(record: Record) -> str:
    """Return how two undisturbed runs differ; empty if they do not, or if there are not two."""
    if record.undisturbed is None or record.repeat is None:
        return ""
    return self_difference(record.undisturbed, record.repeat)


def _with_findings(report: Report, record: Record) -> Report:
    performance, undisturbed, hurt = record.performance, record.undisturbed, record.hurt
    if difference := nondeterminism(record):
        # Whatever the hurt run said could not be told from the script's own wavering.
        return _unknown(report, "deterministic", f"the script is not deterministic: {difference}")
    if record.problem or performance is None or undisturbed is None or hurt is None:
        return _unknown(report, "trial", record.problem or "the evidence of a run is missing")
    if record.preset and (found := fitness.too_short(performance)) is not None:
        # Of a scenario that was asked for by its name it is a failure: there it may be the scenario that is wrong.
        return replace(_unknown(report, "faults_fired", found.text), unfit=str(found.reason))
    told = tuple(accounts(performance, nproc=record.nproc))
    case = Case(
        scenario=record.scenario,
        undisturbed=undisturbed,
        hurt=hurt,
        performance=performance,
        accounts=told,
        repeat=record.repeat,
    )
    findings = tuple(check(case))
    # The script's own lists tell more than what was saved: they are of every step, and of each restore.
    look = diagnose if undisturbed.digests or not saved_by_step(undisturbed) else diagnose_saved
    verdict = overall(findings)
    begun_anew = diagnose_restore(performance.history) if verdict is Verdict.FAIL else None
    return replace(
        report,
        findings=findings,
        verdict=verdict,
        accounts=told,
        launches=performance.launches,
        diagnosis=begun_anew or look(undisturbed, hurt, performance.history, repeated=record.repeat is not None),
        figures=figures(performance.history, told),
    )


def _unknown(report: Report, check: str, text: str) -> Report:
    findings = (Finding.unknown(check, text),)
    return replace(report, findings=findings, verdict=overall(findings))
