"""A step made of tensors from elsewhere: one rank that claims, saves and ends, like any run of the job.

Owns: the names and ties of what is saved, and the order of calls. Does not own: reading other formats (`formats`), or how a
save works (`saving`). Invariant: every tensor is a whole global one, as a job of any mesh restores it; equal sources give
equal steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptd.protos import error_pb2

from . import rng
from .arguments import STEP_LIMIT
from .audit import Auditor
from .config import Config
from .copying import Copier
from .errors import CkptdError, InvalidRequest
from .handles import Ledger
from .journal import Journal
from .link import Link
from .mesh import WHOLE_AXIS, Topology
from .private_agent import PrivateAgent
from .saving import Saver
from .state import Collected
from .tracking import Tracking

_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """What was imported.

    Attributes:
        step: Its number.
        timeline: The one it was saved in.
        tensors: How many, tied names not counted.
        nbytes: Their bytes.
    """

    step: int
    timeline: str
    tensors: int
    nbytes: int


def import_step(
    config: Config, step: int, tensors: Mapping[str, torch.Tensor], ties: Mapping[str, str], *, tags: Mapping[str, str]
) -> Imported:
    """Save tensors as a step of a job that is not running; on return it is durable.

    Args:
        config: Root and job, and what else is to be set.
        step: Its number.
        tensors: By global name; plain dense ones on the host. They are read once.
        ties: Further names, each to one of `tensors`.
        tags: Texts to find the step by later.

    Raises:
        InvalidRequest: a name is not below the name of a thing ("model/..."), or the root belongs to another job, or a run
            of the job is alive.
        Unavailable: no agent, no store, or no room in memory.
        CkptdError: the save failed.
    """
    if not 0 <= step < STEP_LIMIT:
        raise InvalidRequest(f"step {step} is not from 0 to {STEP_LIMIT - 1}", reason=error_pb2.REASON_INVALID_STEP)
    _check_names(tensors, ties)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    agent = PrivateAgent(room=nbytes + nbytes // 8 + _SPARE_BYTES, deadline=time.monotonic() + config.connect_timeout_s)
    try:
        settings = {"socket": agent.socket, "embedded": False, "read_only": False, "slots": 1, "audit": "off"}
        timeline = _saved(config.model_copy(update=settings), step, _Given(tensors, ties), tags)
    finally:
        agent.close()
    return Imported(step=step, timeline=timeline, tensors=len(tensors), nbytes=nbytes)


def _saved(config: Config, step: int, given: _Given, tags: Mapping[str, str]) -> str:
    topology = Topology(rank=0, world=1, axes=(WHOLE_AXIS,), sizes=(1,), coordinate=(0,), members=(0,), store=None)
    ledger, copier = Ledger(None), Copier(config.copy_threads)
    journal = Journal(config.client_event_log, job=config.job, rank=0)
    link = Link(config, topology, ledger)
    saver = Saver(
        config=config,
        topology=topology,
        link=link,
        ledger=ledger,
        tracking=given,
        copier=copier,
        journal=journal,
        auditor=Auditor(mode="off", things=given.given, scope_of=given.scope_of, world=1, rank=0),
    )
    try:
        link.open()
        handle = saver.save(step, None, metrics={}, tags=tags, timeout_s=None)
        handle.wait()
        return handle.timeline
    finally:
        link.close()
        saver.close()
        copier.close()
        journal.close()


class _Given(Tracking):
    """Stands for what a job tracks: these tensors, and generators as they are at a fixed seed."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], ties: Mapping[str, str]) -> None:
        super().__init__()
        self._tensors, self._ties = tensors, ties

    def collect(self, _state: MutableMapping[str, Any] | None) -> Collected:
        """Collect them."""
        self._collector.begin()
        for name, tensor in self._tensors.items():
            self._collector.tensor(name, tensor)
        for name, owner in self._ties.items():
            self._collector.alias(name, owner)
        # A restore of everything asks for it, whatever it was.
        self._collector.object(rng.NAME, _seeded())
        return self._collector.finish()


def _seeded() -> dict[str, object]:
    kind, keys, position, has_gauss, cached = np.random.RandomState(0).get_state(legacy=True)
    return {
        "python": random.Random(0).getstate(),  # noqa: S311 - a state, not a secret
        "numpy": (kind, np.array(keys), int(position), int(has_gauss), float(cached)),
        "torch": torch.Generator().manual_seed(0).get_state().numpy().tobytes(),
    }


def _check_names(tensors: Mapping[str, torch.Tensor], ties: Mapping[str, str]) -> None:
    for name in (*tensors, *ties):
        parts = name.split("/")
        if len(parts) < 2 or not all(parts) or parts[0] == rng.NAME:
            raise InvalidRequest(
                f"{name!r} is not below the name of a thing that a job tracks",
                hint="--prefix model/ puts everything below model",
                key=name,
            )
    wrong = next((name for name, owner in ties.items() if name in tensors or owner not in tensors), None)
    if wrong is not None:
        raise CkptdError(f"{wrong} is tied to {ties[wrong]}, which is no tensor here", key=wrong)
