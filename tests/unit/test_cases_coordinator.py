"""Faults from the field that the coordinator alone must meet, played on a store in memory."""

from __future__ import annotations

from typing import Any

from fixtures.coordinated import Play, Run

from ckptd.protos import error_pb2
from ckptd.protos.coordinator_pb2 import Held, NodeMessage


def begin_errors(run: Run) -> list[Any]:
    """Return the errors of all answers to Begin that the first node got."""
    return [
        m.begin.error for to, m in run.said if to == "node-a" and m.WhichOneof("kind") == "begin" and not m.begin.go
    ]


def fail(run: Run, rank: int, step: int, text: str) -> None:
    error = error_pb2.Error(reason=error_pb2.REASON_RANK_FAILED, message=text, rank=rank, step=step)
    run.say(
        rank, failed=NodeMessage.StepFailed(timeline=run.timeline if run.is_running() else "", step=step, error=error)
    )


class TestRefusedBegin:
    def test_s033_a_rank_that_cannot_read_its_state_ends_the_wait_of_those_that_asked(self) -> None:
        """Rank 0 waits in Begin; rank 1's state raises: rank 0 gets that very error at once, not a deadline."""
        run = Play().run().attach()
        run.begin(1, ranks=(0,))
        run.settle()
        assert begin_errors(run) == []
        fail(run, 1, 1, "rank 1: boom")
        run.settle()
        assert [error.message for error in begin_errors(run)] == ["rank 1: boom"]

    def test_s033_a_rank_that_asks_after_the_failure_hears_of_it_and_the_step_can_be_tried_again(self) -> None:
        """The failure comes first: rank 0 gets it when it asks; after all ranks were told the same step is saved."""
        run = Play().run().attach()
        fail(run, 1, 1, "rank 1: boom")
        run.begin(1, ranks=(0,))
        run.settle()
        assert [error.message for error in begin_errors(run)] == ["rank 1: boom"]
        run.begin(1)
        run.settle()
        run.stage(1)
        run.seal(1)
        run.settle()
        assert run.outcomes() == {1: True}

    def test_s033_the_failure_of_one_step_does_not_touch_the_next(self) -> None:
        """Ranks that never ask for the refused step are not told of it later, and the next step commits."""
        run = Play().run().attach()
        fail(run, 1, 1, "rank 1: boom")
        run.save(2)
        run.settle()
        assert run.outcomes() == {2: True}
        assert begin_errors(run) == []
        assert not run.state.refused_begins


class TestRestartInALivingRun:
    def test_s007_a_coordinator_that_comes_back_decides_what_waits_although_nobody_calls(self) -> None:
        """The run's last save was sealed when its coordinator died; the new one adopts it and tells, with no save or restore."""
        play = Play()
        old = play.run().attach()
        old.save(1)
        old.settle()
        old.begin(2)
        old.settle()
        old.stage(2)
        refs = [old.put(2, rank) for rank in range(2)]
        again = play.run()
        again.lead.run_id = old.lead.run_id
        for rank in range(2):
            held = [Held(timeline=old.timeline, step=2, ranks=[rank], index=refs[rank])]
            again.hello(rank, held=held)
            again.say(
                rank,
                attached=NodeMessage.RankAttached(
                    rank=rank, coordinate=[rank], world=2, mesh=again.lead.mesh, options=again.lead.options
                ),
            )
        again.settle()
        assert again.is_running()
        assert [(ref.timeline, ref.step) for ref in again.last("started").started.keeps] == [
            (old.timeline, 1),
            (old.timeline, 2),
        ]

    def test_another_run_writes_nothing_before_it_is_asked(self) -> None:
        """A new run may still restore an older step: its start record waits for its ranks' word."""
        play = Play()
        old = play.run().attach()
        old.save(1)
        old.settle()
        new = play.run().attach()
        new.settle()
        assert not new.is_running()


class TestBrokenLink:
    def test_s034_a_failure_that_was_said_into_a_broken_link_counts_after_the_reconnect(self) -> None:
        """The node cannot upload and its word is lost: its next hello ends the step for all, long before the deadline."""
        run = Play().run().attach()
        run.begin(1)
        run.settle()
        run.stage(1)
        run.seal(1, ranks=(0,))
        failed = error_pb2.Error(reason=error_pb2.REASON_STORE_FAILED, message="disk on fire")
        run.hello(1, held=[Held(timeline=run.timeline, step=1, ranks=[1], failed=failed)])
        run.settle()
        assert run.outcomes() == {1: False}
        assert run.last("outcome").outcome.aborted.message == "disk on fire"
