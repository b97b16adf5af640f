"""Random number generators that a script made itself, tracked as things of their own.

Owns: their state as a plain value. Does not own: the process's generators (`rng`). Invariant: reading draws nothing,
and a state is only given to a generator of the kind it came from.
"""

from __future__ import annotations

import random
from typing import Any, TypeAlias

import numpy as np
import torch

from .errors import InvalidRequest
from .nested import TrackedStateful

Generator: TypeAlias = torch.Generator | np.random.Generator | random.Random
"""What can be tracked as a generator."""


class TrackedGenerator(TrackedStateful):
    """A generator; it is each rank's own, and loaded after everything that may draw from it."""

    def __init__(self, name: str, generator: Generator) -> None:
        super().__init__(name, _AsStateful(name, generator), per_rank=True)


class _AsStateful:
    def __init__(self, name: str, generator: Generator) -> None:
        self._name, self._generator = name, generator

    def state_dict(self) -> dict[str, Any]:
        return {"kind": kind_of(self._generator), "state": state_of(self._generator)}

    def load_state_dict(self, stored: Any) -> None:
        here = kind_of(self._generator)
        kind = stored.get("kind") if isinstance(stored, dict) else None
        if kind != here:
            raise InvalidRequest(
                f"{self._name}: stored is the state of {kind or 'no generator'}, here is {here}",
                hint="make the generator as the run that saved did",
                key=self._name,
                phase="restore",
            )
        try:
            _apply(self._generator, stored["state"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequest(f"{self._name}: the stored state does not fit: {error}", key=self._name) from error


def kind_of(generator: Generator) -> str:
    """Return what kind of generator it is; states of one kind fit each other."""
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, np.random.Generator):
        return f"numpy {type(generator.bit_generator).__name__}"
    return f"{type(generator).__module__}.{type(generator).__qualname__}"


def state_of(generator: Generator) -> Any:
    """Return its state as a plain value."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate()


def _apply(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)
