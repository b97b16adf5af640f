"""How the matrix starts ranks, and how one of them gets its failpoints.

Owns: the command of a node's ranks, and what each rank is told by variables. Does not own: starting them (`ranks`, or
torchrun with `armed`). Only one rank of a launch has failpoints, so they cannot be given to all of a node alike.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ARMED = "CKPTD_CHAOS_RANK_FAILPOINTS"
"""JSON: failpoints by rank."""
LAUNCH_FOLDER = "CKPTD_CHAOS_LAUNCH"
"""Folder of the launch's evidence."""
RENDEZVOUS = "CKPTD_CHAOS_RENDEZVOUS"
"""URL at which the ranks of a launch meet."""


def rank_log(folder: Path, rank: int) -> Path:
    """Return the file that gets a line for each failpoint that fires in a rank of the launch in `folder`."""
    return folder / f"failpoints.{rank}.log"


def rank_failpoints(rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give a rank its failpoints, from those of its launch."""
    return {
        "CKPTD_FAILPOINTS": json.loads(environment.get(ARMED, "{}")).get(str(rank), ""),
        "CKPTD_FAILPOINT_LOG": str(rank_log(Path(environment[LAUNCH_FOLDER]), rank)),
    }


class ForkLauncher:
    """Starts ranks by `ranks`, in a fork of a process that has imported torch. One per run.

    Args:
        folder: The run's; not used.
    """

    def __init__(self, folder: Path) -> None:
        del folder

    def start(self) -> None:
        """Nothing is shared."""

    def command(self, *, node: int, nnodes: int, nproc: int, launch: int, script: Sequence[str]) -> list[str]:
        """Return the command for one node of a launch."""
        del launch
        return [sys.executable, "-m", "ckptd.chaos.matrix.ranks", str(node), str(nnodes), str(nproc), *script]

    def close(self) -> None:
        """Nothing was begun."""
