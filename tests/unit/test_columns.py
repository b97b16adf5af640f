"""Planning by columns gives what planning by rows gives, and tables are cut and joined as rows would be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon.errors import PlanError
from ckptd.daemon.plan import plan, writers_by_columns, writers_by_rows
from ckptd.protos import shard_table
from ckptd.protos.error_pb2 import Error
from ckptd.protos.shard_table import ShardRow, iter_rows
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK, ShardTable

Layouts = dict[int, list[ShardRow]]


def row(name: str, shape: Iterable[int], box: Iterable[tuple[int, int]], scope: int = SCOPE_GLOBAL) -> ShardRow:
    """Return a row of 2-byte elements; `box` has begin and end of each dimension."""
    box = list(box)
    length = tuple(end - begin for begin, end in box)
    return ShardRow(
        name=name,
        dtype="bfloat16",
        global_shape=tuple(shape),
        offset=tuple(begin for begin, _ in box),
        length=length,
        scope=scope,
        nbytes=2 * int(np.prod(length, dtype=np.int64)),
    )


def _cut(draw: st.DrawFn, box: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut a box in two again and again, so that pieces need be no grid."""
    if not box or not draw(st.integers(0, 2)):
        return [box]
    dim = draw(st.integers(0, len(box) - 1))
    begin, end = box[dim]
    at = draw(st.integers(begin, end))
    parts = [[*box[:dim], span, *box[dim + 1 :]] for span in ((begin, at), (at, end)) if span != (begin, end)]
    return [piece for part in parts for piece in _cut(draw, part)] if len(parts) == 2 else [box]


@st.composite
def worlds(draw: st.DrawFn) -> Layouts:
    """Draw layouts of tensors of 0 to 3 dimensions, in any pieces on any ranks; some with a row spoilt."""
    world = draw(st.integers(1, 5))
    layouts: Layouts = {rank: [] for rank in range(world)}
    for number in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        for piece in _cut(draw, [(0, size) for size in shape]):
            for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)):
                made = row(f"t{number}", shape, piece)
                if made not in layouts[rank]:
                    layouts[rank].append(made)
    for rank, rows in layouts.items():
        if draw(st.booleans()):
            rows.append(row("own", (rank + 1,), [(0, rank + 1)], SCOPE_PER_RANK))
        rows[:] = draw(st.permutations(rows))
    filled = sorted(rank for rank, held in layouts.items() if held)
    spoil: bool = draw(st.booleans())
    if filled and spoil:
        rows = layouts[draw(st.sampled_from(filled))]
        at: int = draw(st.integers(0, len(rows) - 1))
        old = rows[at]
        match draw(st.integers(0, 4)):
            case 0:
                rows.append(old)
            case 1:
                del rows[at]
            case 2:
                spans = [(begin, begin + size) for begin, size in zip(old.offset, old.length, strict=True)]
                rows[at] = row(old.name, [*old.global_shape, 1], [*spans, (0, 1)])
            case 3:
                rows[at] = row(old.name, old.global_shape, [(n, n + 2) for n in old.offset])
            case _:
                rows[at] = row(old.name, old.global_shape, [(n, n) for n in old.offset], SCOPE_PER_RANK)
    return layouts


def tables_of(layouts: Layouts) -> dict[int, ShardTable]:
    return {rank: shard_table.build(rows) for rank, rows in layouts.items()}


def outcome(tables: dict[int, ShardTable], *, fast: bool) -> dict[int, list[int]] | Error:
    try:
        if fast:
            return dict(plan(tables, dict.fromkeys(tables, b"")).writers)
        return writers_by_rows(tables)
    except PlanError as error:
        return error.error


@given(layouts=worlds())
def test_columns_and_rows_give_the_same_writers_and_errors(layouts: Layouts) -> None:
    """The plan is the one that rows give one by one, and so is each refusal."""
    tables = tables_of(layouts)
    assert outcome(tables, fast=True) == outcome(tables, fast=False)


def test_the_usual_layouts_are_planned_by_columns() -> None:
    """Replicas, shards, scalars, an uneven and an irregular tiling, empty and per-rank tensors need no rows."""
    spans = [(0, 3), (3, 6), (6, 7)]
    layouts = {
        rank: [
            row("step", (), ()),
            row("even", (3, 4), [(rank, rank + 1), (0, 4)]),
            row("uneven", (7,), [spans[rank]]),
            row("odd", (2, 2), [[(0, 1), (0, 2)], [(1, 2), (0, 1)], [(1, 2), (1, 2)]][rank]),
            row("all", (5, 5), [(0, 5), (0, 5)]),
            row("none", (0, 5), [(0, 0), (0, 5)]),
            row("own", (rank,), [(0, rank)], SCOPE_PER_RANK),
        ]
        for rank in range(3)
    }
    made = writers_by_columns(tables_of(layouts))
    assert made is not None
    assert made == writers_by_rows(tables_of(layouts))


def test_numbers_beyond_exact_arithmetic_go_row_by_row() -> None:
    """A shape that doubles cannot hold is planned all the same, the slow way."""
    size = 1 << 55
    layouts = {
        0: [row("huge", (size,), [(0, size // 2)])],
        1: [row("huge", (size,), [(size // 2, size)])],
    }
    assert writers_by_columns(tables_of(layouts)) is None
    assert outcome(tables_of(layouts), fast=True) == {0: [0], 1: [1]}


def split_by_rows(table: ShardTable, rows: int, name_bytes: int) -> Iterator[ShardTable]:
    """Cut a table row by row."""
    held: list[ShardRow] = []
    size = 0
    for one in iter_rows(table):
        if held and (len(held) >= rows or size >= name_bytes):
            yield shard_table.build(held)
            held, size = [], 0
        held.append(one)
        size += len(one.name) + 24 * len(one.global_shape)
    yield shard_table.build(held)


@given(layouts=worlds(), rows=st.integers(1, 9), name_bytes=st.integers(1, 300), again=st.permutations(range(3)))
def test_tables_are_cut_and_joined_as_their_rows_would_be(
    layouts: Layouts, rows: int, name_bytes: int, again: list[int]
) -> None:
    """Parts and wholes are, byte for byte, the tables that their rows build, whatever names a table holds unused."""
    for held in layouts.values():
        table = shard_table.build(held)
        table.names.append("unused")
        table.names.extend(table.names[:1])
        parts = list(shard_table.split(table, rows=rows, name_bytes=name_bytes))
        assert parts == list(split_by_rows(table, rows, name_bytes))
        assert shard_table.concat([table]) == shard_table.build(held)
        shuffled = [parts[at] for at in again if at < len(parts)] + parts
        expected = shard_table.build(one for part in shuffled for one in iter_rows(part))
        assert shard_table.concat(iter(shuffled)) == expected
