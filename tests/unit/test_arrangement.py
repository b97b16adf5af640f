"""What a restore takes: what its ranks want and the window, whatever was stored; and the bytes are the right ones."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from fixtures.counting_store import CountingStore, shared_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptd.daemon.arena import Arena
from ckptd.daemon.chunks import aligned, stream_layout
from ckptd.daemon.errors import CorruptError, DaemonError
from ckptd.daemon.fetched import Fetched, Needs
from ckptd.daemon.fetcher import Fetcher
from ckptd.daemon.hashing import chunk_digest
from ckptd.daemon.index import ChunkRef
from ckptd.daemon.keys import Timeline, chunk_key
from ckptd.daemon.pieces import Pieces
from ckptd.daemon.reshard import StoredRows
from ckptd.daemon.window import Window
from ckptd.protos import shard_table
from ckptd.protos.error_pb2 import REASON_ABORTED
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, RankSection
from ckptd.storage_backends.base import PutMode

Array: TypeAlias = npt.NDArray[np.int16]
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
JOB = "cd" * 32
T1 = Timeline(1, "0123456789ab")
DEADLINE_S = 30.0


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


def row(name: str, whole: Array, box: Box) -> ShardRow:
    return ShardRow(
        name=name,
        dtype="int16",
        global_shape=whole.shape,
        offset=box[0],
        length=box[1],
        scope=SCOPE_GLOBAL,
        nbytes=2 * int(np.prod(box[1], dtype=np.int64)),
    )


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(*box, strict=True))


class Step:
    """A step in a store: what each rank wrote, in chunks of one size.

    Args:
        tensors: Name: its value.
        boxes: Rank: name and box of each of its rows.
        chunk: Bytes of a chunk.
    """

    def __init__(self, tensors: dict[str, Array], boxes: Sequence[Sequence[tuple[str, Box]]], chunk: int) -> None:
        self.tensors = tensors
        self.store = CountingStore()
        self.refs: dict[int, list[ChunkRef]] = {}
        sections = {}
        for rank, held in enumerate(boxes):
            table = shard_table.build(row(name, tensors[name], box) for name, box in held)
            layout = stream_layout(rank, table, [rank] * len(held))
            stream = bytearray(layout.data_bytes)
            for (name, box), at in zip(held, layout.offsets, strict=True):
                content = np.ascontiguousarray(tensors[name][slices(box)]).tobytes()
                stream[at : at + len(content)] = content
            sections[rank] = RankSection(
                rank=rank, shards=table, writer=[rank] * len(held), stream_offset=layout.offsets
            )
            self.refs[rank] = [self._put(bytes(stream[at : at + chunk]), at) for at in range(0, len(stream), chunk)]
        self.rows = StoredRows(sections)

    def _put(self, data: bytes, at: int) -> ChunkRef:
        digest = chunk_digest(data)
        key = chunk_key(digest.hex(), 10, T1)
        self.store.put(key, data, mode=PutMode.OVERWRITE)
        return ChunkRef(digest=digest, length=len(data), key=key, stream_offset=at)

    def pieces(self, wants: Sequence[tuple[str, Box]]) -> Pieces:
        """Return what one rank's wish means."""
        return self.rows.pieces(shard_table.build(row(name, self.tensors[name], box) for name, box in wants), None)

    def fetch(self, wishes: Sequence[Sequence[tuple[str, Box]]], arena: Arena) -> Fetched:
        """Fetch what the ranks of one node want, and compare each box as a client reads it."""
        pieces = Pieces.joined([self.pieces(wants) for wants in wishes])
        refs = {rank: self.refs[rank] for rank in set(pieces.rank.tolist())}
        fetcher = Fetcher(self.store)
        try:
            fetched = fetcher.fetch(Needs(refs=refs, pieces=pieces), {}, arena)
        finally:
            fetcher.close()
        self.check(wishes, pieces, fetched)
        return fetched

    def check(self, wishes: Sequence[Sequence[tuple[str, Box]]], pieces: Pieces, fetched: Fetched) -> None:
        """Every element of every box stands where the answer says, and is said once."""
        files = [path.read_bytes() for path in fetched.files]
        placed, begin = fetched.placed, 0
        for wants in wishes:
            end = begin + len(self.pieces(wants))
            made = [np.full(box[1], -1, dtype=np.int16) for _, box in wants]
            for at in range(begin, end):
                name, wanted = wants[int(pieces.want_row[at])]
                dims = len(wanted[0])
                low, size = placed.low[:dims, at].tolist(), placed.size[:dims, at].tolist()
                data = files[int(placed.file[at])][int(placed.at[at]) : int(placed.at[at] + placed.nbytes[at])]
                there = np.frombuffer(data, dtype=np.int16).reshape(size)
                first = [max(a, b) for a, b in zip(low, wanted[0], strict=True)]
                last = [min(a + n, b + m) for a, n, b, m in zip(low, size, *wanted, strict=True)]
                into = tuple(slice(a - b, c - b) for a, c, b in zip(first, last, wanted[0], strict=True))
                out_of = tuple(slice(a - b, c - b) for a, c, b in zip(first, last, low, strict=True))
                assert (made[int(pieces.want_row[at])][into] == -1).all(), name
                made[int(pieces.want_row[at])][into] = there[out_of]
            for (name, box), found in zip(wants, made, strict=True):
                assert np.array_equal(found, self.tensors[name][slices(box)]), name
            begin = end


def matrix(rows: int, columns: int) -> Array:
    return np.random.default_rng(rows).integers(0, 1 << 15, (rows, columns), dtype=np.int16)


def quarters(rows: int, columns: int, name: str = "w") -> list[list[tuple[str, Box]]]:
    """Return four ranks' boxes: a matrix cut along its first dimension."""
    return [[(name, ((rows // 4 * rank, 0), (rows // 4, columns)))] for rank in range(4)]


class TestMemory:
    def test_a_quarter_of_every_chunk_takes_a_quarter_and_the_window(self, shm_dir: Path) -> None:
        """A rank alone on its node that wants a quarter of the columns: the arena is its shard to the byte."""
        step = Step({"w": matrix(256, 512)}, quarters(256, 512), 16 << 10)
        arena = Arena(shm_dir, JOB, 64 << 10)
        fetched = step.fetch([[("w", ((0, 128), (256, 128)))]], arena)
        shard = 256 * 128 * 2
        assert fetched.arena_bytes == shard
        assert sum(path.stat().st_size for path in fetched.files) == shard
        assert 0 < fetched.window_bytes <= (64 << 10) - arena.slack_bytes
        assert sorted(step.store.reads) == sorted(ref.key for refs in step.refs.values() for ref in refs)
        arena.close()
        assert arena.window.peak_bytes == 0

    def test_ranks_of_one_node_share_chunks_and_equal_boxes(self, shm_dir: Path) -> None:
        """Two pairs of ranks, each pair with equal boxes: half of everything, once, and each chunk read once."""
        step = Step({"w": matrix(256, 512)}, quarters(256, 512), 16 << 10)
        wishes = [[("w", ((0, 128 * (rank // 2)), (256, 128)))] for rank in range(4)]
        arena = Arena(shm_dir, JOB, 64 << 10)
        fetched = step.fetch(wishes, arena)
        assert fetched.arena_bytes == 2 * 256 * 128 * 2
        assert len(step.store.reads) == len(set(step.store.reads)) == 16
        arena.close()

    def test_what_is_wanted_whole_is_read_where_it_stays(self, shm_dir: Path) -> None:
        """The layout that saved, and all columns over the ranks of a node: the window is not used."""
        step = Step({"w": matrix(256, 512)}, quarters(256, 512), 16 << 10)
        for wishes in (quarters(256, 512), [[("w", ((0, 128 * rank), (256, 128)))] for rank in range(4)]):
            arena = Arena(shm_dir, JOB, 64 << 10)
            fetched = step.fetch(wishes, arena)
            assert (fetched.arena_bytes, fetched.window_bytes) == (256 * 512 * 2, 0)
            arena.close()

    def test_an_uneven_cut_reads_one_chunk_through_the_window(self, shm_dir: Path) -> None:
        """Rows 0 to 99 of 256 in chunks of 16 rows: six chunks stay whole, a quarter of the seventh is copied."""
        step = Step({"w": matrix(256, 512)}, quarters(256, 512), 16 << 10)
        arena = Arena(shm_dir, JOB, 64 << 10)
        fetched = step.fetch([[("w", ((0, 0), (100, 512)))]], arena)
        assert fetched.arena_bytes == 100 * 512 * 2
        assert fetched.window_bytes == 16 << 10
        assert len(step.store.reads) == 7
        arena.close()

    def test_little_that_is_missing_is_read_along_and_counts_against_the_window(self, shm_dir: Path) -> None:
        """All but one of 16 rows: the whole chunk, as long as that is within a quarter of the window."""
        step = Step({"w": matrix(64, 512)}, quarters(64, 512), 16 << 10)
        wish: list[list[tuple[str, Box]]] = [[("w", ((0, 0), (63, 512)))]]
        for window, arena_bytes, window_bytes in ((64 << 10, 64 << 10, 0), (4096 - 4, 63 << 10, 16 << 10)):
            arena = Arena(shm_dir, JOB, window)
            arena.window.nbytes = 64 << 10
            fetched = step.fetch(wish, arena)
            assert (fetched.arena_bytes, fetched.window_bytes) == (arena_bytes, window_bytes)
            arena.close()

    def test_a_gap_in_every_row_is_read_along_within_the_slack_only(self, shm_dir: Path) -> None:
        """480 of 512 columns: in place while the gaps are within a quarter of the window, else without them."""
        step = Step({"w": matrix(64, 512)}, quarters(64, 512), 16 << 10)
        gaps, shard = 64 * 32 * 2, 64 * 480 * 2
        for window, arena_bytes, window_bytes in (
            (64 << 10, shard + gaps, 0),
            (4 * 959, shard, 1),
        ):  # a chunk has 960 bytes between its rows
            arena = Arena(shm_dir, JOB, window)
            arena.window.nbytes = 64 << 10
            fetched = step.fetch([[("w", ((0, 0), (64, 480)))]], arena)
            assert (fetched.arena_bytes, fetched.window_bytes > 0) == (arena_bytes, window_bytes)
            arena.close()

    def test_small_rows_apart_take_no_more_than_themselves(self, shm_dir: Path) -> None:
        """Every second of 400 tensors of one chunk, each padded to 64 bytes; and of no more chunks than they are in."""
        tensors = {f"t{at}": matrix(1, 40) for at in range(400)}
        held: list[tuple[str, Box]] = [(name, ((0, 0), (1, 40))) for name in tensors]
        step = Step(tensors, [held], 16 << 10)
        arena = Arena(shm_dir, JOB, 64 << 10)
        fetched = step.fetch([held[::2]], arena)
        assert fetched.arena_bytes == 200 * aligned(80)
        arena.close()

    def test_a_chunk_between_two_wanted_ones_is_not_read(self, shm_dir: Path) -> None:
        """Of a tensor of two large planes one row each: their chunks, and not the two between them."""
        whole = matrix(2 * 3072, 512).reshape(2, 3072, 512)
        step = Step({"w": whole}, [[("w", ((0, 0, 0), (2, 3072, 512)))]], 1 << 20)
        arena = Arena(shm_dir, JOB, 8 << 20)
        fetched = step.fetch([[("w", ((0, 0, 0), (2, 1, 512)))]], arena)
        assert sorted(step.store.reads) == sorted(step.refs[0][at].key for at in (0, 3))
        assert fetched.arena_bytes == 2 * 512 * 2
        arena.close()


class TestDamage:
    @pytest.mark.parametrize("wanted", [False, True], ids=["beside what is wanted", "in what is wanted"])
    def test_a_flipped_bit_in_a_chunk_of_which_a_part_is_wanted(self, shm_dir: Path, *, wanted: bool) -> None:
        """Nothing is handed out, also when the bit is in bytes that nobody wants: the chunk is not what was stored."""
        step = Step({"w": matrix(256, 512)}, quarters(256, 512), 16 << 10)
        ref = step.refs[2][1]
        bad = bytearray(step.store.get(ref.key))
        bad[10 * 1024 + (300 if wanted else 10)] ^= 8
        step.store.put(ref.key, bytes(bad), mode=PutMode.OVERWRITE)
        arena = Arena(shm_dir, JOB, 64 << 10)
        with pytest.raises(CorruptError) as caught:
            step.fetch([[("w", ((0, 128), (256, 128)))]], arena)
        assert caught.value.error.object == ref.key
        assert step.store.reads.count(ref.key) == 2
        arena.close()

    def test_bytes_that_are_in_no_chunk_are_corrupt(self, shm_dir: Path) -> None:
        """An index whose rows reach beyond its chunks is an error, not other bytes."""
        step = Step({"w": matrix(64, 512)}, quarters(64, 512), 16 << 10)
        step.refs[3] = []
        with pytest.raises(CorruptError, match="in no chunk"):
            step.fetch(quarters(64, 512), Arena(shm_dir, JOB, 64 << 10))


class TestWindow:
    def test_no_more_is_given_out_than_the_window(self) -> None:
        """Eight threads with random demands: never more than the window, no byte to two, and all get theirs."""
        window, lock, held = Window(64 << 10), threading.Lock(), dict[int, int]()
        most = 0

        def use(number: int) -> None:
            nonlocal most
            nbytes = 1 + (number * 7919) % (40 << 10)
            with window.room(nbytes, threading.Event()) as room:
                place = np.frombuffer(room, dtype=np.uint8)
                with lock:
                    held[number] = nbytes
                    most = max(most, sum(held.values()))
                place[:] = number % 251
                assert (place == number % 251).all()
                with lock:
                    del held[number]

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(use, range(400)))
        assert most <= window.peak_bytes <= 64 << 10

    def test_two_have_room_at_once_side_by_side(self) -> None:
        """As long as both fit: 36 and 28 KiB of 64, each in whole pages."""
        window, stop = Window(64 << 10), threading.Event()
        with window.room(36 << 10, stop) as first, window.room((28 << 10) - 5, stop) as second:
            first[:] = bytes([1]) * len(first)
            second[:] = bytes([2]) * len(second)
            assert bytes(first) == bytes([1]) * (36 << 10)
        assert window.peak_bytes == 64 << 10

    def test_who_waits_is_stopped(self) -> None:
        """A fetch that failed does not leave threads behind that wait for room."""
        window, stop = Window(8192), threading.Event()

        def wait() -> None:
            with window.room(8192, stop):
                pass

        with window.room(4096, stop), ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(wait)
            stop.set()
            window.wake()
            with pytest.raises(DaemonError) as caught:
                waiting.result(DEADLINE_S)
        assert caught.value.error.reason == REASON_ABORTED

    def test_what_a_thread_still_has_is_not_given_out_again(self) -> None:
        """Released while a read hangs: the next fetch gets other memory."""
        window, stop = Window(8192), threading.Event()
        with window.room(8192, stop) as hanging:
            window.release()
            with window.room(8192, stop) as again:
                again[:3] = b"new"
                hanging[:3] = b"old"
                assert bytes(again[:3]) == b"new"


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draw a grid of boxes, of uneven sizes, that tile the shape."""
    cuts = [sorted({0, end, *draw(st.lists(st.integers(0, end), max_size=3))}) for end in shape]
    cells = itertools.product(*(list(itertools.pairwise(each)) for each in cuts))
    return [(tuple(low for low, _ in cell), tuple(high - low for low, high in cell)) for cell in cells]


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Draw a box of the shape, with elements."""
    low = [draw(st.integers(0, end - 1)) for end in shape]
    return tuple(low), tuple(draw(st.integers(1, end - at)) for at, end in zip(low, shape, strict=True))


SHAPES = (
    st.lists(st.one_of(st.integers(1, 9), st.sampled_from([64, 100])), min_size=1, max_size=4)
    .map(tuple)
    .filter(lambda shape: int(np.prod(shape)) <= 40_000)
)


@given(data=st.data(), shapes=st.lists(SHAPES, min_size=1, max_size=3), chunk=st.sampled_from([64, 192, 640, 4096, 70]))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_boxes_come_out_of_any_tiling_and_chunks(
    data: st.DataObject, shapes: list[tuple[int, ...]], chunk: int, shm_dir: Path
) -> None:
    """Every wanted element of every rank, exactly; in no more of the arena than wanted, its padding, and the slack."""
    tensors = {
        f"t{at}": (np.arange(int(np.prod(shape)), dtype=np.int64) % 32749).astype(np.int16).reshape(shape)
        for at, shape in enumerate(shapes)
    }
    held: list[list[tuple[str, Box]]] = [[] for _ in range(data.draw(st.integers(1, 3)))]
    for name, whole in tensors.items():
        for box in data.draw(tilings(whole.shape)):
            held[data.draw(st.integers(0, len(held) - 1))].append((name, box))
    step = Step(tensors, held, chunk)
    names = st.sampled_from(sorted(tensors))
    wishes = [
        [(name, data.draw(boxes(tensors[name].shape))) for name in data.draw(st.lists(names, max_size=4))]
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    arena = Arena(shm_dir, JOB, 32 << 10)
    fetched = step.fetch(wishes, arena)
    # A piece begins and ends somewhere in its padding of 64 bytes; without gaps only its own two.
    wanted = sum(int(nbytes) + 128 for wants in wishes for nbytes in step.pieces(wants).nbytes)
    assert fetched.arena_bytes <= wanted + arena.slack_bytes
    assert fetched.window_bytes <= arena.window.nbytes
    assert len(step.store.reads) == len(set(step.store.reads))
    arena.close()
