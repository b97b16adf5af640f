"""Starts the ranks of one node without torchrun: forks them from a process that has imported torch already.

Run (in a fork of the fork server) as `python -m ckptd.chaos.matrix.launcher NODE NNODES NPROC FOLDER SCRIPT ARGS...`. Owns: the
variables of each rank, its failpoints, and the end of all when one of them fails. Does not own: what a rank does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ckptd.chaos.cluster.fork_server import fork_command

ARMED = "CKPTD_CHAOS_RANK_FAILPOINTS"
"""JSON: failpoints by rank."""
RENDEZVOUS = "CKPTD_CHAOS_RENDEZVOUS"
"""URL at which the ranks of a launch meet."""


def rank_log(folder: Path, rank: int) -> Path:
    """Return the file that gets a line for each failpoint that fires in a rank of the launch in `folder`."""
    return folder / f"failpoints.{rank}.log"


class ForkLauncher:
    """Makes the command that `main` runs. One per run.

    Args:
        folder: The run's; launches have folders of their own below.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self) -> None:
        """Nothing is shared."""

    def command(self, *, node: int, nnodes: int, nproc: int, launch: int, script: Sequence[str]) -> list[str]:
        """Return the command for one node of a launch."""
        where = self._folder / "launches" / str(launch)
        module = "ckptd.chaos.matrix.launcher"
        return [sys.executable, "-m", module, str(node), str(nnodes), str(nproc), str(where), *script]

    def close(self) -> None:
        """Nothing was begun."""


def main(argv: Sequence[str]) -> int:
    """Run the ranks of one node; return 0 when all ended well, else 1 when the first one did not."""
    node, nnodes, nproc = map(int, argv[:3])
    folder, script = Path(argv[3]), list(argv[4:])
    armed = json.loads(os.environ.get(ARMED, "{}"))
    pids = set()
    for local in range(nproc):
        rank = node * nproc + local
        places = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": nnodes * nproc, "LOCAL_WORLD_SIZE": nproc}
        environment = {
            **os.environ,
            **{name: str(number) for name, number in places.items()},
            RENDEZVOUS: f"file://{folder.resolve() / 'rendezvous'}",
            "CKPTD_FAILPOINTS": armed.get(str(rank), ""),
            "CKPTD_FAILPOINT_LOG": str(rank_log(folder, rank)),
        }
        pids.add(fork_command([sys.executable, *script], environment))
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if os.waitstatus_to_exitcode(status) != 0:
            for other in pids:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
