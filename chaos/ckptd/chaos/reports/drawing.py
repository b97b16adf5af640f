"""Draws timelines and distributions as inline SVG.

Owns: geometry. Does not own: colours (`style`), nor what stands on a timeline (`timeline`). Horizontal places are
percentages, so that a drawing is as wide as its box and text keeps its size; heights are pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptd.chaos.reports.lanes import Lane, Mark, Span, Timeline
from ckptd.chaos.reports.markup import Markup, join, tag
from ckptd.chaos.reports.scale import Scale

_LANE = 26
_BAR = 14
_TOP = 24
_AXIS = 26
# Labels nearer than this, in percent of the width, would overlap.
_APART = 2.4
_APART_TEXTS = 4.2
_TALL = frozenset({"saving", "recovery"})

LEGEND = (
    ("starting", "starting"),
    ("training", "training"),
    ("saving", "standing still to save"),
    ("restoring", "restoring"),
    ("ending", "being ended"),
    ("uploading", "hashing and uploading"),
    ("undecided", "never decided"),
    ("leading", "coordinator"),
    ("up", "agent runs"),
    ("paused", "paused"),
    ("recovery", "until training again"),
)


def draw_timeline(shown: Timeline) -> Markup:
    """Return the timeline: names at the left, which stay where they are, and a drawing that can be scrolled and widened."""
    height = _TOP + _LANE * len(shown.lanes) + _AXIS
    scale = Scale(_moments(shown), shown.seconds)
    rows = [_lane(lane, _TOP + _LANE * row, scale) for row, lane in enumerate(shown.lanes)]
    struck = [*shown.faults, *([] if shown.diverged is None else [shown.diverged])]
    faults = [_fault(mark, height - _AXIS, scale) for mark in struck]
    svg = tag(
        "svg",
        _axis(height, scale),
        *rows,
        *faults,
        width="100%",
        height=height,
        role="img",
        aria_label=f"{len(shown.lanes)} lanes over {shown.seconds:.1f} seconds",
        data_seconds=f"{shown.seconds:.3f}",
    )
    names = [tag("div", lane.name, class_=f"name {lane.group}", style=f"height:{_LANE}px") for lane in shown.lanes]
    labels = tag("div", tag("div", style=f"height:{_TOP}px"), *names, class_="names")
    return tag("div", labels, tag("div", svg, class_="scroll", tabindex="0"), class_="timeline")


def draw_legend(shown: Timeline) -> Markup:
    """Return what the colours mean, of those that are seen."""
    seen = {span.kind for lane in shown.lanes for span in lane.spans}
    bars = [tag("li", tag("i", class_=f"swatch {kind}"), text) for kind, text in LEGEND if kind in seen]
    kinds = {mark.kind for lane in shown.lanes for mark in lane.marks} | ({"diverged"} if shown.diverged else set())
    points = [tag("li", tag("i", sign, class_=f"sign {kind}"), text) for kind, sign, text in _SIGNS if kind in kinds]
    if kinds - _SHAPES.keys() - {"fault", "diverged"}:
        points.append(tag("li", tag("i", "●", class_="sign"), "other event: point at it"))
    return tag("ul", *bars, *points, class_="legend")


_SIGNS = (
    ("fault", "●", "fault"),
    ("diverged", "\u2260", "not equal to the undisturbed run from here on"),
    ("died", "✕", "died"),
    ("step", "│", "step"),
    ("again", "│", "step trained again"),
    ("restored", "▲", "restored"),
    ("committed", "◆", "durable"),
    ("adopted", "◆", "adopted"),
    ("aborted", "◇", "aborted"),
    ("fenced", "■", "fenced"),
    ("missed", "\u2013", "fault that did not fire"),
)
_SHAPES = {
    "step": "M0 -6V6",
    "again": "M0 -6V6",
    "died": "M-5 -5L5 5M-5 5L5 -5",
    "restored": "M0 -6L6 5H-6Z",
    "committed": "M0 -6L5 0L0 6L-5 0Z",
    "adopted": "M0 -6L5 0L0 6L-5 0Z",
    "aborted": "M0 -6L5 0L0 6L-5 0Z",
    "fenced": "M-5 -5H5V5H-5Z",
    "missed": "M-6 0H6",
}
"""What marks look like; all other kinds are a dot."""


def draw_values(values: Sequence[float], most: float) -> Markup:
    """Return one distribution as a strip of dots from 0 to `most`."""
    dots = [tag("circle", cx=f"{1.5 + 97 * value / (most or 1):.2f}%", cy=9, r=3.5) for value in values[:2000]]
    line = tag("line", x1="1.5%", x2="98.5%", y1=9, y2=9)
    return tag("svg", line, *dots, width="100%", height=18, class_="strip", role="img", aria_hidden="true")


def _moments(shown: Timeline) -> Iterator[float]:
    for lane in shown.lanes:
        yield from (mark.t for mark in lane.marks)
        for span in lane.spans:
            yield from (span.begin, span.end)


def _lane(lane: Lane, top: int, scale: Scale) -> Markup:
    middle = top + _LANE / 2
    ground = tag("rect", x=0, y=top, width="100%", height=_LANE, class_=f"lane {lane.group}")
    bars = [_bar(span, middle, scale) for span in lane.spans]
    marks = list(_marks(lane.marks, middle, scale, shows_labels=lane.group in ("steps", "coordinator")))
    return tag("g", tag("title", lane.name), ground, *bars, *marks, class_="row", data_lane=lane.name)


def _bar(span: Span, middle: float, scale: Scale) -> Markup:
    left, right = scale.at(span.begin), scale.at(span.end)
    half = _BAR / 2 + 2 * (span.kind in _TALL) - 4 * (span.kind == "recovery")
    box = tag(
        "rect",
        tag("title", span.title),
        x=f"{left:.3f}%",
        y=middle - half,
        width=f"{right - left:.3f}%",
        height=2 * half,
        rx=2,
        class_=f"bar {span.kind}",
    )
    if span.label and right - left > _APART:
        label = tag("text", span.label, x=f"{left + 0.3:.3f}%", y=middle + 4, class_="in")
        return join((box, label))
    return box


def _marks(marks: Sequence[Mark], middle: float, scale: Scale, *, shows_labels: bool) -> Iterator[Markup]:
    last = -100.0
    for mark in sorted(marks, key=lambda mark: mark.t):
        place = scale.at(mark.t)
        shown = shows_labels and mark.label and place - last > _APART
        if shown:
            last = place
        yield _mark(mark, place, middle, label=mark.label if shown else "")


def _mark(mark: Mark, place: float, middle: float, *, label: str) -> Markup:
    if mark.kind == "fault":
        return Markup("")  # drawn over all lanes
    path = tag("path", d=_SHAPES.get(mark.kind, "M0 -4A4 4 0 1 0 0.01 -4Z"))
    name = tag("text", label, x=4, y=-5) if label else ""
    return tag(
        "svg",
        tag("g", tag("title", mark.title), path, name, class_=f"mark {mark.kind}"),
        x=f"{place:.3f}%",
        y=middle,
        overflow="visible",
    )


def _fault(mark: Mark, bottom: float, scale: Scale) -> Markup:
    place = f"{scale.at(mark.t):.3f}%"
    return tag(
        "g",
        tag("title", mark.title),
        tag("line", x1=place, x2=place, y1=12, y2=bottom),
        tag("circle", cx=place, cy=_TOP / 2, r=9),
        tag("text", mark.label, x=place, y=_TOP / 2 + 4),
        class_=mark.kind,
    )


def _axis(height: float, scale: Scale) -> Markup:
    parts: list[Markup] = [_HATCH]
    texts: list[tuple[float, str, str]] = []
    # The longest first: where two labels would overlap, it is the one that is told.
    for left, right, seconds in sorted(scale.pauses(), key=lambda pause: -pause[2]):
        title = tag("title", f"nothing happened for {seconds:.1f} s: squeezed")
        width = f"{right - left:.3f}%"
        parts.append(
            tag("rect", title, x=f"{left:.3f}%", y=_TOP, width=width, height=height - _TOP - _AXIS, class_="pause")
        )
        words = f"+{seconds:.0f} s" if seconds >= 1 else f"+{seconds:.1f} s"
        if all(abs((left + right) / 2 - at) >= _APART_TEXTS for at, _, _ in texts):
            texts.append(((left + right) / 2, words, "pause"))
    for tick in scale.ticks():
        place = f"{tick.at:.3f}%"
        parts.append(tag("line", x1=place, x2=place, y1=_TOP, y2=height - _AXIS + 4))
        if all(abs(tick.at - at) >= _APART_TEXTS for at, _, _ in texts):
            texts.append((tick.at, tick.text, "tick"))
    parts += [tag("text", words, x=f"{at:.3f}%", y=height - 6, class_=kind) for at, words, kind in texts]
    return tag("g", *parts, class_="axis")


_HATCH = tag(
    "defs",
    tag(
        "pattern",
        tag("path", d="M0 6L6 0", class_="hatch"),
        id="hatch",
        width=6,
        height=6,
        patternUnits="userSpaceOnUse",
    ),
)
