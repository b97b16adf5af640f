"""Writes the golden root of format 1. It was run once; the root is checked in and never written again.

    PYTHONPATH=tests .venv/bin/python tests/golden/make_golden.py tests/golden/format-1

Later programs must list, verify and restore it for ever. A change of the format gets a new folder beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from fixtures.at_rest import NOW, BuiltNode, Shard, build_node, make_claim, per_rank, put_claim, sources_of, timeline

from ckptd.daemon import history, records
from ckptd.daemon.coverage import NotWhole, committed, whole
from ckptd.daemon.index import load_index
from ckptd.daemon.keys import JOB, StepId, Timeline, decision_key, start_key
from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Claim, Committed, Quarantined, Retention, StepRef, Value
from ckptd.protos.snapshot_pb2 import Mapping as ValueMapping
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.local import LocalStore

NODES = {"node-a": [0, 1], "node-b": [2, 3]}
MESH = {"dp": 2, "tp": 2}
FIRST, SECOND = timeline(1, 0xA1), timeline(2, 0xB2)


def state(rank: int, step: int) -> tuple[Sequence[Shard], Mapping[str, bytes]]:
    """Return what a rank holds: tensor-parallel halves, replicas over dp, frozen and empty tensors, own state."""
    dp, tp = divmod(rank, 2)
    weight = (np.arange(48, dtype="<f4").reshape(6, 8) + step) / 7
    half = np.ascontiguousarray(weight[:, tp * 4 : tp * 4 + 4])
    holder = tp  # ranks 0 and 1 write, ranks 2 and 3 hold replicas
    shards = [
        Shard(name="weight", values=half, global_shape=(6, 8), offset=(0, tp * 4), writer=holder),
        Shard(name="norm", values=np.full(5, step, dtype="<u2"), dtype="bfloat16", writer=0),
        Shard(name="frozen", values=np.arange(32, dtype="<i8"), writer=1, group=1),
        Shard(name="count", values=np.array(step, dtype="<i8"), writer=3),
        Shard(name="none", values=np.zeros((0, 3), dtype="<f4"), global_shape=(0, 3), writer=2),
        Shard(
            name="rows",
            values=np.full((1, 3), rank, dtype="<f8"),
            global_shape=(4, 3),
            offset=(rank, 0),
            writer=rank,
        ),
        per_rank("rng", np.arange(4, dtype="<u4") + 100 * dp + rank),
    ]
    loader = Value(
        mapping=ValueMapping(
            keys=[Value(text="position"), Value(text="rank")], values=[Value(integer=step * 4), Value(integer=rank)]
        )
    )
    return shards, {"loader": loader.SerializeToString(deterministic=True)}


def upload(
    store: ObjectStore, claim: Claim, step: int, base: StepRef | None, before: list[BuiltNode]
) -> list[BuiltNode]:
    """Put a step of both nodes."""
    built = []
    for node, ranks in NODES.items():
        sources = {}
        for old in before:
            if old.ref.node == node:
                sources = sources_of(old.index, old.ref)
        made = build_node(
            claim,
            step,
            node,
            {rank: state(rank, step) for rank in ranks},
            base=base,
            base_sources=sources,
            metrics={"loss": 1.0 / step},
            aliases={"tied": "weight"},
        )
        made.put(store)
        built.append(made)
    return built


def commit(claim: Claim, step: int, built: list[BuiltNode], *, posthumous: bool = False) -> Committed:
    """Return the commit of a step that was put whole."""
    loaded = {one.ref.node: [load_index(one.ref, one.index)] for one in built}
    found = whole(claim, step, loaded)
    if isinstance(found, NotWhole):
        raise SystemExit(found.error.message)
    return committed(claim=claim, whole=found, created_at=NOW, posthumous=posthumous)


def main(folder: Path) -> None:
    """Write the root, and beside it what readers must find."""
    store = LocalStore(folder)
    store.put(JOB, records.job_bytes("golden", created_at=NOW, version="0.1.0"))
    keep_all = Retention()
    claims = {of: make_claim(of, NODES, mesh=MESH) for of in (FIRST, SECOND)}
    digests: dict[str, str] = {}

    def put(key: str, data: bytes) -> bytes:
        store.put(key, data)
        return data

    def start(
        of: Timeline,
        listed: list[StepRef],
        adopted: Sequence[tuple[StepRef, Committed]] = (),
        bad: Sequence[Quarantined] = (),
    ) -> list[StepRef]:
        record = history.start_record(
            timeline=of,
            run_id="golden",
            listed=listed,
            adopted=adopted,
            origin=adopted[-1][0] if adopted else None,
            rollback=False,
            quarantined=bad,
            retention=keep_all,
            created_at=NOW,
        )
        key = start_key(of)
        return history.with_digest(record.keeps, key, put(key, history.to_bytes(record)))

    def decide(
        of: Timeline, step: int, made: Committed, listed: list[StepRef], bad: list[Quarantined]
    ) -> list[StepRef]:
        record = history.decision_record(
            timeline=of,
            step=step,
            committed=made,
            listed=listed,
            quarantined=bad,
            retention=keep_all,
            created_at=NOW,
        )
        digests[str(StepId(of, step))] = made.state_digest
        key = decision_key(of, step)
        return history.with_digest(record.keeps, key, put(key, history.to_bytes(record)))

    put_claim(store, claims[FIRST])
    listed = start(FIRST, [])
    ten = upload(store, claims[FIRST], 10, None, [])
    listed = decide(FIRST, 10, commit(claims[FIRST], 10, ten), listed, [])
    twenty = upload(store, claims[FIRST], 20, listed[-1], ten)
    listed = decide(FIRST, 20, commit(claims[FIRST], 20, twenty), listed, [])
    why = Error(reason=error_pb2.REASON_RANK_FAILED, message="rank 3 died", rank=3, ranks=[3], phase="stage")
    put(
        decision_key(FIRST, 30),
        history.to_bytes(history.abort_record(timeline=FIRST, step=30, why=why, created_at=NOW)),
    )
    # Step 40 is whole and undecided when the run ends: the next start adopts it. Step 20 was found bad.
    forty = upload(store, claims[FIRST], 40, listed[-1], twenty)
    put_claim(store, claims[SECOND])
    adopted = StepRef(step=40, timeline=str(FIRST), record_key=start_key(SECOND))
    posthumous = commit(claims[FIRST], 40, forty, posthumous=True)
    digests[str(StepId(FIRST, 40))] = posthumous.state_digest
    bad = [
        Quarantined(step=listed[-1], why=Error(reason=error_pb2.REASON_CORRUPT, message="found bad, for the example"))
    ]
    listed = start(SECOND, listed, [(adopted, posthumous)], bad)
    fifty = upload(store, claims[SECOND], 50, listed[-1], forty)
    listed = decide(SECOND, 50, commit(claims[SECOND], 50, fifty), listed, bad)
    # Step 60 is in flight: node B's index is not there yet.
    sixty = build_node(
        claims[SECOND], 60, "node-a", {rank: state(rank, 60) for rank in NODES["node-a"]}, base=listed[-1]
    )
    sixty.put(store)
    expected = {
        "committed": [[ref.step, ref.timeline] for ref in listed],
        "quarantined": [20],
        "incomplete": {"60": [2, 3]},
        "latest": 50,
        "state_digests": digests,
    }
    Path(f"{folder}.json").write_text(json.dumps(expected, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
