"""Schedules: the seed decides what a scenario leaves open, and nothing else does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ckptd.chaos.scenario import Fault, Moment, Scenario, Target
from ckptd.chaos.schedule import ScheduleError, schedule


def scenario(target: Target, *, do: str = "kill", at: Moment | None = None, **more: int) -> Scenario:
    fault = Fault(do=do, target=target, at=at or Moment(step=3))
    return Scenario(name="s", title="t", faults=(fault,), **more)  # type: ignore[arg-type]


def test_the_same_seed_chooses_the_same_victims_in_any_process() -> None:
    """A replay line reproduces the run: nothing depends on the process's hash seed."""
    code = (
        "from ckptd.chaos.scenario import *; from ckptd.chaos.schedule import schedule\n"
        "s = Scenario(name='s', title='t', faults=(Fault(do='kill', target=Target(kind='rank', which='any'),"
        " at=Moment(step=3)),))\n"
        "print([schedule(s, nnodes=4, nproc=4, seed=i)[0].which for i in range(20)])"
    )
    told = {
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    }
    assert len(told) == 1
    chosen = [
        schedule(scenario(Target(kind="rank", which="any")), nnodes=4, nproc=4, seed=seed)[0].which
        for seed in range(20)
    ]
    assert told == {f"{chosen}\n"}
    assert len(set(chosen)) > 5


def test_any_and_last_stay_inside_the_cluster() -> None:
    """Chosen ranks and nodes exist, and the last one is the last one."""
    for seed in range(50):
        (rank,) = schedule(scenario(Target(kind="rank", which="any")), nnodes=2, nproc=3, seed=seed)
        (node,) = schedule(scenario(Target(kind="node", which="any"), do="lose"), nnodes=2, nproc=3, seed=seed)
        assert rank.which in range(6)
        assert node.which in range(2)
        assert rank.node(3) == (rank.which or 0) // 3
    (last,) = schedule(scenario(Target(kind="rank", which="last")), nnodes=2, nproc=3, seed=0)
    assert last.target == "rank 5"


def test_a_target_that_does_not_exist_is_refused() -> None:
    """Rank 6 of 6 ranks is a usage error, with the range."""
    with pytest.raises(ScheduleError, match=r"no rank 6; they are 0\.\.5"):
        schedule(scenario(Target(kind="rank", which=6)), nnodes=2, nproc=3, seed=0)


def test_a_cluster_that_is_too_small_is_refused() -> None:
    """A scenario for two nodes does not run on one."""
    with pytest.raises(ScheduleError, match="needs at least 2 nodes"):
        schedule(scenario(Target(kind="all"), min_nodes=2), nnodes=1, nproc=3, seed=0)


def test_a_fault_says_its_moment_in_words() -> None:
    """Reports name the moment the way a scenario does."""
    at = Moment(event="staged", nth=2, before="sealed")
    (fault,) = schedule(scenario(Target(kind="rank", which=0), at=at), nnodes=1, nproc=1, seed=0)
    assert (fault.target, fault.moment) == ("rank 0", "event staged (no. 2), before sealed")
