"""What a step holds, as a reader hears it: tensors as the boxes that were written, in the order they are stored.

Owns: joining the parts of the answer. Does not own: asking (`step_session`), or names that a caller gives (`opened_step`).
Invariant: each box stands here once, under the rank whose stream holds it; boxes of a rank come in the order of its stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptd.protos import shard_table
from ckptd.protos.agent_pb2 import StoredPart
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SCOPE_PER_RANK


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBox:
    """A box, and where it is stored.

    Attributes:
        row: The box.
        rank: The rank that wrote it.
        offset: Where it begins in the stream of that rank, in bytes.
    """

    row: ShardRow
    rank: int
    offset: int

    @property
    def owner(self) -> int | None:
        """The rank whose own it is; None: a piece of a global tensor."""
        return self.rank if self.row.scope == SCOPE_PER_RANK else None


@dataclass(slots=True)
class StoredBoxes:
    """Joins the parts of the answer.

    Attributes:
        found: The first part.
        boxes: Of all ranks.
        aliases: Names that share memory with another one.
        coordinates: Stored rank: its coordinate, axis by axis.
        holders: Name of an object: the ranks that hold one, ascending.
    """

    found: StoredPart.Found = field(default_factory=StoredPart.Found)
    boxes: list[StoredBox] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    coordinates: dict[int, Mapping[str, int]] = field(default_factory=dict)
    holders: dict[str, list[int]] = field(default_factory=dict)

    def take(self, part: StoredPart) -> None:
        """Add a part.

        Raises:
            ValueError: its columns do not fit together.
        """
        if part.HasField("found"):
            self.found = part.found
        rows = shard_table.iter_rows(part.rows)
        for row, rank, offset in zip(rows, part.row_ranks, part.row_offsets, strict=True):
            self.boxes.append(StoredBox(row=row, rank=rank, offset=offset))
        self.aliases.update(zip(part.aliases.alias, part.aliases.target, strict=True))
        for one in part.rank_objects:
            self.coordinates[one.rank] = dict(zip(self.found.mesh.axes, one.coordinate, strict=False))
            for name in one.names:
                self.holders.setdefault(name, []).append(one.rank)

    def finish(self) -> None:
        """Put everything into its order. When all parts were taken."""
        self.boxes.sort(key=lambda box: (box.rank, box.offset))
        for ranks in self.holders.values():
            ranks.sort()
