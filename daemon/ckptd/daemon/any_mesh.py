"""What a rank hears of a step that was saved on another mesh: global tensors whole, everything else by stored rank.

Pure. Owns: the answer to Restore, and the wish that comes back. Does not own: which bytes a wish means (`reshard`,
`restore_plan`). Invariant: each global tensor stands in the offer once; what was one rank's own stays apart from its namesakes.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ckptd.daemon.errors import DaemonError
from ckptd.protos import error_pb2, shard_table
from ckptd.protos.agent_pb2 import StoredPart, WantPart
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SCOPE_PER_RANK, RankSection, ShardTable

_RANKS_A_PART = 64
_NAMES_SHOWN = 5


@dataclass(kw_only=True, slots=True)
class Wanted:
    """What one rank wants, joined from the parts of its call.

    Attributes:
        tables: Rows, part by part.
        row_ranks: Row: the stored rank meant by a row of scope PER_RANK; empty: the rank at the same coordinate.
        objects: Names.
        object_ranks: Row of objects: as row_ranks.
    """

    tables: list[ShardTable] = field(default_factory=list)
    row_ranks: list[int] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    object_ranks: list[int] = field(default_factory=list)

    def take(self, part: WantPart) -> None:
        """Add a part."""
        self.tables.append(part.rows)
        self.row_ranks.extend(part.row_ranks)
        self.objects.extend(part.object_names)
        self.object_ranks.extend(part.object_ranks)

    def rows(self) -> ShardTable:
        """Return all rows as one table.

        Raises:
            DaemonError: INVALID_ARGUMENT, the columns do not fit together.
        """
        try:
            table = shard_table.concat(self.tables)
        except ValueError as wrong:
            raise DaemonError.of(str(wrong), reason=error_pb2.REASON_INVALID_ARGUMENT, phase="restore") from None
        for ranks, names in ((self.row_ranks, len(table.name)), (self.object_ranks, len(self.objects))):
            if ranks and len(ranks) != names:
                raise DaemonError.of(
                    f"a want names {len(ranks)} stored ranks for {names} entries",
                    reason=error_pb2.REASON_INVALID_ARGUMENT,
                    phase="restore",
                )
        return table


def offer(sections: Mapping[int, RankSection]) -> Iterator[StoredPart]:
    """Yield the parts of the answer to Restore that follow `found`: the same for every rank of the run."""
    whole: dict[str, ShardRow] = {}
    own: list[tuple[int, ShardRow]] = []
    aliases: dict[str, str] = {}
    for rank, section in sorted(sections.items()):
        for row in shard_table.rows_at(section.shards, _told(section.shards, whole)):
            if row.scope == SCOPE_PER_RANK:
                own.append((rank, row))
            elif row.name not in whole:
                whole[row.name] = _whole(row)
        aliases.update(zip(section.aliases.alias, section.aliases.target, strict=True))
    first = StoredPart()
    first.aliases.alias.extend(aliases)
    first.aliases.target.extend(aliases.values())
    yield first
    for ranks in _batches(sorted(sections)):
        yield StoredPart(
            rank_objects=[
                StoredPart.RankObjects(
                    rank=rank, coordinate=sections[rank].coordinate, names=sections[rank].object_names
                )
                for rank in ranks
            ]
        )
    owners = [0] * len(whole) + [rank for rank, _ in own]
    at = 0
    for rows in shard_table.split(shard_table.build([*whole.values(), *(row for _, row in own)])):
        count = shard_table.row_count(rows)
        yield StoredPart(rows=rows, row_ranks=owners[at : at + count])
        at += count


def _told(table: ShardTable, known: Container[str]) -> list[int]:
    """Return the rows of one rank that say something new: of names not known yet, and what is the rank's own."""
    is_new = np.array([name not in known for name in table.names], dtype=np.bool_)
    is_own = np.asarray(table.scope, dtype=np.int64) == SCOPE_PER_RANK
    if not is_new.any() and not is_own.any():
        return []
    told: list[int] = np.flatnonzero(is_new[np.asarray(table.name, dtype=np.int64)] | is_own).tolist()
    return told


def _batches(ranks: Sequence[int]) -> Iterator[Sequence[int]]:
    for at in range(0, len(ranks), _RANKS_A_PART):
        yield ranks[at : at + _RANKS_A_PART]


def _whole(row: ShardRow) -> ShardRow:
    elements = math.prod(row.length)
    return replace(
        row,
        offset=(0,) * len(row.global_shape),
        length=row.global_shape,
        nbytes=row.nbytes // elements * math.prod(row.global_shape) if elements else 0,
    )


def objects_of(sections: Mapping[int, RankSection], rank: int, wanted: Wanted) -> list[tuple[int, int, int, int]]:
    """Return (position in the wish, stored rank, offset, length in its stream) of each wanted object.

    Raises:
        DaemonError: LAYOUT_MISMATCH, not stored.
    """
    found: list[tuple[int, int, int, int]] = []
    missing: list[str] = []
    places: dict[int, dict[str, tuple[int, int]]] = {}
    owners = wanted.object_ranks or [rank] * len(wanted.objects)
    for at, (name, owner) in enumerate(zip(wanted.objects, owners, strict=True)):
        if owner not in places:
            places[owner] = _places(sections[owner]) if owner in sections else {}
        place = places[owner].get(name)
        if place is None:
            missing.append(name)
        else:
            found.append((at, owner, *place))
    if missing:
        raise DaemonError.of(
            f"objects {missing[:_NAMES_SHOWN]} are not in the snapshot",
            reason=error_pb2.REASON_LAYOUT_MISMATCH,
            rank=rank,
            phase="restore",
        )
    return found


def _places(section: RankSection) -> dict[str, tuple[int, int]]:
    columns = zip(section.object_names, section.object_offset, section.object_length, strict=True)
    return {name: (offset, length) for name, offset, length in columns}
