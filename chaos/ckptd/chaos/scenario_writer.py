"""Writes a scenario as the TOML that `scenario_reader` reads. Pure.

Owns: the form. Does not own: the words (`scenario`). Invariant: what is read back equals what was written, but for its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from ckptd.chaos.local_faults import ClockFault, DiskFault, LocalFault
from ckptd.chaos.network.words import STORE, NetworkFault
from ckptd.chaos.scenario import Expectation, Fault, Moment, Scenario, StoreFault


def to_toml(scenario: Scenario) -> str:
    """Return the text of a scenario file."""
    return "\n".join(_lines(scenario)) + "\n"


def _lines(scenario: Scenario) -> Iterator[str]:
    yield from _pairs({"title": scenario.title, "proves": scenario.proves})
    yield from _table("needs", {"nodes": scenario.min_nodes, "ranks": scenario.min_ranks})
    yield from _table("failpoints", {"agents": scenario.agent_failpoints} if scenario.agent_failpoints else {})
    for fault in scenario.faults:
        yield from ("", "[[fault]]", *_pairs(_fault(fault)), f"at = {{ {', '.join(_pairs(_moment(fault.at)))} }}")
    expect = {
        key: list(value) if isinstance(value, tuple) else value
        for key in Expectation.__dataclass_fields__
        if (value := getattr(scenario.expect, key)) not in (None, (), False)
    }
    yield from _table("expect", expect)


def _fault(fault: Fault) -> dict[str, object]:
    if fault.store is not None:
        return {"do": "store", "fault": fault.store.kind, **_store(fault.store)}
    if fault.network is not None:
        return {"do": "network", "fault": fault.network.kind, **_network(fault.network)}
    local = {} if fault.local is None else _local(fault.local)
    # The store's disk is nobody's own, and has no target in a file.
    return {"do": fault.do, **({} if fault.target.kind == STORE else {"target": _target(fault)}), **local}


def _target(fault: Fault) -> str:
    which = fault.target.which
    return fault.target.kind if which is None else f"{fault.target.kind} {which}"


def _network(fault: NetworkFault) -> dict[str, object]:
    if fault.kind == "heal":
        return {}
    told: dict[str, object] = {"between": list(fault.between)}
    told |= {key: value for key in ("for_s", "delay_ms") if (value := getattr(fault, key)) not in (None, 0)}
    # It is said only where it may be: neither a delay nor a reset takes a node out of reach.
    return told if fault.kind in ("delay", "reset") else told | {"replaced": fault.replaced}


def _local(fault: LocalFault) -> dict[str, object]:
    if isinstance(fault, DiskFault):
        told: dict[str, object] = {"disk": fault.disk, "fault": fault.kind}
        told |= {"left_kib": fault.left_kib} if fault.left_kib else {}
        told |= {"size_mib": fault.size_mib} if fault.is_mounted else {}
    elif isinstance(fault, ClockFault):
        told = {"shift_s": fault.shift_s}
    else:
        told = {"percent": fault.percent}
    return told | ({} if fault.for_s is None else {"for_s": fault.for_s})


def _store(fault: StoreFault) -> dict[str, object]:
    told: dict[str, object] = {}
    if match := " ".join(filter(None, (fault.op, fault.prefix))):
        told["match"] = match
    numbers = ("for_s", "times", "delay_s", "bytes_per_s", "per_s")
    return told | {key: value for key in numbers if (value := getattr(fault, key)) not in (None, 0)}


def _moment(at: Moment) -> dict[str, object]:
    unsaid = {"nth": 1}
    return {
        key: value
        for key in Moment.__dataclass_fields__
        if (value := getattr(at, key)) not in (None, False) and (key, value) not in unsaid.items()
    }


def _table(name: str, pairs: Mapping[str, object]) -> Iterator[str]:
    if pairs:
        yield from ("", f"[{name}]", *_pairs(pairs))


def _pairs(pairs: Mapping[str, object]) -> Iterator[str]:
    # JSON's texts, numbers, truths and lists of these are TOML's too, once what lies beyond ASCII is written as it is.
    return (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in pairs.items())
