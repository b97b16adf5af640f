"""A run as lanes over time: what every rank, agent and coordinator did, and when it was hurt. Pure.

Owns: which events make which bar and mark. Does not own: how they look (`drawing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptd.chaos.accounts import Account
from ckptd.chaos.diagnosis import Diagnosis
from ckptd.chaos.history import Event, History
from ckptd.chaos.reports.lanes import Lane, Mark, Span, Timeline
from ckptd.chaos.reports.rank_lanes import rank_lanes

_AGENT_MARKS = {
    "slots_adopted": "took over the staged slots of the agent before it",
    "upload_failed": "an upload failed",
    "rejected": "a copy's digest did not fit",
    "restore_failed_local": "cannot have the bytes of the offered step",
    "internal_error": "internal error",
    "fetched": "has found and verified what its ranks want",
}
_COORDINATOR_MARKS = {
    "fenced": "is fenced: a newer timeline was claimed",
    "refused": "refused the run",
    "quarantined": "found the offered step bad",
    "restore_go": "lets all ranks copy what was restored",
    "store_failed": "cannot reach the store",
    "node_lost": "has lost a node",
}


def timeline(
    history: History, told: Sequence[Account], *, ranks: int, nproc: int, diagnosis: Diagnosis | None = None
) -> Timeline:
    """Return the lanes of a run.

    Args:
        history: What happened.
        told: What each fault cost.
        diagnosis: Where it diverged first; None if it did not.
        ranks: Number of ranks.
        nproc: Ranks on each node.
    """
    begin = min((event.t for event in history), default=0.0)
    end = max((event.t for event in history), default=0.0)
    lanes = [
        _faults(history, told, begin),
        _steps(history, begin),
        *rank_lanes(history, begin, end, ranks=ranks, nproc=nproc),
        _coordinator(history, begin, end),
        _durable(history, begin, end),
        *(_agent(history, name, begin, end) for name in _agents(history)),
    ]
    faults = tuple(mark for mark in lanes[0].marks if mark.kind == "fault")
    return Timeline(
        seconds=max(0.001, end - begin),
        lanes=tuple(lanes),
        faults=faults,
        diverged=None if diagnosis is None else _diverged(history, diagnosis, begin),
    )


def _diverged(history: History, diagnosis: Diagnosis, begin: float) -> Mark | None:
    if not diagnosis.names and not diagnosis.loss_differs:
        return None  # what was trained again is equal
    kind = "restored" if diagnosis.moment == "restore" else "step"
    found = [e for e in history.of(kind, source=f"script {diagnosis.launch}") if e.step == diagnosis.step]
    if not found:
        return None
    where = "" if diagnosis.rank is None else f", first on rank {diagnosis.rank}"
    text = f"not equal to the undisturbed run from here on: step {diagnosis.step}{where}"
    return Mark(kind="diverged", t=found[0].t - begin, title=text, label="\u2260")


def _faults(history: History, told: Sequence[Account], begin: float) -> Lane:
    marks, spans = [], []
    struck = history.of("fault", source="harness")
    for number, event in enumerate(struck, start=1):
        title = f"{event.fields.get('do')} {event.fields.get('target')}"
        if not event.fields.get("fired", True):
            marks.append(Mark(kind="missed", t=event.t - begin, title=f"{title} did not fire", label=str(number)))
            continue
        marks.append(Mark(kind="fault", t=event.t - begin, title=title, label=str(number)))
        account = told[number - 1] if number <= len(told) else None
        if account is not None and account.recovery_s:
            text = f"training again {account.recovery_s:.1f} s after {title}"
            spans.append(_span("recovery", event.t - begin, event.t - begin + account.recovery_s, text))
    return Lane(name="faults", group="faults", spans=tuple(spans), marks=tuple(marks))


def _steps(history: History, begin: float) -> Lane:
    marks, reached = [], 0
    for event in history.of("step", "restored", source="script"):
        launch = event.source.removeprefix("script ")
        step = event.step or 0
        if event.kind == "restored":
            text = f"launch {launch} went on from step {step}, from {event.fields.get('tier')}"
            marks.append(Mark(kind="restored", t=event.t - begin, title=text, label=str(step)))
            continue
        kind = "again" if step <= reached else "step"
        text = f"step {step}{' once more' * (kind == 'again')}, launch {launch}, loss {event.fields.get('loss')}"
        marks.append(Mark(kind=kind, t=event.t - begin, title=text, label=str(step)))
        reached = max(reached, step)
    return Lane(name="steps trained", group="steps", marks=tuple(marks))


def _coordinator(history: History, begin: float, end: float) -> Lane:
    claims = history.of("claimed", source="agent")
    spans, marks = [], []
    for event in claims:
        closed = history.of("coordinator_closed", source=event.source, after=event.t)
        died = _deaths(history, event.source.removeprefix("agent "), event.t)
        newer = [e.t for e in claims if e.t > event.t]
        over = min([*(e.t for e in closed), *died, *newer], default=end)
        text = f"timeline {event.fields.get('timeline')}, led by {event.source}"
        spans.append(_span("leading", event.t - begin, over - begin, text, label=event.source))
    for event in history.of("acknowledged", source="agent"):
        is_commit = event.fields.get("committed") is not False
        text = f"{event.source} acknowledged step {event.step} as {'durable' if is_commit else 'aborted'}"
        kind = "committed" if is_commit else "aborted"
        marks.append(Mark(kind=kind, t=event.t - begin, title=text, label=str(event.step)))
    for event in history.of("adopted", source="agent"):
        text = f"{event.source} adopted step {event.step} of the run before"
        marks.append(Mark(kind="adopted", t=event.t - begin, title=text, label=str(event.step)))
    marks += _said(history, _COORDINATOR_MARKS, "agent", begin)
    return Lane(name="coordinator", group="coordinator", spans=tuple(spans), marks=tuple(marks))


def _durable(history: History, begin: float, end: float) -> Lane:
    """From a save's begin to the moment from which its step cannot be lost any more."""
    begun: dict[tuple[int | None, str], float] = {}
    for event in history.of("begun", "staged", source="agent"):
        begun.setdefault((event.step, str(event.fields.get("timeline"))), event.t)
    ended: dict[tuple[int | None, str], Event] = {}
    for event in history.of("acknowledged", "adopted", source="agent"):
        ended.setdefault((event.step, str(event.fields.get("of" if event.kind == "adopted" else "timeline"))), event)
    spans = []
    for key, t in sorted(begun.items(), key=lambda item: item[1]):
        over = ended.get(key)
        after = end if over is None else over.t
        if over is None:
            kind, text = "undecided", f"step {key[0]} was begun and never decided"
        elif over.fields.get("committed") is False:
            kind, text = "aborted", f"step {key[0]} was aborted after {after - t:.3f} s"
        else:
            kind, text = "uploading", f"step {key[0]} durable {after - t:.3f} s after its save began ({over.kind})"
        spans.append(_span(kind, t - begin, after - begin, text, label=str(key[0])))
    return Lane(name="becoming durable", group="durable", spans=tuple(spans))


def _agents(history: History) -> list[str]:
    names = {event.source.removeprefix("agent ") for event in history if event.source.startswith("agent ")}
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")])


def _agent(history: History, name: str, begin: float, end: float) -> Lane:
    source = f"agent {name}"
    spans: list[Span] = []
    ups = history.of("listening", source=source)
    for event in ups:
        over = min(
            [*_deaths(history, name, event.t), *(e.t for e in history.of("stopped", source=source, after=event.t))],
            default=end,
        )
        spans.append(_span("up", event.t - begin, over - begin, f"{source} runs"))
    spans += _paused(history, name, begin, end)
    spans += _uploads(history, name, begin)
    marks = [
        Mark(kind="died", t=e.t - begin, title=f"{source} died, exit {e.fields.get('code')}")
        for e in history.of("agent_died", source="harness")
        if e.fields.get("agent") == name
    ]
    marks += [
        Mark(kind="died", t=t - begin, title=f"node {name} was lost; a fresh one takes its place")
        for t in _deaths(history, name, begin)
        if t not in {e.t for e in history.of("agent_died", source="harness")}
    ]
    marks += _said(history, _AGENT_MARKS, source, begin)
    return Lane(name=source, group="agent", spans=tuple(spans), marks=tuple(marks))


def _uploads(history: History, name: str, begin: float) -> Iterator[Span]:
    source = f"agent {name}"
    done: dict[int | None, list[float]] = {}
    for event in history.of("sealed-local", "upload_failed", source=source):
        done.setdefault(event.step, []).append(event.t)
    deaths = _deaths(history, name, begin)
    seen: set[tuple[int | None, float]] = set()
    for event in history.of("staged_local", "slots_adopted", source=source):
        ended = min((t for t in [*done.get(event.step, ()), *deaths] if t >= event.t), default=None)
        # The ranks of a node are uploaded together: one bar, from the first of them.
        if ended is not None and (event.step, ended) not in seen:
            seen.add((event.step, ended))
            text = f"{source} hashes and uploads its part of step {event.step}"
            yield _span("uploading", event.t - begin, ended - begin, text)


def _deaths(history: History, name: str, after: float) -> list[float]:
    """Return when an agent died or its node was lost, after a moment."""
    died = [e.t for e in history.of("agent_died", source="harness", after=after) if e.fields.get("agent") == name]
    for replaced in history.of("node_replaced", source="harness", after=after):
        if replaced.fields.get("node") == name and not _was_paused(history, replaced):
            fault = history.last("fault", source="harness", before=replaced.t)
            died.append(replaced.t if fault is None else max(after, fault.t))
    return died


def _was_paused(history: History, replaced: Event) -> bool:
    """Whether the node that was replaced sleeps, and may be woken."""
    before = history.last("fault", source="harness", before=replaced.t)
    return before is not None and before.fields.get("do") == "stop"


def _paused(history: History, name: str, begin: float, end: float) -> Iterator[Span]:
    for event in history.of("node_replaced", source="harness"):
        if event.fields.get("node") == name and _was_paused(history, event):
            woken = history.of(
                "fault", source="harness", after=event.t, where=lambda e: e.fields.get("do") == "continue"
            )
            over = woken[0].t if woken else end
            yield _span("paused", event.t - begin, over - begin, f"node {name} is paused; others took its place")


def _said(history: History, words: dict[str, str], source: str, begin: float) -> list[Mark]:
    return [
        Mark(kind=event.kind, t=event.t - begin, title=f"{event.source} {words[event.kind]}{_about(event)}")
        for event in history.of(*words, source=source)
    ]


def _about(event: Event) -> str:
    step = "" if event.step is None else f" (step {event.step})"
    error = event.fields.get("error")
    return step + (f": {error}" if error else "")


def _span(kind: str, begin: float, end: float, title: str, label: str = "") -> Span:
    return Span(kind=kind, begin=begin, end=max(begin, end), title=title, label=label)
