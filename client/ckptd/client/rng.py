"""The random number generators that every process has: Python's, numpy's, torch's, and those of CUDA devices in use.

Owns: reading and setting their state. Does not own generators a script made itself (track those). Invariant: reading
changes no generator and starts no device: a rank that has not touched CUDA does not after a save either.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from .errors import InvalidRequest

NAME = "rng"
"""Name of the object that holds the state."""


def of_numpy() -> np.random.RandomState:
    """Return the generator behind the functions of `np.random`: what libraries take that are given none."""
    found: np.random.RandomState = np.random.random_sample.__self__  # type: ignore[attr-defined]
    return found


def capture() -> dict[str, object]:
    """Return the state of all generators as a plain value (see `values`)."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - the global one is meant
    state: dict[str, object] = {
        "python": random.getstate(),
        "numpy": (kind, np.array(keys), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # A generator's state is its seed and offset, kept on the host: no other device is woken by reading it.
        state["cuda"] = {
            index: generator.get_state().numpy().tobytes()
            for index, generator in enumerate(torch.cuda.default_generators)
        }
    return state


def _tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def apply(state: Mapping[str, Any]) -> None:
    """Set all generators. CUDA devices that are not here are passed over.

    Raises:
        InvalidRequest: the state does not fit this Python, numpy or torch.
    """
    with _fitting():
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002 - the global one is meant
        torch.set_rng_state(_tensor(state["torch"]))
        if torch.cuda.is_available():
            for index, data in state.get("cuda", {}).items():
                if index < torch.cuda.device_count():
                    torch.cuda.set_rng_state(_tensor(data), index)


def verify(state: object) -> None:
    """Check that all generators could be set, on ones that are thrown away. A device that is not in use is not woken.

    Raises:
        InvalidRequest: the state does not fit this Python, numpy or torch.
    """
    with _fitting():
        if not isinstance(state, Mapping):
            raise TypeError("it is no dict")
        random.Random().setstate(state["python"])  # noqa: S311 - a state, not a secret
        copy.deepcopy(of_numpy()).set_state(state["numpy"])
        torch.Generator().set_state(_tensor(state["torch"]))
        if torch.cuda.is_available():
            for index, data in state.get("cuda", {}).items():
                if index < torch.cuda.device_count():
                    made = _tensor(data)
                    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                        torch.Generator(torch.device("cuda", index)).set_state(made)


@contextlib.contextmanager
def _fitting() -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise InvalidRequest(
            f"the stored state of the random number generators does not fit: {error}", key=NAME, phase="restore"
        ) from error


SHARED_AXES = frozenset({"tp"})
"""Axes whose ranks work on the same activations, and must drop the same of them."""


def derived(
    states: Mapping[int, bytes], coordinates: Mapping[int, Mapping[str, int]], here: Mapping[str, int], *, step: int
) -> bytes:
    """Return what seeds the generators of a rank whose mesh is another than the one that saved: 32 bytes.

    SHA-256 over the step, the stored states in the order of ranks, and this rank's place on every axis that tells
    ranks apart: one along which stored states differ, or one that nothing is known about (size 1, or not there),
    but for `SHARED_AXES`. Ranks that held equal states on an axis hold equal ones on it again; two restores of one
    step on one mesh give equal streams.
    """
    telling = [axis for axis in sorted(here) if _tells(axis, states, coordinates)]
    text = f"{step} {[(axis, here[axis]) for axis in telling]}"
    digest = hashlib.sha256(text.encode())
    for _, state in sorted(states.items()):
        digest.update(hashlib.sha256(state).digest())
    return digest.digest()


def _tells(axis: str, states: Mapping[int, bytes], coordinates: Mapping[int, Mapping[str, int]]) -> bool:
    lines: dict[tuple[tuple[str, int], ...], list[bytes]] = {}
    for rank, state in states.items():
        others = tuple((name, at) for name, at in sorted(coordinates[rank].items()) if name != axis)
        lines.setdefault(others, []).append(state)
    if all(len(line) == 1 for line in lines.values()):
        return axis not in SHARED_AXES
    return any(one != other for line in lines.values() for one, other in itertools.pairwise(line))


def reseed(seed: bytes) -> None:
    """Seed all generators, of CUDA too, from the 32 bytes that `derived` gave."""
    random.seed(seed)
    np.random.seed(np.frombuffer(seed, "<u4"))  # noqa: NPY002 - the global one is meant
    torch.manual_seed(int.from_bytes(seed[:8], "little") >> 1)
