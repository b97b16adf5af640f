"""Who writes what: deterministic, balanced, every box by a rank that holds it; layouts that make no snapshot are named."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptd.daemon.errors import PlanError
from ckptd.daemon.plan import Box, Plan, plan, plan_digest
from ckptd.protos import error_pb2, shard_table
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK

Layouts = dict[int, list[ShardRow]]


def row(
    name: str, shape: tuple[int, ...], offset: tuple[int, ...], length: tuple[int, ...], **more: object
) -> ShardRow:
    """Return a shard of bytes."""
    nbytes = 1
    for size in length:
        nbytes *= size
    made = ShardRow(
        name=name, dtype="uint8", global_shape=shape, offset=offset, length=length, scope=SCOPE_GLOBAL, nbytes=nbytes
    )
    return replace(made, **more)  # type: ignore[arg-type]


def planned(layouts: Mapping[int, list[ShardRow]]) -> Plan:
    """Plan these layouts."""
    tables = {rank: shard_table.build(rows) for rank, rows in layouts.items()}
    return plan(tables, {rank: shard_table.digest(table) for rank, table in tables.items()})


def refused(layouts: Mapping[int, list[ShardRow]]) -> PlanError:
    """Plan what must be refused."""
    with pytest.raises(PlanError) as caught:
        planned(layouts)
    assert caught.value.error.phase == "begin"
    assert caught.value.error.hint
    return caught.value


def loads(layouts: Mapping[int, list[ShardRow]], made: Plan) -> dict[int, int]:
    """Return the bytes each rank writes."""
    return {
        rank: sum(one.nbytes for one, writer in zip(rows, made.writers[rank], strict=True) if writer == rank)
        for rank, rows in layouts.items()
    }


@st.composite
def worlds(draw: st.DrawFn) -> Layouts:
    """Draw layouts: each tensor is cut along its first dimension, each piece held by a drawn set of ranks."""
    world = draw(st.integers(1, 6))
    layouts: Layouts = {rank: [] for rank in range(world)}
    for number in range(draw(st.integers(1, 6))):
        width = draw(st.integers(0, 4))
        lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=4))
        offset = 0
        for length in lengths:
            piece = row(f"t{number}", (sum(lengths), width), (offset, 0), (length, width))
            offset += length
            for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)):
                layouts[rank].append(piece)
    for rank, rows in layouts.items():
        if draw(st.booleans()):
            rows.append(row("own", (rank + 1,), (0,), (rank + 1,), scope=SCOPE_PER_RANK))
        draw(st.randoms(use_true_random=False)).shuffle(rows)
    return layouts


@given(layouts=worlds())
def test_every_box_has_one_writer_and_it_holds_the_box(layouts: Layouts) -> None:
    """All ranks agree who writes a box, that rank has it in its own layout; what is per rank is written by its rank."""
    made = planned(layouts)
    assert {rank: len(rows) for rank, rows in layouts.items()} == {rank: len(w) for rank, w in made.writers.items()}
    chosen: dict[object, int] = {}
    for rank, rows in layouts.items():
        for one, writer in zip(rows, made.writers[rank], strict=True):
            if one.scope == SCOPE_PER_RANK:
                assert writer == rank
                continue
            assert chosen.setdefault((one.name, one.box), writer) == writer
            assert (one.name, one.box) in {(other.name, other.box) for other in layouts[writer]}


@given(layouts=worlds(), seed=st.randoms(use_true_random=False))
def test_equal_layouts_give_equal_plans_whatever_came_first(layouts: Layouts, seed: random.Random) -> None:
    """The order in which ranks arrive changes nothing; neither does how the name tables of their layouts are arranged."""
    arrived = list(layouts)
    seed.shuffle(arrived)
    again, before = planned({rank: layouts[rank] for rank in arrived}), planned(layouts)
    assert (again.digest, dict(again.writers)) == (before.digest, dict(before.writers))


@given(layouts=worlds())
def test_no_replica_would_better_have_gone_to_another_holder(layouts: Layouts) -> None:
    """Take from a rank the last, smallest replica it was given: no other holder of it then has less to write."""
    made = planned(layouts)
    load = loads(layouts, made)
    held: dict[tuple[str, Box], list[int]] = {}
    given_to: dict[int, list[tuple[int, str, Box]]] = {}
    for rank, rows in layouts.items():
        for one, writer in zip(rows, made.writers[rank], strict=True):
            if one.scope == SCOPE_GLOBAL:
                held.setdefault((one.name, one.box), []).append(rank)
                if writer == rank:
                    given_to.setdefault(rank, []).append((-one.nbytes, one.name, one.box))
    for rank, boxes in given_to.items():
        shared = [entry for entry in boxes if len(held[entry[1:]]) > 1]
        if shared:
            negative, name, box = max(shared)
            assert all(load[rank] + negative <= load[other] for other in held[name, box] if other != rank)


@given(world=st.integers(1, 8), sizes=st.lists(st.integers(0, 10_000), min_size=1, max_size=40))
def test_a_state_replicated_on_all_ranks_is_written_in_equal_parts(world: int, sizes: list[int]) -> None:
    """Plain data parallelism: the ranks' shares differ by no more than the largest tensor."""
    rows = [row(f"t{at}", (size,), (0,), (size,)) for at, size in enumerate(sizes)]
    layouts = dict.fromkeys(range(world), rows)
    load = loads(layouts, planned(layouts))
    assert sum(load.values()) == sum(sizes)
    assert max(load.values()) - min(load.values()) <= max(sizes)


def test_replicas_make_up_for_what_a_rank_writes_alone() -> None:
    """Rank 0 has a large shard of its own, so that rank 1 writes what both hold."""
    own = row("own", (100,), (0,), (100,), scope=SCOPE_PER_RANK)
    both = [row(f"t{at}", (30,), (0,), (30,)) for at in range(3)]
    made = planned({0: [own, *both], 1: both})
    assert made.writers == {0: [0, 1, 1, 1], 1: [1, 1, 1]}


# ---------------------------------------------------------------- refusals


def test_one_name_with_two_shapes_names_tensor_ranks_and_both_shapes() -> None:
    """LAYOUT_MISMATCH says what each rank thinks."""
    error = refused({0: [row("w", (4,), (0,), (4,))], 1: [], 2: [row("w", (5,), (0,), (5,))]}).error
    assert (error.reason, error.object, list(error.ranks)) == (error_pb2.REASON_LAYOUT_MISMATCH, "w", [0, 2])
    assert "uint8 (4,) on rank 0, but uint8 (5,) on rank 2" in error.message


def test_one_name_with_two_dtypes_names_both() -> None:
    """LAYOUT_MISMATCH, also where the shapes are equal."""
    error = refused({0: [row("w", (4,), (0,), (4,))], 1: [row("w", (4,), (0,), (4,), dtype="int8")]}).error
    assert (error.reason, error.object, list(error.ranks)) == (error_pb2.REASON_LAYOUT_MISMATCH, "w", [0, 1])
    assert "is uint8 (4,) on rank 0, but int8 (4,) on rank 1" in error.message


@pytest.mark.parametrize("scope", [SCOPE_GLOBAL, SCOPE_PER_RANK])
def test_one_box_twice_on_a_rank_is_refused(scope: int) -> None:
    """LAYOUT_MISMATCH names tensor and rank, for shared and for per-rank names."""
    twice = row("w", (4,), (0,), (4,), scope=scope)
    error = refused({0: [twice], 3: [twice, twice]}).error
    assert (error.reason, error.object, list(error.ranks)) == (error_pb2.REASON_LAYOUT_MISMATCH, "w", [3])
    assert "twice on rank 3" in error.message


def test_equal_names_of_per_rank_scope_are_no_replicas() -> None:
    """Each rank's own tensor may have any shape and dtype of that name."""
    made = planned(
        {
            0: [row("own", (4,), (0,), (4,), scope=SCOPE_PER_RANK)],
            1: [row("own", (9,), (0,), (9,), scope=SCOPE_PER_RANK, dtype="int8")],
        }
    )
    assert made.writers == {0: [0], 1: [1]}


@given(layouts=worlds(), data=st.data())
def test_a_hole_is_named(layouts: Layouts, data: st.DataObject) -> None:
    """Take one box from all who hold it, and another one of that tensor remains: COVERAGE names the tensor and the place."""
    boxes = sorted({(one.name, one.box) for rows in layouts.values() for one in rows if one.scope == SCOPE_GLOBAL})
    gone = data.draw(st.sampled_from(boxes))
    assume(sum(name == gone[0] for name, _ in boxes) > 1)
    assume(gone[1][1][1] > 0)
    less = {rank: [one for one in rows if (one.name, one.box) != gone] for rank, rows in layouts.items()}
    error = refused(less).error
    assert (error.reason, error.object) == (error_pb2.REASON_COVERAGE, gone[0])
    (begin, _), (length, width) = gone[1]
    assert f"{length * width} elements are held by no rank, among them [{begin}:" in error.message


@given(layouts=worlds(), data=st.data())
def test_an_overlap_is_named(layouts: Layouts, data: st.DataObject) -> None:
    """Let one rank's box begin an element too early: COVERAGE names the tensor, both boxes and their ranks."""
    inner = [
        (rank, at)
        for rank, rows in layouts.items()
        for at, one in enumerate(rows)
        if one.scope == SCOPE_GLOBAL and one.offset[0] > 0 and one.length[1] > 0
    ]
    assume(inner)
    rank, at = data.draw(st.sampled_from(inner))
    old = layouts[rank][at]
    wide = row(old.name, old.global_shape, (old.offset[0] - 1, 0), (old.length[0] + 1, old.length[1]))
    assume((wide.name, wide.box) not in {(one.name, one.box) for one in layouts[rank]})
    layouts[rank][at] = wide
    error = refused(layouts).error
    assert (error.reason, error.object) == (error_pb2.REASON_COVERAGE, old.name)
    assert "overlap" in error.message
    assert rank in error.ranks


def test_a_box_outside_its_tensor_is_named() -> None:
    """LAYOUT_MISMATCH names the box that leaves the shape."""
    error = refused({0: [row("w", (4,), (0,), (4,))], 1: [row("w", (4,), (2,), (3,))]}).error
    assert (error.reason, error.object, list(error.ranks)) == (error_pb2.REASON_LAYOUT_MISMATCH, "w", [1])
    assert "[2:5]" in error.message


# ---------------------------------------------------------------- the digest


def test_the_plans_digest_follows_from_the_layouts_digests_and_their_ranks() -> None:
    """Another layout, another rank for it, or one rank more: another plan. The order of the mapping does not matter."""
    one, other = b"1" * 32, b"2" * 32
    digest = plan_digest({0: one, 1: other})
    assert len(digest) == 32
    assert plan_digest({1: other, 0: one}) == digest
    assert len({digest, plan_digest({0: other, 1: one}), plan_digest({0: one}), plan_digest({0: one, 2: other})}) == 4
