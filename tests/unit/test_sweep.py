"""What a sweep deletes, and all that it leaves alone."""

from __future__ import annotations

import random
import time

import pytest
from fixtures.at_rest import make_claim, put_claim, timeline
from fixtures.roots import RootBuilder

from ckptd.daemon.keys import StepId, decision_key, parse_key
from ckptd.daemon.log_reader import read_newest
from ckptd.daemon.roots import RootGoneError, needed_chunks
from ckptd.daemon.sweep import SweepStoppedError, plan_sweep, sweep
from ckptd.daemon.verify import Verdict, verify_step
from ckptd.storage_backends.base import ObjectInfo, PutMode
from ckptd.storage_backends.errors import StorageError
from ckptd.storage_backends.fault_script import Fault, FaultKind, Op
from ckptd.storage_backends.faulty import FaultyStore
from ckptd.storage_backends.memory import MemoryStore
from ckptd.storage_backends.probe import ABANDONED_S, probe


def keys(store: MemoryStore) -> set[str]:
    """Return everything that is there."""
    return {info.key for info in store.list()}


def good(store: MemoryStore) -> list[int]:
    """Return the listed steps, each proved byte by byte."""
    _, newest = read_newest(store)
    assert newest is not None
    for ref in newest.listed:
        report = verify_step(store, newest, ref)
        assert report.verdict is Verdict.GOOD, report.bad
    return [ref.step for ref in newest.listed]


def test_dropped_steps_go_and_listed_ones_stay_whole() -> None:
    """After keep_last=1 nothing is left of older steps but the chunks the newest refers to."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    for step in (10, 20, 30):
        root.commit(step, keep_last=1)
    plan = sweep(store)
    assert [step.step for step in plan.dead_steps] == [10, 20]
    assert plan.nbytes > 0
    assert good(store) == [30]
    left = {key.id.step for text in keys(store) if (key := parse_key(text)) is not None and hasattr(key, "id")}
    assert left == {10, 30}
    assert [text for text in keys(store) if str(StepId(timeline(1), 10)) in text] == [root.chunks(30)[0]]
    assert sweep(store).delete == []


def test_s013_the_newest_by_number_stay() -> None:
    """Steps 900, 9900, 10000, 100000 with keep_last=2 and a sweep: 10000 and 100000 are whole, the others gone."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    for step in (900, 9900, 10000, 100000):
        root.commit(step, keep_last=2)
    sweep(store)
    assert good(store) == [10000, 100000]


def test_a_dry_run_deletes_nothing() -> None:
    """It says the same and leaves everything."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    root.commit(10, keep_last=1)
    root.commit(20, keep_last=1)
    before = keys(store)
    planned = sweep(store, dry_run=True)
    assert keys(store) == before
    assert planned == sweep(store)
    assert keys(store) == before - {info.key for info in planned.delete}


def test_a_probe_that_was_killed_goes_when_it_is_a_day_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that may be under way stays, and so does what only looks like one."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    root.commit(10)
    killed = FaultyStore(store, Fault(kind=FaultKind.ERROR, op=Op.DELETE, prefix="probe/", times=None))
    monkeypatch.setattr(time, "time", lambda: 1_790_000_000.0)
    with pytest.raises(StorageError):
        probe(killed)
    store.put("probe/notes", b"x")
    left = keys(store)
    (made,) = [key for key in left if key.startswith("probe/") and key != "probe/notes"]
    monkeypatch.setattr(time, "time", lambda: 1_790_000_000.0 + ABANDONED_S)
    assert sweep(store).delete == []
    monkeypatch.setattr(time, "time", lambda: 1_790_000_002.0 + ABANDONED_S)
    assert [info.key for info in sweep(store, dry_run=True).delete] == [made]
    sweep(store)
    assert keys(store) == left - {made}
    assert good(store) == [10]


def test_nothing_newer_than_the_newest_record_is_touched() -> None:
    """Steps in flight, undecided and aborted ones newer than the record stay, markers too."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    root.commit(10)
    root.upload(20)
    root.upload(30, ["node-a"])
    root.abort(40)
    before = keys(store)
    assert sweep(store).delete == []
    root.commit(50)
    plan = sweep(store)
    assert [step.step for step in plan.dead_steps] == [20, 30, 40]  # 50 made them old
    assert decision_key(timeline(1), 40) not in keys(store)
    assert {key for key in before if ".000000000010." in key} <= keys(store)


def test_claims_start_records_the_job_pins_and_foreign_objects_stay_for_ever() -> None:
    """Only what is named exactly like a chunk, an index or a decision is ever deleted."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    root.commit(10, keep_last=1)
    strange = ["notes.txt", "chunks/aa/mine", "index/x/y.pb", "log/readme.md", "log/00000001-0000000000a1.bak"]
    for key in strange:
        store.put(key, b"mine")
    for number in (2, 3):
        root.start(number)
        root.commit(10 * number, keep_last=1)
    before = keys(store)
    sweep(store)
    gone = before - keys(store)
    assert gone
    assert all(key.split("/")[0] in {"chunks", "index", "log"} for key in gone)
    assert not [key for key in gone if "claim" in key or "start" in key or key in strange]


def test_a_quarantined_step_is_left_alone_and_so_is_what_it_refers_to() -> None:
    """Evidence stays: its record, indexes and chunks, also those it shares with dropped steps."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    root.commit(10)
    made = root.commit(20)
    chunks = root.chunks(20)
    root.quarantine(20)
    root.start(2)
    root.commit(30, keep_last=1)
    sweep(store)
    assert set(chunks) <= keys(store)
    assert {ref.key for ref in made.indexes} <= keys(store)
    assert decision_key(timeline(1), 20) in keys(store)
    assert good(store) == [30]
    # Where its index cannot be read it is no root, but still left alone.
    store.put(made.indexes[0].key, b"damaged", mode=PutMode.OVERWRITE)
    sweep(store)
    assert made.indexes[0].key in keys(store)


def test_a_sweep_stops_when_a_newer_timeline_was_claimed() -> None:
    """R7, R8: a claim without a record may be a job that restarts from what looks dead; nothing is deleted."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    root.commit(10, keep_last=1)
    root.commit(20, keep_last=1)
    put_claim(store, make_claim(timeline(2)))
    before = keys(store)
    with pytest.raises(SweepStoppedError, match="00000002-000000000000 was claimed"):
        sweep(store)
    assert keys(store) == before


@pytest.mark.parametrize("what", ["index", "damaged index", "record", "damaged record"])
def test_a_sweep_stops_when_a_root_cannot_be_read(what: str) -> None:
    """R7: without every listed index nobody knows what is needed; nothing is deleted."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    made = root.commit(10)
    root.commit(20)
    root.commit(25)
    root.abort(30)
    root.commit(40)
    key = made.indexes[1].key if "index" in what else decision_key(timeline(1), 10)
    if what.startswith("damaged"):
        store.put(key, store.get(key)[:-1] + b"?", mode=PutMode.OVERWRITE)
    else:
        store.delete(key)
    before = keys(store)
    with pytest.raises(RootGoneError, match="step 10 is listed, but"):
        sweep(store)
    assert keys(store) == before


def test_chunks_of_a_listed_step_that_no_index_refers_to_go() -> None:
    """A restarted agent may have put chunks that its final index does not name."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    root.commit(10)
    stray = f"chunks/ab/{'ab' * 32}.{StepId(timeline(1), 10)}"
    store.put(stray, b"stray")
    assert [info.key for info in sweep(store).delete] == [stray]
    assert good(store) == [10]


def test_an_empty_root_is_swept_without_a_word() -> None:
    """No record, nothing to do, whatever lies there."""
    store = MemoryStore()
    store.put("chunks/aa/x", b"")
    assert sweep(store).delete == []


def test_random_histories_keep_every_listed_step_whole() -> None:
    """Over random starts, commits, aborts, rollbacks and leftovers, a sweep never takes a byte of a listed step."""
    for seed in range(40):
        rng = random.Random(seed)
        store = MemoryStore()
        root = RootBuilder(store)
        number, step = 1, 0
        root.start()
        for _ in range(14):
            step += rng.randrange(1, 5)
            match rng.randrange(6):
                case 0:
                    number += 1
                    origin = rng.choice(root.listed) if root.listed else None
                    root.start(number, origin=origin, rollback=origin is not None)
                case 1:
                    root.upload(step, rng.choice([["node-a"], ["node-a", "node-b"]]))
                case 2:
                    root.abort(step)
                case 3:
                    sweep(store)
                case _:
                    root.commit(step, keep_last=rng.randrange(4))
            expected = [ref.step for ref in root.listed]
            assert good(store) == expected, f"seed {seed}"
        sweep(store)
        assert good(store) == [ref.step for ref in root.listed], f"seed {seed}"
        assert sweep(store).delete == [], f"seed {seed}"


def test_the_plan_is_pure() -> None:
    """The same record, listing and roots give the same plan; a listing of a part plans that part."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    root.commit(10, keep_last=1)
    root.commit(20, keep_last=1)
    _, newest = read_newest(store)
    assert newest is not None
    needed = needed_chunks(store, newest, workers=1)
    listing = list(store.list())
    whole = plan_sweep(newest, listing, needed)
    assert plan_sweep(newest, reversed(listing), needed) == whole
    logs = [info for info in listing if info.key.startswith("log/")]
    assert plan_sweep(newest, logs, needed).delete == [
        ObjectInfo(key=info.key, size=info.size) for info in whole.delete if info.key.startswith("log/")
    ]
