"""The tensors of a stored step by name: what `ckptd show --tensors` lists and `ckptd diff` compares.

Pure. Owns: joining the rows of all ranks to named tensors. Does not own: reading indexes (`stored_step`), or bytes. Invariant: a
global tensor appears once, whatever the number of ranks that hold it; what is a rank's own appears once a coordinate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptd.protos import shard_table
from ckptd.protos.snapshot_pb2 import SCOPE_PER_RANK, RankSection

from .index_checks import FINGERPRINT_BYTES
from .tiling import Box


@dataclass(frozen=True, order=True, slots=True)
class TensorKey:
    """What a tensor is found by: its name, and the coordinate where it is a rank's own (empty where it is global)."""

    name: str
    coordinate: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        if not self.coordinate:
            return self.name
        return f"{self.name} at {', '.join(f'{axis} {at}' for axis, at in self.coordinate)}"


@dataclass(kw_only=True, slots=True)
class StoredTensor:
    """A tensor of a step.

    Attributes:
        dtype: Torch's name without "torch.".
        shape: Of the global tensor.
        scope: As in a ShardTable.
        boxes: The distinct boxes it is stored in, with the fingerprint of each.
        nbytes: Bytes stored, replicas counted once.
        ranks: Ranks that hold a part of it, ascending.
        alias_of: The name the bytes are stored under, where this one is tied to it; else "".
    """

    dtype: str
    shape: tuple[int, ...]
    scope: int
    boxes: dict[Box, bytes] = field(default_factory=dict)
    nbytes: int = 0
    ranks: list[int] = field(default_factory=list)
    alias_of: str = ""


def stored_tensors(sections: Mapping[int, RankSection], axes: tuple[str, ...]) -> dict[TensorKey, StoredTensor]:
    """Return the tensors of a step, ascending by name and coordinate; tied names stand beside the one they share bytes with.

    Args:
        sections: Of all ranks.
        axes: Names of the mesh's axes.
    """
    found: dict[TensorKey, StoredTensor] = {}
    tied: dict[TensorKey, str] = {}
    for rank in sorted(sections):
        section = sections[rank]
        coordinate = coordinate_of(section, axes)
        own = set()
        for at, row in enumerate(shard_table.iter_rows(section.shards)):
            key = TensorKey(row.name, coordinate if row.scope == SCOPE_PER_RANK else ())
            if row.scope == SCOPE_PER_RANK:
                own.add(row.name)
            tensor = found.setdefault(key, StoredTensor(dtype=row.dtype, shape=row.global_shape, scope=row.scope))
            if row.box not in tensor.boxes:
                tensor.nbytes += row.nbytes
            # The writer's own: a replica may have none (see RankSection.uncompared and segmented_fingerprints).
            if row.box not in tensor.boxes or section.writer[at] == rank:
                tensor.boxes[row.box] = section.fingerprints[at * FINGERPRINT_BYTES : (at + 1) * FINGERPRINT_BYTES]
            if not tensor.ranks or tensor.ranks[-1] != rank:
                tensor.ranks.append(rank)
        for alias, target in zip(section.aliases.alias, section.aliases.target, strict=True):
            tied[TensorKey(alias, coordinate if target in own else ())] = target
    for key, target in tied.items():
        stored = found.get(TensorKey(target, key.coordinate))
        if stored is not None and key not in found:
            found[key] = StoredTensor(
                dtype=stored.dtype,
                shape=stored.shape,
                scope=stored.scope,
                boxes=stored.boxes,
                nbytes=stored.nbytes,
                ranks=stored.ranks,
                alias_of=target,
            )
    return dict(sorted(found.items()))


def coordinate_of(section: RankSection, axes: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Return a rank's coordinate with the names of the axes; a job of one rank without axes has ("rank", 0)."""
    return tuple(zip(axes, section.coordinate, strict=True)) or (("rank", section.rank),)
