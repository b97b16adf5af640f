"""What the code that saves holds besides what it tracks: the event log's answer to "what did this script forget?".

Owns: the walk through the variables of the calling functions, and what kind of state a value is. Does not own: what is
made of it (the audit speaks of what tracked things hold; the chaos harness names what may be missing after a
divergence). It runs only where there is an event log, once. Invariant: only frames, `__dict__`, dicts, lists and tuples
are read: nothing is called, nothing is drawn, nothing is kept.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler

from .generators import Generator
from .nested import Stateful
from .reachable import OPAQUE, children, reachable
from .sharding import PerRank
from .unsaved_generators import generators_of_the_process

_DEPTH = 3
"""Levels below a variable that are looked at: `self.data.loader` is one."""
_LIMIT = 5_000
_MOST = 50
_OWN = "ckptd.client"
# Words of a class or a variable, where a thing has no method that tells: `train_batches`, `TokenStream`.
_LOADER = re.compile(r"loader|sampler|batche|iterator|stream", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrounding:
    """A thing with state that a calling function holds and that is not tracked.

    Attributes:
        kind: "generator", "model", "optimizer", "scheduler", "scaler", "loader" or "object".
        name: Variable, with a path to it where it lies deeper, and the function that holds it.
        type: Name of its class.
    """

    kind: str
    name: str
    type: str


def kind_of_state(value: object, name: str = "") -> str:
    """Return what kind of state `value` is, "" where it looks like none; `name` is what it is called."""
    words = "" if _is_foreign(value) else f"{type(value).__name__} {name}"
    if isinstance(value, Generator):
        return "generator"
    if isinstance(value, nn.Module):
        return "model" if any(True for _ in value.parameters()) or any(True for _ in value.buffers()) else ""
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, LRScheduler) or "scheduler" in words.lower():
        return "scheduler"
    if type(value).__name__.endswith("GradScaler"):
        return "scaler"
    moves = hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)
    if moves or isinstance(value, DataLoader | Sampler) or _LOADER.search(words):
        return "loader"
    return "object" if isinstance(value, Stateful) else ""


def tracked_kinds(things: Mapping[str, object]) -> dict[str, str]:
    """Return what kind of state each tracked thing is, by name."""
    found = {}
    for name, thing in things.items():
        value = thing.value if isinstance(thing, PerRank) else thing
        is_modules = (
            isinstance(value, list | tuple) and bool(value) and all(isinstance(one, nn.Module) for one in value)
        )
        found[name] = "model" if is_modules else kind_of_state(value, name) or "object"
    return found


def untracked(frame: FrameType | None, things: Mapping[str, object]) -> list[Surrounding]:
    """Return what the functions from `frame` outwards hold that has state and is not tracked, the nearest first.

    Args:
        frame: The innermost one; frames of this package are passed over.
        things: What is tracked, by name; whatever they hold counts as theirs.
    """
    known = {id(one) for one in generators_of_the_process()}
    for name, thing in things.items():
        known |= {id(one) for _, one in reachable(name, thing.value if isinstance(thing, PerRank) else thing)}
    found: list[Surrounding] = []
    while frame is not None and len(found) < _MOST:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith((_OWN, "torch.", "runpy", "importlib")):
            file = Path(frame.f_code.co_filename).name
            function = frame.f_code.co_name
            where = file if function.startswith("<") else f"{function}() of {file}"
            for path, value in _walk(frame.f_locals, known):
                kind = kind_of_state(value, path)
                found.append(Surrounding(kind=kind, name=f"{path} in {where}", type=type(value).__name__))
        frame = frame.f_back
    return found[:_MOST]


def _walk(variables: Mapping[str, object], known: set[int]) -> Iterator[tuple[str, object]]:
    """Yield things with state, nearest first, each once; what one of them holds is its own affair."""
    level = [(name, value) for name, value in variables.items() if not name.startswith("__")]
    looked = 0
    for _ in range(_DEPTH):
        below: list[tuple[str, object]] = []
        for path, value in level:
            looked += 1
            if looked > _LIMIT:
                return
            if id(value) in known or isinstance(value, OPAQUE):
                continue
            known.add(id(value))
            if kind_of_state(value, path):
                yield path, value
            elif isinstance(value, dict | list | tuple) or not (isinstance(value, nn.Module) or _is_foreign(value)):
                below += islice(children(path, value), _LIMIT)
        level = below


def _is_foreign(value: object) -> bool:
    """Whether a value is of a library whose insides are not the script's."""
    return type(value).__module__.partition(".")[0] in _LIBRARIES


_LIBRARIES: Collection[str] = frozenset(
    {"builtins", "ckptd", "torch", "numpy", "logging", "threading", "argparse", "pathlib", "io"}
)
