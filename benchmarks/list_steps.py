"""How long `ckptd ls` takes on a root with many steps, on local files and on SeaweedFS.

    python benchmarks/list_steps.py [--steps 200] [--rounds 5] [--json]

Whole processes, from start to exit, after one warm-up; medians in seconds. The root is written by the daemon's own record
builders: a claim, a start record, and a decision per step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ckptd.chaos.seaweed import SeaweedServer
from ckptd.daemon import history, records
from ckptd.daemon.keys import JOB, Timeline, claim_key, decision_key, start_key
from ckptd.protos.snapshot_pb2 import Claim, ClaimNode, Committed, IndexRef, Mesh, Record, Retention, StepRef
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.urls import open_store

TIMELINE = Timeline(1, "0123456789ab")
STAMP = "2026-01-01T00:00:00Z"


def write_root(store: ObjectStore, steps: int) -> None:
    """Write the log of a job with so many committed steps."""
    store.put(JOB, records.job_bytes("bench", created_at=STAMP, version="0"))
    nodes = [ClaimNode(node="node-0", ranks=[0], hostname="host")]
    mesh = Mesh(axes=["dp"], sizes=[1])
    claim = Claim(format_version=1, timeline=str(TIMELINE), run_id="r", job="bench", world=1, mesh=mesh, nodes=nodes)
    store.put(claim_key(TIMELINE), records.to_bytes(claim))
    start = history.start_record(
        timeline=TIMELINE,
        run_id="r",
        listed=[],
        adopted=[],
        origin=None,
        rollback=False,
        quarantined=[],
        retention=Retention(),
        created_at=STAMP,
    )
    store.put(start_key(TIMELINE), records.to_bytes(start))
    listed: list[StepRef] = []
    for step in range(1, steps + 1):
        digest = f"{step:064x}"
        ref = IndexRef(node="node-0", key=f"index/{step:012d}.{TIMELINE}/node-0.{digest}.pb", blake3=digest, bytes=1)
        record: Record = history.decision_record(
            timeline=TIMELINE,
            step=step,
            committed=Committed(indexes=[ref], world=1, mesh=mesh, state_digest=digest, created_at=STAMP),
            listed=listed,
            quarantined=[],
            retention=Retention(),
            created_at=STAMP,
        )
        key, data = decision_key(TIMELINE, step), records.to_bytes(record)
        store.put(key, data)
        listed = history.with_digest(record.keeps, key, data)


def timed(root: str, rounds: int) -> float:
    """Return the median wall time of `ckptd ls ROOT`, in seconds."""
    command = [sys.executable, "-m", "ckptd.daemon.cli", "ls", root]
    times = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(folder) / "root")
        with open_store(root) as store:
            write_root(store, arguments.steps)
        figures["local_s"] = timed(root, arguments.rounds)
    with SeaweedServer(bucket="bench-list") as server:
        os.environ.update(server.env())
        with open_store(server.url("root")) as store:
            write_root(store, arguments.steps)
        figures["s3_s"] = timed(server.url("root"), arguments.rounds)
    result = {"steps": arguments.steps, "rounds": arguments.rounds, **{k: round(v, 3) for k, v in figures.items()}}
    print(json.dumps(result) if arguments.json else "\n".join(f"{name}: {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
