"""The lanes of the ranks: starting, restoring, training, saving, and how each launch ended. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ckptd.chaos.history import Event, History
from ckptd.chaos.local_faults import NOBODY_ENDS
from ckptd.chaos.reports.lanes import Lane, Mark, Span


def rank_lanes(history: History, begin: float, end: float, *, ranks: int, nproc: int) -> Iterator[Lane]:
    """Yield a lane per rank, in order; `begin` and `end` are the run's, seconds since the epoch."""
    launched = history.of("launched", source="harness")
    for rank in range(ranks):
        spans: list[Span] = []
        marks: list[Mark] = []
        for position, event in enumerate(launched):
            after = launched[position + 1].t if position + 1 < len(launched) else end
            _add_launch(spans, marks, history, event, after, rank=rank, node=rank // nproc, begin=begin)
        for event in history.of("save_returned", source="client"):
            if event.rank != rank:
                continue
            seconds = float(event.fields.get("seconds") or 0.0)
            what = "skipped the save of" if event.fields.get("skipped") else "stood still to save"
            text = f"rank {rank} {what} step {event.step}: {seconds * 1000:.1f} ms"
            spans.append(Span(kind="saving", begin=event.t - seconds - begin, end=event.t - begin, title=text))
        yield Lane(name=f"rank {rank}", group="rank", spans=tuple(spans), marks=tuple(marks))


def _add_launch(
    spans: list[Span],
    marks: list[Mark],
    history: History,
    launched: Event,
    after: float,
    *,
    rank: int,
    node: int,
    begin: float,
) -> None:
    number = launched.fields["launch"]
    exited = [e.t for e in history.of("exited", source="harness") if e.fields.get("launch") == number]
    ended = min([*exited, after])
    hit = _hit(history, launched.t, ended, rank=rank, node=node)
    gone = [
        event.t
        for event in history.of("rank_detached", "rank_lost", source="agent", after=launched.t, before=ended)
        if event.rank == rank
    ]
    over = min([*gone, *([] if hit is None else [hit.t]), ended])
    trained = [event.t for event in history.of("step", source=f"script {number}")]
    attached = [
        event.t
        for event in history.of("attached_local", source="agent", after=launched.t, before=over)
        if event.rank == rank
    ]
    ready = min([*attached[:1], *trained[:1]], default=over)
    spans.append(
        Span(
            kind="starting",
            begin=launched.t - begin,
            end=min(ready, over) - begin,
            title=f"launch {number}: rank {rank} starts for {ready - launched.t:.1f} s",
        )
    )
    for event in history.of("restored", source="client", after=launched.t, before=over):
        if event.rank == rank:
            seconds = float(event.fields.get("seconds") or 0.0)
            text = f"rank {rank} restored step {event.step} from {event.fields.get('tier')} in {seconds:.3f} s"
            spans.append(
                Span(kind="restoring", begin=max(ready, event.t - seconds) - begin, end=event.t - begin, title=text)
            )
            marks.append(Mark(kind="restored", t=event.t - begin, title=text))
            ready = event.t
    if ready < over:
        text = f"launch {number}: rank {rank} trains for {over - ready:.1f} s"
        spans.append(Span(kind="training", begin=ready - begin, end=over - begin, title=text))
    if hit is not None:
        text = f"rank {rank} is hit: {hit.fields.get('do')} {hit.fields.get('target')}"
        marks.append(Mark(kind="died", t=hit.t - begin, title=text))
    elif (exited and over >= exited[0]) or (gone and exited):
        text = f"launch {number} is down: rank {rank} is ended"
        spans.append(Span(kind="ending", begin=over - begin, end=exited[0] - begin, title=text))


def _hit(history: History, after: float, before: float, *, rank: int, node: int) -> Event | None:
    """Return the fault that ended this rank in a launch."""
    for event in history.of("fault", source="harness", after=after, before=before):
        if not event.fields.get("fired", True) or event.fields.get("do") in ("continue", *NOBODY_ENDS):
            continue
        target = event.fields.get("target")
        replaced = [e for e in history.of("node_replaced", source="harness", after=event.t) if e.t <= event.t + _SOON]
        lost = {str(e.fields.get("node")).partition(".")[0] for e in replaced}
        if target in (f"rank {rank}", f"node {node}", "all") or str(node) in lost:
            return event
    return None


# A node is replaced right after the fault that took it.
_SOON = 10.0
