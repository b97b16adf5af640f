"""The random number generators that every process has: Python's, numpy's, torch's, and those of CUDA devices in use.

Owns: reading and setting their state. Does not own generators a script made itself (track those). Invariant: reading
changes no generator and starts no device: a rank that has not touched CUDA does not after a save either.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .errors import InvalidRequest

NAME = "rng"
"""Name of the object that holds the state."""


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
    try:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002 - the global one is meant
        torch.set_rng_state(_tensor(state["torch"]))
        if torch.cuda.is_available():
            for index, data in state.get("cuda", {}).items():
                if index < torch.cuda.device_count():
                    torch.cuda.set_rng_state(_tensor(data), index)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(
            f"the stored state of the random number generators does not fit: {error}", key=NAME
        ) from error
