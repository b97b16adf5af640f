"""What each fault cost: where the job went on from, what was lost, how long it took. Pure.

Owns: reading a history around a fault. Does not own: whether that is right (`checkers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptd.chaos.conductor import Performance
from ckptd.chaos.history import Event, History, step_in_flight
from ckptd.chaos.nemesis.injector import Struck


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """One fault and what followed.

    Attributes:
        kind: What was done, e.g. "kill".
        target: To whom, e.g. "rank 3".
        moment: When it was meant to strike.
        step: The step in flight then: of the event it waited for, else the oldest one begun and not decided.
        fired: Whether it was done.
        late: Why it proves nothing, if it came too late; else empty.
        note: Why it was not done, if it was not.
        relaunched: Whether the job was started again because of it.
        restored_step: Step the next launch went on from; 0 for a new beginning; None if it was not relaunched.
        restored_from: "memory", "store" or "mixed"; of the fresh node alone where a node was lost or rebooted; None if nothing
            was restored.
        lost_steps: Steps that had been trained and were trained again; None as above.
        recovery_s: From the fault to the first step trained after it, seconds; None if none came.
    """

    kind: str
    target: str
    moment: str
    step: int | None
    fired: bool
    late: str
    note: str
    relaunched: bool
    restored_step: int | None
    restored_from: str | None
    lost_steps: int | None
    recovery_s: float | None


def accounts(performance: Performance, *, nproc: int) -> list[Account]:
    """Return one account per scheduled fault, in order."""
    struck = performance.struck
    ends = [following.t if following.fired else float("inf") for following in struck[1:]] + [float("inf")]
    return [_account(performance.history, fate, end, nproc) for fate, end in zip(struck, ends, strict=True)]


def _account(history: History, fate: Struck, end: float, nproc: int) -> Account:
    fault = fate.fault
    step = fate.step if fate.step is not None else step_in_flight(history, fate.t)
    relaunch = next(iter(history.of("launched", after=fate.t, before=end)), None) if fate.fired else None
    restored = trained = None
    if relaunch is not None:
        source = f"script {relaunch.fields['launch']}"
        restored = next(iter(history.of("restored", source=source)), None)
        trained = next(iter(history.of("step", source=source)), None)
    elif fate.fired:
        trained = next(iter(history.of("step", source="script", after=fate.t)), None)
    reached = max((e.step or 0 for e in history.of("step", source="script", before=fate.t)), default=0)
    from_step = None
    if restored is not None:
        from_step = restored.step
    elif trained is not None and relaunch is not None:
        from_step = 0
    return Account(
        kind=fault.do,
        target=fault.target,
        moment=fault.moment,
        step=step,
        fired=fate.fired,
        late=_late(history, fate, step, nproc) if fate.fired else "",
        note=fate.note,
        relaunched=relaunch is not None,
        restored_step=from_step,
        restored_from=_tier(history, fate, relaunch, restored)
        if relaunch is not None and restored is not None
        else None,
        lost_steps=None if from_step is None else max(0, reached - from_step),
        recovery_s=None if trained is None else round(trained.t - fate.t, 3),
    )


def _tier(history: History, fate: Struck, relaunch: Event, restored: Event) -> str:
    """Return where the bytes came from; what rank 0 printed where the agents say nothing."""
    fetched = history.of("fetched", source="agent", after=relaunch.t, before=restored.t + 1.0)
    fresh = {f"agent {e.fields['by']}" for e in history.of("node_replaced", after=fate.t, before=relaunch.t)}
    rebooted = history.of("node_rebooted", after=fate.t, before=relaunch.t)
    fresh |= {f"agent {e.fields['node']}" for e in rebooted}
    by_tier: dict[str, int] = {}
    for event in fetched:
        told = event.fields.get("bytes_by_tier")
        if isinstance(told, Mapping) and (not fresh or event.source in fresh):
            for tier, count in told.items():
                by_tier[str(tier)] = by_tier.get(str(tier), 0) + int(count)
    if fresh and by_tier.get("store"):
        # It began with empty memory; equal chunks of its ranks are read once, and the copies count as memory.
        return "store"
    used = [tier for tier, count in by_tier.items() if count]
    return "mixed" if len(used) > 1 else (used or [str(restored.fields.get("tier"))])[0]


def _late(history: History, fate: Struck, step: int | None, nproc: int) -> str:
    """Return why the fault missed its window; empty if it hit it."""
    fault = fate.fault
    if fault.at.before is None:
        return ""
    node = fault.node(nproc)
    for event in history.of(fault.at.before, source="agent", before=fate.t):
        same_node = fault.kind not in ("agent", "node") or event.source == f"agent {node}"
        if event.step == step and same_node:
            return f"{fault.at.before} of step {step} had come {fate.t - event.t:.3f} s before the fault"
    return ""
