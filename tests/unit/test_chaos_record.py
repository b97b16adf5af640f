"""Saved trials: what is written comes back equal, the same evidence gives the same verdict, and damage is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.chaos_trials import record, without_hurt
from typer.testing import CliRunner

from ckptd.chaos.cli import app
from ckptd.chaos.evidence import EvidenceError
from ckptd.chaos.judging import judge
from ckptd.chaos.plain import from_plain
from ckptd.chaos.record import Record, load_record, save_record
from ckptd.chaos.reports.rebuild import rebuild
from ckptd.chaos.scenario import Expectation, Moment
from ckptd.chaos.verdict import FailureClass, Finding, Verdict


def saved(told: Record, folder: Path) -> Path:
    save_record(told, folder)
    return folder


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    """Scenario, evidence, performance and every event survive the way to disk and back."""
    told = replace(record(), repeat=record().undisturbed)
    found = load_record(saved(told, tmp_path))
    assert told.performance is not None
    assert found.performance is not None
    assert list(found.performance.history) == list(told.performance.history)
    same = replace(found, performance=replace(found.performance, history=told.performance.history))
    assert same == told


def test_the_same_evidence_gives_the_same_report(tmp_path: Path) -> None:
    """Judging is pure: what was judged at once and what is judged from disk are one."""
    for name, told in (("good", record()), ("bad", record(wrong={"model/w": "x"})), ("none", without_hurt("boom"))):
        out = tmp_path / name
        out.mkdir()
        assert judge(load_record(saved(told, out)), out) == judge(told, out)


def test_a_sound_record_passes_and_a_planted_one_does_not(tmp_path: Path) -> None:
    """The verdict is that of the checks, and the advice that of the first difference."""
    good = judge(record(), tmp_path)
    assert [finding.text for finding in good.findings if finding.verdict is not Verdict.PASS] == []
    assert good.verdict is Verdict.PASS
    assert good.diagnosis is None
    bad = judge(record(wrong={"model/w": "x"}), tmp_path)
    assert bad.verdict is Verdict.FAIL
    assert bad.failures() == {FailureClass.WRONG_REPLICA: 1}
    assert bad.diagnosis is not None
    assert (bad.diagnosis.step, bad.diagnosis.rank, bad.diagnosis.moment) == (2, 1, "restore")


def test_a_trial_without_a_hurt_run_is_unknown_with_its_reason(tmp_path: Path) -> None:
    """Nothing was proved, and the report says why."""
    report = judge(without_hurt("the script does not get through undisturbed: boom"), tmp_path)
    assert report.verdict is Verdict.UNKNOWN
    assert [finding.check for finding in report.findings] == ["trial"]
    assert report.headline() == "nothing proved: the script does not get through undisturbed: boom"


def test_two_undisturbed_runs_that_differ_are_unknown_whatever_the_hurt_run_says(tmp_path: Path) -> None:
    """A difference between them outranks a failure: it cannot be told from the script's own wavering."""
    told = record(wrong={"model/w": "x"})
    assert told.undisturbed is not None
    again = replace(told.undisturbed, losses=((1, "0x1"), (2, "0x9")))
    report = judge(replace(told, repeat=again), tmp_path)
    assert report.verdict is Verdict.UNKNOWN
    assert "not deterministic: two undisturbed runs differ first at step 2, loss 0x2 and 0x9" in report.headline()


def test_figures_are_those_of_the_run(tmp_path: Path) -> None:
    """Median, 99th percentile and most of stall, durability lag, restore and recovery."""
    stall, lag, restore, recovery = judge(record(), tmp_path).figures
    assert (stall.count, stall.median, stall.p99, stall.most) == (2, 0.03, 0.04, 0.04)
    assert lag.values == pytest.approx((0.4, 0.5), abs=1e-5)
    assert (restore.count, restore.median) == (2, 0.3)
    assert recovery.values == (12.9,)


def test_a_folder_with_one_trial_is_rebuilt_in_place(tmp_path: Path) -> None:
    """Pages lost are made again, from the evidence alone."""
    rebuilt = rebuild(saved(record(), tmp_path))
    assert rebuilt.verdict is Verdict.PASS
    assert {path.name for path in tmp_path.iterdir()} == {"evidence", "report.html", "report.json", "junit.xml"}
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "pass"


def test_a_folder_with_many_trials_gets_their_index(tmp_path: Path) -> None:
    """One bad trial makes the whole red; an unknown one alone as well."""
    for name, told in (("a", record()), ("b", without_hurt("boom"))):
        (tmp_path / name).mkdir()
        saved(told, tmp_path / name)
    assert rebuild(tmp_path).verdict is Verdict.UNKNOWN
    (tmp_path / "deep" / "c").mkdir(parents=True)
    saved(record(leaks=("process 7",)), tmp_path / "deep" / "c")
    rebuilt = rebuild(tmp_path)
    assert rebuilt.verdict is Verdict.FAIL
    assert rebuilt.page == tmp_path / "index.html"
    assert 'href="deep/c/report.html"' in rebuilt.page.read_text()


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("trial.json", "{", r"trial\.json cannot be read"),
        ("trial.json", '{"format": 9}', "its format is 9, not 1"),
        ("hurt.json", "{}", r"hurt\.json cannot be read"),
        ("history.jsonl", '{"t": 1}\n', r"history\.jsonl cannot be read: line 1 is no event"),
    ],
)
def test_damaged_evidence_is_an_error_that_names_the_file(file: str, text: str, named: str, tmp_path: Path) -> None:
    """Nothing damaged is judged."""
    (saved(record(), tmp_path) / "evidence" / file).write_text(text)
    with pytest.raises(EvidenceError, match=named):
        load_record(tmp_path)


def test_the_report_verb_says_the_verdict_with_its_exit_code(tmp_path: Path) -> None:
    """0, 1 and 3 as for run; a folder without a trial is a usage error."""
    run = CliRunner()
    for name, told, code in (
        ("good", record(), 0),
        ("bad", record(leaks=("process 7",)), 1),
        ("none", without_hurt("boom"), 3),
    ):
        (tmp_path / name).mkdir()
        done = run.invoke(app, ["report", str(saved(told, tmp_path / name))])
        assert done.exit_code == code, done.output
        assert "report.html" in done.output
    done = run.invoke(app, ["report", str(tmp_path / "nowhere")])
    assert done.exit_code == 2
    done = run.invoke(app, ["report", "--json", str(tmp_path)])
    assert json.loads(done.stdout)["verdicts"] == {"pass": 1, "fail": 1, "unknown": 1}


def test_plain_values_of_another_type_are_errors() -> None:
    """A text where a number belongs, an unknown field, or a truth as a number: nothing is taken as it is."""
    assert from_plain(Moment, {"step": 3, "event": None}) == Moment(step=3)
    assert from_plain(Expectation, {"relaunches": [0, 1]}) == Expectation(relaunches=(0, 1))
    finding = {"check": "x", "verdict": "fail", "text": "t", "compared": 0, "failure": "leak"}
    assert from_plain(Finding, finding) == Finding.failed("x", FailureClass.LEAK, "t")
    for kind, value in (
        (Moment, {"step": "3"}),
        (Moment, {"steps": 3}),
        (Moment, {"nth": True}),
        (Expectation, {"relaunches": [0, "1"]}),
        (tuple[int, ...], "12"),
    ):
        with pytest.raises(TypeError):
            from_plain(kind, value)
