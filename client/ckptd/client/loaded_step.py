"""What a reader of a stored step names and gets: descriptions, pieces, whole tensors.

Owns: the values a caller sees. Does not own: any of the work (`opened_step`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from .reshard_hooks import StoredPiece

WINDOW_BYTES = 256 << 20
"""What is read at once by default."""
Names: TypeAlias = str | Iterable[str]
"""Names, each with all below it, or `fnmatch` patterns; as `only` of a restore."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """What is known of a stored tensor without reading it.

    Attributes:
        name: Global name.
        dtype: Its dtype.
        shape: Global shape.
        nbytes: Of the whole tensor.
        alias_of: The name whose memory it shares, or None.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    alias_of: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TensorPiece:
    """A box of a tensor.

    Attributes:
        tensor: Which one.
        offset: Where the box begins in it, in elements.
        data: The box, contiguous. Its memory is used again by the next window: copy what is to be kept.
    """

    tensor: StoredTensor
    offset: tuple[int, ...]
    data: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedStep(Mapping[str, torch.Tensor]):
    """Global tensors by name, on the CPU, whole; and what the step says of itself.

    Attributes:
        step: Its number.
        timeline: The one it was saved in.
        metrics: As given to save().
        tags: As given to save().
        mesh: Axes and sizes of the mesh that saved.
        ties: Names that share memory with another one here: name to name.
        objects: With `objects=True`: name to the values of all ranks that held one, by coordinate, in the order of ranks.
            Tensors in them that were not loaded stand there as `StoredTensor`.
        own: With `objects=True`: name to the tensors that were each rank's own, likewise.
    """

    step: int
    timeline: str
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    mesh: Mapping[str, int]
    ties: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    objects: Mapping[str, tuple[StoredPiece, ...]] = field(default_factory=dict, repr=False)
    own: Mapping[str, tuple[StoredPiece, ...]] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def part_of(tensor: torch.Tensor, offset: Sequence[int], length: Sequence[int]) -> torch.Tensor:
    """Return the view of a box of a tensor."""
    for dim, (at, size) in enumerate(zip(offset, length, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, at, size)
    return tensor
