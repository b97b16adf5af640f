"""A fetch hands out verified bytes or an error that names the object, and reads each chunk once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fixtures.counting_store import CountingStore, shared_folder

from ckptd.daemon.arena import Arena
from ckptd.daemon.chunks import stream_layout
from ckptd.daemon.errors import CorruptError, DaemonError, NoSpaceError
from ckptd.daemon.fetched import Fetched, Needs
from ckptd.daemon.fetcher import Fetcher
from ckptd.daemon.hashing import chunk_digest
from ckptd.daemon.index import ChunkRef
from ckptd.daemon.keys import Timeline, chunk_key
from ckptd.daemon.slots import SlotFile, SlotPool, SlotState
from ckptd.protos import shard_table
from ckptd.protos.error_pb2 import REASON_CORRUPT, REASON_DEADLINE_EXCEEDED
from ckptd.protos.shard_table import ShardRow
from ckptd.storage_backends.base import PutMode
from ckptd.storage_backends.errors import Unavailable
from ckptd.storage_backends.faulty import Fault, FaultKind, FaultyStore, Op
from ckptd.storage_backends.memory import MemoryStore

JOB = "ab" * 32
T1 = Timeline(1, "0123456789ab")
CHUNK = 640
DEADLINE_S = 30.0


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@pytest.fixture
def arena(shm_dir: Path) -> Iterator[Arena]:
    made = Arena(shm_dir, JOB)
    yield made
    made.close()


def stored(store: MemoryStore, stream: bytes) -> list[ChunkRef]:
    """Put a stream in chunks of 640 bytes."""
    refs = []
    for at in range(0, len(stream), CHUNK):
        data = stream[at : at + CHUNK]
        digest = chunk_digest(data)
        key = chunk_key(digest.hex(), 10, T1)
        store.put(key, data, mode=PutMode.OVERWRITE)
        refs.append(ChunkRef(digest=digest, length=len(data), key=key, stream_offset=at))
    return refs


def whole(chunks: Mapping[int, Sequence[ChunkRef]]) -> Needs:
    """Return that these chunks are needed, whole."""
    refs = {rank: sorted(set(each), key=lambda ref: ref.stream_offset) for rank, each in chunks.items()}
    found = [(rank, ref.stream_offset, ref.length) for rank, each in refs.items() for ref in each]
    ranks, offsets, lengths = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return Needs(refs=refs, ranks=ranks, offsets=offsets, lengths=lengths)


def slot_with(shm_dir: Path, data: bytes, objects: bytes = b"") -> SlotFile:
    """Make a staged slot that holds one shard and the objects; `data` must be a multiple of 64."""
    rows = shard_table.build(
        [
            ShardRow(
                name="w",
                dtype="uint8",
                global_shape=(len(data),),
                offset=(0,),
                length=(len(data),),
                scope=0,
                nbytes=len(data),
            )
        ]
    )
    pool = SlotPool(shm_dir, JOB, touch=False)
    slot = pool.acquire(0, 0, len(data), len(objects) + 8)
    header = replace(
        slot.header, state=SlotState.WRITING, timeline=str(T1), step=10, layout_digest=b"l", plan_digest=b"p"
    )
    slot.begin(header, stream_layout(0, rows, [0]))
    slot.data[:] = data
    slot.tail[: len(objects)] = objects
    slot.stage(objects_bytes=len(objects), trailer_bytes=0, staged_at=0)
    return slot


def read(fetched: Fetched, rank: int, offset: int, nbytes: int) -> bytes:
    """Read a range of a rank's stream as a trainer would: from the file named."""
    path, at = fetched.locate(rank, offset, nbytes)
    with path.open("rb") as file:
        file.seek(at)
        return file.read(nbytes)


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def fetcher(store: CountingStore) -> Iterator[Fetcher]:
    made = Fetcher(store)
    yield made
    made.close()


class TestWhatIsHandedOut:
    def test_streams_come_back_from_the_store(self, store: CountingStore, fetcher: Fetcher, arena: Arena) -> None:
        """Any range of any needed stream is contiguous in a file, and its bytes are those stored."""
        streams = {rank: os.urandom(size) for rank, size in [(0, 3000), (3, 640), (5, 64)]}
        needs = {rank: stored(store, stream) for rank, stream in streams.items()}
        fetched = fetcher.fetch(whole(needs), {}, arena, deadline=time.monotonic() + DEADLINE_S)
        for rank, stream in streams.items():
            assert read(fetched, rank, 0, len(stream)) == stream
        assert read(fetched, 0, 600, 1000) == streams[0][600:1600]
        assert fetched.bytes_by_tier == {"memory": 0, "store": 3000 + 640 + 64}

    def test_only_needed_chunks_are_read_and_neighbours_stand_together(
        self, store: CountingStore, fetcher: Fetcher, arena: Arena
    ) -> None:
        """Chunks 1, 2 and 4 of a stream give two ranges; what was not needed is not there."""
        stream = os.urandom(6 * CHUNK)
        refs = stored(store, stream)
        fetched = fetcher.fetch(whole({0: [refs[4], refs[2], refs[1], refs[2]]}), {}, arena)
        assert sorted(store.reads) == sorted(refs[at].key for at in (1, 2, 4))
        assert read(fetched, 0, CHUNK, 2 * CHUNK) == stream[CHUNK : 3 * CHUNK]
        assert read(fetched, 0, 4 * CHUNK, CHUNK) == stream[4 * CHUNK : 5 * CHUNK]
        for offset, nbytes in [(0, 1), (CHUNK - 1, 2), (2 * CHUNK, CHUNK + 1), (5 * CHUNK, 1)]:
            with pytest.raises(KeyError, match="were not fetched"):
                fetched.locate(0, offset, nbytes)
        with pytest.raises(KeyError):
            fetched.locate(1, 0, 1)

    def test_equal_chunks_are_read_once(self, store: CountingStore, fetcher: Fetcher, arena: Arena) -> None:
        """A chunk that stands in several streams, or twice in one, is one read and stands in each place."""
        same = os.urandom(CHUNK)
        streams = {0: same + os.urandom(CHUNK) + same, 1: same}
        needs = {rank: stored(store, stream) for rank, stream in streams.items()}
        fetched = fetcher.fetch(whole(needs), {}, arena)
        assert len(store.reads) == 2
        assert all(read(fetched, rank, 0, len(stream)) == stream for rank, stream in streams.items())
        assert fetched.bytes_by_tier == {"store": 2 * CHUNK, "memory": 2 * CHUNK}

    def test_nothing_needed_is_nothing_fetched(self, fetcher: Fetcher, arena: Arena, shm_dir: Path) -> None:
        """A rank that wants nothing costs no read and no memory."""
        fetched = fetcher.fetch(whole({0: []}), {}, arena)
        assert fetched.bytes_by_tier == {"memory": 0, "store": 0}
        assert list(shm_dir.iterdir()) == []


class TestHeldSlots:
    def test_held_slot_is_read_in_place(
        self, store: CountingStore, fetcher: Fetcher, arena: Arena, shm_dir: Path
    ) -> None:
        """What a slot holds costs no request and no copy, objects included."""
        data, objects = os.urandom(2 * CHUNK), os.urandom(100)
        slot = slot_with(shm_dir, data, objects)
        refs = stored(store, data + objects)
        fetched = fetcher.fetch(whole({0: refs}), {0: slot}, arena)
        assert store.reads == []
        assert fetched.locate(0, 0, 2 * CHUNK)[0] == slot.path
        assert read(fetched, 0, 0, 2 * CHUNK) == data
        assert read(fetched, 0, 2 * CHUNK, 100) == objects
        assert fetched.bytes_by_tier == {"memory": 2 * CHUNK + 100, "store": 0}

    def test_slot_with_one_wrong_bit_is_passed_over(
        self, store: CountingStore, fetcher: Fetcher, arena: Arena, shm_dir: Path
    ) -> None:
        """A slot whose bytes do not have their digests is not trusted: the store's bytes are handed out."""
        data = os.urandom(2 * CHUNK)
        slot = slot_with(shm_dir, data)
        refs = stored(store, data)
        slot.data[CHUNK + 3] ^= 1
        fetched = fetcher.fetch(whole({0: refs}), {0: slot}, arena)
        assert read(fetched, 0, 0, len(data)) == data
        assert fetched.bytes_by_tier == {"memory": 0, "store": len(data)}

    def test_slot_that_is_too_short_or_not_staged_is_passed_over(
        self, store: CountingStore, fetcher: Fetcher, arena: Arena, shm_dir: Path
    ) -> None:
        """A slot that holds something else is no error, just no source."""
        data = os.urandom(4 * CHUNK)
        slot = slot_with(shm_dir, data[: 2 * CHUNK])
        refs = stored(store, data)
        assert read(fetcher.fetch(whole({0: refs}), {0: slot}, arena), 0, 0, len(data)) == data
        slot.free()
        fetched = fetcher.fetch(whole({0: refs[:2]}), {0: slot}, arena)
        assert fetched.bytes_by_tier["memory"] == 0

    def test_chunk_in_another_ranks_slot_is_copied_from_there(
        self, store: CountingStore, fetcher: Fetcher, arena: Arena, shm_dir: Path
    ) -> None:
        """Of a stream that no slot holds, chunks equal to a held one are not read from the store."""
        same, other = os.urandom(CHUNK), os.urandom(CHUNK)
        slot = slot_with(shm_dir, same)
        needs = {0: stored(store, same), 1: stored(store, other + same)}
        fetched = fetcher.fetch(whole(needs), {0: slot}, arena)
        assert store.reads == [needs[1][0].key]
        assert read(fetched, 1, 0, 2 * CHUNK) == other + same
        assert fetched.bytes_by_tier == {"memory": 2 * CHUNK, "store": CHUNK}


class TestDamage:
    def test_flipped_bit_at_rest_is_corrupt_and_named(
        self, store: CountingStore, fetcher: Fetcher, arena: Arena
    ) -> None:
        """The error names the object and both digests; the object was read twice before it was blamed."""
        refs = stored(store, os.urandom(3 * CHUNK))
        bad = bytearray(store.get(refs[1].key))
        bad[7] ^= 4
        store.put(refs[1].key, bad, mode=PutMode.OVERWRITE)
        with pytest.raises(CorruptError) as caught:
            fetcher.fetch(whole({0: refs}), {}, arena)
        assert caught.value.error.reason == REASON_CORRUPT
        assert caught.value.error.object == refs[1].key
        assert refs[1].digest.hex() in caught.value.error.message
        assert chunk_digest(bytes(bad)).hex() in caught.value.error.message
        assert store.reads.count(refs[1].key) == 2

    def test_listed_object_that_is_gone_is_corrupt(self, store: CountingStore, fetcher: Fetcher, arena: Arena) -> None:
        """A missing or short object is the step's fault, not an unavailable store."""
        refs = stored(store, os.urandom(2 * CHUNK))
        store.delete(refs[1].key)
        with pytest.raises(CorruptError, match="nothing found") as caught:
            fetcher.fetch(whole({0: refs}), {}, arena)
        assert caught.value.error.object == refs[1].key
        store.put(refs[1].key, b"short")
        with pytest.raises(CorruptError, match="5 bytes"):
            fetcher.fetch(whole({0: refs}), {}, arena)

    def test_bit_flipped_on_the_way_is_read_again(self, store: CountingStore, arena: Arena) -> None:
        """A single bad answer of the network does not condemn a good step."""
        stream = os.urandom(CHUNK)
        refs = stored(store, stream)
        faulty = FaultyStore(store, Fault(kind=FaultKind.CORRUPTED, op=Op.GET), seed=1)
        fetcher = Fetcher(faulty)
        assert read(fetcher.fetch(whole({0: refs}), {}, arena), 0, 0, CHUNK) == stream
        fetcher.close()
        assert len(store.reads) == 2

    def test_store_that_cannot_be_reached_is_not_called_corrupt(self, store: CountingStore, arena: Arena) -> None:
        """Unavailable stays Unavailable: nobody may quarantine a step for a broken network."""
        refs = stored(store, os.urandom(CHUNK))
        fetcher = Fetcher(FaultyStore(store, Fault(kind=FaultKind.ERROR, op=Op.GET, times=None), seed=1))
        with pytest.raises(Unavailable):
            fetcher.fetch(whole({0: refs}), {}, arena)
        fetcher.close()


class TestBounds:
    def test_hanging_store_ends_at_the_deadline_and_keeps_its_pages(self, arena: Arena) -> None:
        """The error names an object; a read that ends later cannot write into the next attempt's bytes."""
        hang, entered = threading.Event(), threading.Event()

        class Hanging(CountingStore):
            def get_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
                entered.set()
                hang.wait(DEADLINE_S)
                super().get_into(key, buffer, offset=offset)

        store = Hanging()
        refs = stored(store, os.urandom(CHUNK))
        with arena.writing(CHUNK) as file:
            first = file.path
        fetcher = Fetcher(store)
        with pytest.raises(DaemonError) as caught:
            fetcher.fetch(whole({0: refs}), {}, arena, deadline=time.monotonic() + 0.05)
        assert entered.is_set()
        assert caught.value.error.reason == REASON_DEADLINE_EXCEEDED
        assert caught.value.error.object == refs[0].key
        with arena.writing(CHUNK) as again:
            again.view[:CHUNK] = b"\1" * CHUNK
            hang.set()
            fetcher.close()
            assert again.path != first
            assert bytes(again.view[:CHUNK]) == b"\1" * CHUNK

    def test_fetches_that_overlap_never_share_a_file(self, arena: Arena) -> None:
        """An attempt that was superseded in the midst of reading writes to pages that nobody reads."""
        with arena.writing(100) as old, arena.writing(100) as new:
            assert new.path != old.path
            old.view[:3] = b"old"
            new.view[:3] = b"new"
        assert bytes(new.view[:3]) == b"new"
        arena.release(old.path)
        assert new.path.exists()

    def test_reads_in_flight_stay_within_the_limit(self, arena: Arena) -> None:
        """No more reads run at once than allowed."""
        running, most, lock = 0, 0, threading.Lock()

        class Measuring(MemoryStore):
            def get_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
                nonlocal running, most
                with lock:
                    running += 1
                    most = max(most, running)
                super().get_into(key, buffer, offset=offset)
                with lock:
                    running -= 1

        store = Measuring()
        refs = stored(store, os.urandom(50 * CHUNK))
        fetcher = Fetcher(store, get_threads=2)
        fetcher.fetch(whole({0: refs}), {}, arena)
        fetcher.close()
        assert 1 <= most <= 2

    def test_files_of_the_arena_go_one_by_one_and_all_at_its_end(self, shm_dir: Path) -> None:
        """Each fetch has its own; one that failed leaves none, and one that ends after the arena did neither."""
        arena = Arena(shm_dir, JOB)
        paths = []
        for nbytes in (5000, 4000, 8192):
            with arena.writing(nbytes) as file:
                paths.append(file.path)
        with pytest.raises(KeyError), arena.writing(100):
            raise KeyError
        assert sorted(shm_dir.iterdir()) == sorted(paths)
        arena.release(paths[1])
        arena.release(paths[1])
        assert sorted(shm_dir.iterdir()) == sorted((paths[0], paths[2]))
        with arena.writing(100):
            arena.close()
        assert list(shm_dir.iterdir()) == []

    def test_arena_of_a_dead_agent_is_removed_and_a_living_ones_is_not(self, shm_dir: Path) -> None:
        """Restore memory does not outlive its agent for longer than to the next start."""
        living = Arena(shm_dir, JOB)
        with living.writing(100) as file:
            path = file.path
        (shm_dir / f"{JOB[:16]}.00000000.arena").write_bytes(b"orphan")
        Arena(shm_dir, JOB)
        assert [found.name for found in shm_dir.iterdir()] == [path.name]
        living.close()

    def test_no_room_for_the_arena_is_an_error_with_both_numbers(self, shm_dir: Path) -> None:
        """More than the file system holds raises NO_SPACE, and leaves nothing."""
        disk = os.statvfs(shm_dir)
        too_much = disk.f_blocks * disk.f_frsize + (1 << 30)
        with pytest.raises(NoSpaceError, match="needed"), Arena(shm_dir, JOB).writing(too_much):
            pass
        assert list(shm_dir.iterdir()) == []
