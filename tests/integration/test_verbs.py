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
from ckptd.daemon.cli.exit_codes import ExitCode

pytestmark = pytest.mark.integration


def test_a_job_goes_on_from_a_copy_of_one_of_its_steps(agents: Agents, tmp_path: Path) -> None:
    """The middle step is copied while the job runs; another run restores it from the copy and saves on there. `diff` sees no difference."""
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
