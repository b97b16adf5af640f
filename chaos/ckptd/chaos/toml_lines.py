"""In which line of a TOML file something stands; `tomllib` does not tell. Pure.

Owns: that, for files as people write scenarios: a table's head or a key at the begin of a line. Does not own: the files' form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


def lines_of_keys(text: str) -> dict[str, int]:
    """Return the line of each table and key, from 1; tables of an array as `fault[0]`."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    prefix = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if array := re.match(r"\s*\[\[\s*([\w.-]+)\s*\]\]", line):
            index = counts[array[1]] = counts.get(array[1], -1) + 1
            prefix = f"{array[1]}[{index}]"
            lines.setdefault(prefix, number)
            lines.setdefault(array[1], number)
        elif table := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            prefix = table[1]
            lines.setdefault(prefix, number)
        elif key := re.match(r"\s*([\w-]+)\s*=", line):
            lines.setdefault(f"{prefix}.{key[1]}" if prefix else key[1], number)
    return lines


def line_of(path: str, lines: Mapping[str, int]) -> int:
    """Return the line of a path such as `fault[0].at`, or of the nearest above it; 1 where there is none.

    The keys of an inline table stand in its own line, and so do the parts of a list.
    """
    while path and path not in lines:
        path = path.removesuffix("]").rpartition("[")[0] if path.endswith("]") else path.rpartition(".")[0]
    return lines.get(path, 1)
