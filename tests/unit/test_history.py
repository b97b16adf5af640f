"""What the log says, and what a new timeline may adopt."""

from __future__ import annotations

import random

import pytest
from fixtures.at_rest import NOW, make_claim, timeline
from fixtures.roots import RootBuilder
from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon import history
from ckptd.daemon.errors import FormatError
from ckptd.daemon.history import parse_log
from ckptd.daemon.keys import (
    INDEX_PREFIX,
    ClaimKey,
    DecisionKey,
    StartKey,
    StepId,
    claim_key,
    decision_key,
    parse_record_key,
    start_key,
)
from ckptd.daemon.log_reader import read_committed, read_newest
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Committed, IndexRef, Record
from ckptd.storage_backends.base import PutMode
from ckptd.storage_backends.memory import MemoryStore

timelines = st.builds(timeline, st.integers(1, 12), st.integers(0, 3))
log_keys = st.lists(
    st.one_of(
        st.builds(ClaimKey, timelines),
        st.builds(StartKey, timelines),
        st.builds(DecisionKey, st.builds(StepId, timelines, st.integers(0, 200_000))),
    ),
    max_size=20,
)


@given(log_keys, st.randoms(use_true_random=False))
def test_the_log_is_ordered_by_timeline_and_step_start_record_first(keys: list[object], rng: random.Random) -> None:
    """Newest first is (timeline, step), whatever the order and names of the listing; foreign keys change nothing."""
    texts = [*map(str, keys), "log/README", "log/00000001-zz.start.json"]
    rng.shuffle(texts)
    found = parse_log(texts).record_keys()
    positions = [key.position for text in found if (key := parse_record_key(text)) is not None]
    assert positions == sorted(positions, reverse=True)
    assert set(found) == {str(key) for key in keys if not isinstance(key, ClaimKey)}


@given(log_keys, timelines)
def test_a_resolver_sees_older_timelines_only(keys: list[object], mine: object) -> None:
    """R2: records of the own and of newer timelines are no candidates for the newest record of older ones."""
    for text in parse_log(map(str, keys)).record_keys(before=mine):  # type: ignore[arg-type]
        key = parse_record_key(text)
        assert key is not None
        assert key.timeline < mine  # type: ignore[operator]


@given(log_keys)
def test_the_next_number_is_above_every_trace(keys: list[object]) -> None:
    """R1: a number is never used twice, not even where a claim was lost."""
    view = parse_log(map(str, keys))
    numbers = [key.timeline.number for key in keys]  # type: ignore[attr-defined]
    assert view.next_number() == max(numbers, default=0) + 1
    claims = [key.timeline for key in keys if isinstance(key, ClaimKey)]
    assert view.highest_claim() == max(claims, default=None)
    assert all(view.is_fenced(claim) == (claim != max(claims)) for claim in claims)


def test_equal_numbers_are_ordered_by_nonce() -> None:
    """Without put-if-absent two processes may take one number: the greater nonce is the newer timeline."""
    one, two = timeline(3, 1), timeline(3, 2)
    view = parse_log([claim_key(one), claim_key(two)])
    assert view.is_fenced(one)
    assert not view.is_fenced(two)
    assert view.next_number() == 4


def test_an_abort_marker_is_no_record() -> None:
    """R5: the newest record is found behind any number of abort markers, and what it lists is unchanged."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    root.commit(10)
    for step in (20, 30, 40):
        root.abort(step)
    view, newest = read_newest(store)
    assert newest is not None
    assert newest.key == decision_key(timeline(1), 10)
    assert [ref.step for ref in newest.listed] == [10]
    assert sorted(step.step for step in newest.aborted) == [20, 30, 40]
    assert [step for step, _ in view.decision_keys(timeline(1))] == [10, 20, 30, 40]


def test_a_damaged_newest_record_is_an_error_and_not_skipped() -> None:
    """The record before a damaged one would bring back what was dropped since: it is never used instead."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    root.commit(10)
    root.commit(20)
    key = decision_key(timeline(1), 20)
    store.put(key, store.get(key)[:-40], mode=PutMode.OVERWRITE)
    with pytest.raises(FormatError, match=r"000000000020\.json"):
        read_newest(store)


def test_latest_is_the_newest_records_own_step_or_its_from() -> None:
    """After going back to 10 of 10, 20, 30 the latest is 10; a number alone says nothing."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    for step in (10, 20, 30):
        root.commit(step)
    root.start(2, origin=root.listed[0], rollback=True)
    _, newest = read_newest(store)
    assert newest is not None
    assert newest.latest is not None
    assert newest.latest.step == 10
    root.commit(15)
    _, newest = read_newest(store)
    assert newest is not None
    assert newest.latest is not None
    assert [newest.latest.step, *(ref.step for ref in newest.listed)] == [15, 10, 15]


def test_every_listed_step_is_authenticated_by_the_newest_record() -> None:
    """The entries of the newest record carry the digest of each record that holds a decision."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    for step in (10, 20):
        root.commit(step)
    root.start(2)
    root.commit(30)
    _, newest = read_newest(store)
    assert newest is not None
    for ref in newest.listed:
        assert read_committed(store, newest, ref).state_digest
    assert [bool(ref.record_blake3) for ref in newest.record.keeps] == [True, True, False]
    assert all(ref.record_blake3 for ref in newest.listed)


# ---------------------------------------------------------------- adoption


class Left:
    """A root whose run ended with step 10 committed and steps 20, 30 undecided, both referring to 10."""

    def __init__(self, nodes_of_20: tuple[str, ...] = ("node-a", "node-b")) -> None:
        self.store = MemoryStore()
        self.root = RootBuilder(self.store)
        self.root.start()
        self.root.commit(10)
        self.root.upload(20, nodes_of_20)
        self.root.upload(30)
        _, newest = read_newest(self.store)
        assert newest is not None
        self.record: Record = newest.record
        self.listed = newest.listed
        self.claim = make_claim(timeline(1))

    def candidates(self, aborted: tuple[int, ...] = ()) -> list[tuple[int, list[IndexRef]]]:
        """Return the candidates of the next timeline."""
        keys = [info.key for info in self.store.list(INDEX_PREFIX)]
        return history.candidates(claim=self.claim, record=self.record, index_keys=keys, aborted=aborted)


def test_undecided_steps_newer_than_the_newest_record_are_candidates_ascending() -> None:
    """R2: of M's own timeline, newer than it, every node's index there, not aborted; nothing else."""
    left = Left()
    assert [step for step, _ in left.candidates()] == [20, 30]
    assert [step for step, _ in left.candidates(aborted=(20,))] == [30]
    assert [step for step, _ in Left(("node-b",)).candidates()] == [30]
    left.root.start(2)
    left.root.upload(40)
    assert [step for step, _ in left.candidates()] == [20, 30]  # timeline 2 is not M's
    _, newest = read_newest(left.store)
    assert newest is not None
    keys = [info.key for info in left.store.list(INDEX_PREFIX)]
    after = history.candidates(claim=make_claim(timeline(2)), record=newest.record, index_keys=keys, aborted=())
    assert [step for step, _ in after] == [40]  # 20 and 30 are dead for ever


def test_a_whole_candidate_with_a_listed_base_is_adopted() -> None:
    """The posthumous commit says so, and carries what the indexes say."""
    left = Left()
    step, refs = left.candidates()[0]
    blobs = [left.store.get(ref.key) for ref in refs]
    found = history.adoption(left.claim, step, refs, blobs, left.listed, NOW)
    assert isinstance(found, Committed)
    assert found.posthumous
    assert found.base.step == 10
    assert [ref.bytes for ref in found.indexes] == [len(blob) for blob in blobs]


def test_a_candidate_is_declined_with_a_reason() -> None:
    """A dropped base, a damaged index or one that is gone: an error that names it, and no commit."""
    left = Left()
    step, refs = left.candidates()[0]
    blobs: list[bytes | None] = [left.store.get(ref.key) for ref in refs]
    dropped = history.adoption(left.claim, step, refs, blobs, (), NOW)
    assert isinstance(dropped, Error)
    assert "no longer listed" in dropped.message
    for bad in (b"short", None):
        found = history.adoption(left.claim, step, refs, [blobs[0], bad], left.listed, NOW)
        assert isinstance(found, Error)
        assert found.object == refs[1].key


def test_the_start_record_is_not_mistaken_for_a_step() -> None:
    """A timeline that ended before its first commit: its start record is the newest, its steps are candidates."""
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    root.upload(0)
    _, newest = read_newest(store)
    assert newest is not None
    assert newest.key == start_key(timeline(1))
    keys = [info.key for info in store.list(INDEX_PREFIX)]
    found = history.candidates(claim=make_claim(timeline(1)), record=newest.record, index_keys=keys, aborted=())
    assert [step for step, _ in found] == [0]
