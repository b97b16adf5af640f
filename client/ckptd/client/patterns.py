"""Texts that choose names: which names they fit, and which names come close where they fit none.

Pure. Owns: what `only` and `drop` mean by a text. Does not own: what is done with what is chosen (`selecting`, `targets`).
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable

_WILD = frozenset("*?[")
_NEAR = 3
_LONGEST_SEARCH = 5000
"""Beginnings of names that are looked through for similar ones; similarity is slow to find."""


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
    return difflib.get_close_matches(text, sorted(below or cut)[:_LONGEST_SEARCH], n=_NEAR, cutoff=0.5)
