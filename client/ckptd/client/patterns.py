"""Texts that choose names: which names they fit, and which names come close where they fit none.

Pure. Owns: what `only` and `drop` mean by a text. Does not own: what is done with what is chosen (`selecting`, `targets`).
"""

from __future__ import annotations

import bisect
import difflib
import fnmatch
import re
from collections.abc import Iterable

_WILD = frozenset("*?[")
_NEAR = 3
_LOOKED_AT = 1000
"""Names that are looked at for similar ones, those with the longest common beginning: similarity is slow to find."""


def is_pattern(text: str) -> bool:
    """Say whether `text` is an `fnmatch` pattern and no name."""
    return not _WILD.isdisjoint(text)


def matches(name: str, text: str) -> bool:
    """Say whether `text` is `name`, a beginning of it that ends at a "/" or ".", or a pattern that fits it."""
    if is_pattern(text):
        return fnmatch.fnmatchcase(name, text)
    if not name.startswith(text):
        return False
    return len(name) == len(text) or text[-1] in "/." or name[len(text)] in "/."


def near(text: str, names: Iterable[str]) -> list[str]:
    """Return the names, cut to as many components as `text` has, that look most like it; at most three."""
    depth = len(re.findall(r"[/.]", text.rstrip("/.")))
    beginning = re.compile(rf"[^/.]+(?:[/.][^/.]+){{{depth}}}")
    cut = {found[0] for name in names if (found := beginning.match(name)) is not None}
    head = text.partition("/")[0]
    below = [name for name in cut if name.startswith(f"{head}/")]
    ordered = sorted(below or cut)
    at = max(0, bisect.bisect(ordered, text) - _LOOKED_AT // 2)
    return difflib.get_close_matches(text, ordered[at : at + _LOOKED_AT], n=_NEAR, cutoff=0.5)
