"""Every byte is proved, and everything bad is named."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from fixtures.at_rest import NOW, Shard, build_node, make_claim, put_claim, timeline
from fixtures.roots import RootBuilder

from ckptd.daemon import history, verify
from ckptd.daemon.coverage import Whole, committed, whole
from ckptd.daemon.index import build_index, load_index
from ckptd.daemon.keys import IndexKey, StepId, claim_key, decision_key, index_key, parse_key, start_key
from ckptd.daemon.log_reader import NewestRecord, read_newest
from ckptd.daemon.records import digest_hex
from ckptd.daemon.streams import runs_of
from ckptd.daemon.verify import Proved, StepReport, Verdict, verify_step
from ckptd.protos.snapshot_pb2 import IndexRef, RankSection, Retention
from ckptd.storage_backends.base import ObjectStore, PutMode
from ckptd.storage_backends.memory import MemoryStore


def newest_of(store: ObjectStore) -> NewestRecord:
    """Return the newest record."""
    _, newest = read_newest(store)
    assert newest is not None
    return newest


def report_of(store: ObjectStore, **more: object) -> StepReport:
    """Return the verdict on the newest step."""
    newest = newest_of(store)
    return verify_step(store, newest, newest.listed[-1], **more)  # type: ignore[arg-type]


@pytest.fixture
def root() -> RootBuilder:
    """A root with steps 10 and 20, 20 referring to 10."""
    made = RootBuilder(MemoryStore())
    made.start()
    made.commit(10)
    made.commit(20)
    return made


def flip(store: ObjectStore, key: str, at: int = 5) -> None:
    """Flip one bit of an object at rest."""
    data = bytearray(store.get(key))
    data[at] ^= 4
    store.put(key, bytes(data), mode=PutMode.OVERWRITE)


def test_a_good_step_is_good(root: RootBuilder) -> None:
    """All objects are counted: record, two indexes, three chunks."""
    report = report_of(root.store)
    assert report.verdict is Verdict.GOOD
    assert report.objects == 6
    assert report.nbytes > 64 * 2


def test_all_bad_objects_are_named(root: RootBuilder) -> None:
    """One missing, one cut, one altered: three findings, each with its key and kind."""
    missing, altered, cut = root.chunks(20)
    root.store.delete(missing)
    flip(root.store, altered)
    root.store.put(cut, root.store.get(cut)[:-1], mode=PutMode.OVERWRITE)
    report = report_of(root.store)
    assert report.verdict is Verdict.CORRUPT
    assert {bad.key: bad.what.split(":")[0] for bad in report.bad} == {
        missing: "missing",
        altered: "altered",
        cut: "length",
    }


def test_s006_files_cut_to_nothing_or_grown_are_found(root: RootBuilder) -> None:
    """Zero bytes after a power cut, and bytes too many, are both a wrong length."""
    first, second, _ = root.chunks(20)
    root.store.put(first, b"", mode=PutMode.OVERWRITE)
    root.store.put(second, root.store.get(second) + b"x", mode=PutMode.OVERWRITE)
    assert [bad.what.split(":")[0] for bad in report_of(root.store).bad] == ["length", "length"]


@pytest.mark.parametrize("what", ["index", "record"])
@pytest.mark.parametrize("how", ["missing", "altered"])
def test_every_object_of_a_step_is_proved(root: RootBuilder, what: str, how: str) -> None:
    """A bit flipped or a loss in an index or in the step's record is found and named."""
    newest = newest_of(root.store)
    ref = newest.listed[0]
    key = {
        "index": root.commits[StepId(timeline(1), 10)].indexes[0].key,
        "record": decision_key(timeline(1), 10),
    }[what]
    if how == "missing":
        root.store.delete(key)
    else:
        flip(root.store, key)
    report = verify_step(root.store, newest, ref)
    assert report.verdict is Verdict.CORRUPT
    assert [bad.key for bad in report.bad] == [key]


def test_a_step_is_proved_without_its_claim(root: RootBuilder) -> None:
    """A restore does not need the claim, so a root that lost it is still good."""
    root.store.delete(claim_key(timeline(1)))
    assert report_of(root.store).verdict is Verdict.GOOD


def test_every_flipped_bit_of_a_small_root_is_found(root: RootBuilder) -> None:
    """Flip one bit in any byte of any object the step needs: the verdict is corrupt, every time."""
    newest = newest_of(root.store)
    ref = newest.listed[0]
    needed = [
        decision_key(timeline(1), 10),
        *(index.key for index in root.commits[StepId(timeline(1), 10)].indexes),
        *root.chunks(10),
    ]
    for key in needed:
        kept = root.store.get(key)
        for at in range(0, len(kept), 13):
            flip(root.store, key, at)
            report = verify_step(root.store, newest, ref, readers=1)
            assert [bad.key for bad in report.bad] == [key], (key, at)
            root.store.put(key, kept, mode=PutMode.OVERWRITE)
    assert verify_step(root.store, newest, ref).verdict is Verdict.GOOD


def committed_root(store: ObjectStore, change: object, *, chunk_bytes: int = 100) -> None:
    """Put a step of one rank whose section `change` altered after it was built, and commit it as it is."""
    claim = make_claim(timeline(1), {"n": [0]})
    put_claim(store, claim)
    shards = [Shard(name=f"t{at}", values=np.arange(60 + at, dtype="<i8")) for at in range(3)]
    built = build_node(claim, 5, "n", {0: (shards, {"o": b"12345678"})}, chunk_bytes=chunk_bytes)
    header, sections = load_index(built.ref, built.index)[1:]
    change(sections[0])  # type: ignore[operator]
    data = build_index(header, [sections[0]])
    digest = digest_hex(data)
    ref = IndexRef(node="n", key=index_key(5, timeline(1), "n", digest), blake3=digest, bytes=len(data))
    for key, chunk in built.chunks.items():
        store.put(key, chunk)
    store.put(ref.key, data)
    found = whole(claim, 5, {"n": [load_index(ref, data)]})
    assert isinstance(found, Whole)
    start = history.start_record(
        timeline=timeline(1),
        run_id="r",
        listed=(),
        adopted=(),
        origin=None,
        rollback=False,
        quarantined=(),
        retention=Retention(),
        created_at=NOW,
    )
    store.put(start_key(timeline(1)), history.to_bytes(start))
    record = history.decision_record(
        timeline=timeline(1),
        step=5,
        committed=committed(claim=claim, whole=found, created_at=NOW),
        listed=(),
        quarantined=(),
        retention=Retention(),
        created_at=NOW,
    )
    store.put(decision_key(timeline(1), 5), history.to_bytes(record))


def test_an_index_that_points_to_the_wrong_bytes_is_found() -> None:
    """All digests are right, but a row is said to stand elsewhere: its fingerprint tells."""
    for chunk_bytes in (100, 4096):
        store = MemoryStore()
        committed_root(store, lambda _: None, chunk_bytes=chunk_bytes)
        assert report_of(store).verdict is Verdict.GOOD
    store = MemoryStore()
    committed_root(store, lambda section: section.stream_offset.__setitem__(1, section.stream_offset[1] + 8))
    report = report_of(store)
    assert report.verdict is Verdict.CORRUPT
    assert "'t1' does not have the fingerprint" in report.bad[0].what


def test_a_fingerprint_that_does_not_fit_is_found() -> None:
    """The bytes are right and the index's word on them is not: a tensor and an object are named."""

    def change(section: RankSection) -> None:
        section.fingerprints = section.fingerprints[:16] + bytes(16) + section.fingerprints[32:]
        section.object_fingerprints = bytes(16)

    store = MemoryStore()
    committed_root(store, change)
    whats = " ".join(bad.what for bad in report_of(store).bad)
    assert "'t1'" in whats
    assert "'o'" in whats
    assert "'t0'" not in whats


def test_runs_cover_every_chunk_and_row_once() -> None:
    """However chunks are cut, each chunk and each stored row is in one run, and no row leaves its run."""
    for chunk_bytes in (1, 7, 64, 100, 512, 4096):
        claim = make_claim(timeline(1), {"n": [0]})
        shards = [Shard(name=f"t{at}", values=np.arange(9 + at, dtype="<i4")) for at in range(5)]
        built = build_node(claim, 5, "n", {0: (shards, {"o": b"123", "e": b""})}, chunk_bytes=chunk_bytes)
        section = load_index(built.ref, built.index)[2][0]
        runs = list(runs_of(section))
        assert sum(len(run.chunks) for run in runs) == len(section.chunk_length)
        assert sorted(row.name for run in runs for row in run.rows) == ["o", "t0", "t1", "t2", "t3", "t4"]
        for run in runs:
            low, high = run.chunks[0].stream_offset, run.chunks[-1].stream_offset + run.chunks[-1].length
            assert all(low <= row.offset and row.offset + row.nbytes <= high for row in run.rows)


def test_memory_is_bounded_by_the_readers_buffers() -> None:
    """Chunks are read in pieces: the peak is the pool of buffers, whatever the size of chunks."""
    store = MemoryStore()
    claim = make_claim(timeline(1), {"n": [0]})
    big = Shard(name="big", values=np.zeros(6 << 20, dtype=np.uint8))
    built = build_node(claim, 5, "n", {0: ([big], {})}, chunk_bytes=3 << 20)
    for key, chunk in built.chunks.items():
        store.put(key, chunk)
    section = load_index(built.ref, built.index)[2][0]
    runs = list(runs_of(section))
    assert len(runs) == 1
    finding = verify._Finding(step=StepId(timeline(1), 5))
    buffers = verify._Buffers(1 << 16)
    tracemalloc.start()
    assert verify._prove_run(store, runs[0], finding, buffers, None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 18, peak
    assert finding.report().nbytes == 6 << 20


def test_chunks_that_steps_share_are_read_once(root: RootBuilder) -> None:
    """With `--all`, a run of chunks that was proved for one step is not read again for the next."""
    newest = newest_of(root.store)
    read: list[int] = []
    proved = Proved()
    for ref in newest.listed:
        report = verify_step(root.store, newest, ref, proved=proved, progress=read.append, readers=1)
        assert report.verdict is Verdict.GOOD
    sizes = [len(root.store.get(key)) for key in {*root.chunks(10), *root.chunks(20)}]
    assert sum(read) == sum(sizes)


def test_a_bad_shared_chunk_is_found_in_every_step_that_refers_to_it(root: RootBuilder) -> None:
    """Only good runs are remembered."""
    shared = (set(root.chunks(10)) & set(root.chunks(20))).pop()
    flip(root.store, shared)
    newest = newest_of(root.store)
    proved = Proved()
    for ref in newest.listed:
        report = verify_step(root.store, newest, ref, proved=proved)
        assert [bad.key for bad in report.bad] == [shared]
    assert isinstance(parse_key(root.commits[StepId(timeline(1), 10)].indexes[0].key), IndexKey)
