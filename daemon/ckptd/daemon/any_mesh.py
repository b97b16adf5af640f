"""What a rank hears of a step that was saved on another mesh: global tensors whole, everything else by stored rank.

Pure. Owns: the answer to Restore, the wish that comes back, and names for what no
rank wished for. Does not own: which bytes a wish means (`reshard`,
`restore_plan`). Invariant: each global tensor stands in the offer once; what was one rank's own stays apart from its namesakes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ckptd.daemon.errors import DaemonError
from ckptd.daemon.index_checks import FINGERPRINT_BYTES
from ckptd.protos import error_pb2, shard_table
from ckptd.protos.agent_pb2 import StoredPart, WantPart, WantTerms
from ckptd.protos.error_pb2 import Error
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
        terms: What must be put beside the wishes of other ranks; None: nothing was said of it.
    """

    tables: list[ShardTable] = field(default_factory=list)
    row_ranks: list[int] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    object_ranks: list[int] = field(default_factory=list)
    terms: WantTerms | None = None

    def take(self, part: WantPart) -> None:
        """Add a part."""
        self.tables.append(part.rows)
        self.row_ranks.extend(part.row_ranks)
        self.objects.extend(part.object_names)
        self.object_ranks.extend(part.object_ranks)
        if part.HasField("terms"):
            self.terms = part.terms

    def is_same(self, other: Wanted) -> bool:
        """Say whether the same bytes are wanted, in the same order."""
        mine, others = [(one.tables, one.row_ranks, one.objects, one.object_ranks) for one in (self, other)]
        return mine == others

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
    """Yield the parts of the answer to Restore that follow `found`: the same for every rank of the run.

    Raises:
        DaemonError: LAYOUT_MISMATCH, ranks tied one name to different tensors.
    """
    whole: dict[str, ShardRow] = {}
    own: list[tuple[int, ShardRow]] = []
    aliases = _aliases(sections)
    for rank, section in sorted(sections.items()):
        for row in shard_table.rows_at(section.shards, _told(section.shards, whole)):
            if row.scope == SCOPE_PER_RANK:
                own.append((rank, row))
            elif row.name not in whole:
                whole[row.name] = _whole(row)
    yield _aliases_part(aliases)
    yield from _objects_parts(sections)
    owners = [0] * len(whole) + [rank for rank, _ in own]
    at = 0
    for rows in shard_table.split(shard_table.build([*whole.values(), *(row for _, row in own)])):
        count = shard_table.row_count(rows)
        yield StoredPart(rows=rows, row_ranks=owners[at : at + count])
        at += count


def boxes(sections: Mapping[int, RankSection]) -> Iterator[StoredPart]:
    """Yield the parts of the answer for a reader that takes boxes as they were written: each once, under its writer.

    Raises:
        DaemonError: as `offer` does.
    """
    aliases = _aliases(sections)
    yield _aliases_part(aliases)
    yield from _objects_parts(sections)
    for rank, section in sorted(sections.items()):
        columns = zip(shard_table.iter_rows(section.shards), section.writer, section.stream_offset, strict=True)
        written = [(row, offset) for row, writer, offset in columns if writer == rank]
        at = 0
        for rows in shard_table.split(shard_table.build(row for row, _ in written)):
            count = shard_table.row_count(rows)
            offsets = [offset for _, offset in written[at : at + count]]
            yield StoredPart(rows=rows, row_ranks=[rank] * count, row_offsets=offsets)
            at += count


def _aliases(sections: Mapping[int, RankSection]) -> dict[str, str]:
    """Return what each tied name shares memory with, for whoever is none of the ranks that saved.

    Two ranks may have tied a name to different tensors: the third of three tied names where no rank has all. Any will do if
    they hold the same; else the name has a value for each rank, and none for another mesh.
    """
    found: dict[str, tuple[str, int]] = {}
    written = functools.cache(functools.partial(_written, sections))  # few names, on any number of ranks
    for rank, section in sorted(sections.items()):
        for alias, target in zip(section.aliases.alias, section.aliases.target, strict=True):
            first, by = found.setdefault(alias, (target, rank))
            if first != target and written(first) != written(target):
                raise DaemonError.of(
                    f"tensor {alias!r} was tied to {first!r} on rank {by} and to {target!r} on rank {rank}: two values",
                    reason=error_pb2.REASON_LAYOUT_MISMATCH,
                    hint="restore on the mesh that saved; what differs from rank to rank needs names of its own, or PerRank",
                    object=alias,
                    phase="restore",
                )
    return {alias: target for alias, (target, _) in found.items()}


def _written(sections: Mapping[int, RankSection], name: str) -> dict[tuple[object, ...], bytes]:
    """Return the fingerprint of each box of a tensor, from the rank that wrote it."""
    found: dict[tuple[object, ...], bytes] = {}
    for rank, section in sections.items():
        if name not in section.shards.names:
            continue
        for at, row in enumerate(shard_table.iter_rows(section.shards)):
            if row.name == name and section.writer[at] == rank:
                box = (row.dtype, row.global_shape, row.offset, row.length)
                found[box] = section.fingerprints[at * FINGERPRINT_BYTES : (at + 1) * FINGERPRINT_BYTES]
    return found


def _aliases_part(aliases: Mapping[str, str]) -> StoredPart:
    part = StoredPart()
    part.aliases.alias.extend(aliases)
    part.aliases.target.extend(aliases.values())
    return part


def _objects_parts(sections: Mapping[int, RankSection]) -> Iterator[StoredPart]:
    for ranks in _batches(sorted(sections)):
        yield StoredPart(
            rank_objects=[
                StoredPart.RankObjects(
                    rank=rank, coordinate=sections[rank].coordinate, names=sections[rank].object_names
                )
                for rank in ranks
            ]
        )


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


def names_of(sections: Mapping[int, RankSection]) -> list[str]:
    """Return the names of all tensors and objects, sorted: what the bits of `WantTerms.unused` are about."""
    found: set[str] = set()
    for section in sections.values():
        found.update(section.shards.names, section.aliases.alias, section.object_names)
    return sorted(found)


def with_names(error: Error, unused: bytes, sections: Mapping[int, RankSection]) -> Error:
    """Return the coordinator's error, which knows bits, with the names they stand for."""
    bits = f"{int.from_bytes(unused, 'big'):0{8 * len(unused)}b}"
    names = [name for name, bit in zip(names_of(sections), bits, strict=False) if bit == "1"]
    if not names:
        return error
    named = Error()
    named.CopyFrom(error)
    named.message += f": {', '.join(names[:_NAMES_SHOWN])}{', ...' if len(names) > _NAMES_SHOWN else ''}"
    named.object = names[0]
    return named


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
