"""The page of one trial: what broke, where, what it cost, and how to run it again; one file, no outside resources.

Owns: what stands where. Does not own: the timeline's lanes (`timeline`) nor its drawing (`drawing`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from importlib import resources

from ckptd.chaos.accounts import Account
from ckptd.chaos.diagnosis import Diagnosis
from ckptd.chaos.figures import Figure
from ckptd.chaos.history import Event, History
from ckptd.chaos.report import Report
from ckptd.chaos.reports.drawing import draw_legend, draw_timeline, draw_values
from ckptd.chaos.reports.lanes import Timeline
from ckptd.chaos.reports.markup import Markup, join, tag, text
from ckptd.chaos.reports.timeline import timeline
from ckptd.chaos.verdict import Verdict, worst

_TOLD = frozenset(
    {"launched", "exited", "fault", "agent_died", "agent_started", "node_replaced", "deadline", "claimed"}
) | {
    "started",
    "adopted",
    "not_adopted",
    "acknowledged",
    "quarantined",
    "fenced",
    "refused",
    "upload_failed",
    "rejected",
    "restore_chosen",
    "restore_failed",
    "internal_error",
    "store_failed",
    "node_lost",
    "rank_lost",
}
_MOST_EVENTS = 2000
_MOST_TEXT = 300
NONE = "–"  # noqa: RUF001 - what a table shows where there is no value
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
        _checks(report),
        _faults(report.accounts),
        _figures(report.figures),
        _events(history),
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


def chip(text: object, kind: str = "") -> Markup:
    """Return a small label; `kind` is a verdict or nothing."""
    return tag("span", text, class_=f"chip {kind}".strip())


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
        class_=f"card hero {report.verdict}",
    )


def headline(report: Report) -> Markup:
    """Return what broke and where, the class first; for a pass, what was hurt."""
    first = worst(report.findings)
    if first is None:
        return text(report.headline())
    shown = first.text if len(first.text) <= _MOST_TEXT else f"{first.text[:_MOST_TEXT]}…"
    return join(
        (
            chip(first.failure or "nothing proved", first.verdict),
            " ",
            shown,
            " ",
            tag("code", first.check, class_="dim"),
        )
    )


def _where(report: Report) -> str:
    return "; ".join(_told(account) for account in report.accounts)


def _told(account: Account) -> str:
    text = f"{account.kind} {account.target} at {account.moment}"
    if not account.fired:
        return f"{text}: did not fire"
    if account.restored_from is not None:
        return f"{text}: went on from step {account.restored_step}, from {account.restored_from}"
    return f"{text}: began anew" if account.relaunched else f"{text}: the job lived on"


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


def duration(seconds: float) -> str:
    """Return a time as people read it."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


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


def _checks(report: Report) -> Markup:
    rows = [
        tag(
            "tr",
            tag("td", chip(finding.verdict, finding.verdict), class_="inline"),
            tag("td", tag("code", finding.check), class_="inline"),
            tag("td", *((chip(finding.failure, "fail"), " ") if finding.failure else ()), finding.text, class_="say"),
        )
        for finding in sorted(report.findings, key=lambda finding: finding.verdict is Verdict.PASS)
    ]
    return tag("section", tag("h2", "Checks"), table(("", "check", "what was found"), rows), class_="card", id="checks")


def table(heads: Sequence[str], rows: Sequence[Markup]) -> Markup:
    """Return a table that becomes a list on narrow screens; a head that ends in "#" stands over numbers."""
    told = (head.removesuffix("#") for head in heads)
    kinds = ("num" if head.endswith("#") else None for head in heads)
    head = tag("thead", tag("tr", *(tag("th", name, class_=kind) for name, kind in zip(told, kinds, strict=True))))
    return tag("div", tag("table", head, tag("tbody", *rows), class_="stack"), class_="wide")


def _faults(told: Sequence[Account]) -> Markup:
    if not told:
        return Markup("")
    rows = [
        tag(
            "tr",
            tag("td", number, ". ", chip("fired" if a.fired else "did not fire", "pass" if a.fired else "fail")),
            tag("td", f"{a.kind} {a.target}"),
            tag("td", f"{a.moment}{f' (step {a.step} in flight)' if a.step is not None else ''}", data_label="when"),
            tag("td", _after(a), data_label="then", class_="say"),
            tag("td", NONE if a.lost_steps is None else a.lost_steps, data_label="steps trained again", class_="num"),
            tag(
                "td",
                NONE if a.recovery_s is None else duration(a.recovery_s),
                data_label="training again after",
                class_="num",
            ),
        )
        for number, a in enumerate(told, start=1)
    ]
    heads = ("", "fault", "when", "then", "steps trained again#", "training again after#")
    return tag("section", tag("h2", "Faults"), table(heads, rows), class_="card", id="faults")


def _after(account: Account) -> str:
    if account.note or account.late:
        return account.note or account.late
    return _told(account).rpartition(": ")[2]


def _figures(figures: Sequence[Figure]) -> Markup:
    shown = [figure for figure in figures if figure.count]
    if not shown:
        return Markup("")
    rows = [
        tag(
            "tr",
            tag("td", figure.name),
            *(
                tag("td", duration(value or 0.0), data_label=name, class_="num")
                for name, value in (("median", figure.median), ("p99", figure.p99), ("most", figure.most))
            ),
            tag("td", figure.count, data_label="count", class_="num"),
            tag("td", draw_values(figure.values, figure.most or 0.0), style="min-width:160px"),
        )
        for figure in shown
    ]
    heads = ("", "median#", "p99#", "most#", "count#", "each, from 0 to most")
    return tag("section", tag("h2", "Figures"), table(heads, rows), class_="card", id="figures")


def _events(history: History | None) -> Markup:
    if history is None or not len(history):
        return Markup("")
    begin = min(event.t for event in history)
    told = sorted((event for event in history if _is_told(event)), key=lambda event: event.t)
    rows = [
        tag(
            "tr",
            tag("td", f"{event.t - begin:.3f}", class_="num"),
            tag("td", event.source),
            tag("td", event.kind),
            tag("td", " ".join(_fields(event)), class_="say mono"),
        )
        for event in told[:_MOST_EVENTS]
    ]
    left = f"; the first {_MOST_EVENTS} of {len(told)}" if len(told) > _MOST_EVENTS else ""
    heads = ("s#", "who", "what", "")
    name = f"What happened, in order ({len(rows)} events{left})"
    return tag("section", tag("details", tag("summary", name), table(heads, rows)), class_="card", id="events")


def _is_told(event: Event) -> bool:
    return event.kind in _TOLD or (event.kind == "restored" and event.source.startswith("script"))


def _fields(event: Event) -> Iterator[str]:
    for key, value in event.fields.items():
        # An agent's node is a long name that its lane says shorter; the harness's is the short one.
        if value not in (None, "") and key != "job" and (key != "node" or event.source == "harness"):
            yield f"{key}={value}"


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
