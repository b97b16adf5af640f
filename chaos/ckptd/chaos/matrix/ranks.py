"""The ranks of one node without torchrun: forked from a process that has imported torch already.

Run (in a fork of the fork server) as `python -m ckptd.chaos.matrix.ranks NODE NNODES NPROC SCRIPT ARGS...`. Owns: the variables
of each rank, and the end of all when one of them fails. Does not own: what a rank does.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ckptd.chaos.cluster.fork_server import fork_command
from ckptd.chaos.cluster.node import pid_file
from ckptd.chaos.matrix.launcher import LAUNCH_FOLDER, RENDEZVOUS, rank_failpoints


def main(argv: Sequence[str]) -> int:
    """Run the ranks of one node; return 0 when all ended well, else 1 when the first one did not."""
    node, nnodes, nproc = map(int, argv[:3])
    script = list(argv[3:])
    pids = set()
    for local in range(nproc):
        rank = node * nproc + local
        places = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": nnodes * nproc, "LOCAL_WORLD_SIZE": nproc}
        environment = {
            **os.environ,
            **{name: str(number) for name, number in places.items()},
            RENDEZVOUS: f"file://{Path(os.environ[LAUNCH_FOLDER]).resolve() / 'rendezvous'}",
            **rank_failpoints(rank, os.environ),
        }
        pid = fork_command([sys.executable, *script], environment)
        pid_file(Path(os.environ[LAUNCH_FOLDER]), rank).write_text(str(pid), encoding="utf-8")
        pids.add(pid)
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
