"""A matrix on paper: index.html for people, junit.xml for build servers, report.json for programs.

Owns: how boundaries, roles and stores are laid out, and what each form says of a cell. Does not own: counting (`summary`), the
pages of single cells (`running` has them written). Each file is whole or not there. Invariant: a cell that was not run, or
proved nothing, is green in no form: JUnit has it as an error.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from ckptd.chaos.matrix.cells import ONLY_COORDINATOR, REASONS, VICTIMS, Cell, reason
from ckptd.chaos.matrix.results import NOT_APPLICABLE, CellResult
from ckptd.chaos.matrix.summary import Summary, summarize
from ckptd.chaos.reports.junit import clean
from ckptd.chaos.reports.markup import Markup, join, tag
from ckptd.chaos.reports.page import document
from ckptd.chaos.reports.sections import chip, duration, table
from ckptd.chaos.reports.write import JSON, JUNIT, PAGE, write_text
from ckptd.chaos.verdict import Verdict

INDEX = "index.html"
_SIGNS = {str(Verdict.PASS): "✓", str(Verdict.FAIL): "✗", str(Verdict.UNKNOWN): "?", "open": "○"}
_TEXTS = {one.name: one.text for one in (*REASONS, ONLY_COORDINATOR)}


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a matrix was run on.

    Attributes:
        commit: Of the checkout; may be empty.
        code: Digest of the code.
        command: What runs the rest of it, or it again.
    """

    commit: str
    code: str
    command: str


def write_matrix(cells: Sequence[Cell], results: Mapping[str, CellResult], about: About, folder: Path) -> Path:
    """Write all forms into `folder`; return the index's path.

    Raises:
        OSError: As the file system says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary = summarize(cells, results)
    write_text(folder / JSON, json.dumps(_told(cells, results, summary, about), indent=1) + "\n")
    write_text(folder / JUNIT, _junit(cells, results, about))
    write_text(folder / INDEX, _index(cells, results, summary, about, folder))
    return folder / INDEX


def kept_out(cell: Cell, results: Mapping[str, CellResult]) -> str:
    """Return the name of the reason for which a cell does not apply; empty if it does, as far as is known."""
    declared = reason(cell)
    if declared is not None:
        return declared.name
    result = results.get(str(cell))
    return next(iter(result.problems)) if result is not None and result.verdict == NOT_APPLICABLE else ""


def _told(cells: Sequence[Cell], results: Mapping[str, CellResult], summary: Summary, about: About) -> dict[str, Any]:
    told: list[dict[str, Any]] = []
    for cell in cells:
        why = kept_out(cell, results)
        result = results.get(str(cell))
        if why:
            told.append({"cell": str(cell), "verdict": NOT_APPLICABLE, "reason": why})
        elif result is None:
            told.append({"cell": str(cell), "verdict": "open"})
        else:
            told.append(result.to_dict())
    return {
        "commit": about.commit,
        "code": about.code,
        "again": about.command,
        **summary.to_dict(),
        "reasons": _TEXTS,
        "cells": told,
    }


# ---------------------------------------------------------------- JUnit


def _junit(cells: Sequence[Cell], results: Mapping[str, CellResult], about: About) -> str:
    """Return a suite per boundary, a case per cell that applies; a cell that does not is skipped, with its reason."""
    by_boundary: dict[str, list[Cell]] = {}
    for cell in cells:
        by_boundary.setdefault(cell.boundary, []).append(cell)
    root = ET.Element("testsuites", name="ckptd chaos matrix")
    for boundary, mine in by_boundary.items():
        root.append(_suite(boundary, mine, results, about))
    for key in ("tests", "failures", "errors", "skipped"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in root)))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in root):.3f}")
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(boundary: str, cells: Sequence[Cell], results: Mapping[str, CellResult], about: About) -> ET.Element:
    name = f"matrix.{boundary}"
    suite = ET.Element("testsuite", name=clean(name), hostname="localhost")
    properties = ET.SubElement(suite, "properties")
    for key, value in (("commit", about.commit), ("code", about.code), ("again", about.command)):
        ET.SubElement(properties, "property", name=key, value=clean(value))
    seconds = 0.0
    for cell in cells:
        result = results.get(str(cell))
        took = result.seconds if result is not None else 0.0
        seconds += took
        case = ET.SubElement(
            suite, "testcase", classname=clean(name), name=str(cell).partition("/")[2], time=f"{took:.3f}"
        )
        if why := kept_out(cell, results):
            ET.SubElement(case, "skipped", message=f"{why}: {_TEXTS.get(why, '')}")
        elif result is None:
            ET.SubElement(case, "error", type="open", message="not run yet")
        elif result.verdict != Verdict.PASS:
            kind = "failure" if result.verdict == Verdict.FAIL else "error"
            text = _problems(result)
            found = ET.SubElement(case, kind, type=result.failure or "unknown", message=clean(text))
            found.text = clean(f"{text}\n{result.struck}\nagain: {result.replay}\nevidence: {result.evidence}")
        else:
            ET.SubElement(case, "system-out").text = clean(f"{result.struck}; play {result.play}")
    cases = suite.findall("testcase")
    for key, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(sum(case.find(kind) is not None for case in cases)))
    suite.set("tests", str(len(cases)))
    suite.set("time", f"{seconds:.3f}")
    suite.set("timestamp", time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()))
    return suite


def _problems(result: CellResult) -> str:
    return "; ".join(f"{check}: {text}" for check, text in result.problems.items()) or result.verdict


# ---------------------------------------------------------------- the page


def _index(
    cells: Sequence[Cell], results: Mapping[str, CellResult], summary: Summary, about: About, folder: Path
) -> str:
    style = tag("style", Markup((resources.files("ckptd.chaos.matrix") / "grid.css").read_text(encoding="utf-8")))
    title = f"{summary.verdict}: matrix of {len({cell.boundary for cell in cells})} boundaries"
    body = [
        style,
        _hero(cells, summary, about),
        _bad(summary, folder),
        _grid(cells, results, summary),
        _reasons(summary),
    ]
    return document(title, [*body, _counts(summary)])


def _hero(cells: Sequence[Cell], summary: Summary, about: About) -> Markup:
    totals = ", ".join(f"{count} {name}" for name, count in summary.totals.items())
    silent = f"silent divergence: {summary.silent_divergences}"
    names = {cell.boundary for cell in cells}
    return tag(
        "section",
        tag("div", summary.verdict, class_=f"verdict {summary.verdict}"),
        tag("h1", f"A fault at each of {len(names)} boundaries: {len(cells)} cells"),
        tag("p", f"{totals}; {duration(summary.seconds)} of runs", class_="say"),
        tag(
            "p",
            chip(silent, "fail" if summary.silent_divergences else "pass"),
            *(join((" ", chip(f"{name}: {count}", "fail"))) for name, count in summary.classes.items()),
        ),
        tag("p", f"commit {about.commit or 'unknown'}, code {about.code[:16]}", class_="where"),
        tag("pre", about.command),
        class_=f"card hero {summary.verdict}",
    )


def _bad(summary: Summary, folder: Path) -> Markup:
    items = [tag("li", chip("fault missed", "fail"), " ", f"fired in no cell: {name}") for name in summary.silent]
    for result in summary.bad:
        page = Path(result.evidence) / PAGE if result.evidence else None
        name: object = result.cell
        if page is not None and page.is_file():
            name = tag("a", result.cell, href=Path(os.path.relpath(page, folder)).as_posix())
        kind = str(result.verdict)
        items.append(
            tag(
                "li",
                chip(result.failure or kind, kind),
                " ",
                name,
                tag("div", _problems(result)),
                tag(
                    "div", f"{result.struck}; play {result.play or 'none'}; {duration(result.seconds)}", class_="where"
                ),
                tag("pre", result.replay),
                tag("div", result.evidence, class_="where"),
            )
        )
    if not items:
        return Markup("")
    return tag("section", tag("h2", "Not passed"), tag("ul", *items, class_="red"), class_="card", id="bad")


def _grid(cells: Sequence[Cell], results: Mapping[str, CellResult], summary: Summary) -> Markup:
    """Return boundaries by what is done to whom; in each field the stores and shapes side by side."""
    deeds = [(victim, action) for victim, actions in VICTIMS.items() for action in actions]
    fields: dict[str, dict[tuple[str, str], list[Cell]]] = {}
    for cell in cells:
        fields.setdefault(cell.boundary, {}).setdefault((cell.victim, cell.action), []).append(cell)
    places = list(dict.fromkeys((cell.store, str(cell.shape)) for cell in cells if reason(cell) is None))
    heads = [tag("th", "boundary", rowspan=2)]
    heads += [
        tag("th", action if victim == "all" else f"{action} {victim}", colspan=len(places), class_="deed")
        for victim, action in deeds
    ]
    under = [tag("th", f"{store[:1]}{shape[:1]}", title=f"{store} {shape}") for _ in deeds for store, shape in places]
    rows = []
    for boundary, mine in fields.items():
        found: list[Markup] = []
        for deed in deeds:
            at = {(cell.store, str(cell.shape)): cell for cell in mine.get(deed, ())}
            found += [_field(at.get(place), results, class_="deed" if place == places[0] else "") for place in places]
        kind = "silent" if boundary in summary.silent else None
        rows.append(tag("tr", tag("th", boundary, title=_role(mine)), *found, class_=kind))
    legend = (
        "✓ passed, ✗ failed, ? unknown, ○ not run yet, · does not apply. Below each fault: "
        "l2 local files on two nodes, s2 S3 on two nodes, l1 local files on one."
    )
    return tag(
        "section",
        tag("h2", "All cells"),
        tag("p", legend, class_="where"),
        tag(
            "div", tag("table", tag("thead", tag("tr", *heads), tag("tr", *under)), tag("tbody", *rows)), class_="grid"
        ),
        class_="card",
        id="cells",
    )


def _role(fields: Mapping[tuple[str, str], Sequence[Cell]]) -> str:
    """Return who passes the boundary of these cells."""
    return next(cell.role for found in fields.values() for cell in found)


def _field(cell: Cell | None, results: Mapping[str, CellResult], *, class_: str) -> Markup:
    if cell is None or (why := kept_out(cell, results)):
        return tag("td", "·", class_=class_ or None, title=why if cell is not None else None)
    result = results.get(str(cell))
    verdict = "open" if result is None else str(result.verdict)
    title = str(cell) if result is None else f"{cell}: {verdict}, {result.struck}, {result.seconds:.1f} s"
    return tag("td", _SIGNS.get(verdict, "?"), class_=f"{class_} {verdict}".strip(), title=title)


def _reasons(summary: Summary) -> Markup:
    rows = [
        tag(
            "tr",
            tag("td", tag("code", name)),
            tag("td", count, class_="num"),
            tag("td", _TEXTS.get(name, ""), class_="say"),
        )
        for name, count in summary.not_applicable.items()
    ]
    said = (
        (
            tag(
                "p", "Each reason is held against the undisturbed runs, in which every pass is counted.", class_="where"
            ),
            table(("reason", "cells#", "that is"), rows),
        )
        if rows
        else (tag("p", "Every cell of this matrix applies.", class_="where"),)
    )
    return tag(
        "section",
        tag("h2", "Not applicable, and why"),
        *said,
        class_="card",
        id="reasons",
    )


def _counts(summary: Summary) -> Markup:
    rows = [
        tag(
            "tr",
            *(tag("td", part) for part in row),
            *(tag("td", counted[name] or "", class_="num") for name in ("pass", "fail", "unknown", "open")),
        )
        for row, counted in sorted(summary.rows.items())
    ]
    heads = ("boundary of", "hit", "store", "shape", "pass#", "fail#", "unknown#", "open#")
    return tag("section", tag("h2", "Counts"), table(heads, rows), class_="card", id="counts")
