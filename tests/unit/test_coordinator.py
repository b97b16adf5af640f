"""The real coordinator, played operation by operation on a store in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fixtures.coordinated import NODES, Play, Run

from ckptd.daemon import log_reader
from ckptd.daemon.coordinator import effects, saving
from ckptd.daemon.errors import make_error
from ckptd.daemon.keys import DecisionKey, parse_key
from ckptd.protos import error_pb2
from ckptd.protos.coordinator_pb2 import Held, NodeMessage


def is_put(label: str) -> Callable[[effects.Operation], bool]:
    return lambda operation: isinstance(operation, effects.Put) and operation.label == label


def is_list(operation: effects.Operation) -> bool:
    return isinstance(operation, effects.ListKeys) and operation.prefix == "log/"


def listed(play: Play) -> list[tuple[str, int]]:
    """Return what the store says counts: (timeline, step)."""
    _, newest = log_reader.read_newest(play.store)
    return [(ref.timeline, ref.step) for ref in newest.listed] if newest is not None else []


def decisions(play: Play) -> list[DecisionKey]:
    return [key for key in (parse_key(info.key) for info in play.store.list("log/")) if isinstance(key, DecisionKey)]


def restore(run: Run, *, ranks: tuple[int, ...] = (0, 1), **more: Any) -> None:
    for rank in ranks:
        run.say(rank, restore=NodeMessage.Restore(rank=rank, **more))


def ready(run: Run) -> None:
    attempt = run.last("restore_chosen").restore_chosen.attempt
    for rank in range(2):
        run.say(rank, restore_ready=NodeMessage.RestoreReady(rank=rank, attempt=attempt))


def committed_once(play: Play) -> Run:
    run = play.run().attach()
    run.save(1)
    run.settle()
    return run


class TestStart:
    def test_the_claim_is_written_before_history_is_read(self) -> None:
        """R1: nothing under log/ is read for resolving before the claim stands in the store."""
        run = Play().run().attach()
        run.until(is_put("claim"))
        assert not [e for e in run.log if e.kind == "resolved"]
        run.settle()
        assert [e.kind for e in run.log if e.kind in {"claimed", "resolved"}] == ["claimed", "resolved"]

    def test_a_claim_taken_meanwhile_means_a_higher_number(self) -> None:
        """R1: a run that finds another claim of its number or a higher one begins again with a higher one."""
        play = Play()
        first, second = play.run().attach(), play.run().attach()
        second.until(is_put("claim"))
        first.until(is_put("claim"))
        second.settle()
        first.settle()
        numbers = sorted(run.state.timeline.number for run in (first, second))
        assert numbers in ([1, 1], [1, 2])
        assert (
            max(first.state.timeline, second.state.timeline) == (first if numbers == [1, 2] else second).state.timeline
        )

    def test_another_jobs_root_is_refused(self) -> None:
        """A root holds one job; the run ends before it claims."""
        play = Play()
        play.run().attach().settle()
        other = play.run()
        other.lead.job = "other"
        other.attach().settle()
        assert other.last("refused").refused.reason == error_pb2.REASON_JOB_MISMATCH
        assert other.state.timeline is None

    def test_a_living_run_is_not_disturbed_without_takeover(self) -> None:
        """The second start waits its grace, then is refused; with takeover it claims."""
        play = Play()
        play.run().attach().settle()
        second = play.run(alive=2).attach()
        second.settle()
        for _ in range(30):
            second.wait(0.5)
            second.settle()
        assert second.last("refused").refused.reason == error_pb2.REASON_JOB_ALIVE
        third = play.run(alive=2, takeover=True).attach()
        third.settle()
        assert third.state.timeline.number == 2

    def test_missing_ranks_are_named_when_the_deadline_passes(self) -> None:
        """A run whose rank 1 never attaches is refused and names it."""
        run = Play().run()
        run.hello(0)
        run.say(0, attached=NodeMessage.RankAttached(rank=0, coordinate=[0], world=2, mesh=run.lead.mesh))
        run.wait(31)
        refused = run.last("refused").refused
        assert (refused.reason, "ranks [1]" in refused.message) == (error_pb2.REASON_RANKS_MISSING, True)


class TestCommit:
    def test_a_step_is_acknowledged_after_its_record_and_the_second_look(self) -> None:
        """R4: record put, then the claims are listed, then the nodes are told; in this order."""
        play = Play()
        run = play.run().attach()
        run.save(1)
        run.until(is_put("decision"))
        assert listed(play) == []
        run.step()
        assert run.outcomes() == {}
        run.until(is_list)
        run.step()
        assert run.outcomes() == {1: True}
        assert listed(play) == [(run.timeline, 1)]

    def test_d1_an_acknowledged_step_is_lost_only_without_the_second_look(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """D1, P3: the newer run lists before the index lands; the old one commits after: with the look no acknowledgement."""
        for look in (True, False):
            with monkeypatch.context() as patch:
                if not look:
                    patch.setattr(saving, "fenced_by", lambda *_: False)
                play = Play()
                old = play.run().attach()
                old.begin(1)
                old.settle()
                old.stage(1)
                new = play.run().attach()
                restore(new)
                new.settle()
                old.seal(1)
                old.settle()
                acked, there = old.outcomes().get(1), (old.timeline, 1) in listed(play)
                assert (acked, there) == ((None, False) if look else (True, False))

    def test_steps_are_decided_in_their_order(self) -> None:
        """R4: a later step that is sealed first waits for the earlier one."""
        play = Play()
        run = play.run().attach()
        for step in (1, 2):
            run.begin(step)
            run.settle()
            run.stage(step)
        run.seal(2)
        run.settle()
        assert run.outcomes() == {}
        run.seal(1)
        run.settle()
        assert list(run.outcomes()) == [1, 2]
        assert listed(play) == [(run.timeline, 1), (run.timeline, 2)]

    def test_the_base_of_a_step_in_flight_stays_listed(self) -> None:
        """R4, liveness: with keep_last=1, step 2's record still lists step 1 because step 3 refers to it."""
        play = Play()
        run = play.run(keep_last=1).attach()
        run.save(1)
        run.settle()
        for step in (2, 3):
            run.begin(step)
            run.settle()
        for step in (2, 3):
            run.stage(step)
            run.seal(step)
        run.settle()
        assert run.outcomes() == {1: True, 2: True, 3: True}
        assert listed(play) == [(run.timeline, 3)]

    def test_a_step_whose_base_is_no_longer_listed_aborts(self) -> None:
        """R4: the base of step 2 is found bad while step 2 is in flight; it aborts, naming the base."""
        play = Play()
        run = committed_once(play)
        run.begin(2)
        run.settle()
        run.stage(2)
        restore(run)
        run.settle()
        bad = error_pb2.Error(reason=error_pb2.REASON_CORRUPT, message="damaged")
        run.say(0, restore_failed=NodeMessage.RestoreFailed(rank=0, attempt=1, error=bad))
        run.settle()
        run.seal(2)
        run.settle()
        assert run.outcomes() == {1: True, 2: False}
        assert run.last("outcome").outcome.aborted.reason == error_pb2.REASON_BASE_DROPPED

    def test_a_store_that_is_away_at_the_decision_delays_it_and_nothing_else(self) -> None:
        """A record is put again with the same bytes until the store answers; meanwhile saves are skipped as busy."""
        play = Play()
        run = play.run(slots=1).attach()
        run.save(1)
        operation = run.until(is_put("decision"))
        run.pending.pop("history")
        run.apply(effects.Done(lane="history", error=OSError("store away")))
        run.begin(2)
        run.settle()
        assert run.last("begin").begin.error.reason == error_pb2.REASON_BUSY
        run.wait(2)
        assert run.pending["history"] == operation
        run.settle()
        assert run.outcomes() == {1: True}

    def test_an_index_that_is_gone_when_read_back_aborts_the_step(self) -> None:
        """Nothing is committed on a node's word: the index is read from the store before the decision."""
        play = Play()
        run = play.run().attach()
        run.begin(1)
        run.settle()
        run.stage(1)
        refs = [run.put(1, rank) for rank in range(2)]
        for rank, ref in enumerate(refs):
            run.say(rank, sealed=NodeMessage.Sealed(timeline=run.timeline, step=1, index=ref))
        play.store.delete(refs[1].key)
        run.settle()
        assert run.outcomes() == {1: False}
        assert listed(play) == []


class TestAbort:
    def test_a_rank_that_dies_before_it_staged_aborts_the_step_on_all(self) -> None:
        """The marker is put, the claims are looked at, then every node is told who died."""
        play = Play()
        run = play.run().attach()
        run.begin(1)
        run.settle()
        run.say(0, staged=NodeMessage.Staged(rank=0, step=1, timeline=run.timeline))
        run.say(1, gone=NodeMessage.RankGone(rank=1))
        run.settle()
        aborted = run.last("outcome").outcome.aborted
        assert (aborted.reason, aborted.step, "rank 1" in aborted.message) == (error_pb2.REASON_RANK_FAILED, 1, True)
        assert [key.id.step for key in decisions(play)] == [1]
        assert listed(play) == []

    def test_a_rank_that_dies_after_it_staged_harms_nothing(self) -> None:
        """The bytes are the agents': the step commits without its trainers."""
        play = Play()
        run = play.run().attach()
        run.begin(1)
        run.settle()
        run.stage(1)
        for rank in range(2):
            run.say(rank, gone=NodeMessage.RankGone(rank=rank))
        assert not run.closed
        run.seal(1)
        run.settle()
        assert run.outcomes() == {1: True}
        assert run.closed

    @pytest.mark.parametrize("look", [True, False], ids=["with the second look", "without it"])
    def test_p2_a_step_told_aborted_is_never_in_history(self, monkeypatch: pytest.MonkeyPatch, look: bool) -> None:
        """R5: the newer run adopts the step while the old one gives it up; without the look the trainer is told a lie."""
        play = Play()
        old = play.run().attach()
        old.begin(1)
        old.settle()
        old.stage(1)
        for rank in range(2):
            old.put(1, rank)
        new = play.run().attach()
        restore(new)
        new.settle()
        ready(new)
        new.settle()
        if not look:
            monkeypatch.setattr(saving, "fenced_by", lambda *_: False)
        old.say(1, failed=NodeMessage.StepFailed(timeline=old.timeline, step=1))
        old.settle()
        assert (old.timeline, 1) in listed(play)
        assert old.outcomes() == ({} if look else {1: False})


class TestBegin:
    def test_nobody_gets_an_answer_before_all_ranks_asked(self) -> None:
        """Go is one answer for all ranks."""
        run = Play().run().attach()
        run.settle()
        run.begin(1, ranks=(0,))
        run.settle()
        assert "begin" not in run.kinds()
        run.begin(1, ranks=(1,))
        run.settle()
        assert run.last("begin").begin.go

    def test_ranks_that_save_different_steps_are_told_which(self) -> None:
        """Unequal steps are an error on every rank, and the next equal ones are saved."""
        run = Play().run().attach()
        run.begin(1, ranks=(0,))
        run.begin(2, ranks=(1,))
        run.settle()
        error = run.last("begin").begin.error
        assert error.reason == error_pb2.REASON_RANKS_DISAGREE
        assert "step 1 on ranks [0]" in error.message
        assert "step 2 on ranks [1]" in error.message
        run.begin(3)
        run.settle()
        assert run.last("begin").begin.go

    def test_a_step_used_before_is_refused(self) -> None:
        """Each number once per timeline, ascending."""
        run = committed_once(Play())
        run.begin(1)
        run.settle()
        assert run.last("begin").begin.error.reason == error_pb2.REASON_INVALID_STEP

    def test_s024_a_busy_step_is_skipped_on_all_ranks_alike(self) -> None:
        """With every slot in flight the step is skipped, and never mixed with another one."""
        run = Play().run(slots=1).attach()
        run.begin(1)
        run.settle()
        run.begin(2)
        run.settle()
        assert run.last("begin").begin.error.reason == error_pb2.REASON_BUSY
        run.stage(1)
        run.seal(1)
        run.settle()
        run.begin(3)
        run.settle()
        assert run.last("begin").begin.go

    def test_the_answer_is_given_again_after_a_reconnect(self) -> None:
        """A node that asks once more for a step that is under way gets the same go."""
        run = Play().run().attach()
        run.begin(1)
        run.settle()
        first = run.last("begin")
        run.said.clear()
        run.begin(1, ranks=(0,))
        assert run.last("begin") == first


class TestRestore:
    def test_the_start_record_waits_until_every_rank_is_ready(self) -> None:
        """No record before all bytes are verified, no go before the record."""
        play = Play()
        committed_once(play)
        run = play.run().attach()
        restore(run)
        run.settle()
        assert run.last("restore_chosen").restore_chosen.step.step == 1
        assert not run.is_running()
        ready(run)
        run.until(is_put("start_record"))
        assert "restore_go" not in run.kinds()
        run.settle()
        assert "restore_go" in run.kinds()

    def test_a_corrupt_step_is_quarantined_and_the_one_before_is_offered(self) -> None:
        """The fall-back is told to every rank and stands in the start record."""
        play = Play()
        first = committed_once(play)
        first.save(2)
        first.settle()
        run = play.run().attach()
        restore(run)
        run.settle()
        bad = error_pb2.Error(reason=error_pb2.REASON_CORRUPT, message="chunks/aa is damaged")
        run.say(0, restore_failed=NodeMessage.RestoreFailed(rank=0, attempt=1, error=bad))
        run.settle()
        chosen = run.last("restore_chosen").restore_chosen
        assert chosen.step.step == 1
        assert [entry.why.message for entry in chosen.fell_back_from] == ["chunks/aa is damaged"]
        ready(run)
        run.settle()
        assert listed(play) == [(first.timeline, 1)]

    def test_when_no_step_is_good_the_answer_is_an_error_and_never_nothing(self) -> None:
        """Steps exist, all are bad: training must not begin from scratch without a word."""
        play = Play()
        committed_once(play)
        run = play.run().attach()
        restore(run)
        run.settle()
        bad = error_pb2.Error(reason=error_pb2.REASON_CORRUPT, message="damaged")
        run.say(0, restore_failed=NodeMessage.RestoreFailed(rank=0, attempt=1, error=bad))
        run.settle()
        assert run.last("restore_error").restore_error.error.reason == error_pb2.REASON_CORRUPT
        assert not run.is_running()

    def test_s017_an_empty_root_answers_nothing_found_on_every_rank(self) -> None:
        """The same answer for all, and the timeline runs."""
        run = Play().run().attach()
        restore(run)
        run.settle()
        for node in NODES:
            assert [m.restore_chosen.found for to, m in run.said if to == node and m.HasField("restore_chosen")] == [
                False
            ]
        assert run.is_running()

    def test_s016_a_step_that_does_not_exist_is_an_error_that_lists_those_that_do(self) -> None:
        """An explicitly asked step is never replaced by another one."""
        play = Play()
        committed_once(play)
        run = play.run().attach()
        restore(run, step=50)
        run.settle()
        error = run.last("restore_error").restore_error.error
        assert (error.reason, "[1]" in error.message) == (error_pb2.REASON_NOT_FOUND, True)

    def test_going_back_needs_to_be_said_and_then_drops_what_is_newer(self) -> None:
        """An older step is refused without rollback; with it, the start record lists nothing newer."""
        play = Play()
        first = committed_once(play)
        first.save(2)
        first.settle()
        run = play.run().attach()
        restore(run, step=1)
        run.settle()
        assert run.last("restore_error").restore_error.error.reason == error_pb2.REASON_INVALID_ARGUMENT
        restore(run, step=1, rollback=True)
        run.settle()
        ready(run)
        run.settle()
        assert listed(play) == [(first.timeline, 1)]

    def test_uploads_of_the_last_timeline_are_waited_for_and_adopted(self) -> None:
        """The nodes still upload step 1 of the dead run: the new one waits, adopts it, and restores it."""
        play = Play()
        dead = play.run().attach()
        dead.begin(1)
        dead.settle()
        dead.stage(1)
        held = [Held(timeline=dead.timeline, step=1, ranks=[0])], [Held(timeline=dead.timeline, step=1, ranks=[1])]
        run = play.run()
        for rank in range(2):
            run.hello(rank, held=held[rank])
            run.say(rank, attached=NodeMessage.RankAttached(rank=rank, coordinate=[rank], world=2, mesh=run.lead.mesh))
        restore(run)
        run.settle()
        assert "restore_chosen" not in run.kinds()
        for rank in range(2):
            index = dead.put(1, rank)
            run.say(rank, sealed=NodeMessage.Sealed(timeline=dead.timeline, step=1, index=index))
        run.settle()
        chosen = run.last("restore_chosen").restore_chosen
        assert (chosen.step.step, chosen.step.timeline, chosen.committed.posthumous) == (1, dead.timeline, True)

    def test_an_upload_that_never_ends_is_given_up_at_the_deadline(self) -> None:
        """The wait is bounded: the run goes on from what there is."""
        play = Play()
        dead = play.run().attach()
        dead.begin(1)
        dead.settle()
        dead.stage(1)
        run = play.run()
        for rank in range(2):
            run.hello(rank, held=[Held(timeline=dead.timeline, step=1, ranks=[rank])])
            run.say(rank, attached=NodeMessage.RankAttached(rank=rank, coordinate=[rank], world=2, mesh=run.lead.mesh))
        restore(run)
        run.settle()
        run.wait(21)
        run.settle()
        assert run.last("restore_chosen").restore_chosen.found is False


def test_a_failure_that_comes_while_the_decision_is_written_changes_nothing() -> None:
    """A rank's call may end late, after its bytes were sealed: a node that was away hears of the commit, as all others did."""
    run = Play().run().attach()
    run.settle()
    run.save(1)
    run.until(lambda operation: isinstance(operation, effects.Put) and operation.label == "decision")
    why = make_error(error_pb2.REASON_RANK_FAILED, "too late", step=1, rank=1)
    run.say(1, failed=NodeMessage.StepFailed(timeline=run.timeline, step=1, error=why))
    run.settle()
    assert run.outcomes() == {1: True}
    run.hello(0, held=[Held(timeline=run.timeline, step=1, ranks=[0])])
    assert run.kinds().count("outcome") == 2
    assert not run.last("outcome").outcome.HasField("aborted")
