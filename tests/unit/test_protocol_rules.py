"""Every rule of the protocol is needed: the play that breaks the store without it, on the daemon's own code.

Each test plays one interleaving twice. With the rule switched off the violation must appear, so that the play is known
to bite; with the rule on, every property must hold. The order of operations is that of the counterexample the model
found; docs/protocol.md has the table.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest
from fixtures.protocol_actors import Ghost, Incarnation, sweeping, violations
from fixtures.stage import Stage

from ckptd.daemon import history, roots, sweep
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.keys import DecisionKey, StepId, decision_key, parse_key
from ckptd.daemon.log_reader import list_log, read_newest
from ckptd.storage_backends.base import ObjectInfo, ObjectStore

ON_OFF = pytest.mark.parametrize("is_on", [False, True], ids=["off", "on"])


def started(store: ObjectStore, ghost: Ghost, name: int = 1, **options: object) -> Incarnation:
    """Return a coordinator that has claimed, resolved and started."""
    made = Incarnation(name, ghost, **options)  # type: ignore[arg-type]
    start(store, made)
    return made


def start(store: ObjectStore, one: Incarnation) -> None:
    """Claim, resolve, start."""
    one.claim(store)
    one.resolve(store)
    one.start(store)


def save(store: ObjectStore, one: Incarnation, step: int) -> str:
    """Upload a step whole and commit it."""
    for upload in one.begin(step):
        upload(store)
    return one.commit(store, step)


def kinds(found: Collection[str]) -> set[str]:
    """Return the names of the violated properties."""
    return {text.split(" ", 1)[0] for text in found}


@ON_OFF
def test_looking_at_the_claims_before_an_acknowledgement_is_needed(is_on: bool) -> None:
    """R4: a commit that lands after the next timeline's LIST must not be acknowledged; else the step is lost."""
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost, off=() if is_on else ("look_after_commit",))
        upload_a, upload_b = one.begin(1)
        upload_a(stage.store)
        two = Incarnation(2, ghost)
        second = stage.actor("inc2", lambda store: start(store, two))
        second.until("put", ".start.json")  # its LIST did not show node B's index: nothing to adopt
        upload_b(stage.store)
        assert one.commit(stage.store, 1) == ("fenced" if is_on else "acked")
        second.finish()
        found = violations(stage.store, ghost, [one, two])
    assert kinds(found) == (set() if is_on else {"P3"}), found


@ON_OFF
def test_looking_at_the_claims_before_telling_an_abort_is_needed(is_on: bool) -> None:
    """R5: a step that the next timeline adopts must not be told as aborted."""
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost, off=() if is_on else ("look_after_abort",))
        for upload in one.begin(1):
            upload(stage.store)
        two = Incarnation(2, ghost)
        second = stage.actor("inc2", lambda store: start(store, two))
        second.until("put", ".start.json")  # has adopted step 1
        assert one.abort(stage.store, 1) == ("fenced" if is_on else "told")
        second.finish()
        found = violations(stage.store, ghost, [one, two])
        assert [ref.step for ref in two.listed] == [1]
    assert kinds(found) == (set() if is_on else {"P2"}), found


@ON_OFF
def test_the_start_record_is_needed(is_on: bool) -> None:
    """R2: a start record makes every later commit of older timelines old; without it history changes under the newest."""
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost)
        upload_a, upload_b = one.begin(1)
        upload_a(stage.store)
        two = Incarnation(2, ghost, off=() if is_on else ("start_record",))
        start(stage.store, two)
        upload_b(stage.store)
        assert one.commit(stage.store, 1) == "fenced"
        found = violations(stage.store, ghost, [one, two])
    assert kinds(found) == (set() if is_on else {"P9"}), found


@ON_OFF
def test_one_process_per_claim_is_needed(is_on: bool) -> None:
    """R1: a coordinator that restarts must claim anew, or its own zombie commits beside it, on another base."""
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost)
        for upload in one.begin(1):
            upload(stage.store)
        zombie = stage.actor("inc1", lambda store: one.commit(store, 1))
        zombie.until("put", ".000000000001.json")
        again = Incarnation(9, ghost)
        if is_on:
            start(stage.store, again)
        else:
            assert one.timeline is not None
            again.adopt_claim(one.timeline)
            _, newest = read_newest(stage.store)
            assert newest is not None
            again.listed, again.position = newest.listed, newest.position
        assert save(stage.store, again, 2) == "acked"
        assert zombie.finish() == ("fenced" if is_on else "acked")
        found = violations(stage.store, ghost, [one, again])
        _, newest = read_newest(stage.store)
        assert newest is not None
        lost = ghost.acked - {history.order(ref) for ref in newest.listed}
    assert kinds(found) == (set() if is_on else {"P9"}), found
    assert bool(lost) is not is_on


@ON_OFF
def test_deciding_in_step_order_is_needed(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R4: a commit behind a later one is dead at birth, and yet acknowledged; the builder refuses to make it."""
    if not is_on:
        monkeypatch.setattr(history, "_require_order", lambda *_: None)
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost)
        for step in (1, 2):
            for upload in one.begin(step):
                upload(stage.store)
        assert one.commit(stage.store, 2) == "acked"
        if is_on:
            with pytest.raises(DaemonError, match="committed already"):
                one.commit(stage.store, 1)
        else:
            one.listed = []  # the record's own check would refuse a list that is newer than the record
            assert one.commit(stage.store, 1) == "acked"
        found = violations(stage.store, ghost, [one])
    assert kinds(found) == (set() if is_on else {"P9"}), found


@ON_OFF
def test_the_base_must_still_be_listed_at_the_commit(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R4: a base that was dropped between index and commit may be swept away under the step that refers to it."""
    if not is_on:
        monkeypatch.setattr(history, "require_base_listed", lambda *_: None)
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost)
        uploads = {step: one.begin(step) for step in (1, 2)}  # neither has a base
        for upload in uploads[1]:
            upload(stage.store)
        assert one.commit(stage.store, 1) == "acked"
        uploads[3] = one.begin(3)  # base 1
        for upload in uploads[2]:
            upload(stage.store)
        assert one.commit(stage.store, 2) == "acked"  # keeps step 2 alone: step 1 is dropped
        for upload in uploads[3]:
            upload(stage.store)
        broom = stage.actor("sweep", sweeping)
        broom.until("get", "log/")
        broom.step()  # has read the record of step 2
        assert one.commit(stage.store, 3) == ("dropped" if is_on else "acked")
        broom.finish()
        found = violations(stage.store, ghost, [one])
    assert kinds(found) == (set() if is_on else {"P7"}), found


@ON_OFF
def test_a_sweep_must_look_at_the_claims(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R7: a late record of an old timeline drops what the next one goes on from; a sweep must not believe it."""
    if not is_on:
        monkeypatch.setattr(sweep, "require_settled", lambda *_: None)
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost)
        assert save(stage.store, one, 1) == "acked"
        upload_a, upload_b = one.begin(2)
        upload_a(stage.store)
        two = Incarnation(2, ghost)
        second = stage.actor("inc2", lambda store: start(store, two))
        second.until("put", ".start.json")  # goes on from step 1
        upload_b(stage.store)
        assert one.commit(stage.store, 2) == "fenced"  # but its record, which keeps step 2 alone, is there
        broom = stage.actor("sweep", sweeping)
        if is_on:
            assert broom.finish() == "stopped: a higher claim"
            second.finish()
        else:
            broom.until("delete")
            second.finish()
            broom.finish()
        found = violations(stage.store, ghost, [one, two])
    assert (kinds(found) >= {"P1"}) is not is_on, found
    assert not is_on or not found


@ON_OFF
def test_a_sweep_must_stop_when_a_kept_index_is_missing(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R7: a slow sweep that marks with half of its roots deletes what the newest step refers to."""
    if not is_on:
        monkeypatch.setattr(roots, "missing_root", lambda *_: set())
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost)
        assert save(stage.store, one, 1) == "acked"
        for upload in one.begin(2):
            upload(stage.store)
        slow = stage.actor("slow sweep", sweeping)
        slow.until("get", "log/")
        slow.step()
        slow.step()  # has read the record of step 1, and that no newer timeline was claimed
        assert one.commit(stage.store, 2) == "acked"
        assert stage.actor("fast sweep", sweeping).finish().startswith("deleted")
        outcome = slow.finish()
        assert outcome == ("stopped: a root is gone" if is_on else outcome)
        found = violations(stage.store, ghost, [one])
    assert kinds(found) == (set() if is_on else {"P7"}), found


@ON_OFF
def test_an_abort_marker_must_stay_until_a_newer_record(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R5: an aborted step whose marker is gone looks undecided, and the next timeline adopts it."""
    planned = sweep.plan_sweep

    def plan(newest: object, objects: Collection[ObjectInfo], needed: Collection[str]) -> sweep.SweepPlan:
        every = list(objects)
        made = planned(newest, every, needed)  # type: ignore[arg-type]
        markers = [info for info in every if isinstance(parse_key(info.key), DecisionKey)]
        return sweep.SweepPlan(delete=[*made.delete, *markers], kept=made.kept, dead_steps=made.dead_steps)

    if not is_on:
        monkeypatch.setattr(sweep, "plan_sweep", plan)
    ghost = Ghost()
    with Stage() as stage:
        one = started(stage.store, ghost)
        uploads = one.begin(1)
        assert one.abort(stage.store, 1) == "told"
        for upload in uploads:
            upload(stage.store)  # late
        sweeping(stage.store)
        two = started(stage.store, ghost, 2)
        found = violations(stage.store, ghost, [one, two])
        assert [ref.step for ref in two.listed] == ([] if is_on else [1])
    assert kinds(found) == (set() if is_on else {"P2"}), found


@pytest.mark.parametrize("mistake", ["aborted is dead", "an old timeline is dead", "none"])
def test_only_what_is_older_than_the_newest_record_is_dead(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R7: neither an abort marker nor a newer claim makes a step dead: the next timeline may be adopting it."""
    is_dead = sweep.is_dead
    ghost = Ghost()
    with Stage() as stage:

        def dead(step: StepId, *rest: object) -> bool:
            if mistake == "aborted is dead":
                marker = decision_key(step.timeline, step.step)
                return is_dead(step, *rest) or marker in {info.key for info in stage.store.list()}  # type: ignore[arg-type]
            highest = list_log(stage.store).highest_claim()
            return is_dead(step, *rest) or step.timeline != highest  # type: ignore[arg-type]

        if mistake != "none":
            monkeypatch.setattr(sweep, "is_dead", dead)
        one = started(stage.store, ghost)
        for upload in one.begin(1):
            upload(stage.store)
        broom = stage.actor("sweep", sweeping)
        broom.until("get", "log/")
        broom.step()
        broom.step()  # has read the start record, and that no newer timeline was claimed
        two = Incarnation(2, ghost)
        second = stage.actor("inc2", lambda store: start(store, two))
        second.until("put", ".start.json")  # has adopted step 1
        assert one.abort(stage.store, 1) == "fenced"
        second.finish()
        # What the sweep takes for listed is the start record's empty list, so its chunks would go.
        broom.finish()
        found = violations(stage.store, ghost, [one, two])
    assert bool(kinds(found) & {"P1", "P7"}) is (mistake != "none"), found
