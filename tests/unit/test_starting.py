"""A start on a store that loses objects, or beside a run that has won: it ends, and goes on where it can."""

from __future__ import annotations

import pytest
from fixtures.comparing import drifting
from fixtures.comparing import saved as saved_steps
from fixtures.coordinated import MESH, NODES, Play, Run

from ckptd.daemon import keys
from ckptd.daemon.coordinator import effects
from ckptd.daemon.coordinator.state import Phase
from ckptd.daemon.history import order
from ckptd.daemon.log_reader import list_log, read_newest
from ckptd.protos import error_pb2
from ckptd.protos.coordinator_pb2 import NodeMessage
from ckptd.protos.error_pb2 import Error
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import NotFound
from ckptd.storage_backends.fault_script import Fault, FaultKind, Op
from ckptd.storage_backends.faulty import FaultyStore
from ckptd.storage_backends.memory import MemoryStore


class Unread(MemoryStore):
    """LIST shows objects that GET does not give."""

    def __init__(self) -> None:
        super().__init__("memory://play")
        self.lost: list[str] = []
        self.missed = 0
        self.gives_after: int | None = None

    def get(self, key: str) -> bytes:
        if any(key.startswith(prefix) for prefix in self.lost):
            self.missed += 1
            if self.gives_after is None or self.missed <= self.gives_after:
                raise NotFound("404", key=key)
        return super().get(key)


def go_on(run: Run, seconds: int = 60) -> None:
    """Let everything pending happen, and time pass, until nothing more comes of it."""
    run.settle()
    for _ in range(seconds):
        run.wait(1.1)
        run.settle()


def saved(store: ObjectStore, *steps: int) -> Play:
    """Make a job with these steps committed; its run is gone."""
    play = Play(store=store)
    run = play.run().attach()
    for step in steps:
        run.save(step)
        run.settle()
    assert run.outcomes() == dict.fromkeys(steps, True)
    return play


def die(run: Run, *ranks: int) -> None:
    for rank in ranks:
        run.say(rank, gone=NodeMessage.RankGone(rank=rank, clean=False, why=Error(message="killed")))


def of(run: Run, kind: str) -> list[effects.Log]:
    return [entry for entry in run.log if entry.kind == kind]


def lost(store: ObjectStore, prefix: str, *, times: int | None = 1) -> FaultyStore:
    """Says of an object that it was put, and does not have it."""
    return FaultyStore(store, Fault(kind=FaultKind.PUT_LOST, op=Op.PUT, prefix=prefix, nth=1, times=times))


# ---------------------------------------------------------------- a claim that the store took and lost


def test_a_claim_is_not_put_again_when_its_ranks_have_ended() -> None:
    """Nothing can come of that start, and its claim would fence the run that was started in its place."""
    truth = MemoryStore()
    play = saved(truth, 1)
    store = play.store = lost(truth, "log/")
    run = play.run().attach()
    run.settle()
    assert len(store.fired) == 1
    die(run, 0, 1)
    go_on(run, 5)
    assert run.state.refusal is not None
    assert run.state.refusal.reason == error_pb2.REASON_RANKS_MISSING
    assert len(list_log(truth).claims) == 1


def test_a_claim_is_put_again_only_where_a_look_follows() -> None:
    """Each time the store loses it: no put may come after the last look, or a claim would stand for a start that was refused."""
    truth = MemoryStore()
    play = saved(truth, 1)
    store = play.store = lost(truth, "log/", times=5)
    run = play.run().attach()
    go_on(run, 20)
    assert run.state.refusal is not None
    assert run.state.refusal.reason == error_pb2.REASON_STORE_FAILED
    assert len(store.fired) == 5, "the first put, and one before each of the last four looks"
    assert len(list_log(truth).claims) == 1


def test_a_start_outlives_an_error_of_putting_its_claim_again() -> None:
    """The claim stood there all the time, and LIST showed the past: that the store fails meanwhile refuses nothing."""
    truth = MemoryStore()
    play = saved(truth, 1)
    store = play.store = FaultyStore(truth)
    run = play.run().attach()
    run.until(lambda operation: isinstance(operation, effects.Put) and operation.label == "claim")
    run.step()
    store.add(Fault(kind=FaultKind.STALE_LIST, op=Op.LIST, prefix="log/", times=2))
    store.add(Fault(kind=FaultKind.ERROR, op=Op.PUT, prefix="log/", times=1))
    go_on(run, 5)
    assert len(store.fired) == 3
    assert of(run, "store_failed")
    assert run.state.phase is Phase.RESOLVED
    assert len(list_log(truth).claims) == 2


# ---------------------------------------------------------------- what LIST shows and GET does not give


def half_listed(store: Unread) -> Play:
    """Leave step 1 committed, and the indexes of 2 and 3 there without a decision."""
    play = saved(store, 1)
    run = play.run().attach()
    for rank in range(2):
        run.say(rank, restore=NodeMessage.Restore(rank=rank))
    run.settle()
    for rank in range(2):
        run.say(rank, restore_ready=NodeMessage.RestoreReady(rank=rank, attempt=run.state.attempts))
    run.settle()
    for step in (2, 3):
        run.begin(step)
        run.settle()
        run.stage(step)
        for rank in range(2):
            run.put(step, rank)
    store.lost = [index_of(store, 2)]
    return play


def index_of(store: Unread, step: int) -> str:
    """Return the key of the second node's index of a step."""
    found = (keys.parse_key(info.key) for info in store.list(keys.INDEX_PREFIX))
    (key,) = [key for key in found if isinstance(key, keys.IndexKey) and (key.id.step, key.node) == (step, NODES[1])]
    return str(key)


def test_a_step_whose_index_the_store_lost_is_not_adopted_and_the_start_goes_on() -> None:
    """LIST shows it for ever: history is read again a bounded number of times, with pauses, and what is whole is adopted."""
    store = Unread()
    play = half_listed(store)
    run = play.run().attach()
    run.settle()
    assert store.missed == 2, "the second time at once, as something may have been swept meanwhile; then with pauses"
    go_on(run)
    assert run.state.phase is Phase.RESOLVED
    assert 2 < store.missed <= 20
    (refused,) = of(run, "not_adopted")
    assert refused.fields["step"] == 2
    assert store.lost[0] in str(refused.fields["error"])
    assert [ref.step for ref, _ in run.state.adopted] == [3]
    run.begin(4)
    run.settle()
    _, newest = read_newest(store)
    assert newest is not None
    assert [order(ref).step for ref in newest.listed] == [1, 3]


def test_a_step_whose_index_comes_late_is_adopted() -> None:
    """A store that shows it a little later loses nothing."""
    store = Unread()
    play = half_listed(store)
    store.gives_after = 3
    run = play.run().attach()
    go_on(run)
    assert store.missed > 3
    assert [ref.step for ref, _ in run.state.adopted] == [2, 3]
    assert not of(run, "not_adopted")


def test_no_step_behind_a_lost_index_is_adopted_uncompared() -> None:
    """Its replicas may have differed: a step that was not compared, on the word of one before it, is declined."""
    store = Unread()
    play = drifting(3)
    play.store = store
    run = play.run(verify_replicas="every:2", slots=6).attach()
    saved_steps(run, 1, 2)
    for step in (3, 4, 5):
        run.begin(step)
        run.settle()
    assert [run.word(step) is None for step in (3, 4, 5)] == [True, False, True]
    for step in (3, 4, 5):
        for rank in range(2):
            run.put(step, rank)
    store.lost = [index_of(store, 3)]
    after = play.run().attach()
    go_on(after)
    assert [ref.step for ref, _ in after.state.adopted] == [5]
    assert [entry.fields["step"] for entry in of(after, "not_adopted")] == [3, 4]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_start_on_a_record_that_the_store_lost_is_refused(read_only: bool) -> None:
    """It says which: the record before it would bring back what was dropped since."""
    store = Unread()
    play = saved(store, 1, 2)
    (record,) = [info.key for info in store.list("log/") if "0002" in info.key and "claim" not in info.key]
    store.lost = [record]
    run = play.run(read_only=read_only).attach()
    go_on(run)
    assert run.state.refusal is not None
    assert run.state.refusal.reason == error_pb2.REASON_UNAVAILABLE
    assert record in run.state.refusal.message
    assert 2 < store.missed <= 20


# ---------------------------------------------------------------- job.json


def test_a_job_json_that_the_store_took_and_lost_is_put_again() -> None:
    """Before, the start was refused with a TypeError."""
    truth = MemoryStore()
    store = lost(truth, keys.JOB)
    run = Play(store=store).run().attach()
    go_on(run, 3)
    assert len(store.fired) == 1
    assert run.state.phase is Phase.RESOLVED
    assert truth.get(keys.JOB)


def test_a_store_that_loses_job_json_each_time_is_told_so() -> None:
    """After bounded tries, by the object's name; nothing else is written."""
    truth = MemoryStore()
    store = lost(truth, keys.JOB, times=None)
    run = Play(store=store).run().attach()
    go_on(run, 20)
    assert len(store.fired) > 2
    refusal = run.state.refusal
    assert refusal is not None
    assert (refusal.reason, refusal.object) == (error_pb2.REASON_STORE_FAILED, keys.JOB)
    assert [*truth.list()] == []


# ---------------------------------------------------------------- a race for the claim


@pytest.mark.parametrize("takeover", [False, True])
def test_a_start_that_loses_the_race_asks_whether_the_winner_lives(takeover: bool) -> None:
    """Two starts at once after a run that died: the lower claim's does not claim above the other, unless told to take over."""
    play = saved(MemoryStore(), 1)
    loser = play.run(takeover=takeover).attach()
    loser.until(lambda operation: isinstance(operation, effects.Put) and operation.label == "claim")
    winner = play.run().attach()
    winner.settle()
    assert winner.state.phase is Phase.RESOLVED
    loser.alive = 2
    go_on(loser, 20)
    highest = list_log(play.store).highest_claim()
    if takeover:
        assert loser.state.phase is Phase.RESOLVED
        assert highest == loser.state.timeline
    else:
        assert loser.state.refusal is not None
        assert loser.state.refusal.reason == error_pb2.REASON_JOB_ALIVE
        assert highest == winner.state.timeline


def test_a_start_that_loses_the_race_to_a_dead_run_claims_above_it() -> None:
    """Nobody answers for the claim that won."""
    play = saved(MemoryStore(), 1)
    loser = play.run().attach()
    loser.until(lambda operation: isinstance(operation, effects.Put) and operation.label == "claim")
    winner = play.run().attach()
    winner.settle()
    go_on(loser, 3)
    assert loser.state.phase is Phase.RESOLVED
    assert list_log(play.store).highest_claim() == loser.state.timeline


# ---------------------------------------------------------------- refused meanwhile


def test_a_start_that_is_refused_while_it_claims_does_not_come_back() -> None:
    """A rank attaches again with another world: all were told that the run cannot start, so nothing of it may run."""
    run = Play().run().attach()
    run.until(lambda operation: isinstance(operation, effects.Put) and operation.label == "claim")
    run.say(1, attached=NodeMessage.RankAttached(rank=1, coordinate=[1], world=3, mesh=MESH, options=run.lead.options))
    assert "refused" in run.kinds()
    go_on(run, 3)
    assert run.state.phase is Phase.ENDED
    assert not of(run, "resolved")
