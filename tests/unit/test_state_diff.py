"""Two steps are compared by global name, bit by bit and as numbers, whatever their layouts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import typer
from fixtures.at_rest import NOW, Shard, build_node, make_claim, per_rank, put_claim, timeline
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.daemon import history
from ckptd.daemon.cli.diff import diff, parse_sides
from ckptd.daemon.coverage import NotWhole, committed, whole
from ckptd.daemon.errors import CorruptError
from ckptd.daemon.index import load_index
from ckptd.daemon.keys import JOB, decision_key
from ckptd.daemon.records import job_bytes
from ckptd.daemon.slabs import SlabReader, slabs
from ckptd.daemon.state_diff import StateDiff, What, diff_steps
from ckptd.daemon.stored_step import read_stored_step
from ckptd.daemon.value_diff import value_diff
from ckptd.protos.snapshot_pb2 import Retention
from ckptd.storage_backends.base import ObjectStore, PutMode
from ckptd.storage_backends.local import LocalStore
from ckptd.storage_backends.memory import MemoryStore

State = Mapping[int, tuple[Sequence[Shard], Mapping[str, bytes]]]


def saved(store: ObjectStore, state: State, *, step: int = 10, chunk_bytes: int = 64) -> ObjectStore:
    """Commit one step of a job of one node and as many ranks as the state has."""
    own = timeline(1)
    claim = make_claim(own, {"node-a": sorted(state)})
    store.put(JOB, job_bytes("play", created_at=NOW, version="0.1.0"))
    put_claim(store, claim)
    ref = build_node(claim, step, "node-a", state, chunk_bytes=chunk_bytes).put(store)
    found = whole(claim, step, {"node-a": [load_index(ref, store.get(ref.key))]})
    assert not isinstance(found, NotWhole), found
    record = history.decision_record(
        timeline=own,
        step=step,
        committed=committed(claim=claim, whole=found, created_at=NOW),
        listed=[],
        quarantined=[],
        retention=Retention(),
        created_at=NOW,
    )
    store.put(decision_key(own, step), history.to_bytes(record))
    return store


def one(*shards: Shard, **objects: bytes) -> State:
    """Return the state of a job of one rank."""
    return {0: (shards, objects)}


def rows(name: str, values: np.ndarray, cuts: Sequence[int], *, dim: int = 0, dtype: str = "") -> dict[int, Shard]:
    """Cut a tensor along a dimension, a part for each rank."""
    ends = [*cuts, values.shape[dim]]
    found = {}
    for rank, (begin, end) in enumerate(zip([0, *cuts], ends, strict=True)):
        offset = tuple(begin if at == dim else 0 for at in range(values.ndim))
        part = np.take(values, range(begin, end), axis=dim)
        found[rank] = Shard(name=name, values=part, global_shape=values.shape, offset=offset, dtype=dtype)
    return found


def compared(a: ObjectStore, b: ObjectStore, *, values: bool = True, objects: bool = True) -> StateDiff:
    """Compare the latest steps of two roots."""
    steps = [read_stored_step(store) for store in (a, b)]
    readers = [SlabReader(store, step, at_hand_bytes=128) for store, step in zip((a, b), steps, strict=True)]
    return diff_steps((steps[0], readers[0]), (steps[1], readers[1]), values=values, objects=objects)


class Deaf(MemoryStore):
    """A store that does not give chunks."""

    def get(self, key: str) -> bytes:
        assert not key.startswith("chunks/"), key
        return super().get(key)


def test_equal_states_in_one_layout_are_told_by_fingerprints_alone() -> None:
    """No chunk is read, also where the roots, jobs and chunk sizes differ."""
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    a = saved(Deaf(), one(Shard(name="w", values=values), rng=b"x"))
    b = saved(Deaf(), one(Shard(name="w", values=values), rng=b"x"), step=77, chunk_bytes=1000)
    found = compared(a, b)
    assert (found.is_equal, found.equal_tensors, found.equal_objects, found.read_tensors) == (True, 1, 1, 0)


def test_what_differs_is_named_with_how() -> None:
    """Only in A, only in B, another dtype, another shape, other bits with numbers; an object of other bytes."""
    common = np.arange(4, dtype=np.float32)
    a = one(
        Shard(name="bits", values=common),
        Shard(name="dtype", values=common),
        Shard(name="gone", values=common),
        Shard(name="same", values=common),
        Shard(name="shape", values=common),
        rng=b"1",
        loader=b"2",
    )
    other = common.copy()
    other[2] = 2.5
    b = one(
        Shard(name="bits", values=other),
        Shard(name="dtype", values=common.astype(np.float64)),
        Shard(name="new", values=common),
        Shard(name="same", values=common),
        Shard(name="shape", values=common.reshape(2, 2)),
        rng=b"3",
        loader=b"2",
    )
    found = compared(saved(MemoryStore(), a), saved(MemoryStore(), b))
    assert {str(each.key): each.what for each in found.tensors} == {
        "bits": What.BITS,
        "dtype": What.DTYPE,
        "gone": What.ONLY_A,
        "new": What.ONLY_B,
        "shape": What.SHAPE,
    }
    values = found.tensors[0].values
    assert values is not None
    assert (values.elements, values.different, values.max_abs, values.max_rel) == (4, 1, 0.5, 0.2)
    assert [(str(each.key), each.what) for each in found.objects] == [("rng at dp 0", What.BITS)]
    assert (found.equal_tensors, found.equal_objects) == (1, 1)
    assert compared(saved(MemoryStore(), a), saved(MemoryStore(), b), objects=False).objects == []


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    cuts=st.tuples(st.data(), st.data()),
    flip=st.integers(0, 1000) | st.none(),
)
def test_any_layout_is_compared_with_any_other(
    shape: tuple[int, ...], cuts: tuple[st.DataObject, st.DataObject], flip: int | None
) -> None:
    """Equal bits are equal however they were cut; one flipped bit is found, and counted as one element."""
    values = np.random.default_rng(7).integers(-1000, 1000, shape, dtype=np.int16)
    stores = []
    for side, data in enumerate(cuts):
        mine = values.copy()
        if side and flip is not None:
            mine.reshape(-1)[flip % mine.size] ^= 1
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = sorted(data.draw(st.sets(st.integers(1, shape[dim] - 1), max_size=3))) if shape[dim] > 1 else []
        parts = rows("w", mine, at, dim=dim)
        stores.append(saved(MemoryStore(), {rank: ([shard], {}) for rank, shard in parts.items()}))
    found = compared(*stores)
    assert found.is_equal == (flip is None)
    if flip is not None:
        assert found.tensors[0].values is not None
        assert (found.tensors[0].values.different, found.tensors[0].values.max_abs) == (1, 1.0)
        assert not compared(*stores, values=False).is_equal


@given(shape=st.lists(st.integers(0, 9), max_size=3).map(tuple), most=st.integers(1, 64))
def test_slabs_tile_a_box_and_are_small(shape: tuple[int, ...], most: int) -> None:
    """Each element is in one slab, in C order, and no slab is above the bound."""
    seen: list[int] = []
    numbers = np.arange(math.prod(shape)).reshape(shape)
    for offset, length in slabs(((0,) * len(shape), shape), 8, slab_bytes=8 * most):
        assert math.prod(length) <= most
        at = tuple(slice(begin, begin + size) for begin, size in zip(offset, length, strict=True))
        seen += numbers[at].reshape(-1).tolist()
    assert seen == list(range(math.prod(shape)))


def test_memory_is_bounded_by_what_is_kept_at_hand() -> None:
    """A reader keeps no more chunks than it may, whatever it read."""
    values = np.arange(4096, dtype=np.float32)
    store = saved(MemoryStore(), one(Shard(name="w", values=values)))
    step = read_stored_step(store)
    reader = SlabReader(store, step, at_hand_bytes=256)
    other = saved(MemoryStore(), {rank: ([shard], {}) for rank, shard in rows("w", values, [1000]).items()})
    other_step = read_stored_step(other)
    assert diff_steps((step, reader), (other_step, SlabReader(other, other_step))).is_equal
    assert sum(map(len, reader._at_hand.values())) <= 256


def test_what_is_a_ranks_own_is_compared_by_coordinate() -> None:
    """Another value at one coordinate, and a coordinate that the other mesh does not have."""
    rng = np.arange(2, dtype=np.int64)
    a: State = {rank: ([per_rank("rng", rng + rank)], {}) for rank in range(2)}
    b: State = {rank: ([per_rank("rng", rng + 2 * rank)], {}) for rank in range(3)}
    found = compared(saved(MemoryStore(), a), saved(MemoryStore(), b))
    assert [(str(each.key), each.what) for each in found.tensors] == [
        ("rng at dp 1", What.BITS),
        ("rng at dp 2", What.ONLY_B),
    ]
    assert found.tensors[0].values is not None
    assert found.tensors[0].values.max_abs == 1.0


def test_a_changed_chunk_is_corrupt_and_not_a_difference() -> None:
    """Bytes that do not have their digest are never compared."""
    values = np.arange(64, dtype=np.float32)
    a = saved(MemoryStore(), one(Shard(name="w", values=values)))
    b = saved(MemoryStore(), {rank: ([shard], {}) for rank, shard in rows("w", values, [20]).items()})
    key = next(info.key for info in b.list("chunks/"))
    data = bytearray(b.get(key))
    data[3] ^= 1
    b.put(key, bytes(data), mode=PutMode.OVERWRITE)
    with pytest.raises(CorruptError, match=key):
        compared(a, b)


def opaque(values: np.ndarray) -> np.ndarray:
    """Return values as the reader hands them out."""
    return values.view(np.dtype(f"V{values.dtype.itemsize}"))


@pytest.mark.parametrize(
    ("dtype", "a", "b", "expected"),
    [
        ("float32", [1, 2, 0], [1, 4, 0], (1, 2.0, 0.5, 0)),
        ("float16", [1, math.inf], [1, 1], (1, math.inf, math.inf, 0)),
        ("float64", [math.nan, 1], [1, 1], (1, 0.0, 0.0, 1)),
        ("float64", [0.0], [-0.0], (1, 0.0, 0.0, 0)),
        ("int64", [-(2**63), 5], [2**63 - 1, 5], (1, float(2**64 - 1), 2.0, 0)),
        ("uint8", [0, 255], [255, 255], (1, 255.0, 1.0, 0)),
        ("int8", [-128], [127], (1, 255.0, 255 / 128, 0)),
        ("bool", [True, False], [True, True], (1, 1.0, 1.0, 0)),
        ("complex64", [1 + 1j], [1 - 1j], (1, 2.0, math.sqrt(2), 0)),
    ],
)
def test_numbers_are_compared_as_such(
    dtype: str, a: list[float], b: list[float], expected: tuple[int, float, float, int]
) -> None:
    """Bits that differ, largest absolute and relative difference, NaN on one side: also at the ends of a dtype."""
    found = value_diff(dtype, opaque(np.array(a, dtype=dtype)), opaque(np.array(b, dtype=dtype)))
    assert found.max_abs is not None
    assert found.max_rel is not None
    assert (found.different, found.nan_on_one_side) == (expected[0], expected[3])
    assert found.max_abs == pytest.approx(expected[1])
    assert found.max_rel == pytest.approx(expected[2])


def test_bfloat16_is_compared_by_value_and_float8_by_bits() -> None:
    """bfloat16 is the upper half of a float32; a dtype that numpy does not know has bits and no numbers."""
    a, b = (np.array(values, dtype=np.float32) for values in ([1, 2, 3], [1, 2, 3.5]))
    found = value_diff("bfloat16", *(opaque((each.view(np.uint32) >> 16).astype(np.uint16)) for each in (a, b)))
    assert (found.different, found.max_abs) == (1, 0.5)
    found = value_diff("float8_e4m3fn", opaque(np.array([1, 2], np.uint8)), opaque(np.array([1, 3], np.uint8)))
    assert (found.elements, found.different, found.max_abs) == (2, 1, None)


def test_the_verb_exits_with_0_or_9(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal is 0, different is 9 with a row for each difference; infinity is text in JSON."""
    values = np.arange(8, dtype=np.float32)
    other = values.copy()
    other[0] = np.inf
    saved(LocalStore(tmp_path / "a"), one(Shard(name="w", values=values)))
    saved(LocalStore(tmp_path / "b"), {r: ([s], {}) for r, s in rows("w", values, [3]).items()})
    saved(LocalStore(tmp_path / "c"), {r: ([s], {}) for r, s in rows("w", other, [3]).items()})
    a, b, c = (str(tmp_path / name) for name in "abc")
    with pytest.raises(typer.Exit) as ended:
        diff([f"{a}@10", b, "10"])
    assert (ended.value.exit_code, capsys.readouterr().out.splitlines()[0]) == (
        0,
        "equal: 1 of 1 tensors and 0 of 0 objects are equal",
    )
    with pytest.raises(typer.Exit) as ended:
        diff([a, c])
    assert ended.value.exit_code == 9
    assert capsys.readouterr().out.splitlines()[-1] == "w\tbits\tfloat32[8]\tfloat32[8]\t1 of 8\tinf\tinf"
    with pytest.raises(typer.Exit):
        diff([a, c], json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["tensors"][0]["max_abs"], found["tensors"][0]["different"]) == (False, "inf", 1)


def test_sides_are_roots_with_or_without_steps() -> None:
    """ROOT, ROOT@STEP and ROOT STEP in any mixture; not one, not three, no step without a root."""
    assert parse_sides(["s3://b/a@b", "/x@12"]) == [("s3://b/a@b", None), ("/x", 12)]
    assert parse_sides(["/x", "1", "/y", "2"]) == [("/x", 1), ("/y", 2)]
    for wrong in (["/x"], ["/x", "/y", "/z"], ["5", "/x", "/y"], ["/x@1", "2", "/y"]):
        with pytest.raises(typer.BadParameter):
            parse_sides(wrong)
