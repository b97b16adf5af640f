"""docs/chaos-ci.md: what it tells people to copy works as it stands there."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from ckptd.chaos.cli import app
from ckptd.chaos.preset import load_preset, parse_preset
from ckptd.chaos.preset_run import TRIES
from ckptd.chaos.request import read_request
from ckptd.chaos.scenario_reader import ScenarioError

PAGE = (Path(__file__).parent.parent.parent / "docs" / "chaos-ci.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def accepted(line: str) -> None:
    """Let the command's own parser read the line, and what stands behind it be understood, without running it."""
    words = shlex.split(line)
    assert words[:3] == ["ckptd", "chaos", "run"]
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    with command.make_context("run", words[3:]) as context:
        told = dict(context.params)
    kept = {name: told[name] for name in ("preset", "only", "nnodes", "nproc", "store", "timeout")}
    asked = read_request(told["scenario"], told["command"] or [], **(kept | {"only": kept["only"] or []}))
    assert asked.script == ("train.py", "--steps", "20")
    assert asked.nproc == 2
    assert len(asked.scenarios) > 1


def read_timeout(line: str) -> int:
    """Return the bound of each run, seconds."""
    words = shlex.split(line)
    return int(words[words.index("--timeout") + 1]) if "--timeout" in words else load_preset("ci").timeout_s


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def test_the_commands_are_accepted() -> None:
    """Both of "two commands", as a shell reads them."""
    lines = [line.removeprefix("$ ") for line in "".join(blocks("console")).splitlines()]
    assert lines[0] == "pip install ckptd"
    accepted(lines[1])


def test_the_job_for_github_parses_and_its_command_is_accepted() -> None:
    """It is YAML, runs the preset into the folder that it uploads, and uploads it whatever comes out."""
    (text,) = blocks("yaml")
    job = yaml.safe_load(text)["jobs"]["resumes"]
    (run,) = [step["run"] for step in job["steps"] if "chaos" in step.get("run", "")]
    accepted(run)
    out = shlex.split(run)[shlex.split(run).index("--out") + 1]
    bound = read_timeout(run)
    runs = 2 + TRIES * len(load_preset("ci").scenarios)
    (limit,) = [step["timeout-minutes"] for step in job["steps"] if step.get("run") == run]
    # A hang in each run ends with a verdict, not with a killed step; and the upload has its time.
    assert runs * bound < 60 * limit < 60 * job["timeout-minutes"]
    upload = job["steps"][-1]
    assert upload["if"] == "always()"
    assert all(path.startswith(f"{out}/") for path in upload["with"]["path"].split())


def test_the_preset_is_one() -> None:
    """But for the scenario file, which is the reader's."""
    (text,) = blocks("toml")
    with pytest.raises(ScenarioError, match=r"there is no scenario file \./power-cut\.toml"):
        parse_preset(text, name="x")
    preset = parse_preset(text.replace('"./power-cut.toml"', '"everything-lost"'), name="x")
    assert (preset.nodes, preset.ranks, preset.timeout_s, preset.every_save) == (2, 2, 300, True)


def test_the_pytest_example_is_python() -> None:
    """Three lines, and only arguments that the fixture has."""
    (text,) = blocks("python")
    call = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    assert {keyword.arg for keyword in call.keywords} == {"nproc", "preset"}
