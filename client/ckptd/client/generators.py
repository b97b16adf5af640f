"""Random number generators that a script made itself, tracked as things of their own.

Owns: their state as a plain value. Does not own: the process's generators (`rng`). Invariant: reading draws nothing,
and a state is only given to a generator of the kind it came from.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch

from .errors import InvalidRequest
from .nested import TrackedStateful

Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""What can be tracked as a generator."""


class TrackedGenerator(TrackedStateful):
    """A generator; it is each rank's own, and loaded after everything that may draw from it."""

    def __init__(self, name: str, generator: Generator) -> None:
        self._stateful = _AsStateful(name, generator)
        super().__init__(name, self._stateful, per_rank=True)

    def verify(self, value: object) -> None:
        """Check that the generator can take the state; it is not touched.

        Raises:
            InvalidRequest: it cannot.
        """
        self._stateful.verify(value)


class _AsStateful:
    def __init__(self, name: str, generator: Generator) -> None:
        self._name, self._generator = name, generator

    def state_dict(self) -> dict[str, Any]:
        seed = seed_of(self._generator)
        found = {"kind": kind_of(self._generator), "state": state_of(self._generator)}
        return found if seed is None else {**found, "seed": seed}

    def load_state_dict(self, stored: Any) -> None:
        self._check_kind(stored)
        with self._fitting():
            _apply(self._generator, stored["state"])
            if isinstance(self._generator, np.random.Generator) and "seed" in stored:  # not in steps of before
                _seed(self._name, self._generator, stored["seed"])

    def verify(self, stored: Any) -> None:
        """Check all that loading it would, on a generator that is thrown away."""
        self._check_kind(stored)
        with self._fitting():
            if (other := _thrown_away(self._generator)) is not None:
                _apply(other, stored["state"])
            if isinstance(self._generator, np.random.Generator) and "seed" in stored:
                _sequence_for(self._name, self._generator, stored["seed"])

    def _check_kind(self, stored: Any) -> None:
        here = kind_of(self._generator)
        kind = stored.get("kind") if isinstance(stored, dict) else None
        if kind != here:
            raise InvalidRequest(
                f"{self._name}: stored is the state of {kind or 'no generator'}, here is {here}",
                hint="make the generator as the run that saved did",
                key=self._name,
                phase="restore",
            )

    @contextlib.contextmanager
    def _fitting(self) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise InvalidRequest(
                f"{self._name}: the stored state does not fit: {error}", key=self._name, phase="restore"
            ) from error


def _thrown_away(generator: Generator) -> Generator | None:
    """Return another generator of the same kind, or None where a class of the script's own cannot be copied."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device)
    try:
        return copy.deepcopy(generator)
    except Exception:
        return None


def kind_of(generator: Generator) -> str:
    """Return what kind of generator it is; states of one kind fit each other."""
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, np.random.Generator):
        return f"numpy {type(generator.bit_generator).__name__}"
    if isinstance(generator, np.random.RandomState):
        return f"numpy RandomState of {state_of(generator)['bit_generator']}"
    return f"{type(generator).__module__}.{type(generator).__qualname__}"


def state_of(generator: Generator) -> Any:
    """Return its state as a plain value."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def seed_of(generator: Generator) -> dict[str, Any] | None:
    """Return what decides about the generators that `spawn` of this one gives; None where it cannot be told, or has no such."""
    if not isinstance(generator, np.random.Generator):
        return None
    seed = _sequence_of(generator)
    entropy = _plain(seed.entropy) if isinstance(seed, np.random.SeedSequence) else None
    if entropy is None:
        return None
    return {
        "entropy": entropy,
        "spawn_key": tuple(int(part) for part in seed.spawn_key),
        "pool_size": int(seed.pool_size),
        "spawned": int(seed.n_children_spawned),
    }


def _sequence_of(generator: np.random.Generator) -> Any:
    return getattr(generator.bit_generator, "seed_seq", None)


def _plain(entropy: Any) -> int | list[Any] | None:
    if isinstance(entropy, int | np.integer):
        return int(entropy)
    if isinstance(entropy, list | tuple | np.ndarray):
        parts = [_plain(part) for part in entropy]
        return None if None in parts else parts
    return None


def _seed(name: str, generator: np.random.Generator, stored: Any) -> None:
    """Make `spawn` go on where it was: with the sequence that is here where that can be, else with one like the stored.

    Raises:
        InvalidRequest: this numpy cannot be given another one.
    """
    found = _sequence_for(name, generator, stored)
    if isinstance(found, int):
        if found:
            _sequence_of(generator).spawn(found)  # others may hold it, too
        return
    bits = generator.bit_generator
    # What unpickling calls: the only way to give a generator that others hold another sequence.
    bits.__setstate__((bits.state, found))  # type: ignore[attr-defined] # not in numpy's stubs


def _sequence_for(name: str, generator: np.random.Generator, stored: Any) -> int | np.random.SeedSequence:
    """Return how many children the sequence here must still spawn, or the one to be put in its stead. Changes nothing.

    Raises:
        InvalidRequest: this numpy cannot be given another one.
    """
    here = seed_of(generator)
    if here is not None and {**here, "spawned": 0} == {**stored, "spawned": 0}:
        more = stored["spawned"] - here["spawned"]
        if 0 <= more <= _SPAWNED_AT_ONCE:
            return int(more)
    elif not stored["spawned"] and np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return 0  # as far as is known nothing was ever spawned, and nothing need be
    sequence = np.random.SeedSequence(
        stored["entropy"],
        spawn_key=stored["spawn_key"],
        pool_size=stored["pool_size"],
        n_children_spawned=stored["spawned"],
    )
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        raise InvalidRequest(
            f"{name}: the generator that was saved had another seed, or had spawned fewer than this one ({stored['spawned']})",
            hint="make it from the same seed as the run that saved, and restore before spawning; or use numpy 2",
            key=name,
            phase="restore",
        )
    return sequence


_SPAWNED_AT_ONCE = 10_000


def _apply(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)
