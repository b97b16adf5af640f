"""Verbs on roots that real agents made."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from fixtures.agents import Agents
from fixtures.raw_job import Job
from fixtures.stored_root import catalog_of, unproved

from ckptd.daemon.cli.copy_step import copy
from ckptd.daemon.cli.diff import diff
from ckptd.daemon.cli.drop import drop
from ckptd.daemon.cli.exit_codes import ExitCode
from ckptd.daemon.cli.retain import retain
from ckptd.daemon.cli.sweep import sweep
from ckptd.daemon.errors import DaemonError
from ckptd.protos import error_pb2

pytestmark = pytest.mark.integration


def test_a_job_goes_on_from_a_copy_of_one_of_its_steps(agents: Agents, tmp_path: Path) -> None:
    """The middle step is copied while the job runs; a run restores it from the copy, saves on, and `diff` finds nothing."""
    root, target = f"file://{tmp_path}/root", f"file://{tmp_path}/copy"
    nodes = [agents.new(), agents.new()]
    job = Job(root, nodes, 2)
    for step in (1, 2, 3):
        job.save(step)
        job.wait(step)
    copy(root, 2, target)
    assert [step.id.step for step in catalog_of(target).steps] == [2]
    assert unproved(target) == []
    with pytest.raises(typer.Exit) as ended:
        diff([f"{root}@2", target])
    assert ended.value.exit_code == ExitCode.GOOD
    with pytest.raises(typer.Exit) as ended:
        diff([root, target])
    assert ended.value.exit_code == ExitCode.DIFFERENT
    job.save(4)
    job.wait(4)

    others = [agents.new(), agents.new()]
    again = Job(target, others, 2)
    answers = again.restored()
    again.check(answers, 2)
    assert {found.tier for found, _, _ in answers} == {"store"}
    again.save(3)
    again.wait(3)
    again.detach()
    job.detach()
    assert [step.id.step for step in catalog_of(target).steps] == [2, 3]
    assert unproved(target) == []
    assert [step.id.step for step in catalog_of(root).steps] == [1, 2, 3, 4]


def test_steps_are_dropped_of_a_dead_job_and_not_of_a_living_one(agents: Agents, tmp_path: Path) -> None:
    """While its ranks live the job's coordinator answers and nothing is written; later the next run goes on from the latest."""
    root = f"file://{tmp_path}/root"
    nodes = [agents.new(), agents.new()]
    job = Job(root, nodes, 1)
    for step in (1, 2, 3):
        job.save(step)
        job.wait(step)
    with pytest.raises(DaemonError) as refused:
        drop(root, ["1"])
    assert refused.value.error.reason == error_pb2.REASON_JOB_ALIVE
    job.save(4)
    job.wait(4)
    job.detach()

    drop(root, ["1"])
    retain(root, keep_last=2)
    sweep(root)
    assert [step.id.step for step in catalog_of(root).steps] == [3, 4]
    assert unproved(root) == []
    again = Job(root, nodes, 1)
    again.check(again.restored(), 4)
    again.save(5)
    again.wait(5)
    again.detach()
    assert unproved(root) == []
