"""Presets: what a file may say, what the package's own says, and which word counts where several say something."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ckptd.chaos.cli import app
from ckptd.chaos.command import CommandError
from ckptd.chaos.preset import load_preset, parse_preset, preset_names
from ckptd.chaos.request import read_request
from ckptd.chaos.scenario_reader import ScenarioError
from ckptd.chaos.schedule import schedule

NAMES = 'scenarios = ["everything-lost"]\n'


def test_the_preset_for_ci_hits_every_role_and_fits_its_own_size() -> None:
    """One node with two ranks is enough for all of its scenarios, and no save is skipped."""
    preset = load_preset("ci")
    assert preset_names() == ["ci"]
    assert preset.environment() == {"CKPTD_WAIT_WHEN_BUSY": "1"}
    assert 4 <= len(preset.scenarios) <= 6
    kinds = set()
    for scenario in preset.scenarios:
        faults = schedule(scenario, nnodes=preset.nodes, nproc=preset.ranks, seed=1)
        kinds |= {(fault.do, fault.kind) for fault in faults}
    assert kinds == {("kill", "rank"), ("kill", "agent"), ("kill", "coordinator"), ("kill", "all"), ("lose", "all")}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("scenarios = [", "preset x:"),
        ("", "scenarios is a list of names or .toml files, not None"),
        ("scenarios = []", "scenarios is a list of names"),
        ('scenarios = ["nothing"]', "there is no scenario 'nothing'; there are: agent-killed-mid-upload"),
        ('scenarios = ["node-lost", "node-lost"]', "scenario 'node-lost' is there twice"),
        (NAMES + "nnodes = 2", "unknown key 'nnodes'; allowed: title, nodes, ranks"),
        (NAMES + "ranks = 0", "ranks is a whole number from 1, not 0"),
        (NAMES + 'store = "tape"', "store is 'tape'; allowed: local, s3"),
        (NAMES + "every_save = 1", "every_save is true or false, not 1"),
    ],
)
def test_a_wrong_preset_is_refused_with_what_is_allowed(text: str, says: str) -> None:
    """Nothing is begun with a preset that cannot be meant."""
    with pytest.raises(ScenarioError) as refused:
        parse_preset(text, name="x")
    assert says in str(refused.value)


def test_options_win_over_a_torchrun_line_and_both_over_the_preset(tmp_path: Path) -> None:
    """What nobody says is the preset's; without one, the command's own."""
    (tmp_path / "p.toml").write_text(NAMES + "nodes = 2\nranks = 3\ntimeout_s = 50\n")
    script = tmp_path / "train.py"
    script.touch()
    told = read_request("torchrun", ["--nproc-per-node=4", str(script)], preset=str(tmp_path / "p.toml"), store="s3")
    assert (told.nnodes, told.nproc, told.store, told.timeout) == (2, 4, "s3", timedelta(seconds=50))
    alone = read_request("node-lost", [str(script)], nnodes=3)
    assert (alone.nnodes, alone.nproc, alone.store, alone.timeout) == (3, 2, "local", timedelta(seconds=600))
    assert [one.name for one in alone.scenarios] == ["node-lost"]
    assert alone.preset is None


@pytest.mark.parametrize(
    ("preset", "timeout", "bounds"),
    [
        (None, None, (600, 300)),
        ("ci", None, (300, 150)),
        ("ci", 3000, (3000, 1500)),
        ("ci", 60, (60, 150)),
        ("p.toml", None, (4000, 2000)),
    ],
)
def test_the_longest_silence_grows_with_the_bound_of_a_run(
    preset: str | None, timeout: float | None, bounds: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that compiles or downloads for long needs one option, not two, and the preset's file counts as well."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.toml").write_text(NAMES + "timeout_s = 4000\n")
    (tmp_path / "train.py").touch()
    first, rest = ("train.py", []) if preset else ("node-lost", ["train.py"])
    asked = read_request(first, rest, preset=preset, timeout=timeout)
    limits = asked.stage(tmp_path, lambda _run, _event: None).limits
    assert (limits.run.total_seconds(), limits.progress.total_seconds()) == bounds
    assert "a longer --timeout" in limits.way_out


def test_a_scenario_of_a_preset_can_be_run_alone(tmp_path: Path) -> None:
    """By its name; any other is refused, and so is a scenario beside a preset."""
    script = tmp_path / "train.py"
    script.touch()
    told = read_request(str(script), [], preset="ci", only=["everything-lost"])
    assert [one.name for one in told.scenarios] == ["everything-lost"]
    with pytest.raises(ScenarioError, match="preset ci has no scenario 'x'; it has: rank-killed"):
        read_request(str(script), [], preset="ci", only=["x"])
    with pytest.raises(CommandError, match="for this one of them: --only node-lost"):
        read_request("node-lost", [str(script)], preset="ci")
    with pytest.raises(CommandError, match="say --preset ci"):
        read_request(str(script), ["node-lost"])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["--preset", "ci", "--", "python", "train.py"], "leave 'python' out: -- train.py"),
        (["--preset", "ci", "--", "accelerate", "launch", "train.py"], "name the script alone: -- train.py"),
        (["--preset", "ci", "--", "missing.py"], "there is no script 'missing.py'"),
        (["--preset", "cj", "--", "missing.py"], "there is no preset 'cj'; there are: ci"),
        (["node-lost"], "there is no script; the right form: -- train.py ..."),
        (["--preset", "ci", "--nproc", "2"], "there is no script; the right form: -- train.py ..."),
        (["--preset", "cj"], "there is no preset 'cj'; there are: ci"),
        (["--nproc", "2"], "there is no scenario; say --preset ci, or a name of --list"),
        (["node-lost", "--only", "x", "--", "missing.py"], "--only goes with --preset"),
    ],
)
def test_the_command_refuses_before_anything_starts(line: list[str], says: str, tmp_path: Path) -> None:
    """Exit code 2, one sentence on stderr, and no folder is made."""
    out = tmp_path / "out"
    ended = CliRunner().invoke(app, ["run", "--out", str(out), *line])
    assert ended.exit_code == 2
    assert says in " ".join(ended.output.split())
    assert not out.exists()


def test_a_preset_needs_no_scenario() -> None:
    """The help does not ask for one, and so nothing does."""
    scenario = next(one for one in typer.main.get_command(app).commands["run"].params if one.name == "scenario")  # type: ignore[attr-defined]
    assert not scenario.required


def test_presets_are_listed() -> None:
    """`--list` names them after the scenarios."""
    ended = CliRunner().invoke(app, ["--list"])
    assert "--preset ci" in ended.output
