"""The job that random schedules hurt where no script is given: the matrix's trainer, forked from a Python that has torch.

Owns: its command, and how a stage is made that starts it in a second. Does not own: the trainer and the ranks (`matrix`).
Run (in a fork) as `python -m ckptd.chaos.soak.small_job LAUNCH_FOLDER NODE NNODES NPROC SCRIPT ARGS...` it is the launcher of
one node.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from ckptd.chaos.cluster.forked import ForkServer
from ckptd.chaos.cluster.process import Spawn
from ckptd.chaos.conductor import Limits
from ckptd.chaos.matrix import ranks
from ckptd.chaos.matrix.launcher import LAUNCH_FOLDER
from ckptd.chaos.matrix.running import AGENT_MODULES, RANK_MODULES
from ckptd.chaos.matrix.workload import SCRIPT

STEPS = 40
"""Long enough for the last of seven faults to find the job at work; some seconds."""
FLAGS = ("--root", "{root}", "--digests", "{digests}", "--until", str(STEPS))
COMMAND = (str(SCRIPT), *FLAGS)
LIMITS = Limits(run=timedelta(seconds=300), progress=timedelta(seconds=100), relaunches=10, woken=timedelta(seconds=10))


class SmallLauncher:
    """Starts the ranks of a node as forks; see `cluster.launcher.Launcher`. One per run.

    Args:
        folder: The run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self) -> None:
        """Nothing is shared."""

    def command(self, *, node: int, nnodes: int, nproc: int, launch: int, script: Sequence[str]) -> list[str]:
        """Return the command for one node of a launch."""
        folder = self._folder / "launches" / str(launch)
        places = (str(node), str(nnodes), str(nproc))
        return [sys.executable, "-m", "ckptd.chaos.soak.small_job", str(folder), *places, *script]

    def close(self) -> None:
        """Nothing was begun."""


def spawners(stack: ExitStack) -> tuple[Spawn, Spawn]:
    """Start the fork servers of agents and of ranks; they end with the stack.

    Raises:
        ProcessError: One does not start.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    agents = stack.enter_context(ForkServer(*AGENT_MODULES, environment=environment))
    return agents.spawn, stack.enter_context(ForkServer(*RANK_MODULES, environment=environment)).spawn


def main(argv: Sequence[str]) -> int:
    """Be the launcher of one node; see the module."""
    folder, *arguments = argv
    os.environ[LAUNCH_FOLDER] = folder
    return ranks.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
