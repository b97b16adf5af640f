"""An upload puts what the slots hold, once, verified, and the index last; doing it again changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import blake3
import pytest
import xxhash

from ckptd.daemon import chunks, failpoints
from ckptd.daemon.chunks import aligned, stream_layout
from ckptd.daemon.errors import DaemonError, FormatError
from ckptd.daemon.index import chunk_refs, parse_index
from ckptd.daemon.keys import StepId, Timeline
from ckptd.daemon.slots import SlotPool, SlotState
from ckptd.daemon.telemetry import EventLog
from ckptd.daemon.uploader import NodeSnapshot, RankSnapshot, UploadCancelledError, Uploader
from ckptd.protos import shard_table
from ckptd.protos.error_pb2 import (
    REASON_ABORTED,
    REASON_INTERNAL,
    REASON_LAYOUT_MISMATCH,
    REASON_NOT_COMPARED,
    REASON_STORE_FAILED,
)
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import IndexRef, Mesh, RankSection, SlotTrailer, StepRef
from ckptd.storage_backends.base import Buffer, ObjectInfo, ObjectStore, PutMode
from ckptd.storage_backends.errors import StorageError, Unavailable
from ckptd.storage_backends.faulty import Fault, FaultKind, FaultyStore, Op
from ckptd.storage_backends.memory import MemoryStore

T1 = Timeline(1, "0123456789ab")
T2 = Timeline(2, "ba9876543210")
PLAN = b"P" * 32
KIB = 1 << 10


class Recorder(MemoryStore):
    """A store that remembers its calls in order, and how many puts ran at once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self.most_puts = 0
        self._running = 0
        self._count = threading.Lock()

    def put(self, key: str, data: Buffer, *, mode: PutMode = PutMode.CREATE) -> None:
        with self._count:
            self._running += 1
            self.most_puts = max(self.most_puts, self._running)
        assert isinstance(data, memoryview), "a chunk must be put from the slot's own memory"
        try:
            super().put(key, data, mode=mode)
        finally:
            with self._count:
                self._running -= 1
                self.calls.append(("put", key))

    def head(self, key: str) -> ObjectInfo:
        self.calls.append(("head", key))
        return super().head(key)

    def names(self) -> set[str]:
        return {info.key for info in self.list()}


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="ckptd-test-upload-", dir=parent))
    made = SlotPool(folder, "ab" * 32, touch=False)
    yield made
    made.close()
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def no_failpoints() -> Iterator[None]:
    yield
    failpoints.configure("")


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut a thousand times finer than in life, so that many chunks are little to hash."""
    monkeypatch.setattr(chunks, "MAX_CHUNK_BYTES", 64 * KIB)
    monkeypatch.setattr(chunks, "LARGE_SHARD_BYTES", 32 * KIB)


def stage(
    pool: SlotPool,
    tensors: Mapping[str, bytes],
    objects: Mapping[str, bytes] | None = None,
    *,
    rank: int = 0,
    number: int = 0,
    step: int = 10,
    timeline: Timeline = T1,
    frozen: frozenset[str] = frozenset(),
    writer: list[int] | None = None,
    trailer_rows: list[int] | None = None,
    uncompared: bool = False,
) -> RankSnapshot:
    """Fill a slot as a trainer would: shards at the layout's offsets, objects, trailer."""
    rows = shard_table.build(
        ShardRow(
            name=name,
            dtype="uint8",
            global_shape=(len(data),),
            offset=(0,),
            length=(len(data),),
            scope=0,
            nbytes=len(data),
            group=int(name in frozen),
        )
        for name, data in tensors.items()
    )
    writer = writer or [rank] * len(tensors)
    layout = stream_layout(rank, rows, writer)
    blob = b"".join((objects or {}).values())
    offsets = [sum(len(data) for data in list((objects or {}).values())[:at]) for at in range(len(objects or {}))]
    replicas = [row for row, writes in enumerate(writer) if writes != rank] if trailer_rows is None else trailer_rows
    values = list(tensors.values())
    trailer = SlotTrailer(
        object_names=list(objects or {}),
        object_offset=offsets,
        object_length=[len(data) for data in (objects or {}).values()],
        replica_row=replicas,
        replica_fingerprints=b"".join(xxhash.xxh3_128_digest(values[row]) for row in replicas),
        metrics={"loss": 0.5},
        uncompared=uncompared,
    ).SerializeToString()
    slot = pool.acquire(rank, number, layout.data_bytes, len(blob) + len(trailer) + 8)
    header = replace(
        slot.header,
        state=SlotState.WRITING,
        run_id="run",
        timeline=str(timeline),
        step=step,
        layout_digest=shard_table.digest(rows),
        plan_digest=PLAN,
    )
    slot.begin(header, layout)
    for data, offset, writes in zip(values, layout.offsets, writer, strict=True):
        if writes == rank:
            slot.data[offset : offset + len(data)] = data
    slot.tail[: len(blob)] = blob
    at = -(-len(blob) // 8) * 8
    slot.tail[at : at + len(trailer)] = trailer
    slot.stage(objects_bytes=len(blob), trailer_bytes=len(trailer), staged_at=0)
    return RankSnapshot(slot=slot, rows=rows, writer=writer, coordinate=[rank])


def node(
    *ranks: RankSnapshot,
    step: int = 10,
    timeline: Timeline = T1,
    base: tuple[StepId, Mapping[int, RankSection]] | None = None,
    world: int = 2,
    compared_in: StepRef | None = None,
) -> NodeSnapshot:
    return NodeSnapshot(
        step=step,
        timeline=timeline,
        node="node-a",
        world=world,
        mesh=Mesh(axes=["dp"], sizes=[world]),
        plan_digest=PLAN,
        base=StepRef(step=base[0].step, timeline=str(base[0].timeline), record_key="log/x") if base else None,
        base_sections=base[1] if base else {},
        compared_in=compared_in,
        ranks={each.slot.rank: each for each in ranks},
    )


def upload(store: ObjectStore, snapshot: NodeSnapshot, *, resumed: bool = False) -> IndexRef:
    uploader = Uploader(store)
    try:
        return uploader.upload(snapshot, resumed=resumed)
    finally:
        uploader.close()


def read_back(store: MemoryStore, ref: IndexRef) -> dict[int, bytes]:
    """Join each rank's chunks from the store, checking every digest on the way."""
    data = store.get(ref.key)
    assert blake3.blake3(data).hexdigest() == ref.blake3
    assert len(data) == ref.bytes
    streams = {}
    for rank, section in parse_index(data)[1].items():
        parts = []
        for chunk in chunk_refs(section):
            parts.append(store.get(chunk.key))
            assert blake3.blake3(parts[-1]).digest() == chunk.digest
        streams[rank] = b"".join(parts)
    return streams


class TestWhatIsStored:
    def test_every_shard_and_object_comes_back_from_the_store(self, pool: SlotPool) -> None:
        """The index alone leads from a name to its bytes, and its fingerprints are those of the plain bytes."""
        tensors = {"w": os.urandom(1000), "b": os.urandom(7), "empty": b""}
        objects = {"rng": b"r" * 33, "loader": b"l" * 5, "none": b""}
        store = Recorder()
        ref = upload(store, node(stage(pool, tensors, objects)))
        stream = read_back(store, ref)[0]
        header, sections = parse_index(store.get(ref.key))
        section = sections[0]
        for at, data in enumerate(tensors.values()):
            offset = section.stream_offset[at]
            assert stream[offset : offset + len(data)] == data
            assert section.fingerprints[16 * at : 16 * at + 16] == xxhash.xxh3_128(data).digest()
        for at, (name, data) in enumerate(objects.items()):
            offset = section.object_offset[at]
            assert section.object_names[at] == name
            assert stream[offset : offset + section.object_length[at]] == data
            assert section.object_fingerprints[16 * at : 16 * at + 16] == xxhash.xxh3_128(data).digest()
        assert dict(header.metrics) == {"loss": 0.5}
        assert header.new_bytes == len(stream) == aligned(aligned(1000) + 64) + 38

    def test_replicas_bring_their_fingerprints_and_no_bytes(self, pool: SlotPool) -> None:
        """A row that another rank writes has the trainer's fingerprint and is not in the stream."""
        tensors = {"own": b"o" * 64, "shared": b"s" * 100}
        store = Recorder()
        ref = upload(store, node(stage(pool, tensors, writer=[0, 1])))
        section = parse_index(store.get(ref.key))[1][0]
        assert list(section.writer) == [0, 1]
        assert section.fingerprints[16:] == xxhash.xxh3_128(b"s" * 100).digest()
        assert sum(section.chunk_length) == 64

    def test_fingerprints_of_other_rows_than_the_plans_are_refused(self, pool: SlotPool) -> None:
        """A trainer that fingerprinted the wrong replicas fails the step instead of mislabelling bytes."""
        wrong = stage(pool, {"own": b"o" * 64, "shared": b"s" * 100}, writer=[0, 1], trailer_rows=[0])
        with pytest.raises(DaemonError, match="rank 0") as caught:
            upload(Recorder(), node(wrong))
        assert caught.value.error.reason == REASON_LAYOUT_MISMATCH

    def test_replicas_are_left_out_on_the_coordinators_word_alone(self, pool: SlotPool) -> None:
        """With it they are marked zeros; without it the node seals nothing; with fingerprints beside the mark neither."""
        tensors = {"own": b"o" * 64, "shared": b"s" * 100}
        left = stage(pool, tensors, writer=[0, 1], trailer_rows=[], uncompared=True)
        word = StepRef(step=4, timeline=str(T1))
        store = Recorder()
        header, sections = parse_index(store.get(upload(store, node(left, compared_in=word)).key))
        assert header.compared_in == word
        assert sections[0].uncompared
        assert sections[0].fingerprints == xxhash.xxh3_128_digest(b"o" * 64) + bytes(16)
        store = Recorder()
        with pytest.raises(DaemonError, match="rank 0: the trainer gave no fingerprints") as caught:
            upload(store, node(left))
        assert caught.value.error.reason == REASON_NOT_COMPARED
        assert not store.calls
        both = stage(pool, tensors, number=1, writer=[0, 1], uncompared=True)
        with pytest.raises(DaemonError, match="other rows") as caught:
            upload(Recorder(), node(both, compared_in=word))
        assert caught.value.error.reason == REASON_LAYOUT_MISMATCH

    def test_lost_fingerprints_are_not_taken_for_left_out_ones(self, pool: SlotPool) -> None:
        """The word is no mark: a trailer that lacks them and does not say so is refused."""
        lost = stage(pool, {"own": b"o" * 64, "shared": b"s" * 100}, writer=[0, 1], trailer_rows=[])
        with pytest.raises(DaemonError, match="rank 0") as caught:
            upload(Recorder(), node(lost, compared_in=StepRef(step=4, timeline=str(T1))))
        assert caught.value.error.reason == REASON_LAYOUT_MISMATCH

    def test_a_rank_that_writes_all_it_holds_marks_nothing(self, pool: SlotPool) -> None:
        """Nothing of it was left out, so an older reader needs to know of nothing."""
        store = Recorder()
        word = StepRef(step=4, timeline=str(T1))
        ref = upload(store, node(stage(pool, {"own": b"o" * 64}, uncompared=True), compared_in=word))
        header, sections = parse_index(store.get(ref.key))
        assert not sections[0].uncompared
        assert not header.required_features

    def test_rank_without_bytes_has_an_empty_section(self, pool: SlotPool) -> None:
        """A rank that writes nothing is sealed all the same."""
        store = Recorder()
        ref = upload(store, node(stage(pool, {})))
        assert len(store.names()) == 1
        assert list(parse_index(store.get(ref.key))[1][0].chunk_length) == []


class TestDeterminism:
    def test_two_uploads_of_one_staging_make_the_same_objects(self, pool: SlotPool) -> None:
        """Key, index bytes and chunks do not depend on the process, the store or the time."""
        ranks = [
            stage(pool, {"a": os.urandom(500), "b": os.urandom(9)}, {"x": b"1"}),
            stage(pool, {"c": os.urandom(50)}, rank=1),
        ]
        first, second = Recorder(), Recorder()
        assert upload(first, node(*ranks)) == upload(second, node(*reversed(ranks)))
        assert first.names() == second.names()

    def test_second_upload_to_the_same_store_changes_nothing(self, pool: SlotPool) -> None:
        """After a crash behind the index, the same call answers the same; AlreadyExists is our own bytes."""
        ranks = [stage(pool, {"a": os.urandom(500)})]
        store = Recorder()
        ref = upload(store, node(*ranks))
        before = store.names()
        assert upload(store, node(*ranks)) == ref
        assert upload(store, node(*ranks), resumed=True) == ref
        assert store.names() == before

    @pytest.mark.parametrize("where", ["before_put", "after_put", "before_index", "after_index"])
    def test_upload_that_broke_off_anywhere_is_finished_by_calling_again(self, pool: SlotPool, where: str) -> None:
        """Whatever was put before the failure is used, and the result is that of an undisturbed upload."""
        ranks = [stage(pool, {"a": os.urandom(40 * KIB), "b": os.urandom(500)}, {"x": b"1"})]
        undisturbed, store = Recorder(), Recorder()
        expected = upload(undisturbed, node(*ranks))
        nth = 2 if "put" in where else 1
        failpoints.configure(f"uploader.{where}=error:boom@{nth}")
        with pytest.raises(failpoints.FailpointError, match="boom"):
            upload(store, node(*ranks))
        failpoints.configure("")
        assert (expected.key in store.names()) == (where == "after_index")
        store.calls.clear()
        assert upload(store, node(*ranks), resumed=True) == expected
        assert store.names() == undisturbed.names()
        if where == "after_put":
            assert sum(1 for call, key in store.calls if call == "put" and key.startswith("chunks/")) < 3


class TestDedup:
    def test_unchanged_chunks_are_referred_to_where_they_were_first_written(self, pool: SlotPool) -> None:
        """A frozen chunk keeps its name over three steps, through the base's own reference; only new bytes are put."""
        store = Recorder()
        frozen = {"frozen": os.urandom(200)}
        base = None
        names = []
        for step, timeline in [(10, T1), (20, T1), (5, T2)]:
            ranks = [
                stage(pool, {"w": os.urandom(100), **frozen}, step=step, timeline=timeline, frozen=frozenset(frozen))
            ]
            ref = upload(store, node(*ranks, step=step, timeline=timeline, base=base))
            header, sections = parse_index(store.get(ref.key))
            names.append([chunk.key for chunk in chunk_refs(sections[0])])
            base = (StepId(timeline, step), sections)
            assert header.new_bytes == (128 + 256 if step == 10 else 128)
            ranks[0].slot.free()
        assert names[0][1] == names[1][1] == names[2][1]
        assert len({keys[0] for keys in names}) == 3
        assert len([key for key in store.names() if key.startswith("chunks/")]) == 4

    def test_chunk_of_another_rank_of_the_base_counts(self, pool: SlotPool) -> None:
        """After a restart with moved ranks, bytes that any rank of the base stored are not stored again."""
        store = Recorder()
        data = os.urandom(100)
        first = upload(store, node(stage(pool, {"w": data}, rank=1)))
        sections = parse_index(store.get(first.key))[1]
        moved = stage(pool, {"v": data}, rank=0, step=20)
        ref = upload(store, node(moved, step=20, base=(StepId(T1, 10), sections)))
        header, found = parse_index(store.get(ref.key))
        assert header.new_bytes == 0
        assert list(found[0].sources) == [str(StepId(T1, 10))]

    def test_equal_chunks_of_one_step_are_put_once(self, pool: SlotPool) -> None:
        """Two ranks with equal streams make one object, and it counts once as new."""
        store = Recorder()
        ranks = [stage(pool, {"w": b"z" * 640}, rank=rank) for rank in (0, 1)]
        ref = upload(store, node(*ranks))
        assert sum(1 for call, key in store.calls if call == "put" and key.startswith("chunks/")) == 1
        assert parse_index(store.get(ref.key))[0].new_bytes == 640


class TestOrderAndBounds:
    def test_index_comes_after_every_chunk_was_seen(self, pool: SlotPool) -> None:
        """Each chunk is put, then HEADed, and the index is put after all of that."""
        store = Recorder()
        ref = upload(store, node(stage(pool, {"a": os.urandom(40 * KIB), "b": os.urandom(33)})))
        at_index = store.calls.index(("put", ref.key))
        for key in store.names() - {ref.key}:
            assert store.calls.index(("put", key)) < store.calls.index(("head", key)) < at_index

    def test_puts_in_flight_stay_within_the_limit(self, pool: SlotPool) -> None:
        """No more puts run at once than the store asked for."""
        store = Recorder()
        tensors = {f"t{at}": os.urandom(32 * KIB) for at in range(3)}
        uploader = Uploader(store, put_threads=1)
        uploader.upload(node(stage(pool, tensors)))
        uploader.close()
        assert store.most_puts == 1

    def test_events_tell_bytes_and_seconds(self, pool: SlotPool, tmp_path: Path) -> None:
        """hashed, put and sealed-local name step, timeline and bytes."""
        events = EventLog(tmp_path / "events")
        uploader = Uploader(Recorder(), events=events)
        uploader.upload(node(stage(pool, {"a": bytes(64)})))
        uploader.close()
        events.close()
        lines = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
        assert sorted(line["kind"] for line in lines) == ["hashed", "put", "sealed-local"]
        assert all(line["step"] == 10 and line["timeline"] == str(T1) and line["bytes"] == 64 for line in lines)
        assert all(line["seconds"] >= 0 for line in lines)


class TestFailure:
    def test_store_that_loses_one_put_is_repaired(self, pool: SlotPool) -> None:
        """A put that returned but left nothing is found by HEAD and made again before the index."""
        inner = MemoryStore()
        store = FaultyStore(inner, Fault(kind=FaultKind.PUT_LOST, op=Op.PUT, prefix="chunks/"), seed=1)
        data = os.urandom(100)
        ref = upload(store, node(stage(pool, {"w": data})))
        assert read_back(inner, ref)[0][:100] == data

    def test_store_that_loses_puts_for_good_fails_the_upload_without_an_index(self, pool: SlotPool) -> None:
        """No index ever names a chunk that the store does not show; the error names the object."""
        inner = MemoryStore()
        store = FaultyStore(inner, Fault(kind=FaultKind.PUT_LOST, op=Op.PUT, prefix="chunks/", times=None), seed=1)
        with pytest.raises(DaemonError, match="shows nothing") as caught:
            upload(store, node(stage(pool, {"w": os.urandom(100)})))
        assert caught.value.error.reason == REASON_STORE_FAILED
        assert caught.value.error.object.startswith("chunks/")
        assert list(inner.list("index/")) == []

    @pytest.mark.parametrize("verify_puts", [True, False])
    def test_cut_object_under_our_name_is_written_again(self, pool: SlotPool, verify_puts: bool) -> None:
        """A short object left by an earlier attempt does not pass for the chunk."""
        snapshot = node(stage(pool, {"w": os.urandom(100)}))
        store = Recorder()
        ref = upload(store, snapshot)
        (chunk,) = store.names() - {ref.key}
        whole = store.get(chunk)
        store.put(chunk, memoryview(whole[:50]), mode=PutMode.OVERWRITE)
        store.delete(ref.key)
        uploader = Uploader(store, verify_puts=verify_puts)
        assert uploader.upload(snapshot) == ref
        uploader.close()
        assert store.get(chunk) == whole

    def test_error_of_one_put_stops_the_rest_and_is_the_one_raised(self, pool: SlotPool) -> None:
        """The cause comes out, not a consequence, and chunks that were not begun are not put."""
        inner = Recorder()
        store = FaultyStore(inner, Fault(kind=FaultKind.ERROR, op=Op.PUT, prefix="chunks/"), seed=1)
        tensors = {f"t{at}": os.urandom(32 * KIB) for at in range(6)}
        uploader = Uploader(store, hash_threads=1, put_threads=1)
        with pytest.raises(Unavailable) as caught:
            uploader.upload(node(stage(pool, tensors)))
        uploader.close()
        assert isinstance(caught.value, StorageError)
        assert inner.names() == set()

    def test_cancelled_upload_stops_between_chunks(self, pool: SlotPool) -> None:
        """Once the flag is set nothing more is put, no index is, and no thread holds the slot."""
        cancel = threading.Event()

        class Cancelling(Recorder):
            def put(self, key: str, data: Buffer, *, mode: PutMode = PutMode.CREATE) -> None:
                super().put(key, data, mode=mode)
                cancel.set()

        store = Cancelling()
        tensors = {f"t{at}": os.urandom(32 * KIB) for at in range(4)}
        snapshot = node(stage(pool, tensors))
        uploader = Uploader(store, put_threads=1)
        with pytest.raises(UploadCancelledError) as caught:
            uploader.upload(snapshot, cancel=cancel)
        uploader.close()
        assert caught.value.error.reason == REASON_ABORTED
        assert len(store.names()) == 1
        assert not any(key.startswith("index/") for key in store.names())

    def test_slot_of_another_step_is_never_uploaded(self, pool: SlotPool) -> None:
        """A slot that holds step 10 does not become step 20, nor one that is still being written."""
        staged = stage(pool, {"w": b"w"})
        for wrong in (node(staged, step=20), node(staged, timeline=T2)):
            store = Recorder()
            with pytest.raises(DaemonError) as caught:
                upload(store, wrong)
            assert caught.value.error.reason == REASON_INTERNAL
            assert store.names() == set()
        staged.slot.free()
        with pytest.raises(DaemonError, match="is free"):
            upload(Recorder(), node(staged))

    def test_slot_taken_away_in_the_midst_seals_nothing(self, pool: SlotPool) -> None:
        """Bytes that may have changed while they were read get no index."""
        staged = stage(pool, {"w": b"w"})

        class Freeing(Recorder):
            def put(self, key: str, data: Buffer, *, mode: PutMode = PutMode.CREATE) -> None:
                super().put(key, data, mode=mode)
                staged.slot.free()

        store = Freeing()
        with pytest.raises(DaemonError, match="is free"):
            upload(store, node(staged))
        assert not any(key.startswith("index/") for key in store.names())

    def test_unreadable_trailer_fails_before_anything_is_put(self, pool: SlotPool) -> None:
        """Bytes that are no trailer fail the upload at once."""
        staged = stage(pool, {"w": b"w"})
        staged.slot.tail[:4] = b"\xff\xff\xff\xff"
        store = Recorder()
        with pytest.raises(FormatError):
            upload(store, node(staged))
        assert store.names() == set()
