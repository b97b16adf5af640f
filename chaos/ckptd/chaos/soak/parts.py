"""A schedule taken apart: what can be left out of it, and what can be made simpler. Pure.

Owns: which faults belong together, and what is simpler than what. Does not own: the search (`shrinking`). A stop without the
fault that has its target go on would hang any job, and be another failure than the one that is looked for; so it is with a node
that is cut off for good and what heals the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ckptd.chaos.local_faults import LocalFault
from ckptd.chaos.scenario import Fault, Moment, Scenario

_ONLY_THERE = ("stale_list", "corrupted", "put_lost", "skewed")
"""Faults of the store that must be got over under their prefix alone: without it another thing would fail, and rightly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What stays or goes as one.

    Attributes:
        faults: With their places in the schedule; empty for a delay.
        delay: One entry of the failpoints of all agents; empty for faults.
    """

    faults: tuple[tuple[int, Fault], ...] = ()
    delay: str = ""


def parts_of(scenario: Scenario) -> tuple[Part, ...]:
    """Take a schedule apart: each fault, what ends one with the fault that it ends, and each delay.

    A `continue` ends the stop before it of the same target, a `heal` the cut before it that lasts.
    """
    groups: list[list[tuple[int, Fault]]] = []
    for place, fault in enumerate(scenario.faults):
        ended = next((group for group in reversed(groups) if len(group) == 1 and _ends(fault, group[0][1])), None)
        if ended is None:
            groups.append([(place, fault)])
        else:
            ended.append((place, fault))
    delays = [entry for entry in scenario.agent_failpoints.split(";") if entry]
    return (*(Part(faults=tuple(group)) for group in groups), *(Part(delay=delay) for delay in delays))


def _ends(later: Fault, earlier: Fault) -> bool:
    """Whether a fault is there to end one before it."""
    if later.do == "continue":
        return earlier.do == "stop" and earlier.target == later.target
    is_heal = later.network is not None and later.network.kind == "heal"
    return is_heal and earlier.network is not None and earlier.network.replaced


def assembled(parts: Iterable[Part], like: Scenario) -> Scenario:
    """Put parts together again, faults in the order of their places; all else is as in `like`."""
    kept = list(parts)
    faults = sorted((one for part in kept for one in part.faults), key=lambda one: one[0])
    return replace(
        like,
        faults=tuple(fault for _, fault in faults),
        agent_failpoints=";".join(part.delay for part in kept if part.delay),
    )


def simpler(part: Part) -> Iterator[Part]:
    """Yield parts that are like this one and simpler in one thing, the simplest first; each chain of them ends."""
    yield from _simpler_targets(part)
    for at, (place, fault) in enumerate(part.faults):
        for other in _simpler_faults(fault):
            yield replace(part, faults=(*part.faults[:at], (place, other), *part.faults[at + 1 :]))


def _simpler_targets(part: Part) -> Iterator[Part]:
    """Yield the same done to number 0: to all of a part at once, else somebody else would be woken than was stopped."""
    if any(isinstance(fault.target.which, int) and fault.target.which > 0 for _, fault in part.faults):
        yield replace(part, faults=tuple((place, _on_first(fault)) for place, fault in part.faults))


def _on_first(fault: Fault) -> Fault:
    return fault if fault.target.which is None else replace(fault, target=replace(fault.target, which=0))


def _simpler_faults(fault: Fault) -> Iterator[Fault]:
    for at in _simpler_moments(fault.at):
        yield replace(fault, at=at)
    if (local := fault.local) is not None and local.for_s is not None and local.for_s > 1:
        yield replace(fault, local=_for_a_second(local))
    if (network := fault.network) is not None and network.for_s is not None and network.for_s > 1:
        yield replace(fault, network=replace(network, for_s=1))
    if (store := fault.store) is not None:
        if store.prefix and store.kind not in _ONLY_THERE:
            yield replace(fault, store=replace(store, prefix=""))
        if store.times is not None and store.times > 1:
            yield replace(fault, store=replace(store, times=1))
        if store.for_s is not None and store.for_s > 1:
            yield replace(fault, store=replace(store, for_s=1))
        if store.delay_s > 1:
            yield replace(fault, store=replace(store, delay_s=1))


def _for_a_second(local: LocalFault) -> LocalFault:
    return replace(local, for_s=1)


def _simpler_moments(at: Moment) -> Iterator[Moment]:
    if at.after_ms is not None:
        # At once, else half as late.
        yield from (Moment(after_ms=one) for one in dict.fromkeys((1, at.after_ms // 2)) if 0 < one < at.after_ms)
        return
    if at.event is not None and at.event != "step":
        yield Moment(event="step")
    for nth in dict.fromkeys((1, at.nth // 2)):
        if 0 < nth < at.nth:
            yield replace(at, nth=nth)
    if at.restarting and at.failpoint is None:
        yield replace(at, restarting=False)
