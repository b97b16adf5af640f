"""While the coordinator makes up its mind whether a step may begin: each wait, crossed with each change meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fixtures.at_rest import Shard, small_state
from fixtures.coordinated import NODES, Play, Run

from ckptd.daemon.coordinator import effects
from ckptd.daemon.errors import make_error
from ckptd.daemon.keys import StepId
from ckptd.protos import error_pb2, shard_table
from ckptd.protos.coordinator_pb2 import NodeMessage
from ckptd.protos.error_pb2 import Error, Reason
from ckptd.protos.snapshot_pb2 import StepRef

LONG: dict[str, Any] = {"begin_timeout_s": 600.0, "commit_timeout_s": 1800.0}


def until_start(play: Play) -> tuple[Run, int]:
    """All ask for step 1; the timeline has no start record yet."""
    run = play.run(**LONG).attach()
    while not run.state.start_wanted:
        if run.pending:
            run.step(next(iter(run.pending)))
        else:
            run.begin(1)
    return run, 1


def until_slot(play: Play) -> tuple[Run, int]:
    """All ask for step 2; step 1 has the only slot."""
    run = play.run(slots=1, wait_when_busy=True, **LONG).attach()
    run.begin(1)
    run.settle()
    run.stage(1)
    run.begin(2)
    run.settle()
    return run, 2


def until_layouts(play: Play) -> tuple[Run, int]:
    """All ask for step 1, and start is over; the layouts have not come."""
    run = play.run(**LONG).attach()
    run.begin(1)
    while run.pending:
        run.step(next(iter(run.pending)))
    assert run.layouts_asked == {0, 1}
    return run, 1


def until_plan(play: Play) -> tuple[Run, int]:
    """All ask for step 1, and start is over; the plan is being computed."""
    run, step = until_layouts(play)
    for rank in range(2):
        table = run.layouts[rank]
        run.layouts_sent.add(rank)
        run.apply(effects.LayoutReceived(rank=rank, digest=shard_table.digest(table), rows=table))
    assert isinstance(run.pending["admission"], effects.Compute)
    return run, step


def rank_dies(run: Run, step: int) -> None:
    """The process of rank 1 is killed."""
    run.say(1, gone=NodeMessage.RankGone(rank=1, clean=False, why=Error(message="killed")))


def rank_leaves(run: Run, step: int) -> None:
    """Rank 1 detaches."""
    run.say(1, gone=NodeMessage.RankGone(rank=1, clean=True))


def node_is_lost(run: Run, step: int) -> None:
    """The node of rank 1 does not come back within its grace."""
    run.apply(effects.NodeLost(node=NODES[1], incarnation="i"))
    run.wait(31.0)


def rank_cannot_read_its_state(run: Run, step: int) -> None:
    """Rank 1 fails the step that it has asked for."""
    why = make_error(error_pb2.REASON_INVALID_ARGUMENT, "no such tensor", rank=1)
    run.say(1, failed=NodeMessage.StepFailed(step=step, error=why))


def newer_run_claims(run: Run, step: int) -> None:
    """The same agent leads a newer run of the job."""
    run.apply(effects.Superseded())


def free_the_slot(run: Run) -> None:
    """What the begin waited for comes after all."""
    if 1 in run.state.steps and run.state.steps[1].all_staged and not run.state.has_ended:
        run.seal(1, ranks=(0,) if not run.state.nodes[NODES[1]].connected else (0, 1))
    run.settle()


WAITS = [until_start, until_slot, until_layouts, until_plan]
CHANGES: dict[Callable[[Run, int], None], Reason.ValueType] = {
    rank_dies: error_pb2.REASON_RANK_FAILED,
    rank_leaves: error_pb2.REASON_RANK_FAILED,
    node_is_lost: error_pb2.REASON_RANK_FAILED,
    rank_cannot_read_its_state: error_pb2.REASON_INVALID_ARGUMENT,
    newer_run_claims: error_pb2.REASON_FENCED,
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.__name__)
def test_a_step_that_cannot_be_saved_any_more_is_refused_at_once(
    wait: Callable[[Play], tuple[Run, int]], change: Callable[[Run, int], None]
) -> None:
    """Whatever the begin waits for: go is told on no plan that lost a rank meanwhile, those left hear why at once."""
    run, step = wait(Play())
    run.said.clear()
    change(run, step)
    assert step not in run.state.steps
    free_the_slot(run)
    begins = [m.begin for to, m in run.said if to == NODES[0] and m.HasField("begin") and m.begin.step == step]
    assert [(begin.go, begin.error.reason) for begin in begins] == [(False, CHANGES[change])]
    assert step not in run.state.steps
    assert not run.state.begins


@pytest.mark.parametrize("change", [rank_dies, node_is_lost])
@pytest.mark.parametrize("wait", [until_start, until_slot, until_layouts])
def test_a_wait_ends_with_the_rank_that_it_would_be_for(
    wait: Callable[[Play], tuple[Run, int]], change: Callable[[Run, int], None]
) -> None:
    """The others are told before what was waited for has come."""
    run, step = wait(Play())
    run.said.clear()
    change(run, step)
    assert [m.begin.go for to, m in run.said if to == NODES[0] and m.HasField("begin") and m.begin.step == step] == [
        False
    ]


def test_a_rank_that_comes_back_meanwhile_may_ask_again() -> None:
    """Dead and attached anew while the plan was computed, it has not asked: go waits for it, and comes when it does."""
    run, step = until_plan(Play())
    rank_dies(run, step)
    run.say(
        1,
        attached=NodeMessage.RankAttached(
            rank=1, coordinate=[1], world=2, mesh=run.lead.mesh, options=run.lead.options
        ),
    )
    run.settle()
    assert "begin" not in run.kinds()
    run.begin(step, ranks=(1,))
    run.settle()
    assert run.last("begin").begin.go


def longer_state(node: str, own: StepId) -> dict[int, tuple[list[Shard], dict[str, bytes]]]:
    state = small_state(node, own)
    if node == NODES[1]:
        state[1][0].append(Shard(name="grown", values=np.zeros(8, dtype=np.uint8)))
    return state


def test_a_layout_that_changes_while_the_plan_is_computed_is_asked_for() -> None:
    """Go is told on the plan of the layouts that the ranks asked with last."""
    run, step = until_plan(Play())
    run.relayout(longer_state)
    run.layouts_asked.clear()
    run.begin(step, ranks=(1,))
    assert step not in run.state.steps
    run.settle()
    assert run.last("begin").begin.go
    assert run.layouts_sent == {1}
    run.stage(step)
    run.seal(step)
    run.settle()
    assert run.outcomes() == {step: True}


def test_a_layout_that_changes_while_it_is_waited_for_is_asked_for() -> None:
    """The one before never comes: the begin does not wait for it until its deadline."""
    run, step = until_layouts(Play())
    run.relayout(longer_state)
    run.layouts_asked = {0}
    run.begin(step, ranks=(1,))
    assert run.layouts_asked == {0, 1}
    run.settle()
    assert run.last("begin").begin.go


def test_a_layout_is_asked_for_again_when_the_connection_broke() -> None:
    """The question, or the answer, was lost with it; the node says its begin again."""
    run, step = until_layouts(Play())
    run.layouts_asked.clear()
    run.apply(effects.NodeLost(node=NODES[1], incarnation="i"))
    run.hello(1)
    run.begin(step, ranks=(1,))
    assert run.layouts_asked == {1}
    run.layouts_asked.add(0)
    run.settle()
    assert run.last("begin").begin.go
    run.layouts_asked.clear()
    run.begin(step, ranks=(1,))
    assert not run.layouts_asked


def test_a_node_that_is_only_away_is_waited_for() -> None:
    """Within its grace a node's ranks are not gone: the step begins, and the node hears of it when it is back."""
    run, step = until_slot(Play())
    run.apply(effects.NodeLost(node=NODES[1], incarnation="i"))
    run.wait(5.0)
    run.seal(1)
    run.settle()
    assert step in run.state.steps
    run.hello(1)
    run.said.clear()
    run.begin(step, ranks=(1,))
    assert [m.begin.go for to, m in run.said if to == NODES[1] and m.HasField("begin")] == [True]


def begun_before(label: str, *, keep_last: int, newest: int) -> tuple[Run, StepRef | None]:
    """Steps up to `newest` are committed; begin the one after next before that operation of the next one's decision.

    Returns:
        The run, the late step being begun, and the base that it was given.
    """
    run = Play().run(keep_last=keep_last).attach()
    for step in range(1, newest + 1):
        run.save(step)
        run.settle()
    run.save(newest + 1)
    run.until(lambda operation: getattr(operation, "label", "") == label)
    run.begin(newest + 2)
    while "admission" in run.pending:
        run.step("admission")
    go = run.last("begin").begin
    assert (go.step, go.go) == (newest + 2, True)
    return run, go.base if go.HasField("base") else None


@pytest.mark.parametrize(
    ("keep_last", "label", "base"),
    [
        (1, "read_indexes", 2),
        (1, "list_pins", 2),
        (1, "decision", None),
        (1, "second_look", None),
        (2, "decision", 2),
        (2, "second_look", 2),
        (0, "decision", 2),
        (0, "second_look", 2),
    ],
)
def test_no_step_begins_on_a_base_that_is_being_dropped(keep_last: int, label: str, base: int | None) -> None:
    """R3, R4: its base is listed and stays so, also where a record is made, and not acknowledged, that drops the newest step."""
    run, given = begun_before(label, keep_last=keep_last, newest=2)
    assert (given.step if given is not None else None) == base
    run.settle()
    run.stage(4)
    run.seal(4)
    run.settle()
    assert run.outcomes() == dict.fromkeys(range(1, 5), True)
    kept = [ref.step for ref in run.state.listed.keeps]
    assert kept[-1] == 4
    assert not keep_last or len(kept) <= keep_last + 1


def test_the_base_of_a_step_begun_beside_an_abort_is_the_newest() -> None:
    """An abort marker lists nothing and drops nothing."""
    run = Play().run(keep_last=1).attach()
    run.save(1)
    run.settle()
    run.begin(2)
    run.settle()
    run.say(0, failed=NodeMessage.StepFailed(timeline=run.timeline, step=2, error=Error(message="disk")))
    run.until(lambda operation: getattr(operation, "label", "") == "second_look")
    run.begin(3)
    assert run.last("begin").begin.base.step == 1
    run.settle()
    run.stage(3)
    run.seal(3)
    run.settle()
    assert run.outcomes() == {1: True, 2: False, 3: True}
