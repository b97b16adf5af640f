"""How long a restore takes onto another mesh beside one onto the mesh that saved, what it reads, and the memory it takes.

Four ranks (gloo) save about 10^9 bytes of float32 matrices, cut along their first dimension, to local files; the agents that
saved end, so that everything comes from the store. Each round then restores into live tensors in turn, as a start does: onto
the same layout; cut along the second dimension; along both; and along the first over three ranks, which does not come out
even. `--nodes` agents share the ranks. A first round, not counted, warms file cache and allocators; restore memory is new in
every restore.

    python benchmarks/reshard.py [--bytes 1000000000] [--nodes 1] [--rounds 5] [--window MIB] [--json]

Prints per layout the medians of seconds until the last rank is done and of processor seconds of agents and ranks, each with
its ratio to the same layout's; the bytes read from the store over the bytes of the ranks of a node (largest node); and extra
memory per rank, in bytes: what its agent took of arena and window by its own account, over the agent's ranks, and what the
trainer gained beyond its tensors at the peak (largest of all). `bound` is the shard of the rank with most, and the window over
the agent's ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ckptd.client import Checkpointer, Sharded

RANKS = 4
COLUMNS = 4096
LAYOUTS = {"same": (4, 1), "columns": (1, 4), "both": (2, 2), "three": (3, 1)}
"""Over how many ranks the rows and the columns of each matrix are cut."""


def rows_of(nbytes: int) -> list[int]:
    """Return the rows of each matrix: some with chunks of their own on every rank, most not, and many small ones."""
    shares = [8, 8, 4, 4, *[2] * 12, *[0.125] * 32]
    return [max(8, round(nbytes * share / sum(shares) / COLUMNS / 4)) for share in shares]


def cut(length: int, parts: int, at: int) -> tuple[int, int]:
    """Return offset and length of a part, as torch chunks."""
    size = -(-length // parts)
    begin = min(length, at * size)
    return begin, min(length, begin + size) - begin


def state_of(layout: str, rank: int, nbytes: int, *, fill: bool) -> dict[str, Sharded]:
    """Return this rank's boxes: with values that tell every element apart by place, or touched and wrong."""
    down, across = LAYOUTS[layout]
    state = {}
    for number, rows in enumerate(rows_of(nbytes)):
        first, height = cut(rows, down, rank // across)
        left, width = cut(COLUMNS, across, rank % across)
        if fill:
            columns = torch.arange(left, left + width, dtype=torch.float32) * (1 + number)
            tensor = torch.arange(first, first + height, dtype=torch.float32)[:, None] * COLUMNS + columns
        else:
            tensor = torch.full((height, width), -1.0)
        state[f"matrix{number}"] = Sharded(tensor, (rows, COLUMNS), (first, left))
    return state


class Peak:
    """The most memory of its own that the process had while it was watched, beyond the start, in bytes."""

    def __init__(self) -> None:
        self.start = self.most = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    @staticmethod
    def _now() -> int:
        fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return int(fields["RssAnon"].split()[0]) << 10

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.most = max(self.most, self._now())

    def gained(self) -> int:
        """End, and return it."""
        self._stop.set()
        self._thread.join()
        return max(self.most, self._now()) - self.start


def worker(rank: int, folder: Path, socket: Path, nbytes: int) -> None:
    """Do what lines on stdin say: `save`, or a layout to restore."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    three = dist.new_group([0, 1, 2])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        verb = line.strip()
        layout = "same" if verb == "save" else verb
        down, across = LAYOUTS[layout]
        if rank >= down * across:
            print(json.dumps({}), flush=True)
            continue
        state: dict[str, Any] = dict(state_of(layout, rank, nbytes, fill=verb == "save"))
        checkpointer = Checkpointer(
            f"file://{folder / 'root'}",
            job="bench",
            socket=socket,
            mesh={"rows": down, "columns": across},
            process_group=three if down * across == 3 else None,
            read_only=verb != "save",
        )
        told: dict[str, Any] = {"bytes": sum(part.tensor.nbytes for part in state.values())}
        dist.barrier(group=three if down * across == 3 else None)
        if verb == "save":
            checkpointer.save(1, state).wait()
        else:
            peak = Peak()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            checkpointer.restore_into(state, drop=("rng",))
            told["seconds"], told["cpu"] = time.perf_counter() - begin, time.process_time() - begin_cpu
            told["gained"] = peak.gained()
            for name, right in state_of(layout, rank, nbytes, fill=True).items():
                assert torch.equal(_tensor(state[name]), right.tensor), name
        checkpointer.close()
        print(json.dumps(told), flush=True)


def _tensor(value: torch.Tensor | Sharded) -> torch.Tensor:
    return value.tensor if isinstance(value, Sharded) else value


class Agents:
    """One agent a node."""

    def __init__(self, folder: Path, name: str, nodes: int, window: int) -> None:
        self.folders = [folder / f"{name}{node}" for node in range(nodes)]
        self.shm = [Path(f"/dev/shm/ckptd-bench-{secrets.token_hex(4)}") for _ in range(nodes)]
        self.processes = []
        for here, shm in zip(self.folders, self.shm, strict=True):
            here.mkdir()
            command = [
                *(sys.executable, "-m", "ckptd.daemon.cli", "agent", "--run-dir", str(here)),
                *("--data-dir", str(here / "data"), "--shm-dir", str(shm), "--event-log", str(here / "events")),
            ]
            environment = {**os.environ, "CKPTD_RESTORE_WINDOW_BYTES": str(window)}
            self.processes.append(subprocess.Popen(command, env=environment))
        while not all((here / "agent.sock").exists() for here in self.folders):
            time.sleep(0.05)

    def fetched(self) -> list[dict[str, Any]]:
        """Return the last fetch of each node."""
        found = []
        for here in self.folders:
            events = [json.loads(line) for line in (here / "events").read_text().splitlines()]
            found.append([event for event in events if event["kind"] == "fetched"][-1])
        return found

    def cpu(self) -> float:
        """Return the processor seconds that they have taken."""
        times = [psutil.Process(process.pid).cpu_times() for process in self.processes]
        return math.fsum(each.user + each.system for each in times)

    def end(self) -> None:
        """End, and leave no shared memory."""
        for process in self.processes:
            process.terminate()
        for process, shm in zip(self.processes, self.shm, strict=True):
            process.wait(60)
            shutil.rmtree(shm, ignore_errors=True)


class Ranks:
    """The trainers."""

    def __init__(self, folder: Path, agents: Agents, nbytes: int) -> None:
        (folder / "meeting").unlink(missing_ok=True)
        self.node_of = [rank * len(agents.folders) // RANKS for rank in range(RANKS)]
        self.processes = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, "--worker", str(rank), "--folder", str(folder)),
                    *("--socket", str(agents.folders[self.node_of[rank]] / "agent.sock"), "--bytes", str(nbytes)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """Return what each rank says."""
        lines = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        return [json.loads(line) for line in lines]

    def all(self, verb: str) -> list[dict[str, Any]]:
        """Have all ranks do something."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{verb}\n")
            process.stdin.flush()
        return self.answers()

    def end(self) -> None:
        """End in order."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Save once, and restore in rounds."""
    agents = Agents(folder, "saving", args.nodes, args.window)
    try:
        ranks = Ranks(folder, agents, args.bytes)
        ranks.all("save")
        ranks.end()
    finally:
        agents.end()
    agents = Agents(folder, "restoring", args.nodes, args.window)
    found: dict[str, list[dict[str, Any]]] = {layout: [] for layout in args.layouts}
    try:
        ranks = Ranks(folder, agents, args.bytes)
        for number in range(args.rounds + 1):
            for layout in args.layouts:
                before = agents.cpu()
                told = ranks.all(layout)
                if number:
                    found[layout].append(summary(told, agents.fetched(), ranks.node_of, args.window))
                    found[layout][-1]["cpu"] += agents.cpu() - before
        ranks.end()
    finally:
        agents.end()
    result: dict[str, object] = {"bytes": args.bytes, "nodes": args.nodes, "rounds": args.rounds, "window": args.window}
    for layout, rounds in found.items():
        timed: dict[str, float] = {}
        for key in ("seconds", "cpu"):
            timed[key] = round(statistics.median(each[key] for each in rounds), 3)
            ratios = [one[key] / same[key] for one, same in zip(rounds, found["same"], strict=True)]
            timed[f"{key}_ratio"] = round(statistics.median(ratios), 2)
        result[layout] = timed | {key: max(each[key] for each in rounds) for key in rounds[0] if key not in timed}
    return result


def summary(
    told: Sequence[dict[str, Any]], fetched: Sequence[dict[str, Any]], node_of: Sequence[int], window: int
) -> dict[str, Any]:
    """Return the figures of one restore."""
    read, agent, bounds = [], [], []
    for node, event in enumerate(fetched):
        here = [each for each, at in zip(told, node_of, strict=True) if at == node and each]
        if here:
            read.append(event["bytes_by_tier"]["store"] / math.fsum(each["bytes"] for each in here))
            agent.append((event["arena_bytes"] + event["window_bytes"]) / len(here))
            bounds.append(max(each["bytes"] for each in here) + window / len(here))
    return {
        "seconds": max(each.get("seconds", 0.0) for each in told),
        "cpu": math.fsum(each.get("cpu", 0.0) for each in told),
        "read_over_own": round(max(read), 3),
        "agent_per_rank": round(max(agent)),
        "trainer": max(each.get("gained", 0) for each in told),
        "bound": round(max(bounds)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=10**9)
    parser.add_argument("--nodes", type=int, default=1, choices=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=int, default=256, help="MiB")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker >= 0:
        worker(args.worker, args.folder, args.socket, args.bytes)
        return
    args.window <<= 20
    folder = Path(tempfile.mkdtemp(prefix="ckptd-bench-"))
    try:
        result = measure(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        if isinstance(value, dict):
            print(f"{key:10} " + "  ".join(f"{name} {figure}" for name, figure in value.items()))
        else:
            print(f"{key:10} {value}")


if __name__ == "__main__":
    main()
