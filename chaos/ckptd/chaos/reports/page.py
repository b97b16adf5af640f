"""The page of one trial: what broke, where, what it cost, and how to run it again; one file, no outside resources.

Owns: what stands where. Does not own: tables (`sections`), the timeline's lanes (`timeline`) nor its drawing (`drawing`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from importlib import resources

from ckptd.chaos.diagnosis import Diagnosis
from ckptd.chaos.history import History
from ckptd.chaos.report import Report
from ckptd.chaos.reports.drawing import draw_legend, draw_timeline
from ckptd.chaos.reports.lanes import Timeline
from ckptd.chaos.reports.markup import Markup, join, tag
from ckptd.chaos.reports.sections import (
    NONE,
    checks_section,
    chip,
    duration,
    events_section,
    faults_section,
    figures_section,
    headline,
    what_followed,
)
from ckptd.chaos.reports.timeline import timeline
from ckptd.chaos.verdict import Verdict

FILES = {
    "report.json": "report",
    "junit.xml": "JUnit",
    "evidence/history.jsonl": "all events",
    "hurt/nodes/": "agents' logs",
    "hurt/launches/": "output of the ranks",
    "undisturbed/": "undisturbed run",
    "store/": "the store",
}
"""What a trial may leave beside its page, and what it is called there."""


def page(report: Report, history: History | None, files: Collection[str] = ()) -> str:
    """Return the page of a trial.

    Args:
        report: What was found.
        history: The hurt run's; None where there was none.
        files: Which of `FILES` are there, to be linked to.
    """
    shown = None
    if history is not None and len(history):
        shown = timeline(
            history,
            report.accounts,
            ranks=report.nnodes * report.nproc,
            nproc=report.nproc,
            diagnosis=report.diagnosis,
        )
    body = [
        _hero(report),
        _tiles(report),
        _red(report),
        _advice(report.diagnosis),
        _timeline(shown, history),
        checks_section(report),
        faults_section(report.accounts),
        figures_section(report.figures),
        events_section(history),
        _again(report, files),
    ]
    return document(f"{report.verdict}: {report.scenario}", body)


def document(title: str, body: Sequence[object]) -> str:
    """Return a whole page."""
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(_resource("page.css"))),
    )
    content = tag("body", tag("main", *body), tag("script", Markup(_resource("page.js"))))
    return "<!doctype html>\n" + tag("html", tag("head", *head), content, lang="en") + "\n"


def _resource(name: str) -> str:
    return (resources.files("ckptd.chaos.reports") / name).read_text(encoding="utf-8")


def _hero(report: Report) -> Markup:
    size = f"{report.nnodes} x {report.nproc} ranks · {report.store} · seed {report.seed} · {report.seconds:.0f} s"
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(report.begun)) if report.begun else ""
    return tag(
        "section",
        tag("div", report.verdict, class_=f"verdict {report.verdict}"),
        tag("h1", report.scenario, ": ", report.title),
        tag("p", headline(report), class_="say"),
        tag("p", _where(report), class_="where"),
        tag("p", " · ".join(filter(None, (size, when))), class_="where"),
        tag("p", report.cached(), class_="where") if report.cached_at else "",
        class_=f"card hero {report.verdict}",
    )


def _where(report: Report) -> str:
    return "; ".join(what_followed(account) for account in report.accounts)


def _tiles(report: Report) -> Markup:
    passed = sum(finding.verdict is Verdict.PASS for finding in report.findings)
    fired = sum(account.fired for account in report.accounts)
    lost = sum(account.lost_steps or 0 for account in report.accounts)
    tiles = [
        (f"{passed}/{len(report.findings)}", "checks passed"),
        (f"{fired}/{len(report.accounts)}", "faults fired"),
        (str(lost), "steps trained again"),
    ]
    for figure, name in zip(
        report.figures, ("stall, median", "durable after, median", "restore, median", "recovery, most"), strict=False
    ):
        value = figure.most if name.endswith("most") else figure.median
        tiles.append((NONE if value is None else duration(value), name))
    return tag(
        "section",
        *(tag("div", tag("b", value), tag("span", name), class_="tile") for value, name in tiles),
        class_="tiles",
    )


def _red(report: Report) -> Markup:
    red = [finding for finding in report.findings if finding.verdict is not Verdict.PASS]
    if len(red) < 2:  # one alone is the headline
        return Markup("")
    lines = [
        tag(
            "li",
            chip(finding.failure or "unknown", finding.verdict),
            " ",
            tag("code", finding.check),
            " ",
            finding.text,
        )
        for finding in red
    ]
    return tag("section", tag("h2", "What is red"), tag("ul", *lines, class_="red"), class_="card", id="red")


def _advice(found: Diagnosis | None) -> Markup:
    if found is None:
        return Markup("")
    where = f"launch {found.launch}, step {found.step}" + ("" if found.rank is None else f", rank {found.rank}")
    where += ", right after the restore" if found.moment == "restore" else ""
    lines = [
        tag("p", "First difference: ", tag("b", where), "."),
        tag("p", f"Right after that launch's restore (step {found.restored}): {found.after_restore}.")
        if found.restored is not None
        else "",
        tag("p", "Look at: ", tag("b", found.cause), f". {found.advice[:1].upper()}{found.advice[1:]}."),
    ]
    if found.names:
        more = found.count - len(found.names)
        lines.append(
            tag(
                "p", f"{found.count} differ: ", tag("code", ", ".join(found.names)), f" and {more} more" if more else ""
            )
        )
    lines += [tag("p", "The client's audit said: ", text) for text in found.audit]
    return tag(
        "section",
        tag("h2", "Where it left the path, and what is likely missing"),
        *lines,
        class_="card advice",
        id="advice",
    )


def _timeline(shown: Timeline | None, history: History | None) -> Markup:
    if shown is None or history is None:
        return Markup("")
    tools = tag(
        "span",
        *(tag("button", sign, type="button", data_zoom=zoom, title=title) for sign, zoom, title in _ZOOMS),
        class_="bar-tools",
    )
    return tag(
        "section",
        tools,
        tag("h2", "The hurt run"),
        draw_timeline(shown),
        draw_legend(shown),
        class_="card",
        id="timeline",
    )


_ZOOMS = (("-", "0.5", "narrower"), ("fit", "fit", "all of it"), ("+", "2", "wider"))


def _again(report: Report, files: Collection[str]) -> Markup:
    links = [tag("a", text, href=path) for path, text in FILES.items() if path in files]
    ran = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return tag(
        "section",
        tag("h2", "Run it again"),
        tag("pre", report.replay, id="replay"),
        tag("p", report.proves, class_="dim") if report.proves else "",
        tag("p", *(join((link, " ")) for link in links), class_="links"),
        tag("p", ran, class_="dim") if ran else "",
        class_="card",
    )
