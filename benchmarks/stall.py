"""How long `save` keeps training waiting, beside a memcpy of the same bytes into warm shared memory.

One process, one agent, local files; each round measures both, in turn, after every slot has been written once. The memcpy
copies the same tensors, one after the other, into one warm mapping of the same folder, with as many threads as the copy of
the client has. A round waits until the step before is durable, so that uploads do not compete with what is measured.

    python benchmarks/stall.py [--mib 512] [--tensors 300] [--rounds 7] [--threads 1] [--transport shm|stream] [--json]

`--threads` is torch's own (torchrun sets 1). Prints medians in seconds, their ratio, and how much memory of its own the
process gained by saving, in MiB.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from ckptd.client import Checkpointer

MIB = 1 << 20


def model_of(mib: int, tensors: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an AdamW with state, together of about `mib` MiB in `tensors` tensors of that size."""
    count = max(1, tensors // 3)
    size = max(1, mib * MIB // 4 // 3 // count)
    model = nn.ParameterList([nn.Parameter(torch.full((size,), float(number))) for number in range(count)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return everything that a save copies."""
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return [parameter.detach() for parameter in model.parameters()] + state


def anonymous_mib() -> float:
    """Return the process's own memory; mappings of shared memory do not count."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--transport", choices=["shm", "stream"], default="shm")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shm = Path(f"/dev/shm/ckptd-bench-{secrets.token_hex(4)}")
    folder = Path(tempfile.mkdtemp(prefix="ckptd-bench-"))
    agent = subprocess.Popen(
        [
            *(sys.executable, "-m", "ckptd.daemon.cli", "agent", "--run-dir", str(folder / "run")),
            *("--data-dir", str(folder / "data"), "--shm-dir", str(shm)),
        ]
    )
    try:
        result = measure(args, folder, shm)
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


def measure(args: argparse.Namespace, folder: Path, shm: Path) -> dict[str, object]:
    """Run the rounds."""
    model, optimizer = model_of(args.mib, args.tensors)
    sources = tensors_of(model, optimizer)
    total = sum(source.numel() * source.element_size() for source in sources)
    while not (folder / "run" / "agent.sock").exists():
        time.sleep(0.05)
    checkpointer = Checkpointer(
        f"file://{folder / 'root'}",
        job="bench",
        socket=folder / "run" / "agent.sock",
        transport=args.transport,
        keep_last=2,
    )
    checkpointer.track(model=model, optimizer=optimizer)
    room = (shm / "memcpy").open("w+b")
    room.truncate(total + 64 * len(sources))
    warm = torch.frombuffer(mmap.mmap(room.fileno(), 0), dtype=torch.uint8)
    targets, at = [], 0
    for source in sources:
        end = at + source.numel() * source.element_size()
        targets.append(warm[at:end].view(source.dtype).view(source.shape))
        at = end + -end % 64
    saves: list[float] = []
    copies: list[float] = []
    before = 0.0
    for number in range(args.rounds + 3):
        with torch.no_grad():
            for source in sources:
                source.add_(1)  # new bytes in every step, as in training
        begin = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        copied = time.perf_counter() - begin
        begin = time.perf_counter()
        handle = checkpointer.save(number)
        saved = time.perf_counter() - begin
        handle.wait()
        if number >= 3:  # both slots, and the rows' places in them, are warm from here on
            saves.append(saved)
            copies.append(copied)
        else:
            before = anonymous_mib()
    gained = anonymous_mib() - before
    restores = []
    for _ in range(3):
        begin = time.perf_counter()
        checkpointer.restore()
        restores.append(time.perf_counter() - begin)
    checkpointer.close()
    room.close()
    return {
        "bytes": total,
        "tensors": len(sources),
        "torch_threads": args.threads,
        "transport": args.transport,
        "rounds": args.rounds,
        "memcpy_s": round(statistics.median(copies), 5),
        "save_s": round(statistics.median(saves), 5),
        "save_s_min": round(min(saves), 5),
        "save_s_max": round(max(saves), 5),
        "stall_over_memcpy": round(statistics.median(saves) / statistics.median(copies), 3),
        "stall_over_memcpy_pairs": round(statistics.median(a / b for a, b in zip(saves, copies, strict=True)), 3),
        "restore_from_memory_s": round(statistics.median(restores), 5),
        "gained_mib": round(gained, 1),
        "cpus": len(os.sched_getaffinity(0)),
    }


if __name__ == "__main__":
    main()
