"""Starts the ranks of one node: torchrun, with a rendezvous that the harness hosts.

Owns: the launcher's command line. Does not own: the processes (`launch`). Ranks are numbered by node: the rendezvous
sorts nodes by address, and each node has an address of its own. `max-restarts` is 0: the harness starts the
job again itself, as an operator's scheduler would.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from ckptd.chaos.cluster.fabric import Fabric, Loopback
from ckptd.chaos.cluster.process import Leashed, ProcessError
from ckptd.chaos.watch import read_tail, wait_until

_START_DEADLINE = timedelta(seconds=90)
MOST_NODES = 150


class Launcher(Protocol):
    """Makes the command that starts the ranks of a node; it ends with a status other than 0 when one of them does."""

    def start(self) -> None:
        """Begin what all launches share; returns at once."""
        ...

    def command(self, *, node: int, nnodes: int, nproc: int, launch: int, script: Sequence[str]) -> list[str]:
        """Return the command for one node of the launch numbered `launch`; each rank's environment has RANK."""
        ...

    def close(self) -> None:
        """End what `start` began; idempotent."""
        ...


class Rendezvous:
    """Where torchruns of all nodes and launches meet: a process that outlives them.

    Args:
        folder: Where it keeps its log and its port.
        fabric: The network that it and the ranks live in.
    """

    def __init__(self, folder: Path, fabric: Fabric | None = None) -> None:
        self._fabric: Fabric = fabric or Loopback()
        self._port_file = folder / "rendezvous.port"
        self._log = folder / "rendezvous.log"
        self._host: Leashed | None = None

    def start(self) -> None:
        """Start it, if it is not there; it listens some seconds later."""
        if self._host is None:
            self._host = Leashed(
                [
                    *self._fabric.services[0],
                    sys.executable,
                    "-m",
                    "ckptd.chaos.cluster.rendezvous",
                    str(self._port_file),
                ],
                environment=os.environ,
                stdout=self._log,
            )

    def endpoint(self) -> str:
        """Return host and port; waits for it.

        Raises:
            ProcessError: It did not start.
        """
        self.start()
        if not wait_until(self._port_file.exists, within=_START_DEADLINE):
            raise ProcessError(f"the rendezvous did not start: {read_tail(self._log)}")
        return f"{self._fabric.services[1]}:{self._port_file.read_text()}"

    def close(self) -> None:
        """End it; idempotent."""
        if self._host is not None:
            self._host.kill()
            self._host = None


class Torchrun:
    """torchrun on each node of a launch.

    Args:
        folder: Where the rendezvous keeps its log and its port.
        fabric: The network that ranks and rendezvous live in.
        shared: A rendezvous of several runs, which their owner ends; None: one of its own.
    """

    def __init__(self, folder: Path, fabric: Fabric | None = None, *, shared: Rendezvous | None = None) -> None:
        self._logs = folder / "torchrun"
        self._fabric: Fabric = fabric or Loopback()
        self._shared = shared
        self._rendezvous = Rendezvous(folder, self._fabric) if shared is None else shared
        # Launches of several runs must not meet.
        self._run = "" if shared is None else f"{secrets.token_hex(4)}-"

    def start(self) -> None:
        """Start the rendezvous; it is there some seconds later."""
        self._rendezvous.start()

    def command(self, *, node: int, nnodes: int, nproc: int, launch: int, script: Sequence[str]) -> list[str]:
        """Return torchrun's command line; waits for the rendezvous.

        Raises:
            ProcessError: The rendezvous did not start.
        """
        return [
            sys.executable,
            *("-m", "torch.distributed.run"),
            *("--nnodes", str(nnodes)),
            *("--nproc-per-node", str(nproc)),
            *("--max-restarts", "0"),
            *("--rdzv-backend", "c10d"),
            *("--rdzv-id", f"{self._run}launch-{launch}"),
            *("--rdzv-endpoint", self._rendezvous.endpoint()),
            # Short keep-alives: a torchrun that ends waits for its last one.
            *("--rdzv-conf", "is_host=false,keep_alive_interval=1,keep_alive_max_attempt=30"),
            *("--local-addr", self._fabric.address(node)),
            # Its own choice is a temporary folder, which it leaves behind when it is killed.
            *("--log-dir", str(self._logs)),
            *script,
        ]

    def close(self) -> None:
        """End the rendezvous, if it is its own."""
        if self._shared is None:
            self._rendezvous.close()
