"""One line about a verb, without loading it.

Owns: finding the first line of a module's docstring in its source. A verb may import torch, which takes seconds; `ckptd
--help` must not.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path


def summary(module: str) -> str:
    """Return the first line of a module's docstring without its leading "`ckptd verb`: ", or "" where there is none."""
    source = _source(module)
    if source is None:
        return ""
    text = ast.get_docstring(ast.parse(source.read_text("utf-8"))) or ""
    first = text.partition("\n")[0]
    return first.partition("`: ")[2] or first


def _source(module: str) -> Path | None:
    # Only namespace and top package are looked up, which runs no code of theirs; the rest is paths.
    top, below = ".".join(module.split(".")[:2]), module.split(".")[2:]
    try:
        spec = find_spec(top)
    except ImportError:
        return None
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in (Path(folder, *below).with_suffix(".py"), Path(folder, *below, "__init__.py")):
            if path.is_file():
                return path
    return None
