"""What comparing replicas costs: the part of `save`'s stall that fingerprints copies which are not written.

A data-parallel run: every rank holds the same model and optimizer, so that of N copies one is staged and N-1 are only
fingerprinted. Ranks are processes under torchrun, on one agent and local files. In each round they save once with each value
of `verify_replicas`, in an order that changes, and once with "always" without the threads that fingerprint beside the copy.
The figure of a save is that of its slowest rank.

    python benchmarks/replicas.py [--ranks 2] [--mib 128] [--tensors 100] [--rounds 8] [--json]

Prints how many saves were compared, medians in seconds, and which share comparing has in percent: of the stall, and of the
processor time that all threads of a rank use in it. Both are told against the saves of "first", which after the first one do
without. On fewer cores than ranks, or beside other work, stalls vary much; processor time does so less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from ckptd.client import Checkpointer, staging
from ckptd.client.copying import Copier

WARM = 4
"""Saves that are not counted: until both slots have been written, and the first comparison is committed."""
POLICIES = ("always", "every:4", "first")
SERIAL = "always, in one thread"


def model_of(mib: int, tensors: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an AdamW with state, together of about `mib` MiB in `tensors` tensors of that size."""
    count = max(1, tensors // 3)
    size = max(1, (mib << 20) // 4 // 3 // count)
    model = nn.ParameterList([nn.Parameter(torch.full((size,), float(number))) for number in range(count)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def at_once(_: Copier, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Future[Any]]:
    """Stand in for `Copier.beside`: do the work before the copy, in the caller's thread."""
    done = []
    for item in items:
        future: Future[Any] = Future()
        future.set_result(work(item))
        done.append(future)
    return done


class Counted(staging.Fingerprints):
    """Counts the tensors that are fingerprinted."""

    tensors = 0

    def __init__(self, tensors: Sequence[torch.Tensor], copier: Copier, **more: Any) -> None:
        Counted.tensors += len(tensors)
        super().__init__(tensors, copier, **more)


def rank_main(args: argparse.Namespace) -> None:
    """Save with each policy in turn, and let rank 0 write the figures of all ranks to the file."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model, optimizer = model_of(args.mib, args.tensors)
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    sources = [*(parameter.detach() for parameter in model.parameters()), *state]
    arms = {name: name for name in POLICIES} | {SERIAL: "always"}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    processor: dict[str, list[float]] = {name: [] for name in arms}
    hashed: dict[str, list[int]] = {name: [] for name in arms}
    checkpointers = {
        name: Checkpointer(
            f"{args.root}-{at}", job=f"bench-{at}", socket=args.socket, keep_last=2, audit="off", verify_replicas=policy
        )
        for at, (name, policy) in enumerate(arms.items())
    }
    with mock.patch.object(staging, "Fingerprints", Counted), contextlib.ExitStack() as opened:
        for checkpointer in checkpointers.values():
            opened.enter_context(checkpointer)
            checkpointer.track(model=model, optimizer=optimizer)
        for number in range(args.rounds + WARM):
            # Shuffled alike on all ranks: nobody always goes first, or behind the same other one.
            for name in random.Random(number).sample(sorted(arms), len(arms)):
                with torch.no_grad():
                    for source in sources:
                        source.add_(1)  # new bytes in every step, the same on all ranks
                Counted.tensors = 0
                with mock.patch.object(Copier, "beside", at_once if name == SERIAL else Copier.beside):
                    dist.barrier()
                    begin, used = time.perf_counter(), time.process_time()
                    handle = checkpointers[name].save(number)
                    seconds[name].append(time.perf_counter() - begin)
                    processor[name].append(time.process_time() - used)
                handle.wait()
                hashed[name].append(Counted.tensors)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (seconds, processor, hashed))
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(everybody))
    dist.destroy_process_group()


def main() -> None:
    """Start an agent and the ranks, and print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--root", help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out is not None:
        rank_main(args)
        return
    shm = Path(f"/dev/shm/ckptd-bench-{secrets.token_hex(4)}")
    folder = Path(tempfile.mkdtemp(prefix="ckptd-bench-"))
    agent = subprocess.Popen(
        [
            *(sys.executable, "-m", "ckptd.daemon.cli", "agent", "--run-dir", str(folder / "run")),
            *("--data-dir", str(folder / "data"), "--shm-dir", str(shm)),
        ]
    )
    try:
        result = measure(args, folder)
    finally:
        agent.terminate()
        agent.wait(30)
        shutil.rmtree(shm, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:24} {value}")


def measure(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Run the ranks and put their figures together."""
    while not (folder / "run" / "agent.sock").exists():
        time.sleep(0.05)
    out = folder / "figures.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", __file__),
        *("--mib", str(args.mib), "--tensors", str(args.tensors), "--rounds", str(args.rounds)),
        *("--root", f"file://{folder / 'root'}", "--socket", str(folder / "run" / "agent.sock"), "--out", str(out)),
    ]
    subprocess.run(command, check=True, timeout=600, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1"})
    ranks = json.loads(out.read_text())
    rounds = range(WARM, args.rounds + WARM)
    result: dict[str, object] = {
        "ranks": args.ranks,
        "bytes_per_rank": args.mib << 20,
        "tensors": args.tensors,
        "rounds": args.rounds,
        "cpus": len(os.sched_getaffinity(0)),
    }
    stall = {arm: [max(rank[0][arm][at] for rank in ranks) for at in rounds] for arm in ranks[0][0]}
    used = {arm: [statistics.mean(rank[1][arm][at] for rank in ranks) for at in rounds] for arm in ranks[0][1]}
    was = {arm: [any(rank[2][arm][at] for rank in ranks) for at in rounds] for arm in ranks[0][2]}
    for arm, stalls in stall.items():
        result[f"{arm}: compared"] = f"{sum(was[arm])} of {args.rounds}"
        result[f"{arm}: save_s"] = round(typical(stalls, was[arm]), 5)
        result[f"{arm}: processor_s"] = round(typical(used[arm], was[arm]), 5)
        # What comparing costs is told by the saves that do without: they copy the same bytes in the same rounds.
        result[f"{arm}: share_of_stall_percent"] = share(stall["first"], stalls, was[arm])
        result[f"{arm}: share_of_processor_percent"] = share(used["first"], used[arm], was[arm])
    return result


def typical(saves: list[float], was_compared: list[bool]) -> float:
    """Return what a save takes: the medians of those that were compared and of those that were not, each as often as it was."""
    kinds = [[save for save, was in zip(saves, was_compared, strict=True) if was is kind] for kind in (True, False)]
    return sum(len(kind) * statistics.median(kind) for kind in kinds if kind) / len(saves)


def share(bare: list[float], saves: list[float], was_compared: list[bool]) -> float:
    """Return how much of these saves, in percent, is more than the bare ones took."""
    return round(100 * (1 - statistics.median(bare) / typical(saves, was_compared)), 1)


if __name__ == "__main__":
    main()
