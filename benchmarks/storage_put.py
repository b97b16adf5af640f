"""How much of the engine's own speed a put through our stack keeps.

Side by side in one run, in turn: 64 MiB objects through `open_store` (retries, key checks, error
translation) against bare obstore on the same SeaweedFS server, and through the local driver
against a bare write and fsync of the same bytes on the same disk. Prints medians and ratios.

    python benchmarks/storage_put.py [--json] [--mib 64] [--objects 6] [--rounds 5] [--threads 4]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.store import S3Store

from ckptd.chaos.seaweed import SeaweedServer
from ckptd.storage_backends.urls import open_store

if TYPE_CHECKING:
    from collections.abc import Callable


def timed(put: Callable[[str, memoryview], None], keys: list[str], data: memoryview, threads: int) -> float:
    """Put all keys from that many threads; returns seconds."""
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda key: put(key, data), keys))
    return time.perf_counter() - start


def compare(
    puts: dict[str, Callable[[str, memoryview], None]],
    delete: Callable[[str], None],
    data: memoryview,
    args: argparse.Namespace,
) -> dict[str, float]:
    """Run the contestants in turn, the order changing each round; returns median GB/s of each."""
    speeds: dict[str, list[float]] = {name: [] for name in puts}
    names = list(puts)
    for turn in range(args.rounds + 1):
        for name in names if turn % 2 else reversed(names):
            keys = [f"{name}/{turn}/{number}" for number in range(args.objects)]
            seconds = timed(puts[name], keys, data, args.threads)
            if turn > 0:  # the first is for warming up
                speeds[name].append(len(data) * args.objects / seconds / 1e9)
            for key in keys:
                delete(key)
    return {name: statistics.median(values) for name, values in speeds.items()}


def on_s3(data: memoryview, args: argparse.Namespace) -> dict[str, float]:
    with SeaweedServer() as server:
        os.environ.update(server.env())
        bare = S3Store(
            server.bucket,
            endpoint=server.endpoint,
            region="us-east-1",
            access_key_id=server.access_key,
            secret_access_key=server.secret_key,
            unsigned_payload=True,
            client_options={"allow_http": True, "timeout": "120s"},
        )
        with open_store(server.url()) as store:
            return compare(
                {
                    "obstore": lambda key, view: (
                        obstore.put(bare, key, view, mode="create", use_multipart=False) and None
                    ),
                    "ckptd": store.put,
                },
                store.delete,
                data,
                args,
            )


def on_disk(data: memoryview, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    def write_and_sync(key: str, view: memoryview) -> None:
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        done = 0
        while done < len(view):
            done += os.writev(fd, [view[done:]])
        os.fsync(fd)
        os.close(fd)

    with open_store(folder.as_uri()) as store:
        return compare({"writev": write_and_sync, "ckptd": store.put}, store.delete, data, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--mib", type=int, default=64, help="size of an object")
    parser.add_argument("--objects", type=int, default=6, help="objects a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--threads", type=int, default=4, help="puts in flight")
    parser.add_argument("--folder", type=Path, help="where the local store lies (default: beside this tree)")
    args = parser.parse_args()

    # A shared mapping, as the agent's slots are: the bytes must go out without a copy in between.
    slot = mmap.mmap(-1, args.mib << 20)
    data = memoryview(slot)
    for start in range(0, len(data), 1 << 20):
        data[start : start + (1 << 20)] = os.urandom(1 << 20)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    s3 = on_s3(data, args)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    build = args.folder or Path(__file__).parents[1] / "build"
    build.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build) as folder:
        disk = on_disk(data, args, Path(folder))
    result = {
        "object_mib": args.mib,
        "threads": args.threads,
        "seaweedfs_obstore_gb_s": round(s3["obstore"], 3),
        "seaweedfs_ckptd_gb_s": round(s3["ckptd"], 3),
        "seaweedfs_ratio": round(s3["ckptd"] / s3["obstore"], 3),
        "seaweedfs_target_ratio": 0.9,
        "memory_grown_mib": round(grown, 1),
        "disk_writev_gb_s": round(disk["writev"], 3),
        "disk_ckptd_gb_s": round(disk["ckptd"], 3),
        "disk_ratio": round(disk["ckptd"] / disk["writev"], 3),
    }
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
