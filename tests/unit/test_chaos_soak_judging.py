"""What random schedules need of scenarios, and when one of them proves something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from ckptd.chaos.accounts import Account
from ckptd.chaos.checkers.case import Case
from ckptd.chaos.checkers.promises import faults_fired
from ckptd.chaos.cli import app
from ckptd.chaos.cluster.process import ProcessError
from ckptd.chaos.conductor import Performance
from ckptd.chaos.evidence import Evidence
from ckptd.chaos.history import History
from ckptd.chaos.judging import judge
from ckptd.chaos.record import Record, load_record, save_record
from ckptd.chaos.scenario import Expectation, Moment, Scenario
from ckptd.chaos.scenario_reader import ScenarioError, load, parse
from ckptd.chaos.soak.drawing import draw
from ckptd.chaos.soak.running import Setting, Soak
from ckptd.chaos.soak.telling import as_plain
from ckptd.chaos.verdict import FailureClass, Verdict

FAULT = """\
title = "t"

[[fault]]
do = "kill"
target = "agent 1"
at = { event = "staged" }

[[fault]]
do = "kill"
target = "agent 1"
at = { failpoint = "agent.heard_welcome", restarting = true }
"""


def account(*, fired: bool) -> Account:
    return Account(
        kind="kill",
        target="rank 1",
        moment="event staged",
        step=None,
        fired=fired,
        late="",
        note="" if fired else "its moment never came",
        relaunched=False,
        restored_step=None,
        restored_from=None,
        lost_steps=None,
        recovery_s=None,
    )


def case(*fired: bool, may_miss: bool) -> Case:
    performance = Performance(
        history=History(), finished=True, launches=1, struck=(), why="", agent_ends={}, leaks=(), shared={}
    )
    return Case(
        scenario=Scenario(name="x", title="x", expect=Expectation(may_miss=may_miss)),
        undisturbed=Evidence(),
        hurt=Evidence(),
        performance=performance,
        accounts=tuple(account(fired=one) for one in fired),
    )


def test_a_moment_that_never_came_is_told_and_fails_nothing() -> None:
    """In a random schedule the job may be done before: the fault is named as one that was not done."""
    finding = faults_fired(case(True, False, may_miss=True))
    assert finding.verdict is Verdict.PASS
    assert finding.text.endswith("did not fire: kill rank 1 at event staged: its moment never came")
    assert faults_fired(case(True, False, may_miss=False)).failure is FailureClass.FAULT_MISSED


def test_a_schedule_that_did_nothing_proves_nothing() -> None:
    """A job that nobody hurt is no evidence, however well it went."""
    assert faults_fired(case(False, False, may_miss=True)).verdict is Verdict.UNKNOWN


def test_a_fault_may_strike_a_job_that_starts_again() -> None:
    """By a failpoint of an agent that is started again, by an event, or by time."""
    read = parse(FAULT, name="x", source="x.toml")
    assert read.faults[1].at == Moment(failpoint="agent.heard_welcome", restarting=True)
    by_time = FAULT.replace('failpoint = "agent.heard_welcome", restarting = true', "after_ms = 250")
    assert parse(by_time, name="x", source="x.toml").faults[1].at == Moment(after_ms=250)


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (
            'failpoint = "agent.heard_welcome"',
            "with restarting = true also one after a fault that has the target's agent",
        ),
        ("after_ms = 0", "after_ms is a whole number from 1"),
        ('event = "staged", restarting = 1', "restarting is true or false"),
        ('after_ms = 5, event = "staged"', "exactly one of step, event, failpoint, after_ms"),
    ],
)
def test_a_wrong_moment_is_refused_with_its_line(new: str, words: str) -> None:
    """File, line and what is allowed, as everywhere."""
    with pytest.raises(ScenarioError) as caught:
        parse(FAULT.replace('failpoint = "agent.heard_welcome", restarting = true', new), name="x", source="x.toml")
    assert str(caught.value).startswith("x.toml:11: ")
    assert words in str(caught.value)


def test_the_line_that_runs_a_file_again_names_the_file(tmp_path: Path) -> None:
    """A scenario of one's own is found by its path, not by its name; and a soak's schedule by its seed."""
    (tmp_path / "own.toml").write_text(FAULT, encoding="utf-8")
    scenario = load(str(tmp_path / "own.toml"))
    record = Record(scenario=scenario, nnodes=2, nproc=1, store="local", seed=3, command=("train.py",))
    assert judge(record, tmp_path).replay == (
        f"ckptd chaos run {tmp_path / 'own.toml'} --nnodes 2 --nproc 1 --store local --seed 3 -- train.py"
    )
    drawn = replace(record, replay="ckptd chaos soak --seed 3 --seeds 1")
    save_record(drawn, tmp_path)
    assert judge(load_record(tmp_path), tmp_path).replay == "ckptd chaos soak --seed 3 --seeds 1"


def test_a_soak_that_cannot_start_its_processes_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is out of breath: it is said, with evidence, and neither a traceback nor a pass."""

    def refuse(_stack: object) -> NoReturn:
        raise ProcessError("the fork server did not start: out of breath")

    monkeypatch.setattr("ckptd.chaos.soak.running.spawners", refuse)
    monkeypatch.setattr("ckptd.chaos.cluster.disks.missing", lambda: "not here")
    with Soak(Setting(nnodes=2, nproc=1), tmp_path) as soak:
        report = soak.run(
            draw(3, nnodes=2, nproc=1, store="local"), store="local", seed=3, name="a b", replay="again {file}"
        )
    assert report.verdict is Verdict.UNKNOWN
    assert "out of breath" in " ".join(finding.text for finding in report.findings)
    assert (tmp_path / "a b" / "report.html").is_file()
    # A folder with a blank in its name is one word of the line.
    assert report.replay == f"again '{tmp_path / 'a b' / 'schedule.toml'}'"


@pytest.mark.parametrize(
    ("words", "text"), [(["-m", "no-module"], "-m needs the name"), (["python", "x.py"], "leave 'python' out")]
)
def test_a_soak_reads_its_command_as_the_other_verbs_do(words: list[str], text: str) -> None:
    """A module, a torchrun line; all else is refused with the right form, and two numbers that differ as well."""
    refused = CliRunner().invoke(app, ["soak", "--list", "--seeds", "1", "--", *words])
    assert (refused.exit_code, text in refused.output) == (2, True), refused.output
    differs = CliRunner().invoke(
        app, ["soak", "--list", "--seeds", "1", "--", "torchrun", "--nnodes=3", "-m", "some.module"]
    )
    assert (differs.exit_code, "--nnodes is 2, but torchrun is told 3" in differs.output) == (2, True), differs.output
    listed = CliRunner().invoke(
        app, ["soak", "--list", "--seed", "1", "--seeds", "1", "--", "-m", "some.module", "two words"]
    )
    assert listed.exit_code == 0, listed.output


def test_faults_are_counted_by_kind(tmp_path: Path) -> None:
    """The summary says how many faults of each kind were drawn, and how many were done."""
    scenario = draw(3, nnodes=2, nproc=1, store="local")
    record = Record(scenario=scenario, nnodes=2, nproc=1, store="local", seed=3, command=("train.py",))
    report = replace(judge(record, tmp_path), accounts=(account(fired=True), account(fired=False)))
    told = as_plain([report, report], [], broken_off=False)
    assert told["faults"] == {"planned": 4, "fired": 2, "by_kind": {"kill rank": {"planned": 4, "fired": 2}}}
    assert told["verdicts"] == {"pass": 0, "fail": 0, "unknown": 2}
    assert told["broken_off"] is False
