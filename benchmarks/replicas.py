"""What comparing replicas costs: the part of `save`'s stall that fingerprints copies which are not written.

A data-parallel run: every rank holds the same model and optimizer, so that of N copies one is staged and N-1 are only
fingerprinted, in every save. Ranks are processes under torchrun, on one agent and local files. Each rank times its
`save` and, within it, the fingerprints; the figure of a save is that of its slowest rank.

    python benchmarks/replicas.py [--ranks 2] [--mib 128] [--tensors 100] [--rounds 7] [--json]

Prints medians in seconds, and the share of the stall in percent. On fewer cores than ranks, ranks also wait for each
other's work; `fingerprint_gb_s` is then low for that reason.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from ckptd.client import Checkpointer, staging

WARM = 3
"""Saves that are not counted: until both slots have been written."""


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


def rank_main(args: argparse.Namespace) -> None:
    """Save, and let rank 0 write the figures of all ranks to the file."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model, optimizer = model_of(args.mib, args.tensors)
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    sources = [*(parameter.detach() for parameter in model.parameters()), *state]
    spent: list[float] = []
    hashed: list[int] = []

    def timed(tensors: list[torch.Tensor]) -> bytes:
        begin = time.perf_counter()
        found = staging_fingerprints(tensors)
        spent.append(time.perf_counter() - begin)
        hashed.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        return found

    staging_fingerprints = staging.fingerprints
    saves: list[float] = []
    with (
        mock.patch.object(staging, "fingerprints", timed),
        Checkpointer(args.root, job="bench", socket=args.socket, keep_last=2) as checkpointer,
    ):
        checkpointer.track(model=model, optimizer=optimizer)
        for number in range(args.rounds + WARM):
            with torch.no_grad():
                for source in sources:
                    source.add_(1)  # new bytes in every step, the same on all ranks
            dist.barrier()
            begin = time.perf_counter()
            handle = checkpointer.save(number)
            saves.append(time.perf_counter() - begin)
            handle.wait()
    everybody: list[tuple[list[float], list[float], list[int]]] = [([], [], [])] * dist.get_world_size()
    dist.all_gather_object(everybody, (saves, spent, hashed))
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(everybody))
    dist.destroy_process_group()


def main() -> None:
    """Start an agent and the ranks, and print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
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
    saves, spent, hashed = zip(*json.loads(out.read_text()), strict=True)
    rounds = range(WARM, args.rounds + WARM)
    slowest = [max(rank[number] for rank in saves) for number in rounds]
    compared = [max(rank[number] for rank in spent) for number in rounds]
    of_all = sum(rank[number] for rank in hashed for number in rounds)
    seconds = sum(rank[number] for rank in spent for number in rounds)
    return {
        "ranks": args.ranks,
        "bytes_per_rank": args.mib << 20,
        "tensors": args.tensors,
        "rounds": args.rounds,
        "save_s": round(statistics.median(slowest), 5),
        "fingerprints_s": round(statistics.median(compared), 5),
        "share_of_stall_percent": round(
            100 * statistics.median(a / b for a, b in zip(compared, slowest, strict=True)), 1
        ),
        "fingerprint_gb_s": round(of_all / seconds / 1e9, 2),
        "cpus": len(os.sched_getaffinity(0)),
    }


if __name__ == "__main__":
    main()
