"""What is installed is what is in the tree: code, scenarios, presets, pages, and the names by which others find them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling builds the wheel (pip install '.[dev]')")

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("client", "daemon", "protos", "storage_backends", "chaos")


def in_the_tree() -> set[str]:
    """Return the files of all rooms as they are named in the wheel."""
    files = {
        path.relative_to(ROOT / room).as_posix()
        for room in ROOMS
        for path in (ROOT / room / "ckptd").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(files) > 300
    return files


def test_the_wheel_holds_every_file_of_the_tree() -> None:
    """No scenario, preset, stylesheet or generated module stays behind, and nothing else gets in: no test, no example."""
    told = {file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    assert told == in_the_tree()
    for kind in (
        "scenarios/node-lost.toml",
        "presets/ci.toml",
        "reports/page.css",
        "reports/page.js",
        "matrix/grid.css",
    ):
        assert f"ckptd/chaos/{kind}" in told


def test_every_entry_point_leads_into_the_wheel() -> None:
    """The command, its verbs and pytest's plugin are modules that are there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = [target for group in project["entry-points"].values() for target in group.values()]
    files = in_the_tree()
    for target in [*points, *project["scripts"].values()]:
        module = target.partition(":")[0].replace(".", "/")
        assert {f"{module}.py", f"{module}/__init__.py"} & files, target
