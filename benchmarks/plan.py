"""How long planning takes where there are many tensors and many ranks, and that it grows about linearly in shards.

Each tensor is cut over all ranks along its first dimension, one in eight is held by all ranks instead. Three sizes are planned:
half of the ranks, all of them, and twice as many; `ratio` is the processor time of the second over the first, and of the third
over the second, so 2 is linear. `restore` plans what one node of 8 ranks needs of a step of as many ranks, for a mesh of three
quarters as many: its answer to Restore, matching, and places in restore memory. Medians over rounds. The tables are made first
and not measured. `by_rows_s` is the slow way that errors take, for the half; `whole_s` the check before a commit of layouts of
`--rows` rows, 8 ranks, cold. All but `seconds` are processor time, which other processes disturb less.

    python benchmarks/plan.py [--tensors 1024] [--ranks 1024] [--rows 50000] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import numpy as np

from ckptd.daemon.any_mesh import offer
from ckptd.daemon.arrangement import arranged
from ckptd.daemon.chunks import stream_layout
from ckptd.daemon.index import chunk_refs
from ckptd.daemon.layouts import layouts_of
from ckptd.daemon.line import Line
from ckptd.daemon.pieces import Pieces
from ckptd.daemon.plan import plan, writers_by_rows
from ckptd.daemon.reshard import StoredRows
from ckptd.protos import shard_table
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, RankSection, ShardTable


def table_of(rank: int, ranks: int, tensors: int, *, among: int = 0) -> ShardTable:
    """Return the layout of a rank that holds a part of most tensors, and the whole of one in eight.

    Tensors have a row for each of `ranks`, three times over; they are cut `among` fewer ranks where that is given.
    """
    rows = []
    height = 3 * ranks
    part = -(-height // (among or ranks))
    for number in range(tensors):
        width = 16 + number % 5
        at, length = (0, height) if number % 8 == 0 else (min(height, part * rank), min(part, height - part * rank))
        rows.append(
            ShardRow(
                name=f"model/layers.{number}.weight",
                dtype="float32",
                global_shape=(height, width),
                offset=(at, 0),
                length=(length, width),
                scope=SCOPE_GLOBAL,
                nbytes=length * width * 4,
            )
        )
    return shard_table.build(rows)


Clock = Callable[[], float]


def timed(call: Callable[[], object], rounds: int, clock: Clock = time.process_time) -> float:
    """Return the median of how long a call takes, in seconds."""
    found = []
    for _ in range(rounds):
        begin = clock()
        call()
        found.append(clock() - begin)
    return statistics.median(found)


def sections_of(tables: Mapping[int, ShardTable], writers: Mapping[int, list[int]]) -> dict[int, RankSection]:
    """Return the sections of a step that was saved so; every chunk is another."""
    sections = {}
    for rank, table in tables.items():
        layout = stream_layout(rank, table, writers[rank])
        digests = [(rank << 32 | at).to_bytes(32, "little") for at in range(len(layout.chunks))]
        sections[rank] = RankSection(
            rank=rank,
            coordinate=[rank],
            shards=table,
            writer=writers[rank],
            stream_offset=layout.offsets,
            chunk_digests=b"".join(digests),
            chunk_length=[chunk.length for chunk in layout.chunks],
            chunk_source=[0] * len(layout.chunks),
            sources=["000000000001.00000001-0123456789ab"],
        )
    return sections


def restored(sections: Mapping[int, RankSection], wants: list[ShardTable]) -> int:
    """Plan what a node needs for these wants; return the bytes of the arena."""
    list(offer(sections))
    rows = StoredRows(sections)
    pieces = Pieces.joined([rows.pieces(want, None) for want in wants])
    line = Line({rank: chunk_refs(sections[rank]) for rank in sorted(set(pieces.rank.tolist()))})
    none = np.zeros(0, dtype=np.int64)
    return arranged(line, pieces, none, none, slack=64 << 20).nbytes


def measure(tensors: int, ranks: int, rows: int, rounds: int) -> dict[str, object]:
    """Measure everything."""
    result: dict[str, object] = {"tensors": tensors, "ranks": ranks, "shards": tensors * ranks}
    plan_s, restore_s = [], []
    for world in (ranks // 2, ranks, ranks * 2):
        tables = {rank: table_of(rank, world, tensors) for rank in range(world)}
        digests = {rank: shard_table.digest(table) for rank, table in tables.items()}
        plan_s.append(timed(partial(plan, tables, digests), rounds))
        writers = dict(plan(tables, digests).writers)
        if world == ranks // 2:
            result["by_rows_s"] = round(timed(partial(writers_by_rows, tables), 1), 3)
            assert writers_by_rows(tables) == writers
        if world == ranks:
            result["seconds"] = round(timed(partial(plan, tables, digests), rounds, time.perf_counter), 3)
        sections = sections_of(tables, writers)
        wants = [table_of(rank, world, tensors, among=world * 3 // 4) for rank in range(8)]
        restore_s.append(timed(partial(restored, sections, wants), rounds))
    for what, found in (("plan", plan_s), ("restore", restore_s)):
        result[f"{what}_s"] = [round(each, 3) for each in found]
        result[f"{what}_ratio"] = [round(after / before, 2) for before, after in pairwise(found)]
    return result | large_ranks(rows)


def large_ranks(rows: int) -> dict[str, object]:
    """Measure 8 ranks of many rows each."""
    tables = {rank: table_of(rank, 8, rows) for rank in range(8)}
    digests = {rank: shard_table.digest(table) for rank, table in tables.items()}
    writers = plan(tables, digests).writers
    parts = list(shard_table.split(tables[0]))
    split_s = timed(lambda: list(shard_table.split(tables[0])), 1)
    concat_s = timed(partial(shard_table.concat, parts), 1)
    sections = {
        rank: RankSection(rank=rank, coordinate=[rank], shards=table, writer=writers[rank])
        for rank, table in tables.items()
    }
    begin = time.process_time()
    layouts = layouts_of(sections)
    whole_s = time.process_time() - begin
    assert len(np.unique(layouts.holder)) == len(layouts.order)
    return {
        "split_s": round(split_s, 4),
        "concat_s": round(concat_s, 4),
        "whole_rows": 8 * rows,
        "whole_s": round(whole_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.tensors, args.ranks, args.rows, args.rounds)
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:24} {value}")


if __name__ == "__main__":
    main()
