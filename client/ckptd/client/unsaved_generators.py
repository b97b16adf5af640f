"""Generators that a tracked thing holds and that no snapshot would hold.

Owns: finding them, and telling whether their holder saves their state itself. Does not own: generators that are
tracked (`generators`). Invariant: nothing is drawn; `state_dict()` of the holder is the only code that runs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from . import rng
from .generators import Generator, state_of
from .nested import Stateful
from .reachable import reachable


def unsaved_generators(name: str, thing: object, tracked: set[int]) -> Iterator[str]:
    """Yield paths to the generators that `thing` holds, that are not tracked, and whose state it does not save.

    Args:
        name: Of the thing.
        thing: What is tracked.
        tracked: Identities of all that is tracked.
    """
    known = tracked | {id(one) for one in generators_of_the_process()}
    inner: list[tuple[str, Generator]] = [
        (path, value)
        for path, value in reachable(name, thing)
        if isinstance(value, Generator) and id(value) not in known
    ]
    if not inner:
        return
    states = _states(thing)
    forms = Counter(filter(None, map(_form, states)))
    lost = {form for form, held in Counter(_form(state_of(one)) for _, one in inner).items() if forms[form] < held}
    for path, generator in inner:
        state = state_of(generator)
        if _form(state) in lost and not any(_same(state, saved) for saved in states):
            yield path


def generators_of_the_process() -> list[object]:
    """Return the generators that every process has: `rng` saves them."""
    devices = torch.cuda.default_generators if torch.cuda.is_available() else ()
    inst = random.getrandbits.__self__  # type: ignore[attr-defined] # the generator behind the module's functions
    return [torch.default_generator, inst, rng.of_numpy(), *devices]


def _states(thing: object) -> list[object]:
    """Return all values in the thing's `state_dict()`, in which states of its generators may be."""
    if isinstance(thing, nn.Module | Optimizer) or not isinstance(thing, Stateful):
        return []
    found: list[object] = []
    left: list[object] = [thing.state_dict()]
    while left and len(found) < _MOST_STATES:
        value = left.pop()
        found.append(value)
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple) and len(value) < _SHORT:
            left += value
    return found


_MOST_STATES, _SHORT = 10_000, 256


def _plain(stored: object) -> object:
    """Return a stored value in the form that `state_of` gives."""
    if isinstance(stored, torch.Tensor):
        is_state = stored.dtype == torch.uint8 and stored.ndim == 1 and stored.device.type == "cpu"
        return stored.numpy().tobytes() if is_state else None
    if isinstance(stored, tuple) and len(stored) == _LEGACY and isinstance(stored[0], str):
        return {"bit_generator": stored[0]}  # what RandomState.get_state() gives
    return stored


_LEGACY = 5
"""Parts of the older form of a RandomState's state: kind, keys, position, and what is left of a pair of normal numbers."""


def _form(value: object) -> str:
    """Return what states of generators of one kind have in common; "" for what is none.

    Some loaders save the state a generator had when the epoch began, and draw again: it is a state all the same.
    """
    plain = _plain(value)
    if isinstance(plain, bytes):
        return f"bytes {len(plain)}" if len(plain) >= _SMALLEST_TORCH_STATE else ""
    if isinstance(plain, dict):
        return f"numpy {plain['bit_generator']}" if isinstance(plain.get("bit_generator"), str) else ""
    is_python = (
        isinstance(plain, tuple | list) and len(plain) == len(random.getstate()) and plain[0] == random.getstate()[0]
    )
    return "python" if is_python else ""


_SMALLEST_TORCH_STATE = 16
"""Bytes of a CUDA generator's state: seed and offset. A CPU generator's has 5056."""


def _same(state: Any, stored: object) -> bool:
    stored = _plain(stored)
    if isinstance(state, dict):
        return isinstance(stored, dict) and repr(state) == repr(stored)
    return type(stored) is type(state) and bool(stored == state)
