"""Resharding: any layout comes back out of any other, bit for bit, through contiguous ranges."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.daemon.chunks import stream_layout
from ckptd.daemon.errors import PlanError
from ckptd.daemon.index import ChunkRef
from ckptd.daemon.line import Line
from ckptd.daemon.pieces import Piece
from ckptd.daemon.reshard import StoredRows
from ckptd.protos import shard_table
from ckptd.protos.error_pb2 import REASON_LAYOUT_MISMATCH
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK, RankSection

Array = npt.NDArray[np.int16]
Box = tuple[tuple[int, ...], tuple[int, ...]]


def row(
    name: str,
    shape: tuple[int, ...],
    box: Box | None = None,
    *,
    dtype: str = "int16",
    scope: int = SCOPE_GLOBAL,
) -> ShardRow:
    offset, length = box or ((0,) * len(shape), shape)
    return ShardRow(
        name=name,
        dtype=dtype,
        global_shape=shape,
        offset=offset,
        length=length,
        scope=scope,
        nbytes=2 * int(np.prod(length, dtype=np.int64)),
    )


def section(rank: int, rows: list[ShardRow], writer: list[int] | None = None) -> RankSection:
    """Build a section whose stream is laid out as a save would."""
    table = shard_table.build(rows)
    writer = writer or [rank] * len(rows)
    return RankSection(rank=rank, shards=table, writer=writer, stream_offset=stream_layout(rank, table, writer).offsets)


def pieces(sections: list[RankSection], wants: list[ShardRow], own: int | None = 0) -> list[Piece]:
    return list(StoredRows({each.rank: each for each in sections}).pieces(shard_table.build(wants), own))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draw a grid of boxes, of uneven sizes, that tile the shape."""
    cuts = [sorted({0, end, *draw(st.lists(st.integers(0, end), max_size=3))}) for end in shape]
    per_dim = [list(itertools.pairwise(each)) for each in cuts]
    return [
        (tuple(low for low, _ in cell), tuple(high - low for low, high in cell)) for cell in itertools.product(*per_dim)
    ]


@given(data=st.data(), shape=st.lists(st.integers(1, 7), max_size=4).map(tuple))
@settings(max_examples=300, deadline=None)
def test_any_tiling_is_read_out_of_any_other(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Copying the shared part of every piece fills each wanted box with exactly the tensor's elements."""
    world = data.draw(st.integers(1, 3))
    stored_boxes, wanted_boxes = data.draw(tilings(shape)), data.draw(tilings(shape))
    whole: Array = np.arange(1, 1 + int(np.prod(shape, dtype=np.int64)), dtype=np.int16).reshape(shape)
    owners = [data.draw(st.integers(0, world - 1)) for _ in stored_boxes]
    sections, streams = [], {}
    for rank in range(world):
        boxes = [box for box, owner in zip(stored_boxes, owners, strict=True) if owner == rank]
        sections.append(section(rank, [row("t", shape, box) for box in boxes]))
        stream = bytearray(64 * len(boxes) + 2 * whole.size)
        for box, at in zip(boxes, sections[-1].stream_offset, strict=True):
            content = np.ascontiguousarray(whole[slices(box)]).tobytes()
            stream[at : at + len(content)] = content
        streams[rank] = bytes(stream)
    wants = [row("t", shape, box) for box in wanted_boxes]
    targets = {at: np.zeros(box[1], dtype=np.int16) for at, box in enumerate(wanted_boxes)}
    for piece in pieces(sections, wants):
        stored = np.frombuffer(
            streams[piece.rank][piece.stream_offset : piece.stream_offset + piece.nbytes], dtype=np.int16
        ).reshape(piece.source[1])
        copy_shared(targets[piece.want_row], wanted_boxes[piece.want_row], stored, piece.source)
    for at, box in enumerate(wanted_boxes):
        assert np.array_equal(targets[at], whole[slices(box)])


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(*box, strict=True))


def copy_shared(target: Array, wanted: Box, stored: Array, source: Box) -> None:
    """Copy what two boxes share, as a client does."""
    low = [max(a, b) for a, b in zip(wanted[0], source[0], strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(wanted[0], wanted[1], source[0], source[1], strict=True)]
    into = tuple(slice(lo - at, hi - at) for lo, hi, at in zip(low, high, wanted[0], strict=True))
    out_of = tuple(slice(lo - at, hi - at) for lo, hi, at in zip(low, high, source[0], strict=True))
    target[into] = stored[out_of]


def test_same_layout_is_one_whole_piece_per_row() -> None:
    """An exact match reads the stored row as it is, from its writer."""
    box: Box = ((2, 0), (2, 4))
    stored = [section(0, [row("t", (4, 4), ((0, 0), (2, 4)))]), section(1, [row("t", (4, 4), box)])]
    assert pieces(stored, [row("t", (4, 4), box)]) == [
        Piece(want_row=0, rank=1, stream_offset=0, nbytes=16, source=box)
    ]


def test_slab_is_trimmed_along_the_first_dimension() -> None:
    """Rows 3 and 4 of a stored 8x5 box are one range of 20 bytes, not the whole box."""
    stored = [section(0, [row("t", (8, 5))])]
    (piece,) = pieces(stored, [row("t", (8, 5), ((3, 1), (2, 2)))])
    assert (piece.stream_offset, piece.nbytes, piece.source) == (30, 20, ((3, 0), (2, 5)))


def test_trim_goes_on_behind_a_single_row() -> None:
    """Within one row of the first dimension the next dimension is contiguous too."""
    stored = [section(0, [row("t", (8, 5, 2))])]
    (piece,) = pieces(stored, [row("t", (8, 5, 2), ((3, 1, 0), (1, 2, 2)))])
    assert (piece.stream_offset, piece.nbytes, piece.source) == (3 * 20 + 4, 8, ((3, 1, 0), (1, 2, 2)))


def test_of_replicas_the_writers_row_is_read() -> None:
    """A rank that holds a replica but did not write it is never read from."""
    both = [section(rank, [row("t", (4,))], [1]) for rank in (0, 1)]
    assert [piece.rank for piece in pieces(both, [row("t", (4,))])] == [1]


def test_own_rows_come_from_the_same_coordinate_only() -> None:
    """Equal names of PerRank values are not replicas: each rank gets its own back."""
    stored = [section(rank, [row("rng", (4,), scope=SCOPE_PER_RANK)]) for rank in (0, 1)]
    want = [row("rng", (4,), scope=SCOPE_PER_RANK)]
    assert [piece.rank for piece in pieces(stored, want, own=1)] == [1]
    with pytest.raises(PlanError, match="not in the snapshot"):
        pieces(stored, want, own=None)


def test_empty_and_scalar_rows_fit() -> None:
    """A row without elements needs no bytes; a tensor without dimensions is one element."""
    stored = [section(0, [row("empty", (0, 3)), row("scalar", ())])]
    found = pieces(stored, [row("empty", (0, 3)), row("scalar", ())])
    assert [(piece.want_row, piece.nbytes, piece.source) for piece in found] == [(1, 2, ((), ()))]


def test_all_differences_come_in_one_error() -> None:
    """One error counts what does not fit and shows the first five with expected and found."""
    stored = [section(0, [row(f"t{at}", (4,)) for at in range(9)] + [row("hole", (4,), ((0,), (3,)))])]
    wants = [
        row("t0", (4,)),
        row("t1", (5,)),
        row("t2", (4,), dtype="bfloat16"),
        row("absent", (1,)),
        row("hole", (4,)),
        *(row(f"t{at}", (4, 4)) for at in range(3, 9)),
    ]
    with pytest.raises(PlanError) as caught:
        pieces(stored, wants)
    message = caught.value.error.message
    assert caught.value.error.reason == REASON_LAYOUT_MISMATCH
    assert message.startswith("10 of 11 tensors do not fit the snapshot: ")
    assert "'t1': int16 [5] expected, int16 [4] found" in message
    assert "'t2': bfloat16 [4] expected, int16 [4] found" in message
    assert "'absent': not in the snapshot" in message
    assert "'hole': 1 elements of [0:4] are not stored" in message
    assert message.endswith("and 5 more")
    assert message.count("expected") == 3


def test_changed_scope_is_said() -> None:
    """A tensor that became PerRank, or ceased to be, is told apart from a missing one."""
    stored = [section(0, [row("a", (4,)), row("b", (4,), scope=SCOPE_PER_RANK)])]
    with pytest.raises(PlanError, match=r"'a': expected as the rank's own.*'b': expected as a part"):
        pieces(stored, [row("a", (4,), scope=SCOPE_PER_RANK), row("b", (4,))])


@given(
    lengths=st.lists(st.integers(1, 9), max_size=12),
    ranges=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8),
)
def test_chunks_of_ranges_are_those_that_share_a_byte(lengths: list[int], ranges: list[tuple[int, int]]) -> None:
    """A chunk is needed exactly when it holds a byte of a range; order is kept and none comes twice."""
    ends = list(itertools.accumulate(lengths))
    refs = [
        ChunkRef(digest=bytes([at]) * 32, length=length, key=str(at), stream_offset=end - length)
        for at, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]
    inside = [(offset, length) for offset, length in ranges if ends and offset + length <= ends[-1]]
    expected = [
        ref
        for ref in refs
        if any(offset < ref.stream_offset + ref.length and offset + n > ref.stream_offset for offset, n in inside if n)
    ]
    begins, sizes = np.array([each for each in inside if each[1]], dtype=np.int64).reshape(-1, 2).T
    assert [refs[at] for at in Line({0: refs}).touched(begins, begins + sizes)] == expected


def test_every_one_of_many_rows_finds_its_own_bytes() -> None:
    """With 20,000 equal-shaped rows each piece points at the row of its own name."""
    rows = [row(f"layer.{at}.weight", (64, 8)) for at in range(20_000)]
    stored = {0: section(0, rows)}
    found = list(StoredRows(stored).pieces(shard_table.build(reversed(rows)), 0))
    offsets = list(stored[0].stream_offset)
    assert [piece.stream_offset for piece in found] == offsets[::-1]
