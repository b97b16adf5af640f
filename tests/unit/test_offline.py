"""A start record written for a job that is not running: steps dropped by hand, a start that died settled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixtures.at_rest import NOW, make_claim, put_claim, timeline
from fixtures.roots import RootBuilder

from ckptd.daemon import offline
from ckptd.daemon.catalog import StepState, read_catalog
from ckptd.daemon.cli.drop import drop
from ckptd.daemon.cli.retain import retain
from ckptd.daemon.cli.sweep import sweep as sweep_verb
from ckptd.daemon.errors import DaemonError, FencedError, NotFoundError
from ckptd.daemon.keys import PinKey, StepId, claim_key, index_prefix, start_key
from ckptd.daemon.log_reader import list_log, read_claim, read_newest
from ckptd.daemon.offline import OfflineStart, write_start
from ckptd.daemon.sweep import SweepStoppedError, sweep
from ckptd.daemon.verify import Verdict, verify_step
from ckptd.protos import error_pb2
from ckptd.protos.snapshot_pb2 import Claim, Retention
from ckptd.storage_backends.base import PutMode
from ckptd.storage_backends.local import LocalStore
from ckptd.storage_backends.memory import MemoryStore


@pytest.fixture
def root() -> RootBuilder:
    """A root with steps 10, 20 and 30."""
    made = RootBuilder(MemoryStore())
    made.start()
    for step in (10, 20, 30):
        made.commit(step)
    return made


def started(root: RootBuilder, *steps: int, retention: Retention | None = None, give_up: bool = False) -> OfflineStart:
    """Write a start record that drops steps of timeline 1."""
    gone = {StepId(timeline(1), step) for step in steps}
    return write_start(root.store, created_at=NOW, drop=gone, retention=retention, give_up=give_up)


def committed(root: RootBuilder) -> list[int]:
    """Return the steps that are listed, each proved to the last byte."""
    _, newest = read_newest(root.store)
    assert newest is not None
    for ref in newest.listed:
        assert verify_step(root.store, newest, ref).verdict is Verdict.GOOD
    return [ref.step for ref in newest.listed]


def test_a_dropped_step_is_no_longer_listed_and_a_sweep_takes_it(root: RootBuilder) -> None:
    """A timeline of its own with claim and start record; what other steps refer to stays, and the latest is as before."""
    done = started(root, 10)
    assert ([s.step for s in done.dropped], [s.step for s in done.kept], done.adopted) == ([10], [20, 30], [])
    assert committed(root) == [20, 30]
    catalog = read_catalog(root.store)
    assert (catalog.is_provisional, catalog.latest) == (False, StepId(timeline(1), 30))
    assert [step.step for step in sweep(root.store).dead_steps] == [10]
    assert not list(root.store.list(index_prefix(10, timeline(1))))
    assert committed(root) == [20, 30]


def test_the_next_start_goes_on_behind_it(root: RootBuilder) -> None:
    """It claims a higher number, and saves with the latest step as its base."""
    started(root, 10, 20)
    view, newest = read_newest(root.store)
    assert newest is not None
    root.listed = newest.listed
    root.start(view.next_number())
    root.commit(40)
    assert committed(root) == [30, 40]


def test_retention_is_applied_once(root: RootBuilder) -> None:
    """keep_last and keep_every as a run would apply them."""
    done = started(root, retention=Retention(keep_last=1, keep_every=10))
    assert not done.dropped
    done = started(root, retention=Retention(keep_last=1))
    assert [step.step for step in done.dropped] == [10, 20]
    assert committed(root) == [30]


def test_whole_undecided_steps_are_adopted_first(root: RootBuilder) -> None:
    """A step whose run died between its indexes and its decision counts; the one before it may then go."""
    root.upload(40)
    done = started(root, 30)
    assert ([s.step for s in done.adopted], [s.step for s in done.dropped]) == ([40], [30])
    assert committed(root) == [10, 20, 40]
    catalog = read_catalog(root.store)
    assert catalog.latest == StepId(timeline(1), 40)


def test_an_aborted_step_is_not_adopted(root: RootBuilder) -> None:
    """Its marker counts."""
    root.upload(40)
    root.abort(40)
    assert not started(root, 10).adopted


def test_a_step_there_in_part_is_given_up_only_when_asked(root: RootBuilder) -> None:
    """Its agents might finish it: refused before anything is claimed, then dead."""
    root.upload(40, ["node-a"])
    with pytest.raises(DaemonError, match="--give-up") as refused:
        started(root, 10)
    assert refused.value.error.reason == error_pb2.REASON_NOT_ALLOWED
    assert list_log(root.store).highest_claim() == timeline(1)
    started(root, 10, give_up=True)
    assert [step.id.step for step in read_catalog(root.store).steps] == [20, 30]


def test_what_may_not_be_dropped_is_refused_before_the_claim(root: RootBuilder) -> None:
    """The latest, a pinned step, one that is not listed."""
    root.store.put(str(PinKey(StepId(timeline(1), 20), "paper")), b"")
    for step, kind in ((30, DaemonError), (20, DaemonError), (15, NotFoundError)):
        with pytest.raises(kind, match=f"step {step}"):
            started(root, step)
    assert list_log(root.store).claims == (timeline(1),)


def test_quarantined_steps_stay_so(root: RootBuilder) -> None:
    """The record holds them on, with a usable digest."""
    root.quarantine(20)
    root.start(2)
    started(root, 10)
    states = {step.id.step: step.state for step in read_catalog(root.store).steps}
    assert states == {20: StepState.QUARANTINED, 30: StepState.COMMITTED}


def test_a_living_job_is_left_alone(root: RootBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the coordinator of the highest claim answers, nothing is written."""
    asked: list[Claim] = []

    def four(claim: Claim) -> int:
        asked.append(claim)
        return 4

    monkeypatch.setattr(offline, "living_ranks", four)
    with pytest.raises(DaemonError, match="alive") as refused:
        started(root, 10)
    assert refused.value.error.reason == error_pb2.REASON_JOB_ALIVE
    assert [claim.timeline for claim in asked] == [str(timeline(1))]
    assert list_log(root.store).claims == (timeline(1),)


@pytest.mark.parametrize("when", ["claim", "start"])
def test_a_start_beside_it_wins(root: RootBuilder, when: str) -> None:
    """A higher claim before or after the record: fenced, or claimed again above it; never called done below it."""

    class Raced(MemoryStore):
        raced = False

        def put(self, key: str, data: bytes | bytearray | memoryview, *, mode: PutMode = PutMode.CREATE) -> None:
            super().put(key, data, mode=mode)
            if f".{when}.json" in key and not self.raced:
                self.raced = True
                put_claim(self, make_claim(timeline(7)))

    store = Raced()
    for info in root.store.list():
        MemoryStore.put(store, info.key, root.store.get(info.key))
    root.store = store
    if when == "claim":
        assert started(root, 10).timeline.number == 8
        assert committed(root) == [20, 30]
    else:
        with pytest.raises(FencedError):
            started(root, 10)


def test_the_claim_names_the_nodes_and_no_endpoint(root: RootBuilder) -> None:
    """As a start's claim would, but nobody can be asked whether it is alive."""
    done = started(root, 10)
    claim = read_claim(root.store, done.timeline)
    assert claim is not None
    assert [node.node for node in claim.nodes] == ["node-a", "node-b"]
    assert (claim.endpoint, claim.run_id.startswith("offline-")) == ("", True)


def test_a_dead_start_is_settled_by_a_claim_and_then_swept(
    root: RootBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sweep stops at a claim without a record; with --claim it writes one and deletes."""
    root.commit(40, keep_last=1)
    put_claim(root.store, make_claim(timeline(2)))
    with pytest.raises(SweepStoppedError, match="--claim"):
        sweep(root.store)
    done = started(root)
    assert done.timeline.number == 3
    assert [step.step for step in sweep(root.store).dead_steps] == [10, 20, 30]
    assert committed(root) == [40]


def test_the_verbs_print_and_do_nothing_when_there_is_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """drop, retain and sweep --claim on a root on disk."""
    made = RootBuilder(LocalStore(tmp_path))
    made.start()
    for step in (10, 20, 30):
        made.commit(step)
    drop(str(tmp_path), ["10"], dry_run=True)
    assert capsys.readouterr().out == "would be dropped: 10\n"
    drop(str(tmp_path), [f"10@{timeline(1)}"], json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["dropped"], len(found["kept"])) == ([{"step": 10, "timeline": str(timeline(1))}], 2)
    with pytest.raises(NotFoundError):
        drop(str(tmp_path), ["10"])
    retain(str(tmp_path), keep_last=2)
    assert "nothing was written" in capsys.readouterr().out
    retain(str(tmp_path), keep_last=1)
    assert capsys.readouterr().out.startswith("dropped: 20; 1 kept; timeline 00000003-")
    put_claim(made.store, make_claim(timeline(9)))
    sweep_verb(str(tmp_path), claim=True)
    assert "wrote the start record of timeline 00000010-" in capsys.readouterr().err
    assert committed(made) == [30]
    sweep_verb(str(tmp_path), claim=True)
    assert capsys.readouterr().err == "", "a settled root is swept without a claim"
    assert made.store.get(claim_key(timeline(9)))
    assert made.store.get(start_key(timeline(1)))
