"""How fast one process loads a stored step, beside reading the same chunk files into memory.

Prints medians and ratios of one run. Local files, warm page cache: what is measured is everything but the store.

    python benchmarks/load.py --mib 512
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ckptd.client import load, open_step
from ckptd.client.config import Config
from ckptd.client.importing import import_step

TENSOR_MIB = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ckptd-bench-load-"))
    try:
        run(f"file://{folder}", folder, flags.mib, flags.rounds)
    finally:
        shutil.rmtree(folder)


def run(root: str, folder: Path, mib: int, rounds: int) -> None:
    tensors = {f"model/{number}": torch.rand(TENSOR_MIB << 8, 1 << 10) for number in range(mib // TENSOR_MIB)}
    import_step(Config(root=root, job="bench"), 1, tensors, {}, tags={})
    del tensors
    chunks = [path for path in (folder / "chunks").rglob("*") if path.is_file()]
    gib = mib / 1024

    def read() -> None:
        kept = [path.read_bytes() for path in chunks]
        assert sum(map(len, kept)) >= mib << 20

    def pieces() -> None:
        with open_step(root) as step:
            assert sum(piece.data.numel() * 4 for piece in step.pieces()) == mib << 20

    bare = median(read, rounds)
    print(f"reading {len(chunks)} chunk files, {gib:g} GiB: {bare:.2f} s, {gib / bare:.2f} GiB/s")
    for name, call in (
        ("load", lambda: load(root)),
        ("open_step and pieces", pieces),
        ("open_step alone", lambda: _open(root)),
    ):
        took = median(call, rounds)
        print(f"{name}: {took:.2f} s, {gib / took:.2f} GiB/s, {took / bare:.1f} times the reading")


def _open(root: str) -> None:
    with open_step(root):
        pass


def median(call: Callable[[], object], rounds: int) -> float:
    """Return the median of a call's seconds."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


if __name__ == "__main__":
    main()
