"""One node: its folders, its agent, and the ranks that a launch put there.

Owns: an agent process that is started again when it dies, folders, and the death of everything on the node. Does not
own: when (`nemesis`, `conductor`). Run folder and shared memory have short names: a Unix socket's path has at most
107 bytes. Evidence (logs) lies outside of what a lost node loses.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ckptd.chaos.cluster.fabric import NodeNetwork
from ckptd.chaos.cluster.process import Leashed, Spawn, Tree

AGENT_COMMAND = (sys.executable, "-m", "ckptd.daemon.cli", "agent")
# An agent ends uploads that run; its own bound for that is 30 s.
_GRACE = timedelta(seconds=40)
_KEPT = (".slot", ".arena", ".pb")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Folders of one node, and its name: "0", or "0.1" for the first node that took node 0's place."""

    name: str
    evidence: Path
    run_dir: Path
    shm_dir: Path

    @property
    def data_dir(self) -> Path:
        """The agent's disk."""
        return self.evidence / "data"

    @property
    def socket(self) -> Path:
        """Where the agent listens for its ranks."""
        return self.run_dir / "agent.sock"

    @property
    def temporary(self) -> Path:
        """Where the agents' temporary files go, to see that none stays."""
        return self.run_dir / "tmp"

    @property
    def events(self) -> Path:
        """The agents' event log."""
        return self.evidence / "events.jsonl"

    def disks(self) -> dict[str, Path]:
        """Return the folders that a scenario calls a disk of the node, by its word for them."""
        return {"shm": self.shm_dir, "data": self.data_dir, "run": self.run_dir}

    @property
    def failpoints(self) -> Path:
        """One line for each failpoint that fired."""
        return self.evidence / "failpoints.log"

    @property
    def agent_log(self) -> Path:
        """What the agents print."""
        return self.evidence / "agent.log"


class Node:
    """A machine of the cluster, as far as a process tree can be one. For one thread."""

    def __init__(
        self,
        index: int,
        place: Place,
        environment: Mapping[str, str],
        agent: Sequence[str],
        *,
        spawn_agent: Spawn = Leashed,
        spawn_ranks: Spawn = Leashed,
        network: NodeNetwork | None = None,
    ) -> None:
        self.index = index
        self.place = place
        self.network = network or NodeNetwork()
        self.is_paused = False
        self.is_cut_off = False
        """Nobody reaches it, and it lives on."""
        self.is_lost = False
        self.agent: Tree | None = None
        self.ranks: Tree | None = None
        """The launcher of this node's ranks; None before the first launch."""
        self._launch_folder: Path | None = None
        self._environment = dict(environment)
        self._agent_command = list(agent)
        self._spawn_agent, self._spawn_ranks = spawn_agent, spawn_ranks
        for folder in (place.evidence, place.data_dir, place.run_dir, place.shm_dir):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def is_out_of_reach(self) -> bool:
        """Whether a scheduler cannot end what runs here."""
        return self.is_paused or self.is_cut_off

    @property
    def source(self) -> str:
        """The agent's name in the history."""
        return f"agent {self.place.name}"

    def start_agent(self, failpoints: str = "") -> None:
        """Start an agent process on the node's folders, in the place of the one before; returns before it listens."""
        place = self.place
        environment = {
            **self._environment,
            **self.network.environment,
            "CKPTD_FAILPOINTS": failpoints,
            "CKPTD_FAILPOINT_LOG": str(place.failpoints),
            "CKPTD_EVENT_LOG": str(place.events),
            "TMPDIR": str(place.temporary),
        }
        place.temporary.mkdir(exist_ok=True, mode=0o700)
        if self.agent is not None:
            self.agent.kill()
        (place.run_dir / "agent.json").unlink(missing_ok=True)
        self.agent = self._spawn_agent(
            [
                *self.network.inside,
                *self._agent_command,
                *("--run-dir", str(place.run_dir)),
                *("--data-dir", str(place.data_dir)),
                *("--shm-dir", str(place.shm_dir)),
                *("--listen", self.network.listen),
                *("--advertise", self.network.advertise),
            ],
            environment=environment,
            stdout=place.agent_log,
        )

    def agent_is_ready(self) -> bool:
        """Whether the present agent process listens."""
        if self.agent is None or self.agent.poll() is not None:
            return False
        return self._told().get("pid") == self.agent.pid

    def identity(self) -> str:
        """Return the name the agent goes by in events and records; empty while it does not listen."""
        return str(self._told().get("node", ""))

    def _told(self) -> dict[str, object]:
        try:
            return dict(json.loads((self.place.run_dir / "agent.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def start_ranks(self, command: Sequence[str], environment: Mapping[str, str], output: Path, errors: Path) -> None:
        """Start a launcher here; what is left of the one before is killed."""
        if self.ranks is not None:
            self.ranks.kill()
        self._launch_folder = output.parent
        self.ranks = self._spawn_ranks(
            [*self.network.inside, *command],
            environment={
                **self._environment,
                "CKPTD_SOCKET": str(self.place.socket),
                **environment,
                **self.network.environment,
            },
            stdout=output,
            stderr=errors,
        )

    def rank_pids(self) -> dict[int, int]:
        """Return the process of each rank that lives here."""
        found: dict[int, int] = {}
        if self.ranks is not None:
            told = {} if self._launch_folder is None else _told_ranks(self._launch_folder)
            for pid in self.ranks.tree():
                rank = told.get(pid, _rank_of(pid))
                # Parents come first: a rank's own children (data loaders) have its environment too.
                if rank is not None:
                    found.setdefault(rank, pid)
        return found

    def pids(self) -> list[int]:
        """Return every living process of the node."""
        return [pid for tree in (self.agent, self.ranks) if tree is not None for pid in tree.tree()]

    def signal_all(self, number: signal.Signals) -> list[int]:
        """Send a signal to every process of the node at once; return those that got it."""
        reached = []
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                reached.append(pid)
        return reached

    def kill(self) -> None:
        """Kill every process of the node and wait until they are gone; folders stay. Idempotent."""
        self.signal_all(signal.SIGKILL)
        for tree in (self.ranks, self.agent):
            if tree is not None:
                tree.kill()

    def lose(self) -> None:
        """Kill everything at once and remove what the machine held: shared memory, disk, run folder."""
        self.kill()
        self.is_lost = True
        for folder in (self.place.shm_dir, self.place.data_dir, self.place.run_dir):
            shutil.rmtree(folder, ignore_errors=True)

    def reboot(self) -> None:
        """Kill everything at once and empty what lies in memory: shared memory and run folder; the disk stays."""
        self.kill()
        for folder in (self.place.shm_dir, self.place.run_dir):
            # The folder itself may be a mount of its own, which cannot be removed.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True, mode=0o700)

    def await_agent_end(self) -> int | None:
        """Wait for the agent, which was asked to end; return its exit code, None when it had to be killed."""
        if self.agent is None:
            return None
        code = self.agent.wait(_GRACE)
        self.agent.kill()
        return code

    def shared_bytes(self) -> dict[str, int]:
        """Return the files in the node's shared memory and their sizes in bytes."""
        files = {}
        for path in sorted(self.place.shm_dir.rglob("*")):
            with suppress(FileNotFoundError):
                if path.is_file():
                    files[str(path.relative_to(self.place.shm_dir))] = path.stat().st_size
        return files

    def left_files(self) -> tuple[str, ...]:
        """Return what an agent that ended in order should not have left: sockets, temporary files, strange shared ones."""
        sockets = [path for path in self.place.run_dir.rglob("*") if path.is_socket()]
        # Slots, arenas, and what was said of them (plans, snapshots) outlive the agent on purpose: the next takes them over.
        strange = [path for path in self.place.shm_dir.rglob("*") if path.suffix not in _KEPT and path.is_file()]
        temporary = list(self.place.temporary.iterdir()) if self.place.temporary.is_dir() else []
        return tuple(sorted(str(path) for path in [*sockets, *strange, *temporary]))


def pid_file(launch_folder: Path, rank: int) -> Path:
    """Return the file that says which process a rank is, where its environment does not: that of a fork is its parent's."""
    return launch_folder / f"rank.{rank}.pid"


def _told_ranks(launch_folder: Path) -> dict[int, int]:
    found = {}
    for path in launch_folder.glob("rank.*.pid"):
        # It may be just being written.
        with suppress(OSError, ValueError):
            found[int(path.read_text(encoding="utf-8"))] = int(path.name.split(".")[1])
    return found


def _rank_of(pid: int) -> int | None:
    with suppress(OSError, ValueError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return int(entry[5:])
    return None
