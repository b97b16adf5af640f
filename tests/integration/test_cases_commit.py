"""Faults from the field: a step that is there in part is never taken for a whole one."""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from fixtures.agents import AgentProcess, Agents
from fixtures.raw_job import Job, state_of
from fixtures.stored_root import catalog_of, cli, latest, objects_of, states, tree, unproved

from ckptd.daemon import slot_header
from ckptd.daemon.catalog import StepState

pytestmark = pytest.mark.integration

SLOWLY = {"CKPTD_FAILPOINTS": "uploader.after_put=delay:0.02;uploader.before_index=delay:0.02"}


def started(agents: Agents, count: int) -> list[AgentProcess]:
    """Start agents side by side."""
    nodes = [agents.new(start=False) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(AgentProcess.start, nodes))
    return nodes


def test_s001_a_step_that_one_node_never_finished_is_shown_as_such_and_passed_over(
    agents: Agents, tmp_path: Path
) -> None:
    """Node of rank 2 dies for good after the others sealed step 20: `ls` names rank 2, and all ranks restore step 10."""
    root = f"file://{tmp_path}/root"
    nodes = started(agents, 4)
    nodes[2].kill()
    nodes[2].start(env={"CKPTD_FAILPOINTS": "uploader.before_index=kill@2"})
    job = Job(root, nodes, 1)
    job.save(10)
    job.wait(10)
    job.save(20)
    for at in (0, 1, 3):
        nodes[at].wait_event("sealed-local", step=20)
    assert nodes[2].process is not None
    assert nodes[2].process.wait(timeout=30) == -9, "the failpoint must have fired"
    job.die()

    shown = {step["step"]: step for step in cli("ls", root).out["steps"]}
    assert shown[10]["state"] == "committed"
    assert (shown[20]["state"], shown[20]["ranks"]) == ("incomplete", [2])
    assert "rank 2" in shown[20]["why"]

    nodes[2].wipe()
    nodes[2].start()
    again = Job(root, nodes, 1)
    again.check(again.restored(), 10)
    again.save(20)
    again.wait(20)
    again.detach()
    assert states(root) == {10: StepState.COMMITTED, 20: StepState.COMMITTED}


@dataclass(kw_only=True)
class Trial:
    """A job that saves a step each time its agent is killed, and what its next run may restore."""

    root: str
    step: int = 0
    allowed: frozenset[int | None] = frozenset({None})

    def restore(self, node: AgentProcess) -> Job:
        """Start a run and check what it restores, bit for bit."""
        job = Job(self.root, [node], 2)
        answers = job.restored()
        found = {about.step if about.found else None for about, _, _ in answers}
        assert found <= self.allowed, f"{self.root}: restored {found}, not one of {self.allowed}"
        for step in found - {None}:
            job.check(answers, step or 0)
        return job

    def killed(self, *, staged: bool, lost: bool) -> bool:
        """Read from the store what must be restored next; return whether the kill came before the commit."""
        catalog = catalog_of(self.root)
        listed = None if catalog.latest is None else catalog.latest.step
        if listed is not None:
            assert unproved(self.root, newest_only=True) == []
        # A whole step without a record is adopted by the next start: it was never told to be lost.
        whole = [one.id.step for one in catalog.steps if one.state is StepState.UNCOMMITTED]
        from_store = whole[-1] if whole else listed
        if lost:
            self.allowed = frozenset({from_store})
        else:
            # Slots outlive the agent; when save() did not return, they may have been staged or not.
            self.allowed = frozenset({self.step}) if staged else frozenset({self.step, from_store})
        return listed != self.step


def kill_at_random_moments(node: AgentProcess, roots: list[str], kills: Iterable[int]) -> None:
    """SIGKILL the agent while several jobs save, each at a moment of its own; each kill of a job is one seed."""
    trials = [Trial(root=root) for root in roots]
    cut = 0
    for kill in kills:
        draw = random.Random(kill)
        jobs = [trial.restore(node) for trial in trials]
        ahead = [draw.uniform(0.0, 0.3) for _ in trials]
        lost, lost_after_commit = kill % 2 == 0, kill % 5 == 0
        with ThreadPoolExecutor(len(trials)) as pool:
            begun = time.monotonic()

            def save(
                at: int,
                jobs: list[Job] = jobs,
                ahead: list[float] = ahead,
                begun: float = begun,
                lost_after_commit: bool = lost_after_commit,
            ) -> None:
                # The moment of the fault, not a wait for anything.
                time.sleep(max(0.0, begun + 0.3 - ahead[at] - time.monotonic()))
                trials[at].step += 1
                jobs[at].save(trials[at].step)
                if at == 0 and lost_after_commit:
                    jobs[at].wait(trials[at].step)

            savings = [pool.submit(save, at) for at in range(len(trials))]
            time.sleep(max(0.0, begun + 0.3 - time.monotonic()))
            if lost_after_commit:
                savings[0].result(timeout=60)
            assert node.kill() == -9
            staged = [saving.exception() is None for saving in savings]
        for job in jobs:
            job.die()
        cut += sum(trial.killed(staged=done, lost=lost) for trial, done in zip(trials, staged, strict=True))
        sys.stdout.write(f"kill {kill}: lost={lost} staged={staged} next {[trial.allowed for trial in trials]}\n")
        if lost:
            node.wipe()
        node.start(env=SLOWLY)
    for trial in trials:
        trial.restore(node).detach()
        assert unproved(trial.root) == []
    steps = sum(trial.step for trial in trials)
    assert 0 < cut < steps, f"{cut} of {steps} kills came before the commit: the moments do not spread"


def test_s002_an_agent_killed_at_any_moment_of_an_upload_loses_nothing_committed_on_disk(
    agents: Agents, tmp_path: Path
) -> None:
    """30 kills of a job: the last committed step (or the killed one, whole) restores with equal bytes; no record lies."""
    roots = [f"file://{tmp_path}/root{at}" for at in range(3)]
    kill_at_random_moments(agents.new(env=SLOWLY), roots, range(10))


@pytest.mark.s3
@pytest.mark.long
def test_s002_an_agent_killed_at_any_moment_of_an_upload_loses_nothing_committed_on_s3(
    agents: Agents, fresh_root: Callable[[], str]
) -> None:
    """The same on an S3 server, whose puts are atomic but not instant."""
    kill_at_random_moments(agents.new(env=SLOWLY), [fresh_root() for _ in range(3)], range(100, 110))


def test_s003_the_store_alone_tells_complete_from_incomplete_from_uncommitted(agents: Agents, tmp_path: Path) -> None:
    """Three copies of a root, no agent: whole; an object gone (named); record gone. Different codes, nothing written."""
    whole = tmp_path / "whole"
    nodes = started(agents, 2)
    job = Job(f"file://{whole}", nodes, 1)
    for step in (1, 2):
        job.save(step)
        job.wait(step)
    job.detach()
    second = (nodes[1].folder / "data" / "node-id").read_text().strip()
    for node in nodes:
        node.kill()
        node.wipe()

    torn, unlisted, half = (Path(shutil.copytree(whole, tmp_path / name)) for name in ("torn", "unlisted", "half"))
    gone = objects_of(torn, 2, "chunks")[0]
    gone.unlink()
    next((unlisted / "log").glob("*.000000000002.json")).unlink()
    next((half / "log").glob("*.000000000002.json")).unlink()
    next(path for path in objects_of(half, 2, "index") if path.name.startswith(second)).unlink()

    before = {path: tree(path) for path in (whole, torn, unlisted, half)}
    answers = {path: cli("verify", f"file://{path}", "2") for path in before}
    assert {path: tree(path) for path in before} == before, "verify wrote into the root"
    assert {path.name: answer.code for path, answer in answers.items()} == {
        "whole": 0,
        "torn": 4,
        "unlisted": 3,
        "half": 3,
    }
    bad = answers[torn].out["steps"][0]["bad"]
    assert [(one["key"], one["what"]) for one in bad] == [(str(gone.relative_to(torn)), "missing")]
    assert answers[unlisted].out["steps"][0]["state"] == "uncommitted"
    assert answers[half].out["steps"][0]["state"] == "incomplete"
    assert "rank 1" in answers[half].out["steps"][0]["why"]
    assert (latest(f"file://{whole}"), latest(f"file://{unlisted}"), latest(f"file://{half}")) == (2, 1, 1)


def test_s009_what_a_killed_run_left_lying_about_hinders_nobody(agents: Agents, tmp_path: Path) -> None:
    """Torn slots, temporary files, socket, lock and port file of killed processes: four ranks save twice, in time."""
    root = tmp_path / "root"
    node = agents.new()
    job = Job(f"file://{root}", [node], 4)
    job.save(1)
    job.wait(1)
    job.each(lambda rank: rank.begin(2, rank.put_layout(state_of(2, rank.about.rank))))
    node.kill()
    job.die()
    torn = [path for path in node.shm.glob("*.slot") if not is_staged(path)]
    assert len(torn) == 4, "the slots of step 2 must have been left in the midst of writing"
    (root / ".ckptd-tmp" / "4194304-00").write_bytes(b"cut short")
    (node.shm / "0123456789abcdef.plan.new").write_bytes(b"cut short")
    assert node.socket.exists()
    assert (node.folder / "run" / "agent.lock").exists()
    assert list((node.folder / "run").glob("*.port"))

    node.start()
    again = Job(f"file://{root}", [node], 4, begin_timeout_s=5.0, commit_timeout_s=10.0)
    again.check(again.restored(), 1)
    for step in (2, 3):
        again.save(step)
        again.wait(step)
    assert len(list(node.shm.glob("*.slot"))) <= 4 * 2
    again.detach()
    assert list((root / ".ckptd-tmp").iterdir()) == []
    assert unproved(f"file://{root}") == []


def is_staged(path: Path) -> bool:
    header = slot_header.decode(path.read_bytes()[:4096])
    return header is not None and header.state is slot_header.SlotState.STAGED
