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
