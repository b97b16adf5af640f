"""What comparing replicas costs: the part of `save`'s stall that fingerprints copies which are not written.

A data-parallel run: every rank holds the same model and optimizer, so that of N copies one is staged and N-1 are only
fingerprinted. Ranks are processes under torchrun, on one agent and local files. In each round they save once with each value
of `verify_replicas`, in an order that changes, once with "always" without the threads that fingerprint beside the copy, and once
with "always" and `hash_replicas="in-place"`: fingerprinted where they lie, on the device that is printed. All others bring what
is on a GPU to the host. The figure of a save is that of its slowest rank.

    python benchmarks/replicas.py [--ranks 2] [--mib 128] [--tensors 100] [--rounds 8] [--device cpu] [--json]
    python benchmarks/replicas.py --hashes [--mib 256] [--device cpu] [--json]

With `--hashes` no job is started: the functions alone are measured, over as many bytes that are in memory already: xxh3-128 and
the segmented one by the library, as agents compute them, in one thread and in two, and the segmented one by torch on the device.

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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from ckptd.client import Checkpointer, hash_in_place, staging
from ckptd.client.copying import Copier
from ckptd.protos import segmented

WARM = 4
"""Saves that are not counted: until both slots have been written, and the first comparison is committed."""
POLICIES = ("always", "every:4", "first")
SERIAL = "always, in one thread"
IN_PLACE = "always, in place"
SAMPLES = 5


def model_of(mib: int, tensors: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an AdamW with state, together of about `mib` MiB in `tensors` tensors of that size."""
    count = max(1, tensors // 3)
    size = max(1, (mib << 20) // 4 // 3 // count)
    model = nn.ParameterList(
        [nn.Parameter(torch.full((size,), float(number), device=device)) for number in range(count)]
    )
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
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    model, optimizer = model_of(args.mib, args.tensors, device)
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    sources = [*(parameter.detach() for parameter in model.parameters()), *state]
    arms = {name: (name, "host") for name in POLICIES} | {SERIAL: ("always", "host"), IN_PLACE: ("always", "in-place")}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    processor: dict[str, list[float]] = {name: [] for name in arms}
    hashed: dict[str, list[int]] = {name: [] for name in arms}
    checkpointers = {
        name: Checkpointer(
            f"{args.root}-{at}",
            job=f"bench-{at}",
            socket=args.socket,
            keep_last=2,
            audit="off",
            verify_replicas=policy,
            hash_replicas=where,
        )
        for at, (name, (policy, where)) in enumerate(arms.items())
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
                    if device.type == "cuda":
                        torch.cuda.synchronize()
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
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hashes", action="store_true", help="measure the functions alone")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--root", help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out is not None:
        rank_main(args)
        return
    if args.hashes:
        show(hashes(args), as_json=args.json)
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
    show(result, as_json=args.json)


def show(result: dict[str, object], *, as_json: bool) -> None:
    """Print figures by name."""
    if as_json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:44} {value}")


def hashes(args: argparse.Namespace) -> dict[str, object]:
    """Return what each function does in a second, and in a second of the processor, in GB; the best of some samples."""
    nbytes = args.mib << 20
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    data, placed = tensor.numpy().data, tensor.to(args.device)
    functions: dict[str, tuple[Callable[[], object], int]] = {
        "xxh3-128, one thread": (lambda: xxhash.xxh3_128_digest(data), 1),
        "segmented, one thread": (lambda: segmented.digest(data), 1),
        "xxh3-128, two threads": (lambda: xxhash.xxh3_128_digest(data), 2),
        "segmented, two threads": (lambda: segmented.digest(data), 2),
        f"segmented, torch on {args.device}": (lambda: hash_in_place.fingerprints([placed]), 1),
        f"to the host, then xxh3-128, from {args.device}": (
            lambda: xxhash.xxh3_128_digest(staging.plain_bytes(placed)),
            1,
        ),
    }
    assert hash_in_place.fingerprints([placed]) == [segmented.digest(data)]
    best = {name: (float("inf"), float("inf")) for name in functions}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(SAMPLES):
            for name, (function, threads) in functions.items():
                begin, used = time.perf_counter(), time.process_time()
                for future in [pool.submit(function) for _ in range(threads)]:
                    future.result()
                took = (time.perf_counter() - begin) / threads, (time.process_time() - used) / threads
                best[name] = min(best[name][0], took[0]), min(best[name][1], took[1])
    result: dict[str, object] = {"bytes": nbytes, "device": device_name(args), "cpus": len(os.sched_getaffinity(0))}
    for name, (seconds, processor) in best.items():
        result[f"{name}: GB/s"] = round(nbytes / seconds / 1e9, 2)
        result[f"{name}: GB/processor s"] = round(nbytes / processor / 1e9, 2)
    return result


def device_name(args: argparse.Namespace) -> str:
    """Return what tensors lie on."""
    return torch.cuda.get_device_name() if args.device == "cuda" else "cpu"


def measure(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Run the ranks and put their figures together."""
    while not (folder / "run" / "agent.sock").exists():
        time.sleep(0.05)
    out = folder / "figures.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", __file__),
        *("--mib", str(args.mib), "--tensors", str(args.tensors), "--rounds", str(args.rounds)),
        *("--device", args.device),
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
        "device": device_name(args),
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
