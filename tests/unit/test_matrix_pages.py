"""What a matrix leaves for people, build servers and programs: every cell is in each, and none is greener than it was."""

from __future__ import annotations

import html as entities
import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ckptd.chaos.matrix.cells import REASONS, Cell, cells, reason
from ckptd.chaos.matrix.pages import About, kept_out, write_matrix
from ckptd.chaos.matrix.results import NOT_APPLICABLE, CellResult
from ckptd.chaos.verdict import FailureClass, Verdict
from ckptd.protos.boundaries import BOUNDARIES

ABOUT = About(commit="abc", code="c" * 64, command="ckptd chaos matrix")
EVERY = list(cells())
APPLY = [one for one in EVERY if reason(one) is None]


def passed(cell: Cell) -> CellResult:
    return CellResult(cell=str(cell), verdict=Verdict.PASS, fired=True, seconds=1.0, problems={}, play="resumed")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, CellResult], Path]:
    """A matrix with one cell of each kind, and where it was written."""
    tmp_path = tmp_path_factory.mktemp("pages")
    known = {str(one): passed(one) for one in APPLY}
    wrong, unknown, left_out, _open = map(str, APPLY[:4])
    known[wrong] = CellResult(
        cell=wrong,
        verdict=Verdict.FAIL,
        fired=True,
        problems={"same_digests": "step 3, rank 1: <b>w</b> differs \x00", "no_leaks": "a socket"},
        classes=(str(FailureClass.SILENT_DIVERGENCE), str(FailureClass.LEAK)),
        evidence=str(tmp_path / "worker-1" / "run"),
    )
    known[unknown] = CellResult(cell=unknown, verdict=Verdict.UNKNOWN, problems={"trial": "no store"})
    known[left_out] = CellResult(cell=left_out, verdict=NOT_APPLICABLE, problems={"only-coordinator": ""})
    del known[_open]
    page = tmp_path / "worker-1" / "run" / "report.html"
    page.parent.mkdir(parents=True)
    page.write_text("")
    return known, write_matrix(EVERY, known, ABOUT, tmp_path / "out").parent


def test_the_page_shows_each_cell_as_it_is(outcome: tuple[dict[str, CellResult], Path]) -> None:
    """A field each, whatever became of it; what did not pass is told with class, replay line, and its own page."""
    _, out = outcome
    html = (out / "index.html").read_text()
    counts = {sign: len(re.findall(rf"<td[^>]*>{re.escape(sign)}</td>", html)) for sign in "✓✗?○"}
    assert counts == {"✓": len(APPLY) - 4, "✗": 1, "?": 1, "○": 1}
    assert all(name in html for name in BOUNDARIES)
    assert "silent divergence: 1" in html
    assert f"ckptd chaos matrix --again --only &#x27;{APPLY[0]}&#x27;" in html
    assert 'href="../worker-1/run/report.html"' in html
    assert "&lt;b&gt;w&lt;/b&gt;" in html
    assert "<b>w</b>" not in html
    assert all(one.text in entities.unescape(html) for one in REASONS)
    assert "http://" not in html.replace("http://www.w3.org", "")


def test_junit_has_a_suite_per_boundary_and_nothing_unproved_is_green(
    outcome: tuple[dict[str, CellResult], Path],
) -> None:
    """Failures have their class as type; what is unknown or was not run is an error, what does not apply is skipped with why."""
    known, out = outcome
    root = ET.fromstring((out / "junit.xml").read_text())  # noqa: S314 - our own
    assert [suite.get("name") for suite in root] == [f"matrix.{name}" for name in BOUNDARIES]
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == (str(len(EVERY)), "1", "2")
    assert root.get("skipped") == str(sum(kept_out(one, known) != "" for one in EVERY))
    (failure,) = root.iter("failure")
    assert failure.get("type") == "silent divergence"
    assert "--only" in (failure.text or "")
    assert {one.get("type") for one in root.iter("error")} == {"unknown", "open"}
    assert all(one.get("message", "").partition(":")[0] for one in root.iter("skipped"))


def test_the_report_for_programs_holds_every_cell_and_the_counts(outcome: tuple[dict[str, CellResult], Path]) -> None:
    """Run, not applicable with reasons, passed, failed, unknown, open: they add up to the product."""
    _, out = outcome
    told = json.loads((out / "report.json").read_text())
    assert [one["cell"] for one in told["cells"]] == list(map(str, EVERY))
    assert sum(told["totals"].values()) == len(EVERY)
    assert told["totals"] | {NOT_APPLICABLE: 0} == {
        "pass": len(APPLY) - 4,
        "fail": 1,
        "unknown": 1,
        "open": 1,
        NOT_APPLICABLE: 0,
    }
    assert told["silent_divergence"] == 1
    assert told["classes"] == {"silent divergence": 1, "leak": 1}
    assert set(told["not_applicable"]) <= set(told["reasons"])
    assert told["verdict"] == "fail"


@pytest.mark.parametrize("fired", [True, False])
def test_a_fault_that_never_fired_is_red_on_paper_too(tmp_path: Path, fired: bool) -> None:
    """A boundary whose cells all passed without their fault is named, and the matrix fails."""
    mine = [one for one in APPLY if one.boundary == "uploader.before_put"]
    known = {str(one): CellResult(cell=str(one), verdict=Verdict.PASS, fired=fired, problems={}) for one in mine}
    html = write_matrix(mine, known, ABOUT, tmp_path).read_text()
    assert ("fired in no cell: uploader.before_put" in html) == (not fired)
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == ("pass" if fired else "fail")
