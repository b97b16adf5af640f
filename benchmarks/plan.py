"""How long planning takes where there are many tensors and many ranks, and that it grows about linearly in shards.

Each tensor is cut over all ranks along its first dimension, one in eight is held by all ranks instead. Two sizes are planned:
half of the ranks, and all of them; `ratio` is the processor time of the second over the first, so 2 is linear. The tables are
made first and not measured. `by_rows_s` is the slow way that errors take, for the half; `whole_s` the check before a commit
of layouts of that many rows, 8 ranks, cold. All but `seconds` are processor time, which other processes disturb less.

    python benchmarks/plan.py [--tensors 1024] [--ranks 1024] [--rows 50000] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from ckptd.daemon.layouts import layouts_of
from ckptd.daemon.plan import plan, writers_by_rows
from ckptd.protos import shard_table
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, RankSection, ShardTable


def table_of(rank: int, ranks: int, tensors: int) -> ShardTable:
    """Return the layout of a rank that holds a part of most tensors, and the whole of one in eight."""
    rows = []
    for number in range(tensors):
        width = 16 + number % 5
        at, length = (0, ranks) if number % 8 == 0 else (rank, 1)
        rows.append(
            ShardRow(
                name=f"model/layers.{number}.weight",
                dtype="float32",
                global_shape=(ranks, width),
                offset=(at, 0),
                length=(length, width),
                scope=SCOPE_GLOBAL,
                nbytes=length * width * 4,
            )
        )
    return shard_table.build(rows)


def planned(
    tensors: int, ranks: int, clock: Callable[[], float] = time.process_time
) -> tuple[float, dict[int, ShardTable], dict[int, list[int]]]:
    """Return how long planning took by `clock`, what was planned, and the plan's writers."""
    tables = {rank: table_of(rank, ranks, tensors) for rank in range(ranks)}
    digests = {rank: shard_table.digest(table) for rank, table in tables.items()}
    begin = clock()
    made = plan(tables, digests)
    return clock() - begin, tables, dict(made.writers)


def measure(tensors: int, ranks: int, rows: int) -> dict[str, object]:
    """Run everything once."""
    half, tables, writers = planned(tensors, ranks // 2)
    begin = time.process_time()
    slow = writers_by_rows(tables)
    by_rows_s = time.process_time() - begin
    assert slow == writers
    del slow
    seconds, _, _ = planned(tensors, ranks, time.perf_counter)
    full, _, _ = planned(tensors, ranks)
    _, tables, writers = planned(rows, 8)
    begin = time.process_time()
    parts = list(shard_table.split(tables[0]))
    split_s = time.process_time() - begin
    begin = time.process_time()
    shard_table.concat(parts)
    concat_s = time.process_time() - begin
    sections = {
        rank: RankSection(rank=rank, coordinate=[rank], shards=table, writer=writers[rank])
        for rank, table in tables.items()
    }
    begin = time.process_time()
    layouts = layouts_of(sections)
    whole_s = time.process_time() - begin
    assert len(np.unique(layouts.holder)) == len(layouts.order)
    return {
        "tensors": tensors,
        "ranks": ranks,
        "shards": tensors * ranks,
        "half_s": round(half, 3),
        "by_rows_s": round(by_rows_s, 3),
        "full_s": round(full, 3),
        "seconds": round(seconds, 3),
        "ratio": round(full / half, 2),
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
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.tensors, args.ranks, args.rows)
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:24} {value}")


if __name__ == "__main__":
    main()
