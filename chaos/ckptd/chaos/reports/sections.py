"""Sections of a trial's page that are tables: checks, faults, figures, events; and what tables are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptd.chaos.accounts import Account
from ckptd.chaos.figures import Figure
from ckptd.chaos.history import Event, History
from ckptd.chaos.report import Report
from ckptd.chaos.reports.drawing import draw_values
from ckptd.chaos.reports.markup import Markup, join, tag, text
from ckptd.chaos.verdict import Verdict, worst

_TOLD = frozenset(
    {"launched", "exited", "fault", "agent_died", "agent_started", "node_replaced", "deadline", "claimed"}
) | {
    "lifted",
    "given_up",
    "node_rebooted",
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


def chip(text: object, kind: str = "") -> Markup:
    """Return a small label; `kind` is a verdict or nothing."""
    return tag("span", text, class_=f"chip {kind}".strip())


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


def what_followed(account: Account) -> str:
    """Return a fault and what the job did after it, in one line."""
    text = f"{account.kind} {account.target} at {account.moment}"
    if not account.fired:
        return f"{text}: did not fire"
    if account.restored_from is not None:
        return f"{text}: went on from step {account.restored_step}, from {account.restored_from}"
    return f"{text}: began anew" if account.relaunched else f"{text}: the job lived on"


def duration(seconds: float) -> str:
    """Return a time as people read it."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


def checks_section(report: Report) -> Markup:
    """Return all checks, red ones first."""
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


def faults_section(told: Sequence[Account]) -> Markup:
    """Return what each fault cost; nothing where there was none."""
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
    return what_followed(account).rpartition(": ")[2]


def figures_section(figures: Sequence[Figure]) -> Markup:
    """Return the distributions; nothing where nothing was measured."""
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


def events_section(history: History | None) -> Markup:
    """Return what happened, in order of time, to be folded out; nothing where there is no history."""
    if history is None or not len(history):
        return Markup("")
    begin = min(event.t for event in history)
    told = sorted((event for event in history if _iswhat_followed(event)), key=lambda event: event.t)
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


def _iswhat_followed(event: Event) -> bool:
    return event.kind in _TOLD or (event.kind == "restored" and event.source.startswith("script"))


def _fields(event: Event) -> Iterator[str]:
    for key, value in event.fields.items():
        # An agent's node is a long name that its lane says shorter; the harness's is the short one.
        if value not in (None, "") and key != "job" and (key != "node" or event.source == "harness"):
            yield f"{key}={value}"
