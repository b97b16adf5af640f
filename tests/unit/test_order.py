"""The order of test files in a parallel run, and which scenarios it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.asked import VARIABLE, asked
from fixtures.order import HEAVY, turn

from ckptd.chaos.scenario_reader import scenario_names

TESTS = Path(__file__).parent.parent


def test_heavy_files_begin_and_unit_tests_end() -> None:
    """Each heavy file is there under its name and comes before all others."""
    files = sorted(TESTS.glob("*/test_*.py"), key=turn)
    assert [path.name for path in files[: len(HEAVY)]] == list(HEAVY)
    assert [path.parent.name for path in files[-20:]] == ["unit"] * 20


def test_the_usual_scenarios_are_run_unless_others_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All, or those that are named; a name that no scenario has is refused with all names."""
    usual, every = ["node-lost"], scenario_names()
    monkeypatch.delenv(VARIABLE, raising=False)
    assert asked(usual, every) == usual
    monkeypatch.setenv(VARIABLE, "all")
    assert asked(usual, every) == every
    monkeypatch.setenv(VARIABLE, "rank-raises everything-lost")
    assert asked(usual, every) == ["everything-lost", "rank-raises"]
    assert asked(usual, ["partition-heals"]) == []
    monkeypatch.setenv(VARIABLE, "node-loost")
    with pytest.raises(ValueError, match="no scenario node-loost; say all, or: agent-killed-mid-upload"):
        asked(usual, every)
