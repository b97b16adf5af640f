"""Interleavings that broke the first draft of the protocol, played on the daemon's own code: none of them breaks this one.

Drafts had a parent chain, tombstones and decisions by whoever resolved. D1 to D8 and K3 are the names docs/protocol.md
gives them.
"""

from __future__ import annotations

from fixtures.at_rest import NOW, build_node, make_claim, small_state, sources_of, timeline
from fixtures.protocol_actors import FencedError, Ghost, Incarnation, sweeping, violations
from fixtures.stage import Stage

from ckptd.daemon import history, records
from ckptd.daemon.catalog import StepState, read_catalog
from ckptd.daemon.keys import JOB, StepId, decision_key
from ckptd.daemon.log_reader import read_newest
from ckptd.daemon.verify import Verdict, verify_step
from ckptd.storage_backends.base import ObjectStore


def started(store: ObjectStore, ghost: Ghost, name: int = 1, *, keep_last: int = 1) -> Incarnation:
    """Return a coordinator that has claimed, resolved and started."""
    one = Incarnation(name, ghost, keep_last=keep_last)
    start(store, one)
    return one


def start(store: ObjectStore, one: Incarnation) -> None:
    """Claim, resolve, start."""
    one.claim(store)
    one.resolve(store)
    one.start(store)


def upload(store: ObjectStore, one: Incarnation, step: int) -> None:
    """Upload all nodes of a step."""
    for each in one.begin(step):
        each(store)


def save(store: ObjectStore, one: Incarnation, step: int) -> str:
    """Upload and commit a step."""
    upload(store, one, step)
    return one.commit(store, step)


def listed(store: ObjectStore) -> list[str]:
    """Return what the newest record lists, as "<step> of <timeline number>"."""
    _, newest = read_newest(store)
    return [] if newest is None else [f"{ref.step} of {int(ref.timeline[:8])}" for ref in newest.listed]


def test_d1_a_commit_beside_a_restart_is_adopted_or_not_acknowledged() -> None:
    """D1: whatever commits after the next timeline has read history sees its claim and acknowledges nothing."""
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost)
        upload(stage.store, one, 1)
        first = stage.actor("inc1", lambda store: one.commit(store, 1))
        first.until("put", "log/")
        two = Incarnation(2, ghost)
        second = stage.actor("inc2", two.claim)
        second.finish()
        first.finish()
        assert first.result == "fenced"
        two.resolve(stage.store)
        two.start(stage.store)
        assert not violations(stage.store, ghost, [one, two])
        assert listed(stage.store) == ["1 of 1"]  # not acknowledged, and yet not lost: its record was there in time


def test_d1_reading_history_before_the_claim_would_lose_an_acknowledged_step() -> None:
    """D1, the rule off: history that was read before the claim is stale, and the step acknowledged meanwhile is lost."""
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost)
        two = Incarnation(2, ghost)
        two.timeline = timeline(99)  # only its number is used: take what is older
        two.resolve(stage.store)
        assert save(stage.store, one, 1) == "acked"
        two.claim(stage.store)
        two.start(stage.store)
        assert [text[:2] for text in violations(stage.store, ghost, [one, two])][:1] == ["P3"]


def test_d2_a_ghost_commit_is_nothing() -> None:
    """D2: a commit that lands after the sweep of its step is older than the newest record, so nobody believes it."""
    ghost = Ghost()
    with Stage() as stage:
        stage.store.put(JOB, records.job_bytes("play", created_at=NOW, version="1"))
        one = started(stage.store, ghost)
        upload_a, upload_b = one.begin(1)
        upload_a(stage.store)
        two = Incarnation(2, ghost)
        second = stage.actor("inc2", lambda store: start(store, two))
        second.until("put", ".start.json")
        upload_b(stage.store)
        first = stage.actor("inc1", lambda store: one.commit(store, 1))
        first.until("put", "log/")
        second.finish()
        assert sweeping(stage.store).startswith("deleted")
        assert first.finish() == "fenced"
        assert decision_key(timeline(1, 1), 1) in {info.key for info in stage.store.list()}
        assert listed(stage.store) == []
        assert [step for step in read_catalog(stage.store).steps if step.state is StepState.COMMITTED] == []
        assert not violations(stage.store, ghost, [one, two])
        sweeping(stage.store)
        assert decision_key(timeline(1, 1), 1) not in {info.key for info in stage.store.list()}


def test_d3_an_aborted_and_swept_step_does_not_come_back() -> None:
    """D3: late agents may put every index of a step that was given up; no later timeline adopts it."""
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost)
        uploads = one.begin(1)
        assert one.abort(stage.store, 1) == "told"
        two = started(stage.store, ghost, 2)
        assert sweeping(stage.store).startswith("deleted")  # its marker is older than the newest record now
        for late in uploads:
            late(stage.store)
        three = started(stage.store, ghost, 3)
        assert listed(stage.store) == []
        assert not violations(stage.store, ghost, [one, two, three])


def test_d4_a_step_whose_base_was_dropped_is_not_committed() -> None:
    """D4: the base is checked against the newest record at the commit, not remembered by a process."""
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost)
        assert save(stage.store, one, 1) == "acked"
        uploads = {2: one.begin(2), 3: one.begin(3)}  # both refer to step 1
        for each in uploads[2]:
            each(stage.store)
        assert one.commit(stage.store, 2) == "acked"
        for each in uploads[3]:
            each(stage.store)
        assert sweeping(stage.store).startswith("deleted")
        assert one.commit(stage.store, 3) == "dropped"
        assert not violations(stage.store, ghost, [one])
        assert listed(stage.store) == ["2 of 1"]


def test_d5_a_sweep_beside_late_uploads_of_an_aborted_step_takes_nothing_that_counts() -> None:
    """D5: what is newer than the newest record is never swept, so a half-swept step cannot be resolved as whole."""
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost)
        upload_a, upload_b = one.begin(1)
        upload_a(stage.store)
        assert one.abort(stage.store, 1) == "told"
        broom = stage.actor("sweep", sweeping)
        broom.until("list", "chunks/")
        upload_b(stage.store)
        two = started(stage.store, ghost, 2)
        assert broom.finish() == "deleted 0"
        assert listed(stage.store) == []
        assert not violations(stage.store, ghost, [one, two])


def test_d6_a_late_put_of_an_old_agent_process_cannot_change_a_committed_index() -> None:
    """D6: an index bears its digest in its name, so the hanging put of a dead process makes another object."""
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost)
        assert one.timeline is not None
        claim = make_claim(one.timeline)
        own = StepId(one.timeline, 1)
        old = build_node(claim, 1, "node-a", small_state("node-a", own), chunk_bytes=32)
        new = build_node(claim, 1, "node-a", small_state("node-a", own))
        hanging = stage.actor("old agent", old.put)
        hanging.until("put", "index/")
        new.put(stage.store)
        one.begin(1)[1](stage.store)
        assert one.commit(stage.store, 1) == "acked"
        hanging.finish()
        _, newest = read_newest(stage.store)
        assert newest is not None
        assert verify_step(stage.store, newest, newest.listed[0]).verdict is Verdict.GOOD
        assert sweeping(stage.store).startswith("deleted")  # the chunks only the old index refers to
        assert verify_step(stage.store, newest, newest.listed[0]).verdict is Verdict.GOOD


def test_d7_a_step_is_not_dropped_under_the_timeline_that_goes_on_from_it() -> None:
    """D7: a sweep that runs beside a rollback deletes nothing of the step the operator goes back to."""
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost, keep_last=2)
        assert save(stage.store, one, 1) == "acked"
        assert save(stage.store, one, 2) == "acked"
        broom = stage.actor("sweep", sweeping)
        broom.until("get", "log/")
        broom.step()  # has read that steps 1 and 2 are listed
        two = Incarnation(2, ghost)
        two.claim(stage.store)
        two.resolve(stage.store)
        two.start(stage.store, back_to=StepId(timeline(1, 1), 1))
        broom.finish()
        assert not violations(stage.store, ghost, [one, two])
        assert listed(stage.store) == ["1 of 1"]
        assert sweeping(stage.store).startswith("deleted")
        assert not violations(stage.store, ghost, [one, two])


def test_d8_a_sweep_that_dies_anywhere_leaves_every_listed_step_whole() -> None:
    """D8: there is no order of deletes that must be finished: after any of them, all that is listed is there."""
    after = 0
    while True:
        ghost = Ghost()
        with Stage() as stage:
            one = started(stage.store, ghost)
            for step in (1, 2, 3):
                assert save(stage.store, one, step) == "acked"
            broom = stage.actor("sweep", sweeping)
            broom.until("delete")
            for _ in range(after):
                if broom.is_done:
                    break
                broom.step()
            is_over = broom.is_done
            assert not violations(stage.store, ghost, [one])
            assert sweeping(stage.store).startswith("deleted")
            assert not violations(stage.store, ghost, [one])
            assert sweeping(stage.store) == "deleted 0"
        if is_over:
            break
        after += 1
    assert after > 4


def test_k3_a_superseded_start_record_is_shown_as_provisional() -> None:
    """K3, R6: what a superseded resolver lists may not last, so a reader that looks at the claims says provisional."""
    ghost = Ghost()
    with Stage() as stage:
        stage.store.put(JOB, records.job_bytes("play", created_at=NOW, version="1"))
        one = started(stage.store, ghost)
        upload_a, upload_b = one.begin(1)
        upload_a(stage.store)
        two, three = Incarnation(2, ghost), Incarnation(3, ghost)
        second = stage.actor("inc2", lambda store: start(store, two))
        second.until("list", "index/")
        third = stage.actor("inc3", lambda store: start(store, three))
        third.until("put", ".start.json")  # its LIST shows no record of timeline 2 and no whole step
        upload_b(stage.store)
        second.until("put", ".start.json")  # has adopted step 1
        second.step()
        catalog = read_catalog(stage.store)
        assert [step.id.step for step in catalog.steps if step.state is StepState.COMMITTED] == [1]
        assert catalog.is_provisional
        third.finish()
        assert isinstance(_error(second), FencedError)
        catalog = read_catalog(stage.store)
        assert catalog.steps == []
        assert not catalog.is_provisional
        assert not violations(stage.store, ghost, [one, two, three])


def test_a_record_swept_between_list_and_get_makes_the_reader_list_again() -> None:
    """R6: the newest record is gone at GET only because a newer one is there."""
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost)
        assert save(stage.store, one, 1) == "acked"
        reader = stage.actor("reader", read_newest)
        reader.until("get", "log/")
        assert save(stage.store, one, 2) == "acked"
        sweeping(stage.store)
        _, newest = reader.finish()
        assert [ref.step for ref in newest.listed] == [2]


def test_chunks_of_a_dropped_step_stay_while_a_listed_step_refers_to_them() -> None:
    """R7: a frozen chunk outlives the step it was written for, through as many steps as refer to it."""
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost)
        for step in range(1, 6):
            assert save(stage.store, one, step) == "acked"
            sweeping(stage.store)
        own = StepId(timeline(1, 1), 1)
        ref = one.commits[StepId(timeline(1, 1), 5)].indexes[0]
        assert set(sources_of(stage.store.get(ref.key), ref).values()) == {own}
        left = [info.key for info in stage.store.list() if str(own) in info.key]
        assert len(left) == 1
        assert left[0].startswith("chunks/")
        assert not violations(stage.store, ghost, [one])
        _, newest = read_newest(stage.store)
        assert newest is not None
        assert history.order(newest.listed[0]).step == 5


def _error(actor: object) -> BaseException | None:
    try:
        actor.finish()  # type: ignore[attr-defined]
    except FencedError as error:
        return error
    return None
