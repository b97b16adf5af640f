"""Reads a fault of the network from a scenario's table, and refuses what is wrong in it.

Owns: the form. Does not own: the line numbers (`scenario_reader` gives them to what is raised here).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptd.chaos.network.words import ALL, NETWORK_FAULTS, NODES, STORE, NetworkFault

NETWORK_KEYS = ("fault", "between", "for_s", "delay_ms", "replaced")
_ENDS = "node N, coordinator, nodes (all others), store, all (both)"
_LONGEST_DELAY_MS = 60_000


class WordError(ValueError):
    """A word is wrong; `key` says which one, the text what is allowed."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def read_network_fault(table: Mapping[str, object]) -> NetworkFault:
    """Return the fault that the table's NETWORK_KEYS describe.

    Raises:
        WordError: Names the key and what is allowed.
    """
    kind = table.get("fault")
    if kind not in NETWORK_FAULTS:
        raise WordError(
            "fault", f"a fault of the network needs fault, one of {', '.join(NETWORK_FAULTS)}, not {kind!r}"
        )
    if kind == "heal":
        for key in NETWORK_KEYS[1:]:
            if key in table:
                raise WordError(key, f"heal ends every fault of the network that lasts; it takes no {key}")
        return NetworkFault(kind="heal")
    between = _between(table.get("between"))
    for_s = _whole(table, "for_s")
    delay_ms = _whole(table, "delay_ms")
    replaced = table.get("replaced")
    if replaced is not None and not isinstance(replaced, bool):
        raise WordError("replaced", "replaced is true or false")
    if (kind == "delay") != (delay_ms is not None):
        raise WordError("delay_ms", "delay needs delay_ms, and nothing else takes it")
    if (delay_ms or 0) > _LONGEST_DELAY_MS:
        raise WordError("delay_ms", f"delay_ms is at most {_LONGEST_DELAY_MS}")
    if kind == "reset" and for_s is not None:
        raise WordError("for_s", "a reset breaks what stands, at once; it takes no for_s")
    if kind in ("delay", "reset") and replaced:
        raise WordError("replaced", "only a node that nobody reaches is replaced: by partition or one-way")
    if replaced is None:
        # A cut that never heals leaves the scheduler no choice; one from the store stops no training.
        replaced = kind == "partition" and for_s is None and STORE not in between
    if replaced and not (between[0].startswith("node ") or between[0] == "coordinator"):
        raise WordError("between", "the first end is the one that is replaced: node N or coordinator")
    return NetworkFault(kind=str(kind), between=between, for_s=for_s, delay_ms=delay_ms or 0, replaced=bool(replaced))


def _between(value: object) -> tuple[str, str]:
    ends = [value, NODES] if isinstance(value, str) else value
    if not isinstance(ends, list) or len(ends) != 2 or not all(isinstance(end, str) for end in ends):
        raise WordError("between", f'between is one end or a list of two, as ["node 0", "node 1"]; ends: {_ENDS}')
    for end in ends:
        if end not in ("coordinator", NODES, STORE, ALL) and not re.fullmatch(r"node \d{1,3}", end):
            raise WordError("between", f"unknown end {end!r}; allowed: {_ENDS}")
    first, second = ends
    if first == second or {first, second} == {STORE, ALL}:
        raise WordError("between", f"nothing lies between {first} and {second}; ends: {_ENDS}")
    if first in (NODES, ALL):
        raise WordError("between", f"the first end is node N, coordinator or store; {first} are the others")
    return first, second


def _whole(table: Mapping[str, object], key: str) -> int | None:
    value = table.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise WordError(key, f"{key} is a whole number from 1, not {value!r}")
    return value
