"""Pages and JUnit: facts stand where they belong, nothing of a run gets out of its text, nothing comes from outside."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from fixtures.chaos_trials import EVENTS, T1, Entry, history, record, without_hurt
from rich.console import Console

from ckptd.chaos.history import Event
from ckptd.chaos.judging import judge
from ckptd.chaos.progress import Progress
from ckptd.chaos.record import Record
from ckptd.chaos.report import Report, render
from ckptd.chaos.reports.drawing import draw_legend, draw_timeline
from ckptd.chaos.reports.junit import junit
from ckptd.chaos.reports.lanes import Lane, Mark, Timeline
from ckptd.chaos.reports.markup import Markup, join, tag
from ckptd.chaos.reports.page import FILES, page
from ckptd.chaos.reports.scale import Scale
from ckptd.chaos.reports.summary import summary, write_summary
from ckptd.chaos.reports.timeline import timeline
from ckptd.chaos.reports.write import write_report
from ckptd.chaos.verdict import FailureClass, Finding, Verdict

EVIL = "</script><script>alert(1)</script>\"'&<img src=x onerror=alert(1)>\x00\x1b[31m\ud800"


class Elements(HTMLParser):
    """Every element with its attributes and the text in it, and whether all of them are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, list[str]]] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        texts: list[str] = []
        self.found.append((tag, dict(attrs), texts))
        if tag != "meta":
            self._open.append((tag, texts))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, texts in self._open:
            texts.append(data)

    def texts(self, name: str, class_: str | None = None) -> list[str]:
        return [
            "".join(texts)
            for tag, attributes, texts in self.found
            if tag == name and (class_ is None or class_ in (attributes.get("class") or "").split())
        ]

    def attributes(self, name: str) -> Iterator[str]:
        for _, attributes, _ in self.found:
            if attributes.get(name) is not None:
                yield str(attributes[name])


def shown(told: Record) -> tuple[Report, str]:
    report = judge(told, Path("/tmp/x"))
    return report, page(report, None if told.performance is None else told.performance.history, FILES)


def test_the_page_says_first_what_broke_and_where() -> None:
    """Verdict, class and place stand in the headline; advice, checks and replay line follow."""
    report, text = shown(record(wrong={"model/w": "x"}))
    elements = Elements(text)
    assert elements.texts("title")[0] == "fail: node-lost"
    (hero,) = elements.texts("section", "hero")
    assert hero.startswith("fail")
    assert "wrong replica first at step 2, rank 1 right after a restore: model/w differs" in hero
    assert "lose node 1 at event acknowledged, then the next step: went on from step 2, from store" in hero
    (advice,) = elements.texts("section", "advice")
    assert "launch 2, step 2, rank 1, right after the restore" in advice
    assert "1 differ: model/w" in advice
    assert elements.texts("pre") == [report.replay]


def test_every_check_has_a_row_red_ones_first() -> None:
    """No finding is left out, and the first row is the one that matters."""
    report, text = shown(record(wrong={"model/w": "x"}))
    rows = re.findall(r'<td class="inline"><code>(\w+)</code>', text)
    assert rows[0] == "same_digests"
    assert sorted(rows) == sorted(finding.check for finding in report.findings)


def test_a_page_of_a_trial_that_was_not_judged_says_why() -> None:
    """No hurt run, no timeline; the reason is the headline."""
    _, text = shown(without_hurt("the script does not get through undisturbed: boom"))
    (hero,) = Elements(text).texts("section", "hero")
    assert hero.startswith("unknown")
    assert "boom" in hero
    assert "<svg" not in text


def test_the_page_needs_nothing_from_outside() -> None:
    """No address of another host, no link but to files beside it, no style or script from elsewhere."""
    _, text = shown(record(wrong={"model/w": "x"}))
    elements = Elements(text)
    assert not re.search(r"https?:|//[a-z]", re.sub(r"// Everything can be read.*", "", text))
    assert [
        tag for tag, attributes, _ in elements.found if tag in ("link", "img", "iframe") or "src" in attributes
    ] == []
    assert list(elements.attributes("href")) == list(FILES)
    assert all(re.fullmatch(r"[a-z][\w./-]*", link) for link in FILES)
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {"#hatch"}


def test_nothing_that_a_run_says_gets_out_of_its_text(tmp_path: Path) -> None:
    """Names, errors, commands and losses may hold anything: they are shown, never obeyed."""
    told = record(
        wrong={EVIL: "x"},
        name=EVIL,
        command=(EVIL,),
        more=[
            (20.0, "agent 0", "upload_failed", {"step": 2, "error": EVIL}),
            (20.0, f"agent {EVIL}", "listening", {}),
            (28.6, "script 2", "step", {"step": 5, "loss": EVIL}),
        ],
        leaks=(EVIL,),
    )
    report = replace(judge(told, tmp_path), title=EVIL, proves=EVIL, versions={EVIL: EVIL})
    write_report(report, told)
    write_summary([report], tmp_path / "all")
    for path in (tmp_path / "report.html", tmp_path / "all" / "index.html"):
        elements = Elements(path.read_text(encoding="utf-8"))
        assert [tag for tag, _, _ in elements.found if tag in ("script", "img")] == ["script"]
        assert not any(name.startswith("on") for _, attributes, _ in elements.found for name in attributes)
        assert any("alert(1)" in text for text in elements.texts("section"))
        assert not re.search(r"[\x00-\x08\x1b]", path.read_text(encoding="utf-8"))
    assert ET.parse(tmp_path / "junit.xml").getroot().get("name") == "ckptd chaos"  # noqa: S314 - our own


def test_markup_escapes_whatever_is_not_markup() -> None:
    """Texts and attributes are escaped once, elements not at all, and attributes get their names as HTML writes them."""
    assert tag("p", "<&>", tag("b", "x"), 3) == "<p>&lt;&amp;&gt;<b>x</b>3</p>"
    assert tag("a", href='"><x', data_label="y", class_="z", off=None) == (
        '<a href="&quot;&gt;&lt;x" data-label="y" class="z"></a>'
    )
    assert join(("<", Markup("<"))) == "&lt;<"


# ---------------------------------------------------------------- timeline


def lanes(told: Record | None = None) -> dict[str, Lane]:
    told = told or record()
    assert told.performance is not None
    accounts = judge(told, Path("/tmp/x")).accounts
    return {lane.name: lane for lane in timeline(told.performance.history, accounts, ranks=2, nproc=1).lanes}


def spans(lane: Lane) -> list[tuple[str, float, float]]:
    return [(span.kind, round(span.begin, 3), round(span.end, 3)) for span in lane.spans]


def marks(lane: Lane) -> list[tuple[str, float]]:
    return [(mark.kind, round(mark.t, 3)) for mark in lane.marks]


def test_there_is_a_lane_for_each_rank_agent_and_the_coordinator() -> None:
    """Fresh nodes have a lane of their own, beside the one they replaced."""
    names = [
        "faults",
        "steps trained",
        "rank 0",
        "rank 1",
        "coordinator",
        "becoming durable",
        "agent 0",
        "agent 1",
        "agent 1.1",
    ]
    assert list(lanes()) == names
    _, text = shown(record())
    assert list(Elements(text).attributes("data-lane")) == names
    assert Elements(text).texts("div", "name") == names


def test_a_rank_starts_restores_trains_saves_and_is_ended() -> None:
    """Both launches of a rank that lived, and of one that was lost with its node."""
    assert spans(lanes()["rank 0"]) == [
        ("starting", 1.0, 11.0),
        ("training", 11.0, 14.4),
        ("ending", 14.4, 14.5),
        ("starting", 16.0, 26.0),
        ("restoring", 26.1, 26.4),
        ("training", 26.4, 29.1),
        ("saving", 13.18, 13.2),
    ]
    assert spans(lanes()["rank 1"])[:2] == [("starting", 1.0, 11.0), ("training", 11.0, 14.1)]
    assert marks(lanes()["rank 1"]) == [("died", 14.1), ("restored", 26.4)]


def test_an_agent_runs_uploads_and_dies_with_its_node() -> None:
    """The bar of a lost node ends at the fault, not when somebody noticed."""
    assert spans(lanes()["agent 1"]) == [("up", 0.1, 14.1), ("uploading", 13.2, 13.5)]
    assert marks(lanes()["agent 1"]) == [("died", 14.1)]
    assert spans(lanes()["agent 1.1"]) == [("up", 15.0, 29.1)]


def test_steps_decisions_faults_and_recovery_stand_where_they_happened() -> None:
    """A step trained again is told apart; the lag of each step is a bar of its own."""
    found = lanes()
    assert marks(found["steps trained"]) == [
        ("step", 12.0), ("step", 13.0), ("step", 14.0), ("restored", 26.5), ("again", 27.0), ("step", 28.0),
    ]  # fmt: skip
    assert marks(found["coordinator"]) == [("committed", 13.6), ("committed", 28.5)]
    assert spans(found["coordinator"]) == [("leading", 11.1, 26.1), ("leading", 26.1, 29.1)]
    assert spans(found["becoming durable"]) == [("uploading", 13.1, 13.6), ("uploading", 28.1, 28.5)]
    assert marks(found["faults"]) == [("fault", 14.1)]
    assert spans(found["faults"]) == [("recovery", 14.1, 27.0)]


def test_a_step_that_was_never_decided_and_one_that_was_aborted_look_different() -> None:
    """Neither became durable."""
    more = [
        (13.9, "agent 0", "begun", {"step": 3, "timeline": T1}),
        (28.6, "agent 0", "begun", {"step": 5, "timeline": T1}),
        (28.7, "agent 0", "acknowledged", {"step": 5, "timeline": T1, "committed": False}),
    ]
    kinds = [kind for kind, _, _ in spans(lanes(record(more=more))["becoming durable"])]
    assert kinds == ["uploading", "undecided", "uploading", "aborted"]
    assert ("aborted", 28.7) in marks(lanes(record(more=more))["coordinator"])


def test_a_paused_node_is_shown_as_paused_until_it_is_woken() -> None:
    """A zombie's bar says how long it slept."""
    more: list[Entry] = [
        (20.0, "harness", "fault", {"do": "stop", "target": "coordinator", "fired": True}),
        (20.1, "harness", "node_replaced", {"node": "0", "by": "0.1"}),
        (27.5, "harness", "fault", {"do": "continue", "target": "coordinator", "fired": True}),
        (27.6, "agent 0", "fenced", {"timeline": T1}),
    ]
    found = lanes(record(more=more))
    assert ("paused", 20.1, 27.5) in spans(found["agent 0"])
    assert ("fenced", 27.6) in marks(found["coordinator"])


def test_the_moment_from_which_the_run_is_not_equal_is_marked() -> None:
    """Right after the restore, or at the step, of the launch that diverged."""
    other = [(*entry[:3], {"step": 4, "loss": "0x9"}) if entry[:2] == (28.0, "script 2") else entry for entry in EVENTS]
    for told, t in ((record(wrong={"model/w": "x"}), 26.5), (record(history=history(other)), 28.0)):
        assert told.performance is not None
        report = judge(told, Path("/tmp/x"))
        drawn = timeline(told.performance.history, report.accounts, ranks=2, nproc=1, diagnosis=report.diagnosis)
        assert drawn.diverged is not None
        assert round(drawn.diverged.t, 3) == t
        assert Elements(draw_timeline(drawn)).texts("g", "diverged") == [f"{drawn.diverged.title}\u2260"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [("committed", "durable"), ("missed", "fault that did not fire"), ("restore_go", "other event: point at it")],
)
def test_whatever_stands_on_a_timeline_is_in_its_legend(kind: str, text: str) -> None:
    lane = Lane(name="agent 0", group="agent", marks=(Mark(kind=kind, t=0.5, title="something"),))
    legend = draw_legend(Timeline(seconds=1.0, lanes=(lane,), faults=()))
    assert re.findall(r"</i>([^<]+)</li>", legend) == [text]


def test_a_squeezed_axis_keeps_the_order_and_says_what_it_left_out() -> None:
    """A long pause takes little room; what happens in milliseconds can be seen."""
    moments = [0.0, 100.0, 100.1, 100.2, 100.3, 100.4, 160.0]
    scale = Scale(moments, 160.0)
    places = [scale.at(t) for t in sorted([*moments, 50.0, 130.0])]
    assert all(before < after for before, after in pairwise(places))
    assert [places[0], places[-1]] == pytest.approx([2.0, 98.0])
    assert scale.at(100.4) - scale.at(100.0) > 50
    assert [(round(seconds, 1)) for _, _, seconds in scale.pauses()] == [100.0, 59.6]
    ticks = [tick.at for tick in scale.ticks()]
    assert ticks == sorted(ticks)
    assert all(after - before >= 5 for before, after in pairwise(ticks))


def test_an_even_run_is_true_to_scale() -> None:
    """Where nothing is long and empty, nothing is squeezed."""
    scale = Scale([float(t) for t in range(31)], 30.0)
    assert scale.pauses() == []
    assert scale.at(15.0) == pytest.approx(50.0)


def test_a_timeline_of_one_moment_can_be_drawn() -> None:
    """A run that said one thing only is no error."""
    drawn = timeline(history([(0.0, "harness", "launched", {"launch": 1})]), (), ranks=1, nproc=1)
    Elements(draw_timeline(drawn))


# ---------------------------------------------------------------- JUnit and summary


def test_junit_has_a_suite_per_trial_and_a_case_per_check() -> None:
    """Counts are those of the cases; failures have their class, unknowns are errors, all name the replay line."""
    bad = judge(record(wrong={"model/w": "x"}, leaks=("process 7",)), Path("/tmp/x"))
    unknown = judge(without_hurt("boom"), Path("/tmp/y"))
    root = ET.fromstring(junit([bad, unknown]))  # noqa: S314 - our own
    assert root.tag == "testsuites"
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == (str(len(bad.findings) + 1), "2", "1")
    first, second = root.findall("testsuite")
    assert first.attrib | {"timestamp": ""} == {
        "name": "chaos.node-lost.2x1.local.seed7",
        "tests": str(len(bad.findings)),
        "failures": "2",
        "errors": "0",
        "skipped": "0",
        "time": "31.500",
        "timestamp": "",
        "hostname": "localhost",
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", first.get("timestamp", ""))
    cases = first.findall("testcase")
    assert [case.get("name") for case in cases] == [finding.check for finding in bad.findings]
    assert all(case.get("classname") and case.get("time") == "0" for case in cases)
    failures = {failure.get("type"): failure for case in cases for failure in case.findall("failure")}
    assert set(failures) == {"wrong replica", "leak"}
    assert bad.replay in (failures["leak"].text or "")
    (error,) = second.findall("testcase/error")
    assert (error.get("type"), error.get("message")) == ("unknown", "boom")
    properties = {one.get("name"): one.get("value") for one in first.findall("properties/property")}
    assert (properties["seed"], properties["replay"]) == ("7", bad.replay)


def test_a_summary_counts_verdicts_and_classes_and_links_to_each_trial(tmp_path: Path) -> None:
    """Red rows come first, the worst class above all; links are relative, and only to pages that are there."""
    reports = []
    for name, told in (
        ("good", record()),
        ("leak", record(leaks=("process 7",))),
        ("none", without_hurt("boom")),
        ("wrong", record(wrong={"model/w": "x"}, leaks=("process 7",))),
    ):
        (tmp_path / name).mkdir()
        report = replace(judge(told, tmp_path / name), scenario=name)
        if name != "none":
            write_report(report, told)
        reports.append(report)
    index = write_summary(reports, tmp_path)
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["verdict"] == "fail"
    assert (told["trials"], told["verdicts"]) == (4, {"pass": 1, "fail": 2, "unknown": 1})
    assert told["failures"] == {"wrong replica": 1, "leak": 2}
    assert [one["scenario"] for one in told["reports"]] == ["good", "leak", "none", "wrong"]
    elements = Elements(index.read_text())
    assert list(elements.attributes("href")) == ["wrong/report.html", "leak/report.html", "good/report.html"]
    rows = elements.texts("tr")[1:]
    assert [name for row in rows for name in ("good", "leak", "none", "wrong") if f"{name}2 x 1" in row] == [
        "wrong", "leak", "none", "good",
    ]  # fmt: skip
    (hero,) = elements.texts("section", "hero")
    assert "2 fail, 1 unknown, 1 pass" in hero
    assert len(ET.parse(tmp_path / "junit.xml").getroot().findall("testsuite")) == 4  # noqa: S314 - our own


def test_a_kept_undisturbed_run_is_said_in_every_report(tmp_path: Path) -> None:
    """Whoever reads a verdict sees that one side of the comparison is older; where it is not, nothing is said."""
    note = "undisturbed run of 2026-11-30 10:40:00 UTC taken from the cache; --no-cache runs it anew"
    for cached_at, count in ((1796035200.0, 1), (0.0, 0)):
        out = tmp_path / str(count)
        out.mkdir()
        told = replace(record(), cached_at=cached_at)
        report = judge(told, out)
        write_report(report, told)
        write_summary([report, report], out)
        for name in ("report.html", "junit.xml", "report.json", "index.html"):
            assert (note in (out / name).read_text()) is bool(count), name
        assert (out / "index.html").read_text().count(note) == count
        console = Console(file=io.StringIO(), width=200)
        render(report, console)
        assert (note in console.file.getvalue()) is bool(count)  # type: ignore[attr-defined]


def test_a_summary_of_nothing_is_unknown(tmp_path: Path) -> None:
    """No trial is no proof."""
    write_summary([], tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "unknown"
    assert summary([])["trials"] == 0


def test_the_json_report_holds_what_it_held_and_more() -> None:
    """Programs that read yesterday's reports find the same fields."""
    told = json.loads(json.dumps(judge(record(wrong={"model/w": "x"}), Path("/tmp/x")).to_dict()))
    assert told["verdict"] == "fail"
    assert {
        "scenario",
        "title",
        "nnodes",
        "nproc",
        "store",
        "seed",
        "command",
        "out",
        "launches",
        "seconds",
    } <= told.keys()
    assert told["findings"][0].keys() >= {"check", "verdict", "text", "compared", "failure"}
    assert told["accounts"][0]["restored_step"] == 2
    assert told["failures"] == {"wrong replica": 1}
    assert told["diagnosis"]["names"] == ["model/w"]
    assert [figure["count"] for figure in told["figures"]] == [2, 2, 2, 1]


# ---------------------------------------------------------------- terminal


def see(console: Console) -> None:
    with Progress(console) as progress:
        for event in record().performance.history:  # type: ignore[union-attr]
            progress.see("hurt", event)


def test_without_a_terminal_progress_is_plain_lines() -> None:
    """Launches, faults and restores are told once each; no codes that a log could not show."""
    out = io.StringIO()
    see(Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert lines == [
        "hurt: harness: launched launch=1",
        "hurt: harness: fault do=lose target=node 1 step=2 fired=True",
        "hurt: harness: node_replaced node=1 by=1.1",
        "hurt: harness: exited launch=1 codes={'0': 1, '1': 137}",
        "hurt: harness: launched launch=2",
        "hurt: script 2: restored step=2 tier=memory",
    ]


def test_on_a_terminal_the_present_step_is_shown_and_cleared() -> None:
    """The moving line says launch and step; what was told stays."""
    out = io.StringIO()
    see(Console(file=out, width=100, force_terminal=True))
    assert "launch 2: step 4" in out.getvalue()
    assert "hurt: harness: fault do=lose" in out.getvalue()


def test_the_terminal_report_names_class_and_advice() -> None:
    """A red check says its class, and the replay line is whole."""
    out = io.StringIO()
    report = judge(record(wrong={"model/w": "x"}), Path("/tmp/x"))
    render(report, Console(file=out, width=60))
    assert "wrong replica" in out.getvalue()
    assert f"again: {report.replay}\n" in out.getvalue()


def test_the_worst_finding_is_the_headline() -> None:
    """A report of a pass counts what was hurt instead."""
    report = judge(record(), Path("/tmp/x"))
    assert report.headline() == "1 fault, 2 launches, every check passed"
    findings = (Finding.unknown("a", "?"), Finding.failed("b", FailureClass.LEAK, "left"))
    assert replace(report, findings=findings, verdict=Verdict.FAIL).headline() == "leak: left"


def test_an_event_without_a_launch_is_no_error() -> None:
    """Whatever a foreign log says, progress goes on."""
    Progress(Console(file=io.StringIO())).see("x", Event(t=0.0, source="agent 0", kind="launched"))
