"""A cluster on this machine: nodes, and launches of the script over all of them.

Owns: nodes and their replacement, launches, and the end of everything. Does not own: when things happen (`conductor`)
or what hurts (`nemesis`). Invariant: after `close`, and after any death of the harness, no process and no shared
memory of the cluster is left.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ckptd.chaos.cluster.disks import Disks
from ckptd.chaos.cluster.fabric import Loopback
from ckptd.chaos.cluster.fork_server import TAG, process_name
from ckptd.chaos.cluster.launcher import Launcher
from ckptd.chaos.cluster.node import AGENT_COMMAND, Node, Place
from ckptd.chaos.cluster.planted import Planted
from ckptd.chaos.cluster.process import Leashed, ProcessError, Spawn
from ckptd.chaos.cluster.proxied import ProxiedStore
from ckptd.chaos.history import Event
from ckptd.chaos.watch import read_tail, wait_until

if TYPE_CHECKING:
    from ckptd.chaos.network.way import Network

_READY_DEADLINE = timedelta(seconds=60)
_TERM_GRACE = timedelta(seconds=3)
# The last line of a traceback, but for torchrun's own, which only says that a rank failed.
_RAISED = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*(?!ChildFailed)[A-Z]\w*: \S.*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One start of the script on all nodes; its processes are the nodes' `ranks`.

    Attributes:
        number: From 1.
        nodes: Where it runs.
        outputs: What its ranks print, by node.
        errors: Same for errors.
    """

    number: int
    nodes: tuple[Node, ...]
    outputs: Mapping[int, Path]
    errors: Mapping[int, Path]

    def codes(self) -> dict[int, int | None]:
        """Return the launcher's exit code by node; None while it runs."""
        return {node.index: node.ranks.poll() if node.ranks is not None else None for node in self.nodes}

    def failed(self) -> bool:
        """Whether a launcher ended otherwise than with 0."""
        return any(code not in (None, 0) for code in self.codes().values())

    def succeeded(self) -> bool:
        """Whether every launcher ended with 0."""
        return all(code == 0 for code in self.codes().values())

    def end(self) -> None:
        """End what still runs, as a scheduler does: SIGTERM, some seconds, SIGKILL; not on nodes out of reach."""
        running = [
            n.ranks for n in self.nodes if not n.is_out_of_reach and n.ranks is not None and n.ranks.poll() is None
        ]
        for ranks in running:
            ranks.signal(signal.SIGTERM)
        wait_until(lambda: all(ranks.poll() is not None for ranks in running), within=_TERM_GRACE)
        for ranks in running:
            ranks.kill()

    def complaint(self) -> str:
        """Return the exceptions that its ranks printed, else the end of what they printed as errors."""
        text = "".join(read_tail(path, most=100_000) for path in self.errors.values())
        raised = dict.fromkeys(found[1] for found in _RAISED.finditer(text))
        return "; ".join(list(raised)[:3]) if raised else text[-500:].strip()


class Cluster:
    """Nodes with an agent each. A context manager; for one thread.

    Args:
        nnodes: Number of nodes.
        nproc: Ranks on each.
        folder: Evidence: logs, digests, event logs.
        launcher: Starts ranks on a node; closed with the cluster.
        environment: Variables of every process, besides the harness's own ones (without CKPTD_*).
        agent: Command of an agent; folders and address are added.
        failpoints: Failpoints of every agent all the time.
        arm: Returns more of them for one process: number of the node, how many-th agent process there, from 1.
        spawn_agent: Starts agents.
        spawn_ranks: Starts launchers.
        network: What the nodes stand in, where it can be hurt; None: the loopback. The caller closes it.
    """

    def __init__(
        self,
        *,
        nnodes: int,
        nproc: int,
        folder: Path,
        launcher: Launcher,
        environment: Mapping[str, str],
        agent: Sequence[str] = AGENT_COMMAND,
        failpoints: str = "",
        arm: Callable[[int, int], str] = lambda _node, _start: "",
        spawn_agent: Spawn = Leashed,
        spawn_ranks: Spawn = Leashed,
        network: Network | None = None,
    ) -> None:
        self.nnodes, self.nproc, self.folder = nnodes, nproc, folder
        self.tag = secrets.token_hex(4)
        self._launcher = launcher
        self._agent_command = tuple(agent)
        self._failpoints = failpoints
        self._arm, self._spawn_agent, self._spawn_ranks = arm, spawn_agent, spawn_ranks
        self.agent_pids: dict[tuple[int, int], int] = {}
        """Every agent process there was, by number of the node and start."""
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
        # One host: gloo must not look for a network.
        self.environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
        self.environment |= {TAG: self.tag, **environment}
        self._shm = Path("/dev/shm") / f"ckptd-chaos-{self.tag}"  # noqa: S108 - shared memory, mode 0700 below
        self._run = Path(tempfile.gettempdir()) / f"ckptd-chaos-{self.tag}"
        self._janitor: Leashed | None = None
        self.proxied: ProxiedStore | None = None
        """The store as its processes see it, where it can be made to fail."""
        self.network = network
        self._fabric = network or Loopback()
        self.planted: Planted | None = None
        """What its processes are told from within, where something is."""
        self.disks: Disks | None = None
        """File systems of their own, where its disks can be full; closed by whoever made them."""
        self.store_folder: Path | None = None
        """Where the store is a folder: this one."""
        self.nodes: list[Node] = []
        self.gone: list[Node] = []
        """Nodes that were lost or replaced, also paused ones that still live."""
        self._generations = [0] * nnodes
        self._launches = 0

    def start(self, once: Mapping[int, str] | None = None) -> None:
        """Start an agent on every node, and return when all listen.

        Args:
            once: Failpoints, by node, of its first agent process only.

        Raises:
            ProcessError: An agent did not start; the message ends with its log.
        """
        for folder in (self._shm, self._run):
            folder.mkdir(mode=0o700)
        self._janitor = Leashed([], environment=self.environment, wipe=[self._shm, self._run])
        self._launcher.start()
        for index in range(self.nnodes):
            self.nodes.append(self._new_node(index))
            self.start_agent(self.nodes[index], once=(once or {}).get(index, ""))
        self.await_agents()

    def start_agent(self, node: Node, *, once: str = "") -> None:
        """Start an agent on a node; `once` are failpoints of this process only. Returns before it listens."""
        start = 1 + sum(index == node.index for index, _ in self.agent_pids)
        node.start_agent(";".join(filter(None, (self._failpoints, once, self._arm(node.index, start)))))
        if node.agent is not None:
            self.agent_pids[node.index, start] = node.agent.pid
            self._fabric.agent_started(node.place.name, node.agent.pid)

    def await_agents(self) -> None:
        """Wait until the agents of all nodes listen.

        Raises:
            ProcessError: One does not; the message ends with its log.
        """
        wait_until(
            lambda: all(n.agent_is_ready() or n.agent is None or n.agent.poll() is not None for n in self.nodes),
            within=_READY_DEADLINE,
        )
        for node in self.nodes:
            if not node.agent_is_ready():
                raise ProcessError(f"{node.source} does not listen:\n{read_tail(node.place.agent_log)}")

    def replace(self, node: Node) -> Node:
        """Put a fresh node with empty folders in the place of `node`, and start its agent."""
        self.gone.append(node)
        fresh = self.nodes[node.index] = self._new_node(node.index)
        self.start_agent(fresh)
        return fresh

    def launch(self, script: Sequence[str], environment: Mapping[str, str]) -> Launch:
        """Start the script on all nodes.

        Raises:
            ProcessError: The launcher cannot be started.
        """
        self._launches += 1
        folder = self.folder / "launches" / str(self._launches)
        folder.mkdir(parents=True)
        launch = Launch(
            number=self._launches,
            nodes=tuple(self.nodes),
            outputs={index: folder / f"{index}.out" for index in range(self.nnodes)},
            errors={index: folder / f"{index}.err" for index in range(self.nnodes)},
        )
        for node in self.nodes:
            command = self._launcher.command(
                node=node.index, nnodes=self.nnodes, nproc=self.nproc, launch=self._launches, script=script
            )
            events = {"CKPTD_CLIENT_EVENT_LOG": str(self.client_events(node, launch.number))}
            node.start_ranks(command, {**environment, **events}, launch.outputs[node.index], launch.errors[node.index])
        return launch

    def client_events(self, node: Node, launch: int) -> Path:
        """Return the event log of the ranks of a launch on a node."""
        return self.folder / "launches" / str(launch) / f"{node.index}.events.jsonl"

    def rank_pids(self) -> dict[int, int]:
        """Return the process of each living rank of the present nodes."""
        return {rank: pid for node in self.nodes for rank, pid in node.rank_pids().items()}

    def true_time(self, event: Event) -> Event:
        """Return an event of one of its processes with the time when it really happened."""
        return event if self.planted is None else self.planted.true_time(event)

    def cut_off(self) -> list[Node]:
        """Return the nodes that were cut off, replaced, and live on."""
        return [
            n for n in self.gone if n.is_cut_off and not n.is_paused and n.agent is not None and n.agent.poll() is None
        ]

    def end_agents(self) -> dict[str, int | None]:
        """Ask all agents to end in order; return each one's exit code by its source, None where it had to be killed.

        Whoever was cut off is asked as well: a signal needs no network.
        """
        running = [n for n in self.nodes if n.agent is not None and n.agent.poll() is None and not n.is_out_of_reach]
        running += self.cut_off()
        for node in running:
            if node.agent is not None:
                node.agent.signal(signal.SIGTERM)
        return {node.source: node.await_agent_end() for node in running}

    def close(self) -> None:
        """Kill every process and remove shared memory and run folders; evidence stays. Idempotent."""
        for node in [*self.nodes, *self.gone]:
            node.kill()
        self._launcher.close()
        if self._janitor is not None:
            for folder in (self._shm, self._run):
                if self.disks is not None:
                    self.disks.unmount(folder)
                shutil.rmtree(folder, ignore_errors=True)
            self._janitor.kill()
            self._janitor = None

    def leaks(self) -> list[str]:
        """Return what is left of the cluster after `close`: processes by pid and command, folders."""
        left = [f"folder {folder}" for folder in (self._shm, self._run) if folder.exists()]
        mark, name = f"{TAG}={self.tag}".encode(), process_name(self.tag)
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and (
                    mark in (entry / "environ").read_bytes().split(b"\0")
                    # A process that was forked shows the environment of the one it was forked from.
                    or (entry / "comm").read_text().strip() == name
                ):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    left.append(f"process {entry.name}: {command}")
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _new_node(self, index: int) -> Node:
        generation = self._generations[index]
        self._generations[index] += 1
        name = str(index) if generation == 0 else f"{index}.{generation}"
        place = Place(
            name=name,
            evidence=self.folder / "nodes" / name,
            run_dir=self._run / name,
            shm_dir=self._shm / name,
        )
        environment = self.environment
        if self.planted is not None:
            ranks = range(index * self.nproc, (index + 1) * self.nproc)
            environment = environment | self.planted.variables(name, ranks, environment)
        node = Node(
            index,
            place,
            environment,
            self._agent_command,
            spawn_agent=self._spawn_agent,
            spawn_ranks=self._spawn_ranks,
            network=self._fabric.join(index, name),
        )
        if self.disks is not None:
            self.disks.put_under(place.disks())
        return node
