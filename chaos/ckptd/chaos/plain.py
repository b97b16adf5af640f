"""Frozen dataclasses out of the plain values that `dataclasses.asdict` and JSON made of them.

Owns: the way back. Does not own: files. Invariant: what comes back equals what was written, for fields that are
numbers, texts, truths, enumerations, paths, tuples, mappings with text keys, and dataclasses of these; a value of
another type than the field's is an error, never taken as it is.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints


def from_plain(kind: Any, value: Any) -> Any:
    """Return `value` as a value of the type `kind`.

    Raises:
        TypeError: It is none, or a field is missing or unknown.
        ValueError: No member of an enumeration.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any or kind is object:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(parts, value)
    if origin is tuple:
        return _tuple(parts, value)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise TypeError(f"{value!r} is no mapping")
        # Keys of JSON are texts.
        return {parts[0](key): from_plain(parts[1], one) for key, one in value.items()}
    if is_dataclass(kind):
        return _dataclass(kind, value)
    if isinstance(kind, type) and issubclass(kind, Enum | Path):
        return kind(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {getattr(kind, '__name__', kind)}")
    return value


def _one_of(kinds: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if type(value) is kind:
            return value
    for kind in kinds:
        if kind is not type(None):
            try:
                return from_plain(kind, value)
            except TypeError:
                continue
    raise TypeError(f"{value!r} is none of {', '.join(map(str, kinds))}")


def _tuple(parts: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{value!r} is no list")
    if len(parts) == 2 and parts[1] is Ellipsis:
        return tuple(from_plain(parts[0], one) for one in value)
    return tuple(from_plain(part, one) for part, one in zip(parts, value, strict=True))


def _dataclass(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    hints = get_type_hints(kind)
    known = {field.name for field in fields(kind)}
    if strange := sorted(value.keys() - known):
        raise TypeError(f"{kind.__name__} has no {', '.join(strange)}")
    return kind(**{name: from_plain(hints[name], one) for name, one in value.items()})
