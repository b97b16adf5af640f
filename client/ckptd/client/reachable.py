"""What tracked things hold in their attributes, as far as a bounded walk finds it.

Owns: the walk. Does not own: what a find means (`audit`). Invariant: only `__dict__`, dicts, lists and tuples are
read: no property runs, nothing is called, and no more than `LIMIT` objects are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np
import torch

LIMIT = 20_000
"""Objects looked at in one walk."""
_WIDEST = 256
"""Items looked at in one container: what lies in a longer one is data."""
_DEPTH = 12
OPAQUE = (
    *(str, bytes, bytearray, int, float, complex, type, type(None)),
    *(FunctionType, MethodType, BuiltinFunctionType, ModuleType),
    *(torch.Tensor, torch.dtype, torch.device, np.ndarray, np.generic),
)
"""Types that hold nothing to be found."""


def reachable(name: str, thing: object) -> Iterator[tuple[str, object]]:
    """Yield `thing` and what it holds, nearest first, each once, with a path to it such as ``loader.sampler``."""
    seen = {id(thing)}
    level: list[tuple[str, object]] = [(name, thing)]
    looked = 0
    for _ in range(_DEPTH):
        below: list[tuple[str, object]] = []
        for path, value in level:
            yield path, value
            looked += 1
            if looked >= LIMIT:
                return
            for child_path, child in children(path, value):
                if id(child) not in seen and not isinstance(child, OPAQUE):
                    seen.add(id(child))
                    below.append((child_path, child))
        level = below


def children(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield what a value holds itself, with its path."""
    if isinstance(value, dict):
        for key, item in islice(value.items(), _WIDEST):
            yield f"{path}[{key!r}]" if isinstance(key, str | int) else f"{path}[...]", item
    elif isinstance(value, list | tuple):
        for position, item in enumerate(islice(value, _WIDEST)):
            yield f"{path}[{position}]", item
    for key, item in getattr(value, "__dict__", {}).items():
        if isinstance(value, torch.nn.Module) and key in ("_modules", "_parameters", "_buffers"):
            if key == "_modules":
                yield from ((f"{path}.{child}", module) for child, module in item.items())
            continue
        yield f"{path}.{key}", item
