"""How fast staged slots get to a store, beside the fastest that the same machine can do in the same minutes.

Two stores, one run each, sides taking turns:

- SeaweedFS: `Uploader` against obstore alone, which puts the same memory with as many requests in flight, and
  neither hashes nor looks again;
- a local folder: `Uploader` over the local driver against O_DIRECT writes of the same memory with fsync, as many
  files at once.

Slots are warm. Reported are medians of seconds, the median of the ratios of neighbouring rounds (above 1: we are
faster), and how much memory of its own the process gained while it uploaded.

    python benchmarks/upload.py --json build/upload.json [--mib 1024] [--rounds 5] [--only seaweed|local]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import obstore
import obstore.store

from ckptd.chaos.seaweed import SeaweedServer
from ckptd.daemon.chunks import ChunkSpan, StreamLayout, stream_layout
from ckptd.daemon.keys import Timeline
from ckptd.daemon.slots import SlotFile, SlotPool, SlotState
from ckptd.daemon.uploader import NodeSnapshot, RankSnapshot, Uploader
from ckptd.protos import shard_table
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import Mesh, ShardTable, SlotTrailer
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.urls import open_store

MIB = 1 << 20
PLAN = b"p" * 32
TIMELINE = Timeline(1, "0123456789ab")


class Staged:
    """One rank's warm slot, full of random bytes, that can be staged for one step after the other."""

    def __init__(self, folder: Path, mib: int) -> None:
        self.rows: ShardTable = shard_table.build(
            ShardRow(
                name=f"layer.{at}",
                dtype="uint8",
                global_shape=(64 * MIB,),
                offset=(0,),
                length=(64 * MIB,),
                scope=0,
                nbytes=64 * MIB,
            )
            for at in range(mib // 64)
        )
        self.writer = [0] * (mib // 64)
        self.layout: StreamLayout = stream_layout(0, self.rows, self.writer)
        self.pool = SlotPool(folder, "be" * 32, touch=False)
        self.slot: SlotFile = self.pool.acquire(0, 0, self.layout.data_bytes, 4096)
        random = np.random.default_rng(1)
        content = np.frombuffer(self.slot.data, dtype=np.uint64)
        for at in range(0, len(content), 8 * MIB):
            content[at : at + 8 * MIB] = random.integers(0, 1 << 63, 8 * MIB, dtype=np.uint64)
        del content
        self._step = 0

    def snapshot(self) -> NodeSnapshot:
        """Stage the same bytes for a new step: its objects have new names."""
        self._step += 1
        trailer = SlotTrailer().SerializeToString()
        self.slot.free()
        header = replace(
            self.slot.header,
            state=SlotState.WRITING,
            timeline=str(TIMELINE),
            step=self._step,
            layout_digest=shard_table.digest(self.rows),
            plan_digest=PLAN,
        )
        self.slot.begin(header, self.layout)
        self.slot.stage(objects_bytes=0, trailer_bytes=len(trailer), staged_at=0)
        return NodeSnapshot(
            step=self._step,
            timeline=TIMELINE,
            node="bench",
            world=1,
            mesh=Mesh(axes=["dp"], sizes=[1]),
            plan_digest=PLAN,
            ranks={0: RankSnapshot(slot=self.slot, rows=self.rows, writer=self.writer, coordinate=[0])},
        )

    def views(self) -> list[memoryview]:
        """Return the chunks as the uploader puts them."""
        return [self.slot.stream(ChunkSpan(offset=chunk.offset, length=chunk.length)) for chunk in self.layout.chunks]


class OwnMemory:
    """The process's own memory (RssAnon: neither slots nor libraries), sampled while a block runs."""

    def __init__(self) -> None:
        self.growth = 0
        self.peak = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Keep the peak, and the highest growth over the value at the start, in bytes."""
        before, done = rss_anon(), threading.Event()

        def watch() -> None:
            while not done.wait(0.005):
                self.peak = max(self.peak, rss_anon())
                self.growth = max(self.growth, rss_anon() - before)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def rss_anon() -> int:
    """Return the process's anonymous resident memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def turns(
    ours: Callable[[], None], best: Callable[[], None], rounds: int, after: Callable[[], None]
) -> dict[str, object]:
    """Time both sides, taking turns, after one round that does not count."""
    seconds: dict[str, list[float]] = {"ours": [], "best": []}
    memory = OwnMemory()
    for number in range(rounds + 1):
        for side, call in (("ours", ours), ("best", best)):
            begun = time.perf_counter()
            if side == "ours":
                with memory.watched():
                    call()
            else:
                call()
            if number:
                seconds[side].append(time.perf_counter() - begun)
            after()
    ratios = [best_s / ours_s for ours_s, best_s in zip(seconds["ours"], seconds["best"], strict=True)]
    return {
        "ours_s": round(statistics.median(seconds["ours"]), 3),
        "best_s": round(statistics.median(seconds["best"]), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "own_memory_growth_mib": round(memory.growth / MIB, 1),
        "own_memory_peak_mib": round(memory.peak / MIB, 1),
    }


def uploads(staged: Staged, store: ObjectStore) -> Callable[[], None]:
    """Return a call that uploads the slot for one more step."""
    uploader = Uploader(store)

    def upload() -> None:
        uploader.upload(staged.snapshot())

    return upload


def seaweed(staged: Staged, rounds: int) -> dict[str, object]:
    """Upload to an S3 server of our own."""
    with SeaweedServer(bucket="ckptd-bench") as server:
        os.environ.update(server.env())
        store = open_store(server.url("ours"))
        client = obstore.store.S3Store(
            server.bucket,
            prefix="best",
            endpoint=server.endpoint,
            access_key_id=server.access_key,
            secret_access_key=server.secret_key,
            region="us-east-1",
            unsigned_payload=True,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": "120s"},
        )
        in_flight = store.capabilities.concurrency
        pool = ThreadPoolExecutor(in_flight)
        count = 0

        def best() -> None:
            nonlocal count
            count += 1
            names = [f"{count}/{at}" for at in range(len(staged.views()))]
            puts = [
                pool.submit(obstore.put, client, name, view, mode="create", use_multipart=False)
                for name, view in zip(names, staged.views(), strict=True)
            ]
            for put in puts:
                put.result()

        def clear() -> None:
            for info in list(store.list("")):
                store.delete(info.key)
            for page in obstore.list(client):
                obstore.delete(client, [entry["path"] for entry in page])

        found = turns(uploads(staged, store), best, rounds, clear)
        pool.shutdown()
        return {**found, "in_flight": in_flight, "against": "obstore, payload unsigned, from the slot's memory"}


def local(staged: Staged, rounds: int, folder: Path) -> dict[str, object]:
    """Upload to a folder on this machine's disk."""
    root, raw = folder / "ours", folder / "best"
    root.mkdir()
    raw.mkdir()
    store = open_store(str(root))
    in_flight = store.capabilities.concurrency
    pool = ThreadPoolExecutor(in_flight)

    def write(path: Path, view: memoryview) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            written = 0
            while written < len(view):
                written += os.write(fd, view[written:])
            os.fsync(fd)
        finally:
            os.close(fd)

    def best() -> None:
        writes = [pool.submit(write, raw / str(at), view) for at, view in enumerate(staged.views())]
        for each in writes:
            each.result()
        fd = os.open(raw, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def clear() -> None:
        for info in list(store.list("")):
            store.delete(info.key)
        for path in raw.iterdir():
            path.unlink()

    found = turns(uploads(staged, store), best, rounds, clear)
    pool.shutdown()
    return {**found, "in_flight": in_flight, "against": "O_DIRECT and fsync, from the slot's memory"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--mib", type=int, default=1024, help="bytes of state, in MiB; a multiple of 64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["seaweed", "local"])
    parser.add_argument("--folder", type=Path, help="for the local store; on the disk to measure")
    args = parser.parse_args()
    shm = Path(tempfile.mkdtemp(prefix="ckptd-bench-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="ckptd-bench-", dir=args.folder))
    result: dict[str, object] = {
        "mib": args.mib,
        "rounds": args.rounds,
        "cpus": os.cpu_count(),
        "host": platform.platform(),
    }
    staged = Staged(shm, args.mib)
    try:
        if args.only != "local":
            result["seaweed"] = seaweed(staged, args.rounds)
        if args.only != "seaweed":
            result["local"] = local(staged, args.rounds, disk)
    finally:
        staged.pool.close()
        shutil.rmtree(shm)
        shutil.rmtree(disk)
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
