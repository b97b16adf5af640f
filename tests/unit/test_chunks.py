"""The stream layout: every shard has its place, and the cuts cover the stream."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon.chunks import (
    ALIGNMENT,
    LARGE_SHARD_BYTES,
    MAX_CHUNK_BYTES,
    StreamLayout,
    object_chunks,
    stream_layout,
)
from ckptd.protos import shard_table
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import ShardTable

MIB = 1 << 20
SIZES = st.one_of(
    st.integers(0, 300),
    st.integers(0, 200 * MIB),
    st.sampled_from([0, 1, 63, 64, 65, 32 * MIB - 1, 32 * MIB, 64 * MIB, 64 * MIB + 1, 128 * MIB, 129 * MIB]),
)


def table(*rows: tuple[int, int]) -> ShardTable:
    """Build a table of (nbytes, group)."""
    return shard_table.build(
        ShardRow(
            name=f"t{at}",
            dtype="uint8",
            global_shape=(nbytes,),
            offset=(0,),
            length=(nbytes,),
            scope=0,
            nbytes=nbytes,
            group=group,
        )
        for at, (nbytes, group) in enumerate(rows)
    )


def laid_out(*rows: tuple[int, int]) -> StreamLayout:
    return stream_layout(0, table(*rows), [0] * len(rows))


@given(rows=st.lists(st.tuples(SIZES, st.integers(0, 1), st.booleans()), max_size=60))
def test_layout_gives_each_written_shard_a_place_of_its_own(rows: list[tuple[int, int, bool]]) -> None:
    """Written shards start at multiples of 64, overlap nowhere, and with the padding fill the tensor part exactly."""
    sizes = [(nbytes, group) for nbytes, group, _ in rows]
    layout = stream_layout(7, table(*sizes), [7 if own else 3 for *_, own in rows])
    used = [
        (offset, offset + nbytes)
        for offset, (nbytes, _, own) in zip(layout.offsets, rows, strict=True)
        if own and nbytes
    ]
    padding = zip(layout.padding_starts.tolist(), layout.padding_lengths.tolist(), strict=True)
    ranges = sorted([*used, *((start, start + length) for start, length in padding)])
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    assert (ranges[0][0], ranges[-1][1]) == (0, layout.data_bytes) if ranges else layout.data_bytes == 0
    assert all(0 < length < ALIGNMENT for length in layout.padding_lengths.tolist())
    assert all(offset == 0 for offset, (*_, own) in zip(layout.offsets, rows, strict=True) if not own)


@given(rows=st.lists(st.tuples(SIZES, st.integers(0, 1)), max_size=60))
def test_chunks_cover_the_tensor_part_in_order(rows: list[tuple[int, int]]) -> None:
    """Chunks follow one another without gap, are aligned, not empty and not longer than 64 MiB."""
    layout = laid_out(*rows)
    at = 0
    for chunk in layout.chunks:
        assert chunk.offset == at
        assert chunk.offset % ALIGNMENT == 0
        assert 0 < chunk.length <= MAX_CHUNK_BYTES
        at = chunk.end
    assert at == layout.data_bytes


@given(rows=st.lists(st.tuples(SIZES, st.integers(0, 1)), max_size=60))
def test_chunks_respect_shards_and_groups(rows: list[tuple[int, int]]) -> None:
    """A chunk holds whole small shards of one group, or a part of one large shard and nothing else."""
    layout = laid_out(*rows)
    for chunk in layout.chunks:
        inside = [
            (nbytes, group, offset)
            for offset, (nbytes, group) in zip(layout.offsets, rows, strict=True)
            if nbytes and offset < chunk.end and offset + nbytes > chunk.offset
        ]
        assert len({group for _, group, _ in inside}) == 1
        if any(nbytes >= LARGE_SHARD_BYTES for nbytes, *_ in inside):
            assert len(inside) == 1
        else:
            assert all(chunk.offset <= offset and offset + nbytes <= chunk.end for nbytes, _, offset in inside)


@given(rows=st.lists(st.tuples(SIZES, st.integers(0, 1)), max_size=60))
def test_objects_stay_few(rows: list[tuple[int, int]]) -> None:
    """There is about one chunk per 32 MiB at most, and one more per group: small shards are packed."""
    layout = laid_out(*rows)
    assert len(layout.chunks) <= layout.data_bytes // (MAX_CHUNK_BYTES // 2) + 2


@given(rows=st.lists(st.tuples(SIZES, st.integers(0, 1)), max_size=40), data=st.data())
def test_layout_depends_on_rows_alone(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    """The same rows and writers give the same layout, however the name tables of the message are arranged."""
    first = table(*rows)
    second = ShardTable.FromString(first.SerializeToString())
    shift = data.draw(st.integers(1, 5))
    del second.names[:]
    second.names.extend(["unused"] * shift + list(first.names))
    second.name[:] = [position + shift for position in first.name]
    writer = [data.draw(st.integers(0, 1)) for _ in rows]
    assert stream_layout(1, first, writer) == stream_layout(1, second, writer)


def test_frozen_shards_keep_their_chunks_when_trained_ones_change() -> None:
    """The lengths of frozen chunks do not depend on how much is trained beside them."""
    frozen = [(40 * MIB, 1), (1000, 1), (30 * MIB, 1)]

    def frozen_chunks(layout: StreamLayout, trained_bytes: int) -> list[int]:
        return [chunk.length for chunk in layout.chunks if chunk.offset >= trained_bytes]

    assert frozen_chunks(laid_out((640, 0), *frozen), 640) == frozen_chunks(laid_out((64, 0), *frozen), 64)


def test_long_shard_is_cut_evenly() -> None:
    """A shard one byte longer than a chunk makes two halves, not one full chunk and a crumb."""
    layout = laid_out((64 * MIB + 1, 0))
    assert [chunk.length for chunk in layout.chunks] == [32 * MIB + 64, 32 * MIB]


def test_small_shards_are_packed_whole_into_full_chunks() -> None:
    """A chunk takes as many whole small shards as fit into 64 MiB, and the next one begins with the one that did not."""
    layout = laid_out(*[(20 * MIB, 0)] * 5, (4 * MIB, 0), (20 * MIB, 0))
    assert [chunk.length // MIB for chunk in layout.chunks] == [60, 64]


@given(data_bytes=st.integers(0, 10**9), objects_bytes=st.integers(0, 300 * MIB))
def test_object_chunks_cover_the_objects(data_bytes: int, objects_bytes: int) -> None:
    """Object chunks begin at the next multiple of 64 behind the tensors and cover the blob to its last byte."""
    chunks = object_chunks(data_bytes, objects_bytes)
    start = -(-data_bytes // 64) * 64
    assert all(0 < chunk.length <= MAX_CHUNK_BYTES for chunk in chunks)
    assert [chunk.offset for chunk in chunks] == [start, *(chunk.end for chunk in chunks[:-1])][: len(chunks)]
    assert chunks[-1].end == start + objects_bytes if chunks else objects_bytes == 0


def test_writer_must_have_a_row_each() -> None:
    """A plan that does not fit the layout is refused with both counts."""
    with pytest.raises(ValueError, match="rank 4: 1 writers for 2 rows"):
        stream_layout(4, table((1, 0), (2, 0)), [4])


def test_a_hundred_thousand_rows_make_few_chunks() -> None:
    """The number of objects follows from the bytes, not from the number of tensors."""
    random.seed(1)
    rows = table(*((random.randrange(1, 5000), 0) for _ in range(100_000)))
    layout = stream_layout(0, rows, [0] * 100_000)
    assert len(layout.chunks) <= 1 + 2 * layout.data_bytes // MAX_CHUNK_BYTES
    assert sum(chunk.length for chunk in layout.chunks) == layout.data_bytes
