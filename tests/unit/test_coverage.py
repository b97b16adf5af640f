"""When a step is whole: every element once, every replica equal, every rank there; and otherwise who is to blame."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from fixtures.at_rest import PLAN_DIGEST, BuiltNode, Shard, build_node, make_claim, per_rank, timeline
from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon.comparisons import Comparisons
from ckptd.daemon.coverage import LoadedIndex, NotWhole, Whole, committed, whole
from ckptd.daemon.index import chunk_keys, load_index
from ckptd.daemon.keys import StepId
from ckptd.daemon.tiling import Box, tiling
from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Claim, StepRef

T1 = timeline(1)
NODES = {"a": [0, 1], "b": [2, 3]}
MESH = {"dp": 2, "tp": 2}
State = Mapping[int, tuple[Sequence[Shard], Mapping[str, bytes]]]


# ---------------------------------------------------------------- tiling


def partition(shape: tuple[int, ...], rng: random.Random, cuts: int) -> list[Box]:
    """Cut a tensor at random into boxes that tile it, regular or not."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(cuts):
        at = rng.randrange(len(boxes))
        offset, length = boxes[at]
        dims = [dim for dim, size in enumerate(length) if size > 1]
        if not dims:
            continue
        dim = rng.choice(dims)
        left = rng.randrange(1, length[dim])
        boxes[at] = (offset, (*length[:dim], left, *length[dim + 1 :]))
        moved = (*offset[:dim], offset[dim] + left, *offset[dim + 1 :])
        boxes.append((moved, (*length[:dim], length[dim] - left, *length[dim + 1 :])))
    return boxes


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@given(shapes, st.randoms(use_true_random=False), st.integers(0, 25))
def test_random_partitions_of_random_shapes_tile_exactly(shape: tuple[int, ...], rng: random.Random, cuts: int) -> None:
    """Any partition tiles, in any order, also with empty boxes among its parts."""
    boxes = partition(shape, rng, cuts)
    rng.shuffle(boxes)
    holders = {box: [rank] for rank, box in enumerate(boxes)}
    holders[shape, (0,) * len(shape)] = [99] if shape else holders[(), ()]
    assert tiling("t", shape, holders) is None


@given(shapes.filter(lambda shape: 0 not in shape), st.randoms(use_true_random=False), st.integers(0, 25))
def test_a_hole_is_found_and_named(shape: tuple[int, ...], rng: random.Random, cuts: int) -> None:
    """Take one box out of any partition: COVERAGE, with the tensor, the number of elements and the ranks that hold the rest."""
    boxes = partition(shape, rng, cuts)
    gone = boxes.pop(rng.randrange(len(boxes)))
    error = tiling("t", shape, {box: [rank] for rank, box in enumerate(boxes)})
    assert error is not None
    assert error.reason == error_pb2.REASON_COVERAGE
    assert error.object == "t"
    assert f"{int(np.prod(gone[1], dtype=int))} elements are held by no rank" in error.message
    assert list(error.ranks) == list(range(len(boxes)))


@given(shapes.filter(lambda shape: 0 not in shape), st.randoms(use_true_random=False), st.integers(0, 25))
def test_an_overlap_is_found_and_both_sides_named(shape: tuple[int, ...], rng: random.Random, cuts: int) -> None:
    """Add any box of a partition's area: COVERAGE that names two boxes which do overlap, and their ranks."""
    boxes = partition(shape, rng, cuts)
    low = tuple(rng.randrange(size) for size in shape)
    extra = (low, tuple(rng.randrange(1, size - at + 1) for at, size in zip(low, shape, strict=True)))
    if extra in boxes:
        return
    error = tiling("t", shape, {box: [rank] for rank, box in enumerate([*boxes, extra])})
    assert error is not None
    assert error.reason == error_pb2.REASON_COVERAGE
    assert "overlap" in error.message
    first, second = (([*boxes, extra])[rank] for rank in error.ranks)
    for one, two, size_one, size_two in zip(first[0], second[0], first[1], second[1], strict=True):
        assert one < two + size_two
        assert two < one + size_one


@pytest.mark.parametrize(
    ("shape", "box"),
    [((4,), ((2,), (3,))), ((4,), ((5,), (0,))), ((4,), ((0, 0), (4, 1))), ((), ((0,), (1,))), ((4,), ((-1,), (2,)))],
)
def test_a_box_outside_its_tensor_is_refused(shape: tuple[int, ...], box: Box) -> None:
    """LAYOUT_MISMATCH for a box that leaves the tensor or has other dimensions."""
    error = tiling("t", shape, {box: [3]})
    assert error is not None
    assert error.reason == error_pb2.REASON_LAYOUT_MISMATCH
    assert list(error.ranks) == [3]


@pytest.mark.parametrize("size", [1, 5, 6, 7, 8])
@pytest.mark.parametrize("world", [1, 3, 4, 8])
def test_s076_uneven_and_empty_shards_tile(size: int, world: int) -> None:
    """Dim-0 sizes that do not divide, with empty shards on the last ranks, are covered exactly."""
    part = -(-size // world)
    boxes: dict[Box, list[int]] = {}
    for rank in range(world):
        low = min(rank * part, size)
        boxes.setdefault(((low,), (min(part, size - low),)), []).append(rank)
    assert tiling("t", (size,), boxes) is None


def test_four_thousand_boxes_are_checked_in_a_moment() -> None:
    """A tensor sharded over a large mesh on two dims costs milliseconds, regular or not."""
    boxes: dict[Box, list[int]] = {((i, j), (1, 1)): [0] for i, j in itertools.product(range(64), range(64))}
    assert tiling("t", (64, 64), boxes) is None
    boxes[(0, 0), (1, 2)] = boxes.pop(((0, 0), (1, 1)))
    error = tiling("t", (64, 64), boxes)
    assert error is not None


# ---------------------------------------------------------------- whole


def state_of(rank: int, *, change: str = "") -> tuple[list[Shard], dict[str, bytes]]:
    """Return four ranks' state: halves over tp, replicas over dp, own state; `change` is one fault on rank 3."""
    tp = rank % 2
    full = np.arange(48, dtype="<f4").reshape(6, 8)
    half = np.ascontiguousarray(full[:, tp * 4 : tp * 4 + 4])
    bias = np.arange(5, dtype="<f8")
    shards = {
        "weight": Shard(name="weight", values=half, global_shape=(6, 8), offset=(0, tp * 4), writer=tp),
        "bias": Shard(name="bias", values=bias, writer=2),
        "rng": per_rank("rng", np.arange(3) + rank),
        "scalar": Shard(name="scalar", values=np.array(7, dtype="<i8"), writer=3),
    }
    if rank == 3 and change:
        weight = shards["weight"]
        if change == "diverged":
            values = half.copy()
            values[2, 1] = -0.0 if values[2, 1] == 0 else np.nextafter(values[2, 1], np.float32(9))
            shards["weight"] = replace(weight, values=values)
        elif change == "hole":
            shards.pop("weight")
        elif change == "overlap":
            shards["weight"] = replace(weight, offset=(0, 3), writer=3)
        elif change == "dtype":
            shards["weight"] = replace(weight, dtype="int32")
        elif change == "shape":
            shards["weight"] = replace(weight, global_shape=(6, 9))
        elif change == "writers":
            shards["weight"] = replace(weight, writer=3)
        elif change == "holder":
            shards["scalar"] = replace(shards["scalar"], writer=2)
        elif change == "scope":
            shards["rng"] = Shard(name="rng", values=np.arange(3) + rank)
        elif change == "per rank writer":
            shards["rng"] = replace(shards["rng"], writer=2)
        elif change == "twice":
            shards["again"] = shards["bias"]
    return list(shards.values()), {"loader": b"at %d" % rank}


def build(claim: Claim, step: int = 7, *, change: str = "", **more: object) -> dict[str, BuiltNode]:
    """Return both nodes' work for a step."""
    return {
        node: build_node(
            claim,
            step,
            node,
            {rank: state_of(rank, change=change) for rank in ranks},
            **more,  # type: ignore[arg-type]
        )
        for node, ranks in NODES.items()
    }


def load(*built: Mapping[str, BuiltNode]) -> dict[str, list[LoadedIndex]]:
    """Return indexes as they are read from the store."""
    found: dict[str, list[LoadedIndex]] = {}
    for nodes in built:
        for node, one in nodes.items():
            found.setdefault(node, []).append(load_index(one.ref, one.index))
    return found


def claim_of(nodes: Mapping[str, Sequence[int]] = NODES) -> Claim:
    """Return the claim of the four ranks."""
    return make_claim(T1, nodes, mesh=MESH)


def accepted(claim: Claim, indexes: Mapping[str, Sequence[LoadedIndex]], step: int = 7) -> Whole:
    """Return the answer, which must be Whole."""
    found = whole(claim, step, indexes)
    assert isinstance(found, Whole), found.error
    return found


def refused(claim: Claim, indexes: Mapping[str, Sequence[LoadedIndex]], step: int = 7) -> Error:
    """Return the error of what must not be whole."""
    found = whole(claim, step, indexes)
    assert isinstance(found, NotWhole)
    assert found.error.step == step
    return found.error


def test_a_whole_step_is_whole_and_counted_once() -> None:
    """Replicas count once in the sums; the indexes stand in the claim's order."""
    found = accepted(claim_of(), load(build(claim_of(), metrics={"loss": 0.5})))
    assert [ref.node for ref in found.indexes] == ["a", "b"]
    assert found.totals.tensors == 3
    assert found.totals.objects == 4
    assert found.totals.bytes == 48 * 4 + 5 * 8 + 8 + 4 * 24 + 4 * 4
    made = committed(claim=claim_of(), whole=found, created_at="now", posthumous=True)
    assert made.metrics["loss"] == 0.5
    assert made.posthumous
    assert not made.HasField("base")


@pytest.mark.parametrize(
    ("change", "reason", "expected", "ranks"),
    [
        ("diverged", error_pb2.REASON_REPLICAS_DIFFER, r"'weight', box \[0:6, 4:8\].*\[1\].*\[3\]", [1, 3]),
        ("overlap", error_pb2.REASON_COVERAGE, "'weight'.*overlap", [0, 2, 3]),
        ("dtype", error_pb2.REASON_LAYOUT_MISMATCH, "'weight': int32 .* rank 3, float32", [0, 3]),
        ("shape", error_pb2.REASON_LAYOUT_MISMATCH, r"'weight': float32 \[6, 9\] on rank 3", [0, 3]),
        ("writers", error_pb2.REASON_LAYOUT_MISMATCH, "'weight'.*several writers", [1, 3]),
        ("holder", error_pb2.REASON_LAYOUT_MISMATCH, "'scalar'.*several writers", [0, 1, 2, 3]),
        ("scope", error_pb2.REASON_LAYOUT_MISMATCH, "'rng': one rank declares it PerRank", [0, 3]),
        ("per rank writer", error_pb2.REASON_LAYOUT_MISMATCH, "'rng': rank 2 would write", [2, 3]),
        ("twice", error_pb2.REASON_LAYOUT_MISMATCH, "'bias': rank 3 holds box .* twice", [3]),
    ],
)
def test_what_does_not_fit_is_named(change: str, reason: int, expected: str, ranks: list[int]) -> None:
    """Every fault of one rank is refused with its tensor, box and ranks."""
    error = refused(claim_of(), load(build(claim_of(), change=change)))
    assert error.reason == reason
    assert list(error.ranks) == ranks
    assert re.search(expected, error.message), error.message


def test_a_hole_in_a_global_tensor_is_named() -> None:
    """A writer that does not hold its half leaves a hole, or a replica without a holder."""
    claim = claim_of()
    built = build(claim)
    lacking = {0: (state_of(0)[0][1:], {}), 1: state_of(1)}
    built["a"] = build_node(claim, 7, "a", lacking)
    error = refused(claim, load(built))
    assert error.reason == error_pb2.REASON_COVERAGE
    assert "rank 0 should hold box [0:6, 0:4] and does not" in error.message
    built["b"] = build_node(claim, 7, "b", {2: (state_of(2)[0][1:], {}), 3: state_of(3)})
    error = refused(claim, load(built))
    assert error.reason == error_pb2.REASON_COVERAGE
    assert "24 elements are held by no rank" in error.message
    assert "[0:6, 0:4]" in error.message


def test_s001_a_missing_node_is_named_with_its_ranks() -> None:
    """No index of a node: RANKS_MISSING with node and ranks."""
    indexes = load(build(claim_of()))
    del indexes["b"]
    error = refused(claim_of(), indexes)
    assert (error.reason, error.node, list(error.ranks)) == (error_pb2.REASON_RANKS_MISSING, "b", [2, 3])


def test_ranks_are_those_of_the_claim() -> None:
    """A node that holds other ranks than the claim says is refused."""
    claim = claim_of()
    built = build(claim)
    built["b"] = build_node(claim, 7, "b", {2: state_of(2)})
    error = refused(claim, load(built))
    assert error.reason == error_pb2.REASON_RANKS_DISAGREE
    assert "[2]" in error.message
    assert "[2, 3]" in error.message


def test_s023_indexes_of_different_plans_bases_or_steps_are_not_mixed() -> None:
    """One step has one plan and one base on all nodes; an index of another step is none of this one."""
    claim = claim_of()
    one = build(claim)
    other_plan = build(claim, plan_digest=bytes(32))
    assert "different plans" in refused(claim, load({"a": one["a"], "b": other_plan["b"]})).message
    no_plan = build(claim, plan_digest=b"")
    assert "different plans" in refused(claim, load(no_plan)).message
    based = build(claim, base=StepRef(step=3, timeline=str(T1)))
    assert "different bases" in refused(claim, load({"a": one["a"], "b": based["b"]})).message
    assert "is named" in refused(claim, load(build(claim, 6))).message


def test_two_ranks_cannot_have_one_coordinate() -> None:
    """Per-rank values go back to a coordinate, so it must be one rank's."""
    claim = claim_of()
    built = build(claim)
    ref, header, sections = load_index(built["b"].ref, built["b"].index)
    sections[3].coordinate[:] = [1, 0]
    error = refused(claim, {"a": load(built)["a"], "b": [(ref, header, sections)]})
    assert "coordinate" in error.message
    assert list(error.ranks) == [2, 3]


def test_the_lexically_first_index_that_makes_the_set_whole_counts() -> None:
    """A restarted agent may leave two indexes of a node: readers agree which one counts; a bad one does no harm."""
    claim = claim_of()
    good, other, bad = build(claim), build(claim, chunk_bytes=64), build(claim, change="diverged")
    by_key = sorted([good["b"], other["b"]], key=lambda one: one.ref.key)
    for order in itertools.permutations([good, {"b": other["b"]}, {"b": bad["b"]}]):
        found = accepted(claim, load(*order))
        assert found.indexes[1] == by_key[0].ref


@pytest.mark.parametrize(("two", "is_whole"), [(0x7FF8000000000001, True), (0x7FF8000000000002, False)])
def test_replicas_are_compared_by_their_bits(two: int, is_whole: bool) -> None:
    """NaN equals NaN of the same payload and no other; no value is compared as a number."""
    claim = make_claim(T1)
    values = [np.array([0x7FF8000000000001, 1 << 63], dtype="<u8").view("<f8"), np.array([two, 1 << 63], dtype="<u8")]
    state: State = {rank: ([Shard(name="w", values=values[rank].view("<f8"), writer=0)], {}) for rank in (0, 1)}
    built = {
        "node-a": build_node(claim, 7, "node-a", {0: state[0]}),
        "node-b": build_node(claim, 7, "node-b", {1: state[1]}),
    }
    assert isinstance(whole(claim, 7, load(built)), Whole) is is_whole


WORD = StepRef(step=3, timeline=str(T1))


def backing(*, plan: bytes = PLAN_DIGEST) -> Comparisons:
    """Return what backs the word."""
    return Comparisons(timeline=str(T1), step=5, plan_digest=plan.hex())


def test_replicas_may_be_left_uncompared_on_a_word_that_the_caller_backs() -> None:
    """Tiling is proved all the same, the state digest is that of the compared step, and the caller's step is named."""
    claim = claim_of()
    built = load(build(claim, compared_in=WORD, uncompared=True))
    found = whole(claim, 7, built, comparisons=backing())
    assert isinstance(found, Whole), found.error
    assert found.compared_in == StepRef(step=5, timeline=str(T1))
    assert found.state_digest == accepted(claim, load(build(claim))).state_digest
    made = committed(claim=claim, whole=found, created_at="now")
    assert (made.compared_in, made.plan_digest) == (found.compared_in, PLAN_DIGEST.hex())
    for change in ("overlap", "dtype", "writers", "holder"):
        wrong = whole(
            claim, 7, load(build(claim, change=change, compared_in=WORD, uncompared=True)), comparisons=backing()
        )
        assert isinstance(wrong, NotWhole)
        assert wrong.error.reason == refused(claim, load(build(claim, change=change))).reason


def test_a_mark_is_no_leave_to_go_uncompared() -> None:
    """Without a caller who backs it, with another plan, or on a word of another timeline: NOT_COMPARED, with the ranks."""
    claim = claim_of()
    built = load(build(claim, compared_in=WORD, uncompared=True))
    for known in (None, Comparisons(timeline=str(T1)), backing(plan=bytes(32)), Comparisons(timeline="x", step=5)):
        found = whole(claim, 7, built, comparisons=known)
        assert isinstance(found, NotWhole)
        assert found.error.reason == error_pb2.REASON_NOT_COMPARED
        assert list(found.error.ranks) == [0, 1, 2, 3]


def test_a_fingerprint_that_is_lost_is_a_replica_that_differs() -> None:
    """Zeros without the mark are a value like any other, whatever the caller would allow."""
    claim = claim_of()
    built = build(claim, compared_in=WORD)
    ref, header, sections = load_index(built["b"].ref, built["b"].index)
    assert list(sections[2].writer[:2]) == [0, 2]
    sections[2].fingerprints = bytes(16) + sections[2].fingerprints[16:]
    found = whole(claim, 7, {"a": load(built)["a"], "b": [(ref, header, sections)]}, comparisons=backing())
    assert isinstance(found, NotWhole)
    assert found.error.reason == error_pb2.REASON_REPLICAS_DIFFER
    assert (found.error.object, list(found.error.ranks)) == ("weight", [0, 2])


def test_what_has_fingerprints_is_compared_beside_what_has_none() -> None:
    """One node's ranks left theirs out, the other's did not: a difference that can be seen is seen."""
    claim = claim_of()
    left = build(claim, compared_in=WORD, uncompared=True)
    for change, is_whole in (("", True), ("diverged", False)):
        given_anyhow = build(claim, change=change)
        found = whole(claim, 7, load({"a": left["a"], "b": given_anyhow["b"]}), comparisons=backing())
        assert isinstance(found, Whole) is is_whole
        if isinstance(found, Whole):
            assert found.compared_in is not None
        else:
            assert found.error.reason == error_pb2.REASON_REPLICAS_DIFFER
            assert list(found.error.ranks) == [1, 3]


def test_nodes_that_were_told_different_words_are_not_mixed() -> None:
    """A node that was told none goes along: an older agent knows no words."""
    claim = claim_of()
    one = build(claim, compared_in=WORD, uncompared=True)
    other = build(claim, compared_in=StepRef(step=4, timeline=str(T1)), uncompared=True)
    found = whole(claim, 7, load({"a": one["a"], "b": other["b"]}), comparisons=backing())
    assert isinstance(found, NotWhole)
    assert found.error.reason == error_pb2.REASON_RANKS_DISAGREE
    found = whole(claim, 7, load({"a": one["a"], "b": build(claim)["b"]}), comparisons=backing())
    assert isinstance(found, Whole)


def test_a_reference_that_the_base_does_not_hold_is_refused() -> None:
    """With the base's chunks at hand, a reference to anything else is CORRUPT."""
    claim = claim_of()
    base = build(claim, 3)
    held = {
        digest: StepId(T1, 3)
        for one in base.values()
        for section in load_index(one.ref, one.index)[2].values()
        for at in range(len(section.chunk_length))
        for digest in [section.chunk_digests[at * 32 : at * 32 + 32]]
    }
    built = build(claim, base=StepRef(step=3, timeline=str(T1)), base_sources=held)
    indexes = load(built)
    keys = {key for one in load(base).values() for _, _, of in one for key in chunk_keys(list(of.values()))}
    assert isinstance(whole(claim, 7, indexes, base_chunks=keys), Whole)
    gone = min(keys)
    found = whole(claim, 7, indexes, base_chunks=keys - {gone})
    assert isinstance(found, NotWhole)
    assert gone in found.error.message


# ---------------------------------------------------------------- state digest


def test_the_state_digest_is_of_the_state_alone() -> None:
    """Equal state gives an equal digest at any step, timeline, chunking, writer and base; any changed bit another one."""
    first = accepted(claim_of(), load(build(claim_of()))).state_digest
    assert accepted(claim_of(), load(build(claim_of(), 9)), 9).state_digest == first
    later = make_claim(timeline(5, 5), {"x": [0], "y": [1, 2, 3]}, mesh=MESH)
    built = {
        "x": build_node(later, 7, "x", {0: state_of(0)}, chunk_bytes=16),
        "y": build_node(later, 7, "y", {rank: state_of(rank) for rank in (1, 2, 3)}),
    }
    assert accepted(later, load(built)).state_digest == first
    seen = {first}
    for what in ("tensor", "rng", "object", "object name"):
        changed = {rank: state_of(rank) for rank in range(4)}
        shards, objects = changed[2]
        if what == "tensor":
            for rank in range(4):
                changed[rank][0][1] = replace(changed[rank][0][1], values=np.arange(5, dtype="<f8") * 2)
        elif what == "rng":
            shards[2] = per_rank("rng", np.arange(3) + 77)
        elif what == "object":
            objects["loader"] = b"elsewhere"
        else:
            objects["loader2"] = objects.pop("loader")
        built = {n: build_node(claim_of(), 7, n, {r: changed[r] for r in ranks}) for n, ranks in NODES.items()}
        seen.add(accepted(claim_of(), load(built)).state_digest)
    assert len(seen) == 5


def test_values_of_two_ranks_exchanged_give_another_digest() -> None:
    """Per-rank values and objects belong to a coordinate: exchanging them between ranks is another state."""
    states = {rank: state_of(rank) for rank in range(4)}
    states[0][1]["loader"], states[3][1]["loader"] = states[3][1]["loader"], states[0][1]["loader"]
    built = {n: build_node(claim_of(), 7, n, {r: states[r] for r in ranks}) for n, ranks in NODES.items()}
    first = accepted(claim_of(), load(build(claim_of()))).state_digest
    assert accepted(claim_of(), load(built)).state_digest != first
