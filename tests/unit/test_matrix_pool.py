"""Several workers run a matrix: no result is lost, none comes twice, and the time that is left is learned on the way."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ckptd.chaos.matrix.cells import TWO_NODES, Cell, cell_named, cells
from ckptd.chaos.matrix.pace import SECONDS, Pace
from ckptd.chaos.matrix.pool import Pool
from ckptd.chaos.matrix.results import CellResult, Results
from ckptd.chaos.verdict import Verdict

STANDIN = """
import json, os, sys, time
assert json.loads(sys.stdin.readline()) == {}
folder = sys.argv[3]
for line in sys.stdin:
    cell = line.strip()
    with open(os.path.join(os.path.dirname(folder), "asked"), "a") as file:
        file.write(f"{sys.argv[2]} {cell}\\n")
    if "DIES" in os.environ and os.environ["DIES"] in cell:
        sys.exit("it was all too much")
    result = {"cell": cell, "verdict": "pass", "problems": {}, "fired": True, "seconds": 1.5, "classes": []}
    text = json.dumps(result) + "\\n"
    os.write(1, text[:9].encode())  # an answer may come in pieces
    os.write(1, text[9:].encode())
"""


def some(count: int) -> list[Cell]:
    found = [one for one in cells([TWO_NODES]) if one.victim == "all" and one.store == "local"]
    return found[:count]


def run(tmp_path: Path, due: list[Cell], workers: int) -> tuple[Results, list[CellResult]]:
    script = tmp_path / "worker.py"
    script.write_text(STANDIN)
    kept, told = Results(tmp_path / "results", "0" * 64), list[CellResult]()
    with Pool(tmp_path / "out", kept, workers, command=(sys.executable, str(script))) as pool:
        pool.run(due, tell=told.append)
    return kept, told


def test_every_cell_is_run_once_and_kept(tmp_path: Path) -> None:
    """In the order given, by all workers; the file holds each result as one whole line."""
    due = some(20)
    kept, told = run(tmp_path, due, 3)
    names = list(map(str, due))
    asked = [line.split() for line in (tmp_path / "out" / "asked").read_text().splitlines()]
    assert sorted(cell for _, cell in asked) == sorted(names)
    for worker in {number for number, _ in asked}:
        mine = [names.index(cell) for number, cell in asked if number == worker]
        assert mine == sorted(mine)
    assert {result.cell for result in told} == set(names)
    lines = [json.loads(line) for line in kept.path.read_text().splitlines()]
    assert sorted(line["cell"] for line in lines) == sorted(names)
    assert all(Results(tmp_path / "results", "0" * 64).is_settled(name) for name in names)


def test_a_worker_that_dies_costs_its_own_cell_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That cell is unknown and says why; the others have their results, from those that are left and a new one."""
    due = some(12)
    monkeypatch.setenv("DIES", str(due[4]))
    kept, told = run(tmp_path, due, 2)
    assert len(told) == 12
    bad = [result for result in told if result.verdict != Verdict.PASS]
    assert [(result.cell, result.verdict) for result in bad] == [(str(due[4]), Verdict.UNKNOWN)]
    assert "it was all too much" in bad[0].problems["worker"]
    assert not kept.is_settled(str(due[4]))


def test_workers_that_always_die_end_the_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after each of two thousand cells: something else is wrong then, and the message says what they said."""
    monkeypatch.setenv("DIES", "/")
    with pytest.raises(RuntimeError, match="it was all too much"):
        run(tmp_path, some(30), 2)


def test_a_cell_is_found_by_its_name() -> None:
    """Workers are told names; each of the product comes back as it was, and nothing else does."""
    assert all(cell_named(str(one)) == one for one in cells())
    name = str(next(cells()))
    for wrong in ("", "x", name.upper(), name + "/1x2", name.replace("local", "tape"), "no.such/kill/rank/local/2x1"):
        with pytest.raises(ValueError, match="no cell"):
            cell_named(wrong)


def test_what_is_left_is_learned_from_what_was_done() -> None:
    """At first as measured elsewhere; a machine ten times slower is soon known for it, and at the end nothing is left."""
    due = some(40)
    pace, whole = Pace(due, 2), 40 * SECONDS["kill all"] / 2
    assert pace.left_s(0.0) == pytest.approx(whole)
    for cell in due[:20]:
        pace.done(str(cell))
    assert pace.left_s(whole / 2) == pytest.approx(whole / 2)
    assert 2 * whole < pace.left_s(5 * whole) < 5 * whole
    for cell in due[20:]:
        pace.done(str(cell))
    assert pace.left_s(10 * whole) == pytest.approx(0)
