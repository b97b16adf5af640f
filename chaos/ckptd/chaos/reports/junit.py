"""Reports as JUnit XML, as build servers read it: a suite per trial, a case per check.

A failed check is a failure with its class as type, an unknown one an error: both make a build red. Times are of the
whole trial; a check takes none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from xml.etree import ElementTree as ET

from ckptd.chaos.report import Report
from ckptd.chaos.verdict import Finding, Verdict

# XML 1.0 knows no other control characters.
_FORBIDDEN = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


NOT_DONE = "not done: the command has not come to it, or was ended before"
"""What is said of a scenario that is still open."""


def junit(reports: Iterable[Report], *, still_open: Sequence[str] = ()) -> str:
    """Return the XML document of some trials; a scenario that is still open is an error."""
    suites = [_suite(report) for report in reports] + [_open(name) for name in still_open]
    root = ET.Element("testsuites", name="ckptd chaos")
    for key in ("tests", "failures", "errors"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in suites)))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in suites):.3f}")
    root.extend(suites)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(report: Report) -> ET.Element:
    name = f"chaos.{report.scenario}.{report.nnodes}x{report.nproc}.{report.store}.seed{report.seed}"
    count = {verdict: sum(finding.verdict is verdict for finding in report.findings) for verdict in Verdict}
    suite = ET.Element(
        "testsuite",
        name=clean(name),
        tests=str(len(report.findings)),
        failures=str(count[Verdict.FAIL]),
        errors=str(count[Verdict.UNKNOWN]),
        skipped="0",
        time=f"{report.seconds:.3f}",
        timestamp=time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(report.begun)),
        hostname="localhost",
    )
    properties = ET.SubElement(suite, "properties")
    for key, value in (
        ("verdict", report.verdict),
        ("seed", report.seed),
        ("store", report.store),
        ("nodes", report.nnodes),
        ("ranks per node", report.nproc),
        ("replay", report.replay),
        ("evidence", report.out),
        ("undisturbed run", report.cached() or "run anew"),
    ):
        ET.SubElement(properties, "property", name=key, value=clean(str(value)))
    for finding in report.findings:
        suite.append(_case(finding, name, report.replay))
    return suite


def _open(scenario: str) -> ET.Element:
    name = clean(f"chaos.{scenario}")
    suite = ET.Element("testsuite", name=name, tests="1", failures="0", errors="1", skipped="0", time="0")
    case = ET.SubElement(suite, "testcase", classname=name, name="trial", time="0")
    ET.SubElement(case, "error", type="not done", message=NOT_DONE)
    return suite


def _case(finding: Finding, suite: str, replay: str) -> ET.Element:
    case = ET.Element("testcase", classname=clean(suite), name=clean(finding.check), time="0")
    if finding.verdict is Verdict.PASS:
        ET.SubElement(case, "system-out").text = clean(finding.text)
        return case
    kind = "failure" if finding.verdict is Verdict.FAIL else "error"
    told = ET.SubElement(case, kind, type=str(finding.failure or "unknown"), message=clean(finding.text))
    told.text = clean(f"{finding.text}\nagain: {replay}")
    return case


def clean(text: str) -> str:
    """Return text without what XML cannot hold."""
    return _FORBIDDEN.sub("\ufffd", text)
