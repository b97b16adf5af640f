"""HTML and SVG that cannot be broken by what a run says.

Owns: escaping. Invariant: text that was not made here is escaped, whoever wrote it; only `Markup` goes in as it is.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_NO_END = frozenset({"meta", "br", "col"})
# HTML knows no other control characters than tab and line ends.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Return anything as escaped text."""
    return value if isinstance(value, Markup) else Markup(html.escape(_CONTROL.sub("\ufffd", str(value))))


def join(parts: Iterable[object]) -> Markup:
    """Return parts one after the other, escaped where they are no markup."""
    return Markup("".join(text(part) for part in parts))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: Its name.
        children: What is in it; texts are escaped.
        attributes: `class_` is class, and other underscores are hyphens; None leaves one out, True gives it no value.
    """
    told = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        written = _CASED.get(key, key.rstrip("_").replace("_", "-"))
        told.append(f" {written}" if value is True else f' {written}="{text(value)}"')
    opened = f"<{name}{''.join(told)}>"
    return Markup(opened if name in _NO_END else f"{opened}{join(children)}</{name}>")


# SVG's attributes have capitals.
_CASED = {"view_box": "viewBox", "preserve_aspect_ratio": "preserveAspectRatio"}
