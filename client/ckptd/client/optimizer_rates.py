"""Hyperparameters that are tensors: rates and the like, put back without writing into what belongs to something else.

Owns: which of them are filled in place. Does not own: state and groups (`optimizers`). Invariant: what is filled through a
group is memory of restored groups alone. Where a tensor of something else lies in it, be it restored or left as it is, that
has its value already: a group keeps the tensor if it was stored with the same, and gets one of its own if not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckptd.protos.snapshot_pb2 import SCOPE_PER_RANK

from .copying import writing
from .optimizer_state import is_plain_kind, looks_alike
from .overlapping import held, sharing
from .sharding import Sharded, is_tensor_leaf
from .shown import How
from .staging import plain_bytes
from .stored import Stored
from .targets import Targets
from .tree import leaves
from .values import MAX_DEPTH

Standing = Sequence[torch.Tensor]
"""Live local tensors that have their value: those of other things that were filled, and of what is left as it is."""


def tensors_in(groups: Sequence[Mapping[str, Any]], prefix: str) -> Iterator[tuple[str, object]]:
    """Yield the names and values of the hyperparameters that are tensors, nested ones too; `prefix` is that of the groups."""
    for number, group in enumerate(groups):
        rest = {key: value for key, value in group.items() if key != "params"}
        yield from leaves(rest, is_leaf=is_tensor_leaf, prefix=f"{prefix}/{number}", depth=MAX_DEPTH)


def prepare(prefix: str, groups: Sequence[Mapping[str, Any]], stored: Stored, targets: Targets) -> None:
    """Ask for the stored hyperparameters that are tensors, into fresh ones: as pieces where a piece stands here."""
    live = dict(tensors_in(groups, prefix))
    for name in stored.names_below(prefix):
        leaf, rows = live.get(name), stored.rows[name]
        made: object | None = None
        with torch.no_grad():
            if isinstance(leaf, DTensor):
                made = torch.empty_like(leaf, requires_grad=False)
            elif isinstance(leaf, Sharded):
                made = Sharded(torch.empty_like(leaf.tensor), leaf.global_shape, leaf.offsets)
        if made is not None and targets.fits(name, made, scope=SCOPE_PER_RANK):
            targets.fill(name, made, scope=SCOPE_PER_RANK, how=How.MADE)
        elif targets.fresh(name) is not None and rows[0].length != rows[0].global_shape:
            # Said to be a rank's own, it would come back as if its piece were all there is.
            targets.misfits.different[name] = "stored as a piece of a tensor; nothing here says how to hold it"


def keep(optimizers: Mapping[str, Optimizer], restored: Iterable[str], targets: Targets) -> None:
    """Note the rates of optimizers that are left as they are; a group of a wrapper is its inner one's."""
    names = set(restored)
    taken = {id(group) for name in names for group in optimizers[name].param_groups}
    for name in sorted(optimizers.keys() - names):
        groups = [group for group in optimizers[name].param_groups if id(group) not in taken]
        for full, leaf in tensors_in(groups, f"{name}/param_groups"):
            targets.keep(full, leaf)


class Rates:
    """Puts the rates of all optimizers of one restore back.

    Args:
        standing: See `Standing`.
    """

    def __init__(self, standing: Standing = ()) -> None:
        self._standing = standing
        self._written: set[object] = set()

    def put(self, pairs: Sequence[tuple[dict[str, Any], str, object]]) -> None:
        """Give the groups of one optimizer their values: group, key, and what is stored."""
        rates = [
            (number, group[key])
            for number, (group, key, _) in enumerate(pairs)
            if isinstance(group.get(key), torch.Tensor)
        ]
        beside = self._beside(rates)
        for number, (group, key, found) in enumerate(pairs):
            live = group.get(key)
            if isinstance(live, torch.Tensor) and isinstance(found, torch.Tensor):
                group[key] = self._filled(live, found, is_beside=number in beside)
            else:
                group[key] = found

    def _beside(self, rates: Sequence[tuple[int, torch.Tensor]]) -> set[int]:
        """Return the numbers of the rates that lie in the memory of something else."""
        if not rates or not self._standing:
            return set()
        others = [(f"standing {at}", tensor) for at, tensor in enumerate(self._standing)]
        groups = sharing([*others, *((str(number), held(rate)) for number, rate in rates)])
        taken = {groups[name] for name, _ in others if name in groups}
        return {number for number, _ in rates if groups.get(str(number)) in taken}

    def _filled(self, live: torch.Tensor, found: torch.Tensor, *, is_beside: bool) -> torch.Tensor:
        """Return the live tensor with the stored value, or one of its own where it cannot have it.

        Groups may share one: it is the value of all only where they were stored with equal ones.
        """
        # Compared as the dtype here: what stands beside may have been cast.
        is_alike = looks_alike(live, found) or (is_beside and _converts(live, found))
        if not is_alike:
            return found.to(live.device)
        place = (live.device, held(live).data_ptr())
        if is_beside or place in self._written:
            same = plain_bytes(held(live)) == plain_bytes(held(found).to(live.dtype))
            return live if same else found.to(live.device)
        with writing(live):
            held(live).copy_(held(found))
        self._written.add(place)
        return live


def _converts(live: torch.Tensor, found: torch.Tensor) -> bool:
    are_floating = live.dtype.is_floating_point and found.dtype.is_floating_point
    return live.shape == found.shape and is_plain_kind(live) and is_plain_kind(found) and are_floating
