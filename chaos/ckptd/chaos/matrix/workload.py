"""The jobs that a matrix hurts: the small one of its own, and a real training script under torchrun. Values.

Owns: what makes a job one that plays can be performed with. Does not own: the plays of the small job (`plays`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ckptd.chaos.cluster.launcher import Launcher, Torchrun
from ckptd.chaos.conductor import Limits
from ckptd.chaos.matrix.launcher import ForkLauncher
from ckptd.chaos.matrix.plays import PLAYS, Act, Play

SCRIPT = Path(__file__).with_name("trainer.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Nodes and ranks of a run."""

    nnodes: int
    nproc: int

    def __str__(self) -> str:
        return f"{self.nnodes}x{self.nproc}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A job.

    Attributes:
        command: Script and flags; --root, --digests and the flags of an act are added.
        plays: What it goes through, in the order in which a boundary looks for its play.
        launcher: Makes the launcher of a run.
        is_forked: Whether its agents and ranks are forks of processes that have imported everything.
        limits: Deadlines of one run.
    """

    command: tuple[str, ...]
    plays: tuple[Play, ...]
    launcher: Callable[[Path], Launcher]
    is_forked: bool
    limits: Limits


TINY = Workload(
    command=(str(SCRIPT),),
    plays=PLAYS,
    launcher=ForkLauncher,
    is_forked=True,
    limits=Limits(run=timedelta(seconds=150), progress=timedelta(seconds=75), relaunches=6, woken=timedelta(seconds=4)),
)


def real_job(script: Path) -> Workload:
    """Return the mixture-of-experts job of examples/train_moe.py, on two nodes with two ranks each, under torchrun."""
    flags = ("--dp-shard", "2", "--tp", "2", "--hidden", "64", "--save-every", "2", "--step-s", "0.2")
    return Workload(
        command=(str(Path(__file__).with_name("armed.py")), str(script), *flags),
        plays=(
            Play(
                name="resumed",
                title="a job begins, ends, and goes on from shared memory",
                acts=(Act(flags=("--steps", "6")), Act(flags=("--steps", "12"))),
            ),
        ),
        launcher=Torchrun,
        is_forked=False,
        limits=Limits(
            run=timedelta(seconds=400), progress=timedelta(seconds=200), relaunches=6, woken=timedelta(seconds=20)
        ),
    )
