"""Who writes what: from the layouts of all ranks to one writer per shard.

Pure. Owns: grouping equal boxes into replicas, choosing the writer of each so that bytes are balanced,
refusing layouts that do not make one snapshot. Does not own: where a shard stands in a slot (`chunks`), nor
the proof that replicas hold equal bits (`coverage`, at commit). Invariant: every global tensor is tiled exactly
once by the boxes of the ranks, and each box has exactly one writer, which holds it. Deterministic: equal
layouts give equal plans, whatever the order of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import blake3

from ckptd.daemon.coverage import tiling
from ckptd.daemon.errors import PlanError, make_error
from ckptd.protos import error_pb2, shard_table, snapshot_pb2
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import ShardTable

_HINT = "data that differs between ranks under one name must be declared with PerRank or Sharded"
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Who writes what. `writers[rank][row]` is the rank that writes the row of `rank`'s layout."""

    digest: bytes
    writers: Mapping[int, list[int]]


def plan_digest(layout_digests: Mapping[int, bytes]) -> bytes:
    """Return the digest that names the plan for these layouts (BLAKE3 over the ranks' layout digests in rank order)."""
    hasher = blake3.blake3(b"ckptd plan 1")
    for rank in sorted(layout_digests):
        hasher.update(rank.to_bytes(4, "little"))
        hasher.update(layout_digests[rank])
    return hasher.digest()


def plan(layouts: Mapping[int, ShardTable], layout_digests: Mapping[int, bytes]) -> Plan:
    """Return the writers for the layouts of all ranks.

    Args:
        layouts: table of every rank of the world.
        layout_digests: `shard_table.digest` of each.

    Raises:
        PlanError: LAYOUT_MISMATCH (one name with two shapes or dtypes, one box twice on a rank) or COVERAGE (a hole
            or an overlap); names tensor and ranks.
    """
    rows = {rank: list(shard_table.iter_rows(layouts[rank])) for rank in sorted(layouts)}
    holders: dict[str, dict[Box, list[int]]] = {}
    first: dict[str, tuple[int, ShardRow]] = {}
    for rank, table in rows.items():
        own: set[tuple[str, Box]] = set()
        for row in table:
            if (row.name, row.box) in own:
                raise _mismatch(f"tensor {row.name!r} has the same box twice on rank {rank}", row.name, (rank,))
            own.add((row.name, row.box))
            if row.scope == snapshot_pb2.SCOPE_PER_RANK:
                continue
            seen_rank, seen = first.setdefault(row.name, (rank, row))
            if (seen.dtype, seen.global_shape) != (row.dtype, row.global_shape):
                raise _mismatch(
                    f"tensor {row.name!r} is {seen.dtype} {seen.global_shape} on rank {seen_rank}, "
                    f"but {row.dtype} {row.global_shape} on rank {rank}",
                    row.name,
                    (seen_rank, rank),
                )
            holders.setdefault(row.name, {}).setdefault(row.box, []).append(rank)
    for name, boxes in holders.items():
        wrong = tiling(name, first[name][1].global_shape, boxes)
        if wrong is not None:
            wrong.phase, wrong.hint = "begin", wrong.hint or _HINT
            raise PlanError(wrong)
    chosen = _balanced(rows, holders)
    writers = {
        rank: [rank if row.scope == snapshot_pb2.SCOPE_PER_RANK else chosen[(row.name, row.box)] for row in table]
        for rank, table in rows.items()
    }
    return Plan(digest=plan_digest(layout_digests), writers=writers)


def _balanced(
    rows: Mapping[int, list[ShardRow]], holders: Mapping[str, Mapping[Box, list[int]]]
) -> dict[tuple[str, Box], int]:
    """Choose one writer per box: sole holders first, then the largest replicas to the rank with the fewest bytes."""
    load = dict.fromkeys(rows, 0)
    nbytes: dict[tuple[str, Box], int] = {}
    for rank, table in rows.items():
        for row in table:
            if row.scope == snapshot_pb2.SCOPE_PER_RANK:
                load[rank] += row.nbytes
            else:
                nbytes[(row.name, row.box)] = row.nbytes
    chosen: dict[tuple[str, Box], int] = {}
    shared: list[tuple[int, str, Box, list[int]]] = []
    for name, boxes in holders.items():
        for box, ranks in boxes.items():
            if len(ranks) == 1:
                chosen[(name, box)] = ranks[0]
                load[ranks[0]] += nbytes[(name, box)]
            else:
                shared.append((-nbytes[(name, box)], name, box, ranks))
    for negative, name, box, ranks in sorted(shared):
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        chosen[(name, box)] = writer
        load[writer] -= negative
    return chosen


def _mismatch(message: str, name: str, ranks: tuple[int, ...]) -> PlanError:
    return PlanError(
        make_error(
            error_pb2.REASON_LAYOUT_MISMATCH,
            message,
            hint=_HINT,
            object=name,
            ranks=ranks,
            phase="begin",
        )
    )
