"""The allowed range of a setting in words, for the errors of both programs. Pure."""

from __future__ import annotations

from collections.abc import Iterable

_WORDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def allowed(constraints: Iterable[object]) -> str:
    """Return e.g. "more than 0, at most 3600" for the metadata of a pydantic field; "" where no number is bounded."""
    found = {name: getattr(one, name) for one in constraints for name in _WORDS if hasattr(one, name)}
    return ", ".join(f"{words} {found[name]}" for name, words in _WORDS.items() if name in found)
