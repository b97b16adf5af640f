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
import numpy as np

from ckptd.daemon.columns import Boxes, Columns, Ints, boxes_of, columns_of, untiled
from ckptd.daemon.coverage import tiling
from ckptd.daemon.errors import PlanError, make_error
from ckptd.protos import error_pb2, shard_table, snapshot_pb2
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import ShardTable

_HINT = "data that differs between ranks under one name must be declared with PerRank or Sharded"
_MAX_BYTES = 1 << 62
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Who writes what.

    Attributes:
        digest: See `plan_digest`.
        writers: `writers[rank][row]` is the rank that writes the row of `rank`'s layout.
        nbytes: Bytes of all rows of all ranks.
        replica_bytes: Bytes of those of them that another rank writes.
    """

    digest: bytes
    writers: Mapping[int, list[int]]
    nbytes: int
    replica_bytes: int


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
    writers = writers_by_columns(layouts)
    if writers is None:
        writers = writers_by_rows(layouts)
    nbytes = {rank: np.asarray(table.nbytes, dtype=np.uint64) for rank, table in layouts.items()}
    replicas = (of_rank[np.asarray(writers[rank], dtype=np.int64) != rank] for rank, of_rank in nbytes.items())
    return Plan(
        digest=plan_digest(layout_digests),
        writers=writers,
        nbytes=sum(int(of_rank.sum()) for of_rank in nbytes.values()),
        replica_bytes=sum(int(of_rank.sum()) for of_rank in replicas),
    )


def writers_by_columns(layouts: Mapping[int, ShardTable]) -> dict[int, list[int]] | None:
    """Return the writers by arithmetic on whole columns, or None where anything has to be said about the layouts."""
    rows = columns_of(layouts)
    boxes = None if rows is None else boxes_of(rows)
    if rows is None or boxes is None or float(rows.nbytes.sum(dtype=np.float64)) >= _MAX_BYTES:
        return None
    is_global = rows.scope[boxes.head] != snapshot_pb2.SCOPE_PER_RANK
    odd = untiled(rows, boxes.head[is_global])
    if odd is None or not all(_is_tiled(rows, boxes, name) for name in odd):
        return None
    holders = np.diff(boxes.begins)
    nbytes = rows.nbytes[boxes.head]
    load: Ints = np.zeros(len(layouts), dtype=np.int64)
    own = ~is_global[boxes.box]
    np.add.at(load, rows.rank[own], rows.nbytes[own])
    chosen = rows.rank[boxes.head]
    sole = is_global & (holders == 1)
    np.add.at(load, chosen[sole], nbytes[sole])
    shared = np.flatnonzero(is_global & (holders > 1)).tolist()
    shared.sort(key=lambda box: (-int(nbytes[box]), *_place(rows, int(boxes.head[box]))))
    for box in shared:
        ranks = rows.rank[boxes.order[boxes.begins[box] : boxes.begins[box + 1]]]
        writer = ranks[load[ranks].argmin()]  # ranks ascend, and the first of equals is taken
        chosen[box] = writer
        load[writer] += nbytes[box]
    numbers = np.array(sorted(layouts), dtype=np.int64)
    writer_of = numbers[np.where(own, rows.rank, chosen[boxes.box])].tolist()
    begins = rows.begins.tolist()
    return {
        rank: writer_of[begin:end] for rank, begin, end in zip(sorted(layouts), begins[:-1], begins[1:], strict=True)
    }


def _place(rows: Columns, row: int) -> tuple[str, Box]:
    dims = int(rows.ndim[row])
    return rows.names[int(rows.name[row])], (
        tuple(rows.offset[:dims, row].tolist()),
        tuple(rows.length[:dims, row].tolist()),
    )


def _is_tiled(rows: Columns, boxes: Boxes, name: int) -> bool:
    """Whether the boxes of a tensor that are no grid tile it."""
    heads = boxes.head[rows.name[boxes.head] == name].tolist()
    shape = tuple(rows.shape[: int(rows.ndim[heads[0]]), heads[0]].tolist())
    return tiling(rows.names[name], shape, {_place(rows, row)[1]: () for row in heads}) is None


def writers_by_rows(layouts: Mapping[int, ShardTable]) -> dict[int, list[int]]:
    """Return the writers, one row after the other: slower, and the error names what is wrong first."""
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
    return {
        rank: [rank if row.scope == snapshot_pb2.SCOPE_PER_RANK else chosen[(row.name, row.box)] for row in table]
        for rank, table in rows.items()
    }


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
