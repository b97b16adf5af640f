"""The pytest plugin's wiring: what a verdict makes of a test, and that it costs nothing to those who do not use it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

# What the fixture runs is replaced: one real run stands in tests/integration/test_chaos_own_script.py.
CONFTEST = """
import sys
import pytest
import ckptd.chaos.preset_run
from ckptd.chaos.diagnosis import Diagnosis
from ckptd.chaos.preset_run import Series
from ckptd.chaos.report import Report
from ckptd.chaos.verdict import FailureClass, Finding, Verdict

SEEN = []

@pytest.fixture(autouse=True)
def double(monkeypatch):
    def run(stage, scenarios, *, store, seed, cache_folder, twice, **_more):
        SEEN.append((stage, scenarios, store, seed, twice))
        args = stage.command[1:]
        finding = Finding.passed("same_end", "fine")
        if "wrong" in args:
            finding = Finding.failed("same_state_digests", FailureClass.SILENT_DIVERGENCE, "first at step 5: net/w")
        if "stranger" in args:
            finding = Finding.unknown("trial", "made no Checkpointer")
        advice = Diagnosis(
            launch=2, step=5, rank=None, moment="step", names=("net/w",), count=1, loss_differs=False, restored=4,
            after_restore="not listed", cause="loader", advice="Not tracked: batches in main()",
        )
        report = Report(
            scenario=scenarios[0].name, title="t", nnodes=stage.nnodes, nproc=stage.nproc, store=store, seed=seed,
            command=stage.command, out=stage.out, findings=(finding,), verdict=finding.verdict,
            unfit="does not use the client" if "stranger" in args else "", preset=stage.preset,
            diagnosis=advice if "wrong" in args else None,
        )
        return Series(reports=(report,), page=stage.out / "index.html", seconds=1.0)
    # pytester takes modules back that a run in this process has imported, but not out of their packages.
    monkeypatch.setattr(sys.modules["ckptd.chaos.preset_run"], "run_series", run)
"""
TESTS = """
from conftest import SEEN

def test_resumes(ckptd_chaos):
    ckptd_chaos("train.py", "--steps", "20", nproc=3)
    stage, scenarios, store, _seed, twice = SEEN.pop()
    assert stage.command == ("train.py", "--steps", "20")
    assert (stage.nnodes, stage.nproc, store, twice, stage.preset) == (1, 3, "local", True, "ci")
    assert stage.environment == {"CKPTD_WAIT_WHEN_BUSY": "1"}
    assert len(scenarios) > 3

def test_twice(ckptd_chaos):
    first, second = (ckptd_chaos("train.py", only=("everything-lost",), once=True, seed=n) for n in (1, 2))
    assert first.page.parent != second.page.parent
    assert [one.scenario for one in first.reports] == ["everything-lost"]

def test_diverges(ckptd_chaos):
    ckptd_chaos("train.py", "wrong", seed=7)

def test_is_no_user(ckptd_chaos):
    ckptd_chaos("train.py", "stranger")

def test_is_asked_wrongly(ckptd_chaos):
    ckptd_chaos("python", "train.py")
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TESTS)
    pytester.makepyfile(train="")
    return pytester


def plugin() -> tuple[str, ...]:
    # Where this tree is installed the entry point has loaded it already.
    return ("-p", "ckptd.chaos.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:xdist")


def test_a_verdict_becomes_the_outcome_of_a_test(project: pytest.Pytester) -> None:
    """A pass passes; all else fails with headline, first divergence, advice, replay line and page, and no traceback."""
    ended = project.runpytest_inprocess(*plugin(), "--ckptd-chaos-out", "kept")
    ended.assert_outcomes(passed=2, failed=3)
    kept = project.path / "kept" / "test_it.py__test_diverges" / "chaos-1"
    ended.stdout.fnmatch_lines(
        [
            "rank-killed-while-uploading: fail: silent divergence: first at step 5: net/w",
            "  first divergence: launch 2, step 5: net/w",
            "  likely: loader: Not tracked: batches in main()",
            "  again: ckptd chaos run --preset ci --only * --nnodes 1 --nproc 2 * --seed 7 -- train.py wrong",
            f"page: {kept}/index.html",
            "rank-killed-while-uploading: unknown: nothing proved: made no Checkpointer",
            "*UsageError: ckptd_chaos: the harness starts Python itself*leave 'python' out: -- train.py",
        ]
    )
    assert "pytest_plugin.py" not in "\n".join(line for line in ended.outlines if "prove(" in line)


def test_a_folder_of_an_earlier_run_is_not_written_into(project: pytest.Pytester) -> None:
    """Evidence of two runs never mixes."""
    line = (*plugin(), "--ckptd-chaos-out", "kept", "-k", "test_resumes")
    project.runpytest_inprocess(*line).assert_outcomes(passed=1)
    ended = project.runpytest_inprocess(*line)
    ended.assert_outcomes(failed=1)
    ended.stdout.fnmatch_lines(["*chaos-1 is there already; --ckptd-chaos-out names a new folder each time"])


def test_the_entry_point_bears_the_name_of_its_module() -> None:
    """So `-p` and the entry point are one plugin: pytest refuses one module under two names."""
    text = (Path(__file__).parent.parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    points = tomllib.loads(text)["project"]["entry-points"]["pytest11"]
    assert points == {"ckptd.chaos.pytest_plugin": "ckptd.chaos.pytest_plugin"}


def test_nothing_of_the_harness_is_imported_before_the_fixture_is_used() -> None:
    """Whoever has ckptd installed and tests something else pays for one small module."""
    code = (
        "import sys, pytest; before = set(sys.modules); import ckptd.chaos.pytest_plugin; "
        "print(sorted(name for name in set(sys.modules) - before if not name.startswith('_')))"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "['ckptd', 'ckptd.chaos', 'ckptd.chaos.pytest_plugin']"
