"""A series of trials that does not come to its end: what is done is told at once, and what is open is named."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from fixtures.chaos_trials import record
from typer.testing import CliRunner

from ckptd.chaos import preset_run
from ckptd.chaos.cli import app
from ckptd.chaos.conductor import Limits
from ckptd.chaos.ending import SignalledError, ends_in_order
from ckptd.chaos.judging import judge
from ckptd.chaos.leading import Undisturbed
from ckptd.chaos.preset import load_preset
from ckptd.chaos.preset_run import run_series
from ckptd.chaos.record import Record
from ckptd.chaos.report import Report
from ckptd.chaos.reports.summary import write_summary
from ckptd.chaos.trial import Stage
from ckptd.chaos.verdict import Verdict

SCENARIOS = load_preset("ci").scenarios
NAMES = [scenario.name for scenario in SCENARIOS]


def summary(out: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((out / "report.json").read_text())
    return told


def errors(out: Path) -> list[str]:
    """Return the suites in which something was not done."""
    suites = ET.parse(out / "junit.xml").getroot().findall("testsuite")  # noqa: S314 - our own
    return [str(suite.get("name")) for suite in suites if suite.find("testcase/error[@type='not done']") is not None]


def series(out: Path, monkeypatch: pytest.MonkeyPatch, *, ends_at: str) -> tuple[list[list[str]], list[Report]]:
    """Run the preset with doubles of its runs, of which one is broken off; return what was open when each trial was told."""
    sound = record()
    opened: list[list[str]] = []
    told: list[Report] = []

    def undisturbed(*_args: object, **_options: object) -> Undisturbed:
        assert summary(out)["open"] == NAMES
        if ends_at == "undisturbed":
            raise SignalledError(signal.SIGTERM)
        assert sound.undisturbed is not None
        return Undisturbed(first=sound.undisturbed)

    def hurt(
        stage: Stage, _scenario: object, _store: object, begun: Record, *_more: object, **_options: object
    ) -> Record:
        if stage.out.name == ends_at:
            raise SignalledError(signal.SIGTERM)
        return replace(begun, performance=sound.performance, hurt=sound.hurt)

    def tell(report: Report) -> None:
        told.append(report)
        opened.append(summary(out)["open"])

    monkeypatch.setattr(preset_run, "_sharing", lambda stage, _stack: stage)
    monkeypatch.setattr(preset_run, "undisturbed_runs", undisturbed)
    monkeypatch.setattr(preset_run, "hurt", hurt)
    stage = Stage(
        nnodes=1, nproc=2, command=("train.py",), out=out, limits=Limits(run=timedelta(seconds=9)), preset="ci"
    )
    with pytest.raises(SignalledError):
        run_series(stage, SCENARIOS, store="local", seed=1, cache_folder=None, tell=tell)
    return opened, told


def test_the_summary_is_there_after_each_trial_and_names_what_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever kills the command finds index, JUnit and JSON of what was done; the rest is no pass."""
    opened, told = series(tmp_path, monkeypatch, ends_at=NAMES[2])
    assert opened == [NAMES[1:], NAMES[2:], NAMES[3:]]
    assert told[2].headline() == "nothing proved: broken off by SIGTERM before its end"
    left = summary(tmp_path)
    assert (left["open"], [one["scenario"] for one in left["reports"]]) == (NAMES[3:], NAMES[:3])
    assert left["verdict"] != "pass"
    assert errors(tmp_path) == [f"chaos.{name}" for name in NAMES[3:]]
    index = (tmp_path / "index.html").read_text()
    assert f'href="{NAMES[2]}/report.html"' in index
    assert index.count("not done: the command has not come to it, or was ended before") == len(NAMES[3:])


def test_passes_are_no_pass_while_something_is_open(tmp_path: Path) -> None:
    """All that was done is green: of the rest nothing is proved. A failure stays one."""
    for verdict, overall in ((Verdict.PASS, "unknown"), (Verdict.FAIL, "fail")):
        report = replace(judge(record(), tmp_path), verdict=verdict)
        write_summary([report], tmp_path, still_open=["node-lost"])
        assert summary(tmp_path)["verdict"] == overall
        assert f"<title>{overall}: " in (tmp_path / "index.html").read_text()


def test_a_series_that_ends_before_its_first_trial_leaves_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is proved of anything, and the report of the undisturbed run says why."""
    opened, (told,) = series(tmp_path, monkeypatch, ends_at="undisturbed")
    assert opened == [NAMES]
    assert (told.scenario, told.out) == ("undisturbed", tmp_path / "undisturbed")
    # It is none of the preset's scenarios, so that it cannot be asked for alone.
    assert told.replay == "ckptd chaos run --preset ci --nnodes 1 --nproc 2 --store local --seed 1 -- train.py"
    assert summary(tmp_path)["verdict"] == "unknown"
    assert errors(tmp_path) == [f"chaos.{name}" for name in NAMES]


def test_the_first_signal_asks_and_the_second_one_would_end() -> None:
    """Afterwards all is as it was."""
    before = signal.getsignal(signal.SIGTERM)
    then: list[object] = []

    @ends_in_order()
    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            then.append(signal.getsignal(signal.SIGTERM))

    with pytest.raises(SignalledError) as ended:
        work()
    assert then == [signal.SIG_DFL]
    assert (ended.value.number, ended.value.exit_code) == (signal.SIGTERM, 143)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("out", [None, "out", "there"])
def test_a_scenario_that_does_not_fit_leaves_no_folder(
    out: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a temporary one nor one of a name; a folder that was there stays."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    named = [] if out is None else ["--out", out]
    ended = CliRunner().invoke(app, ["run", "store-outage", *named, "--", "train.py"])
    assert (ended.exit_code, "say --store s3" in ended.output) == (2, True), ended.output
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["there", "tmp", "train.py"]
