"""What a rank asks for of a step: rows, and the views they go into; objects.

Owns: the words. Does not own: choosing (`targets`), fetching or copying. Invariant: a wanted row has the box, dtype and shape of
the view it will be copied into.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from ckptd.protos.shard_table import ShardRow

from .placements import LocalBox


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Wanted:
    """A row to fetch, under its stored name, and the view it goes into."""

    row: ShardRow
    view: torch.Tensor
    rank: int | None = None
    """Stored rank whose own it is, where a step of another mesh is read; the view is fresh memory then."""
    is_apart: bool = False
    """Whether the view is memory made for this restore: of a new tensor, or standing for a live one until
    `Targets.settle`."""

    @property
    def is_fresh(self) -> bool:
        """Whether filling the view touches nothing live: done first, as checks and the user's hooks depend on it."""
        return self.rank is not None or self.is_apart


ObjectKey: TypeAlias = tuple[str, int | None]
"""Name of an object, and the stored rank it is of; None: the rank at this coordinate."""


def row_of(first: ShardRow, box: LocalBox, dtype: torch.dtype) -> ShardRow:
    """Return the row of one more box of the tensor that `first` is a row of."""
    return replace(first, offset=box.offset, length=box.length, nbytes=math.prod(box.length) * dtype.itemsize)
