"""The coordinator's agent dies inside a living job: training does not notice more than a lost snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.agents import Agents
from fixtures.raw_job import Job, state_of

from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import Event

pytestmark = pytest.mark.integration


def test_the_job_goes_on_under_the_next_timeline(agents: Agents, tmp_path: Path) -> None:
    """The restarted agent listens where the first did, claims the next timeline, and the other node finds it by itself."""
    root = f"file://{tmp_path}/root"
    nodes = [agents.new(), agents.new()]
    job = Job(root, nodes, 1)
    job.save(1)
    job.wait(1)
    nodes[0].kill()
    nodes[0].start()
    job.ranks[0].reconnect(nodes[0].socket)
    assert job.ranks[0].about.endpoint == job.ranks[1].about.endpoint
    job.save(2)
    job.wait(2)
    assert len(nodes[0].events("claimed")) == 2
    job.detach()
    again = Job(root, nodes, 1)
    again.check(again.restored(), 2)
    again.detach()


def test_a_step_that_was_staged_is_finished_and_told_to_the_living_ranks(agents: Agents, tmp_path: Path) -> None:
    """Its upload goes on under the old timeline; the new coordinator adopts it, and every rank hears that it is durable."""
    root = f"file://{tmp_path}/root"
    nodes = [agents.new(start=False), agents.new()]
    nodes[0].start(env={"CKPTD_FAILPOINTS": "coordinator.before_decision=kill@2"})
    job = Job(root, nodes, 1)
    job.save(1)
    job.wait(1)
    job.save(2)
    assert nodes[0].process is not None
    assert nodes[0].process.wait(timeout=30) == -9, "the failpoint must have fired"
    nodes[0].start()
    job.ranks[0].reconnect(nodes[0].socket)
    job.save(3)
    job.wait(2)
    job.wait(3)
    assert nodes[0].wait_event("adopted", step=2)
    job.detach()


def test_a_step_that_was_not_staged_everywhere_is_told_aborted(agents: Agents, tmp_path: Path) -> None:
    """The coordinator dies before rank 1 has staged; the step is given up, and the next save commits."""
    root = f"file://{tmp_path}/root"
    nodes = [agents.new(), agents.new()]
    job = Job(root, nodes, 1)
    job.save(1)
    job.wait(1)
    replies = job.each(lambda rank: rank.begin(2, rank.put_layout(state_of(2, rank.about.rank))))
    assert [reply.go for reply in replies] == [True, True]
    nodes[0].kill()
    nodes[0].start()
    job.ranks[0].reconnect(nodes[0].socket)
    job.save(3)
    told = job.ranks[1].event("step", state=Event.ABORTED, step=2)
    assert told.step.error.reason == error_pb2.REASON_ABORTED
    job.wait(3)
    job.detach()


def test_a_step_that_was_torn_with_its_agent_is_told_to_the_rank_that_had_staged(
    agents: Agents, tmp_path: Path
) -> None:
    """The next agent has nothing of it and would say nothing: the rank would wait until its deadline, `close` with it."""
    root = f"file://{tmp_path}/root"
    node = agents.new()
    job = Job(root, [node], 2)
    job.save(1)
    job.wait(1)
    replies = job.each(lambda rank: rank.begin(2, rank.put_layout(state_of(2, rank.about.rank))))
    assert [reply.go for reply in replies] == [True, True]
    first = job.ranks[0]
    first.stub.Staged(first.fill(replies[0], 2, state_of(2, 0), {"rng": b"r"}), timeout=30)
    node.kill()
    node.start()
    first.about.in_flight.add(step=2, timeline=replies[0].timeline)
    for rank in job.ranks:
        rank.reconnect(node.socket)
    job.save(3)
    told = first.event("step", state=Event.ABORTED, step=2)
    assert (told.step.timeline, told.step.error.reason) == (replies[0].timeline, error_pb2.REASON_ABORTED)
    job.wait(3)
    job.detach()


def test_an_outcome_that_was_told_while_a_rank_was_away_is_told_again(agents: Agents, tmp_path: Path) -> None:
    """Its stream had broken: neither agent nor coordinator died, and nobody else would say it."""
    root = f"file://{tmp_path}/root"
    node = agents.new()
    job = Job(root, [node], 2)
    replies = job.save(1)
    job.wait(1)
    away = job.ranks[1]
    away.about.in_flight.add(step=1, timeline=replies[1].timeline)
    away.reconnect(node.socket)
    assert away.event("step", state=Event.COMMITTED, step=1).step.timeline == replies[1].timeline
    del away.about.in_flight[:]
    job.save(2)
    job.wait(2)
    job.detach()
