"""Faults as JSON: what the harness orders, and what the proxy takes.

Owns the form of an order, and the refusal of what is wrong in it. Does not own the words (`fault_script`). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from ckptd.storage_backends.fault_script import Fault, FaultKind, Op

# An error of one's own is a Python function; it cannot travel.
_KEYS = tuple(field.name for field in fields(Fault) if field.name != "error")


class OrderError(ValueError):
    """An order makes no sense; the text says what is allowed."""


def to_json(fault: Fault) -> dict[str, object]:
    """Return what `from_json` reads."""
    return {key: getattr(fault, key) for key in _KEYS}


def from_json(order: Mapping[str, object]) -> Fault:
    """Return the fault that an order describes; `times` is 1 by default, with `for_s` without bound.

    Raises:
        OrderError: A key or value is unknown, of the wrong type, or does not fit the kind.
    """
    for key in order:
        if key not in _KEYS:
            raise OrderError(f"unknown key {key!r}; allowed: {', '.join(_KEYS)}")
    kind, op = order.get("kind"), order.get("op")
    if kind not in list(FaultKind):
        raise OrderError(f"kind is {kind!r}; allowed: {', '.join(FaultKind)}")
    if op is not None and op not in list(Op):
        raise OrderError(f"op is {op!r}; allowed: {', '.join(Op)}")
    prefix = order.get("prefix", "")
    if not isinstance(prefix, str):
        raise OrderError(f"prefix is a text, not {prefix!r}")
    for_s = order.get("for_s")
    times = order.get("times", None if for_s is not None else 1)
    try:
        return Fault(
            kind=FaultKind(str(kind)),
            op=None if op is None else Op(str(op)),
            prefix=prefix,
            nth=_whole(order, "nth", 1),
            times=None if times is None else _whole({"times": times}, "times", 1),
            probability=_number(order, "probability", 1.0),
            for_s=None if for_s is None else _number(order, "for_s", 0.0),
            delay_s=_number(order, "delay_s", 0.0),
            bytes_per_s=_number(order, "bytes_per_s", 0.0),
            per_s=_whole(order, "per_s", 0),
        )
    except ValueError as error:
        raise OrderError(str(error)) from None


def _whole(order: Mapping[str, object], key: str, default: int) -> int:
    value = order.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise OrderError(f"{key} is a whole number, not {value!r}")
    return value


def _number(order: Mapping[str, object], key: str, default: float) -> float:
    value = order.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise OrderError(f"{key} is a number from 0, not {value!r}")
    return float(value)
