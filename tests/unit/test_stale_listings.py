"""A store whose LIST shows the past: nobody who writes takes it for the present."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fixtures.coordinated import Play, Run
from fixtures.roots import RootBuilder

from ckptd.daemon import log_reader, offline
from ckptd.daemon.catalog import read_catalog
from ckptd.daemon.coordinator import effects
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.sweep import sweep
from ckptd.protos import error_pb2
from ckptd.protos.coordinator_pb2 import NodeMessage
from ckptd.storage_backends.base import ObjectInfo, ObjectStore
from ckptd.storage_backends.fault_script import Fault, FaultKind, Op
from ckptd.storage_backends.faulty import FaultyStore
from ckptd.storage_backends.memory import MemoryStore


def stale(times: int | None) -> Fault:
    """LIST of the log gives what it gave last to this process."""
    return Fault(kind=FaultKind.STALE_LIST, op=Op.LIST, prefix="log/", times=times)


def restore(run: Run) -> None:
    """Both ranks restore the newest step, and the run starts."""
    for rank in range(2):
        run.say(rank, restore=NodeMessage.Restore(rank=rank))
    run.settle()
    attempt = run.last("restore_chosen").restore_chosen.attempt
    for rank in range(2):
        run.say(rank, restore_ready=NodeMessage.RestoreReady(rank=rank, attempt=attempt))
    run.settle()


def kinds(run: Run) -> list[str]:
    return [entry.kind for entry in run.log]


def listed(store: ObjectStore) -> list[int]:
    _, newest = log_reader.read_newest(store)
    return [ref.step for ref in newest.listed] if newest is not None else []


def test_a_second_look_from_the_past_acknowledges_nothing() -> None:
    """A zombie commits, and its LIST is from before the next claim: it looks again until it finds that it is fenced."""
    truth = MemoryStore()
    old = FaultyStore(truth)
    play = Play(store=old)
    zombie = play.run().attach()
    zombie.save(1)
    zombie.settle()
    zombie.save(2)
    zombie.until(lambda operation: isinstance(operation, effects.Put) and operation.label == "decision")
    play.store = truth
    newer = play.run().attach()
    restore(newer)
    assert newer.is_running()
    old.add(stale(3))
    zombie.settle()
    for looks in range(1, 3):
        assert len(old.fired) == looks
        zombie.wait(1.1)
        zombie.settle()
        assert zombie.outcomes() == {1: True}
    zombie.wait(1.1)
    zombie.settle()
    assert len(old.fired) == 3
    assert kinds(zombie).count("stale_listing") == 3
    assert "fenced" in zombie.kinds()
    assert zombie.outcomes() == {1: True}, "what is not in the newer run's history was acknowledged"


def look_twice_more(run: Run) -> None:
    for _ in range(2):
        run.wait(1.1)
        run.settle()


def lost(store: MemoryStore, nth: int) -> FaultyStore:
    """Says of the nth object of the log that it was put, and does not have it."""
    return FaultyStore(store, Fault(kind=FaultKind.PUT_LOST, op=Op.PUT, prefix="log/", nth=nth, times=1))


def test_a_decision_that_the_store_took_and_lost_is_put_again() -> None:
    """Answered, and not there: nothing is acknowledged until the listing shows it, and it does not wait for ever."""
    store = lost(MemoryStore(), 3)
    run = Play(store=store).run().attach()
    run.save(1)
    run.settle()
    assert (len(store.fired), run.outcomes()) == (1, {})
    look_twice_more(run)
    assert run.outcomes() == {1: True}
    assert listed(store) == [1]
    assert kinds(run).count("stale_listing") == 2


def test_a_start_record_that_the_store_took_and_lost_is_put_again() -> None:
    """As above: the run does not save before its start is there."""
    truth = MemoryStore()
    play = Play(store=truth)
    first = play.run().attach()
    first.save(1)
    first.settle()
    store = play.store = lost(truth, 2)
    run = play.run().attach()
    restore(run)
    assert (len(store.fired), run.is_running()) == (1, False)
    look_twice_more(run)
    assert run.is_running()
    run.save(2)
    run.settle()
    assert run.outcomes() == {2: True}
    assert kinds(run).count("stale_listing") == 2


def test_a_claim_that_the_store_took_and_lost_is_put_again() -> None:
    """Or the start would be refused for one lie of the store; nothing is read before the listing shows it."""
    truth = MemoryStore()
    play = Play(store=truth)
    first = play.run().attach()
    first.save(1)
    first.settle()
    store = play.store = lost(truth, 1)
    run = play.run().attach()
    run.settle()
    assert len(store.fired) == 1
    assert [entry.kind for entry in run.log if entry.kind in ("claimed", "resolved")] == []
    look_twice_more(run)
    restore(run)
    assert run.is_running()
    run.save(2)
    run.settle()
    assert run.outcomes() == {2: True}
    assert listed(truth) == [1, 2]
    assert len(log_reader.list_log(truth).claims) == 2
    assert kinds(run).count("stale_listing") == 2


def test_a_start_does_not_read_history_from_before_its_claim() -> None:
    """A step is acknowledged before the next run claims; that run's LIST is older than that: it does not start without it."""
    truth = MemoryStore()
    play = Play(store=truth)
    first = play.run().attach()
    first.save(1)
    first.settle()
    late = play.store = FaultyStore(truth)
    second = play.run().attach()
    second.until(lambda operation: isinstance(operation, effects.ListKeys))
    second.step()
    first.save(2)
    first.settle()
    assert first.outcomes() == {1: True, 2: True}
    late.add(stale(3))
    second.settle()
    for _ in range(3):
        second.wait(1.1)
        second.settle()
    assert len(late.fired) == 3
    restore(second)
    assert second.last("restore_chosen").restore_chosen.step.step == 2
    assert listed(truth) == [1, 2]


def test_a_start_on_a_store_whose_list_is_always_old_is_refused() -> None:
    """After bounded looks, with the object that LIST leaves out; history is left as it was."""
    truth = MemoryStore()
    play = Play(store=truth)
    first = play.run().attach()
    first.save(1)
    first.settle()
    play.store = FaultyStore(truth, stale(None))
    second = play.run().attach()
    second.settle()
    for _ in range(20):
        second.wait(1.1)
        second.settle()
    refused = second.last("refused").refused
    assert refused.reason == error_pb2.REASON_STORE_FAILED
    assert refused.object.endswith(".claim.json")
    assert "cache" in refused.hint
    assert listed(truth) == [1]


def test_a_commit_on_a_store_whose_list_is_always_old_is_never_acknowledged() -> None:
    """Its record stands, and nobody is told that the step is durable."""
    truth = MemoryStore()
    old = FaultyStore(truth)
    run = Play(store=old).run().attach()
    run.save(1)
    run.settle()
    old.add(stale(None))
    run.save(2)
    run.settle()
    for _ in range(20):
        run.wait(1.1)
        run.settle()
    assert listed(truth) == [1, 2]
    assert run.outcomes() == {1: True}
    old.clear()
    run.wait(1.1)
    run.settle()
    assert run.outcomes() == {1: True, 2: True}


class BackInTime(MemoryStore):
    """After the first LIST of the log it gives the one that was kept, for so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.past: list[ObjectInfo] = []
        self.stale_lists = 0
        self.looks = 0

    def keep(self) -> None:
        """From the second LIST of the log on, show it as it is now."""
        self.past = [*super().list("log/")]
        self.looks = 0

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.looks += prefix == "log/"
        if prefix == "log/" and self.past and self.looks > 1 and self.stale_lists > 0:
            self.stale_lists -= 1
            return iter(self.past)
        return super().list(prefix)


def dropped_once(store: BackInTime) -> None:
    """Make a root whose newest record no longer lists step 10; the past is from before that record."""
    root = RootBuilder(store)
    root.start()
    root.commit(10)
    store.keep()
    root.commit(20, keep_last=1)


@pytest.mark.parametrize("read", [read_catalog, sweep], ids=["ls", "sweep"])
def test_a_reader_does_not_look_at_the_claims_of_the_past(
    read: Callable[[BackInTime], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look after the record must show that record: it looks again, and gives up when it never does, deleting nothing."""
    monkeypatch.setattr(log_reader, "LOOK_PAUSE_S", 0.0)
    store = BackInTime()
    dropped_once(store)
    before = [info.key for info in MemoryStore.list(store)]
    store.stale_lists = 1000
    with pytest.raises(DaemonError, match="LIST of log/") as caught:
        read(store)
    assert caught.value.error.reason == error_pb2.REASON_STORE_FAILED
    assert [info.key for info in MemoryStore.list(store)] == before
    store.looks, store.stale_lists = 0, 2
    read(store)
    assert store.stale_lists == 0


def test_a_verb_that_writes_a_start_does_not_resolve_from_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its claim LIST goes back: what was committed since is not lost, and nothing is written."""
    monkeypatch.setattr(log_reader, "LOOK_PAUSE_S", 0.0)
    store = BackInTime()
    root = RootBuilder(store)
    root.start()
    root.commit(10)
    past = [*store.list("log/")]
    root.commit(20)
    put = store.put

    def put_then_go_back(key: str, *rest: object, **more: object) -> None:
        put(key, *rest, **more)  # type: ignore[arg-type]
        if key.endswith(".claim.json"):
            store.past, store.stale_lists = past, 1000

    monkeypatch.setattr(store, "put", put_then_go_back)
    with pytest.raises(DaemonError, match="LIST of log/"):
        offline.write_start(store, created_at="2026-01-01T00:00:00Z")
    store.past = []
    assert listed(store) == [10, 20]
