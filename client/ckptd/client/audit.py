"""What a script may have forgotten to save: an audit of the things that are tracked.

Owns: the findings, and when they are said. Does not own: saving. Invariant: an audit changes nothing, draws from no
generator, and its own failure never stops a save that was only to be warned of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL

from .config import AuditMode
from .errors import InvalidRequest
from .left_out import left_out
from .nested import Stateful
from .reachable import reachable
from .sharding import PerRank
from .tree import component
from .unsaved_generators import unsaved_generators
from .unsaved_optimizers import unsaved_in_optimizer, untracked_optimizers

log = logging.getLogger("ckptd.client")

ScopeOf = Callable[[str, object, int], int]

_SHOWN = 5
"""Names a message shows of each kind; the counts are complete."""

_SAYS: Mapping[str, str] = {
    "unsaved_tensor": "tensors in attributes of modules and optimizers that are no parameters, buffers or state",
    "unsaved_module": "modules that a tracked module holds without registering them",
    "unsaved_object": "objects with state that a tracked module or optimizer holds",
    "non_persistent_buffer": "buffers that are not persistent",
    "left_out": "parameters and persistent buffers that the state_dict() of their module leaves out",
    "unowned_parameter": "trained parameters that no tracked optimizer owns",
    "untracked_parameter": "parameters of a tracked optimizer that are in no tracked module",
    "untracked_generator": "random number generators that are not tracked",
    "untracked_optimizer": "tracked things bound to an optimizer that is not tracked",
    "own_state_dict": "tracked optimizers whose state_dict() gives more than .state and .param_groups, all that is saved",
    "per_rank_statistics": "running statistics that each rank may have of its own",
}
"""Every kind of finding, and what it says of the names."""

_HINTS: Mapping[str, str] = {
    "unsaved_tensor": "register_buffer() it, or leave it if it can be made again",
    "unsaved_module": "hold modules in an nn.ModuleList or nn.ModuleDict, or track them",
    "unsaved_object": "track it",
    "non_persistent_buffer": "leave it if it can be made again, else register it as persistent",
    "left_out": "leave it if it can be made again, else let state_dict() give it",
    "unowned_parameter": "track its optimizer, or freeze it",
    "untracked_parameter": "track the module it is in: now it is not saved, and its state only by its place",
    "untracked_generator": "track(name=generator), or save its state in the state_dict() of what holds it",
    "untracked_optimizer": "track the optimizer too",
    "own_state_dict": "track an object with state_dict() and load_state_dict() that takes care of the rest",
    "per_rank_statistics": 'use SyncBatchNorm, or say per_rank=["<name>/*.running_*", "<name>/*.num_batches_tracked"]',
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that may be missing from snapshots.

    Attributes:
        kind: Stable word, see docs/client.md.
        name: What it is about: a tensor's name, or a path of attributes from a tracked thing.
        text: One sentence.
        hint: The way out.
    """

    kind: str
    name: str
    text: str
    hint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What an audit found, in order of kinds.

    Attributes:
        findings: All of them; empty when nothing was found.
    """

    findings: tuple[Finding, ...] = ()

    def of(self, kind: str) -> tuple[Finding, ...]:
        """Return the findings of one kind."""
        return tuple(finding for finding in self.findings if finding.kind == kind)

    def __str__(self) -> str:
        """Return one paragraph with counts, first names and hints by kind."""
        parts = []
        for kind, says in _SAYS.items():
            names = [finding.name for finding in self.of(kind)]
            if names:
                shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
                parts.append(f"{len(names)} {says}: {shown} ({_HINTS[kind]})")
        return "; ".join(parts) or "nothing was found"


def audit(things: Mapping[str, object], *, scope_of: ScopeOf, world: int) -> Audit:
    """Return what may be missing when `things` are saved.

    Args:
        things: What is tracked, by name.
        scope_of: Says whether a tensor is each rank's own, see `Collector.scope_of`.
        world: Ranks that save together.
    """
    bare = {name: thing.value if isinstance(thing, PerRank) else thing for name, thing in things.items()}
    modules = {
        name: list(thing) if isinstance(thing, list | tuple) else [thing]
        for name, thing in bare.items()
        if isinstance(thing, nn.Module | list | tuple)
    }
    modules = {name: held for name, held in modules.items() if all(isinstance(one, nn.Module) for one in held)}
    optimizers = {name: thing for name, thing in bare.items() if isinstance(thing, Optimizer)}
    tracked = {id(thing) for thing in bare.values()}
    found: list[tuple[str, str]] = []
    if world > 1:
        for name, held in modules.items():
            if not isinstance(things[name], PerRank):
                found += _statistics(name, held, scope_of)
    for name, held in modules.items():
        for root in held:
            found += _module(name, root, tracked)
    found += (("left_out", _full(name, root, path)) for name, root, path in left_out(modules, bare))
    found += _parameters(modules, optimizers)
    found += (
        ("untracked_generator", path)
        for name, thing in bare.items()
        for path in unsaved_generators(name, thing, tracked)
    )
    parameters = (
        (_full(name, root, path), parameter)
        for name, held in modules.items()
        for root in held
        for path, parameter in root.named_parameters()
    )
    found += (("untracked_optimizer", path) for path in untracked_optimizers(bare, parameters))
    for name, optimizer in optimizers.items():
        found += unsaved_in_optimizer(name, optimizer, tracked)
    order = {kind: position for position, kind in enumerate(_SAYS)}
    found = sorted(dict.fromkeys(found), key=lambda pair: order[pair[0]])
    return Audit(
        findings=tuple(
            Finding(kind=kind, name=name, text=f"{name} is one of the {_SAYS[kind]}", hint=_HINTS[kind])
            for kind, name in found
        )
    )


def _full(name: str, root: nn.Module, path: str) -> str:
    """Return the name that a tensor at `path` is saved under."""
    if isinstance(root, DistributedDataParallel):
        path = path.removeprefix("module.")
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        path = path.replace(wrapper, "")
    return f"{name}/{component(path)}"


def _statistics(name: str, roots: list[nn.Module], scope_of: ScopeOf) -> Iterator[tuple[str, str]]:
    for root in roots:
        for path, module in root.named_modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                full = _full(name, root, f"{path}.running_mean" if path else "running_mean")
                mean = module.running_mean
                if mean is not None and scope_of(full, mean, SCOPE_GLOBAL) == SCOPE_GLOBAL:
                    yield "per_rank_statistics", full


def _module(name: str, root: nn.Module, tracked: set[int]) -> Iterator[tuple[str, str]]:
    inside = {id(module) for module in root.modules()}
    registered = {id(one) for one in (*root.parameters(), *root.buffers())}
    for path, module in root.named_modules():
        here = f"{path}." if path else ""
        for buffer in sorted(module._non_persistent_buffers_set):  # noqa: SLF001 - nothing public says it
            if module._buffers.get(buffer) is not None:  # noqa: SLF001 - as above
                yield "non_persistent_buffer", _full(name, root, f"{here}{buffer}")
        for key, value in vars(module).items():
            if key.startswith("__") or key in _OWN_ATTRIBUTES:
                continue
            where = f"{name}.{here}{key}"
            if isinstance(value, torch.Tensor):
                if id(value) not in registered and value.numel():
                    yield "unsaved_tensor", where
            elif not isinstance(value, nn.Module) and isinstance(value, Stateful) and not isinstance(value, type):
                if id(value) not in tracked:
                    yield "unsaved_object", where
            else:
                yield from _hidden(where, value, inside | tracked)


_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
"""What every module has: parameters, buffers, hooks."""


def _hidden(where: str, value: object, known: set[int]) -> Iterator[tuple[str, str]]:
    """Yield modules in plain lists and dicts: their parameters are seen by nobody."""
    if isinstance(value, nn.Module | list | tuple | dict):
        for path, item in reachable(where, value):
            if isinstance(item, nn.Module) and id(item) not in known and any(True for _ in item.parameters()):
                yield "unsaved_module", path
                return


def _parameters(
    modules: Mapping[str, list[nn.Module]], optimizers: Mapping[str, Optimizer]
) -> Iterator[tuple[str, str]]:
    if not optimizers:
        return
    owned = {
        id(one) for optimizer in optimizers.values() for group in optimizer.param_groups for one in group["params"]
    }
    named: set[int] = set()
    for name, roots in modules.items():
        for root in roots:
            for path, parameter in root.named_parameters():
                named.add(id(parameter))
                if parameter.requires_grad and id(parameter) not in owned:
                    yield "unowned_parameter", _full(name, root, path)
    for name, optimizer in optimizers.items():
        position = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in named:
                    yield "untracked_parameter", f"{name}/#{position}"
                position += 1


class Auditor:
    """The audits of one Checkpointer.

    Args:
        mode: What the first save does with findings.
        things: Returns what is tracked, with a state that the caller keeps.
        scope_of: See `audit`.
        world: Ranks that save together.
        rank: This one.
    """

    def __init__(
        self,
        *,
        mode: AuditMode,
        things: Callable[[Mapping[str, Any] | None], Mapping[str, object]],
        scope_of: ScopeOf,
        world: int,
        rank: int,
    ) -> None:
        self._is_due, self._raises = mode != "off", mode == "raise"
        self._things, self._scope_of, self._world, self._rank = things, scope_of, world, rank

    def audit(self, state: Mapping[str, Any] | None) -> Audit:
        """Return what may be missing."""
        return audit(self._things(state), scope_of=self._scope_of, world=self._world)

    def things(self, state: Mapping[str, Any] | None) -> Mapping[str, object]:
        """Return what is saved, by name."""
        return self._things(state)

    def at_save(self, state: Mapping[str, Any] | None) -> None:
        """Say once what was found.

        Raises:
            InvalidRequest: something was found, and findings are to raise; then the next save looks again.
        """
        if not self._is_due:
            return
        try:
            found = self.audit(state)
        except Exception as failure:
            if self._raises:
                raise InvalidRequest(f"the audit raised {type(failure).__name__}: {failure}") from failure
            self._is_due = False
            log.warning("the audit of what is tracked failed; the save goes on", exc_info=True)
            return
        if found.findings and self._raises:
            raise InvalidRequest(
                f"the audit found what is not saved: {found}",
                hint='audit="warn" saves anyway; audit() gives the whole list',
                key=found.findings[0].name,
            )
        self._is_due = False
        if found.findings:
            log.warning("rank %d: this may be missing from snapshots: %s", self._rank, found)
