"""What a node reads of a step that is to be restored, where the step is not what its record says."""

from __future__ import annotations

import blake3
import pytest
from fixtures.at_rest import build_node, make_claim, put_claim, small_state, timeline

from ckptd.daemon import keys, restore_plan
from ckptd.daemon.any_mesh import Wanted, objects_of
from ckptd.daemon.errors import CorruptError, DaemonError
from ckptd.daemon.index import build_index
from ckptd.daemon.keys import StepId
from ckptd.protos import error_pb2
from ckptd.protos.coordinator_pb2 import CoordinatorMessage
from ckptd.protos.snapshot_pb2 import Committed, IndexHeader, IndexRef, Mesh, RankSection, StepRef
from ckptd.storage_backends.memory import MemoryStore


@pytest.mark.parametrize("world", [2, 4], ids=["same mesh", "another mesh"])
def test_a_decision_without_a_nodes_index_is_corrupt(world: int) -> None:
    """Then the step can be put aside and an older one taken; any other error would end the restore on all ranks."""
    store = MemoryStore("memory://plan")
    own = StepId(timeline(1), 7)
    claim = make_claim(own.timeline)
    put_claim(store, claim)
    only = build_node(claim, own.step, "node-a", small_state("node-a", own)).put(store)
    chosen = CoordinatorMessage.RestoreChosen(
        step=StepRef(step=own.step, timeline=str(own.timeline)),
        committed=Committed(indexes=[only], world=2, mesh=claim.mesh),
    )
    mesh = Mesh(axes=["dp"], sizes=[world])
    with pytest.raises(CorruptError, match="names no index of node node-b"):
        restore_plan.load(store, chosen, mesh, world, {1: [1]})


TURNED = b"t" * 32
STOOD_AT = {0: [0, 0], 1: [1, 0], 2: [0, 1], 3: [1, 1]}
"""Where each rank that saved stood: they were numbered along dp first."""


def saved(store: MemoryStore, rank_order: bytes) -> CoordinatorMessage.RestoreChosen:
    """Put a step whose ranks each hold an object of their own, saved on 2 x 2 ranks that stood at STOOD_AT."""
    own = StepId(timeline(1), 7)
    claim = make_claim(own.timeline, {"node": [0, 1, 2, 3]}, mesh={"dp": 2, "tp": 2})
    claim.mesh.rank_order = rank_order
    put_claim(store, claim)
    sections = [
        RankSection(
            rank=rank,
            coordinate=place,
            object_names=["rng"],
            object_offset=[0],
            object_length=[1],
            object_fingerprints=bytes(16),
            chunk_digests=bytes([rank]) * 32,
            chunk_length=[1],
            chunk_source=[0],
            sources=[str(own)],
        )
        for rank, place in STOOD_AT.items()
    ]
    header = IndexHeader(
        step=own.step, timeline=str(own.timeline), node="node", world=4, mesh=claim.mesh, plan_digest=b"p" * 32
    )
    data = build_index(header, sections)
    digest = blake3.blake3(data).hexdigest()
    key = keys.index_key(own.step, own.timeline, "node", digest)
    store.put(key, data)
    committed = Committed(
        world=4, mesh=claim.mesh, indexes=[IndexRef(node="node", key=key, blake3=digest, bytes=len(data))]
    )
    return CoordinatorMessage.RestoreChosen(
        found=True, step=StepRef(step=own.step, timeline=str(own.timeline)), committed=committed
    )


@pytest.mark.parametrize(("stored", "here"), [(TURNED, b""), (b"", TURNED), (TURNED, b"u" * 32)])
def test_ranks_that_are_numbered_otherwise_make_another_mesh(stored: bytes, here: bytes) -> None:
    """What a rank stored is offered to all by its coordinate, and not to the rank of its number."""
    store = MemoryStore("memory://plan")
    mesh = Mesh(axes=["dp", "tp"], sizes=[2, 2], rank_order=here)
    chosen = saved(store, stored)
    found = restore_plan.load(store, chosen, mesh, 4, {1: [0, 1]})
    assert found.other_mesh
    assert (b"rank-order" in store.get(chosen.committed.indexes[0].key)) is bool(stored)
    assert {rank: list(section.coordinate) for rank, section in found.sections.items()} == STOOD_AT


def test_ranks_that_are_numbered_alike_get_their_own() -> None:
    """The same mesh, row-major or not."""
    store = MemoryStore("memory://plan")
    mesh = Mesh(axes=["dp", "tp"], sizes=[2, 2], rank_order=TURNED)
    found = restore_plan.load(store, saved(store, TURNED), mesh, 4, {1: [1, 0]})
    assert not found.other_mesh
    assert objects_of(found.sections, 1, Wanted(objects=["rng"])) == [(0, 1, 0, 1)]


def test_a_record_that_does_not_say_how_ranks_were_numbered_gives_no_rank_what_another_one_stored() -> None:
    """One of an older program, saved along dp first and restored row-major: the coordinates in the index tell."""
    store = MemoryStore("memory://plan")
    mesh = Mesh(axes=["dp", "tp"], sizes=[2, 2])
    with pytest.raises(
        DaemonError, match=r"rank 1 stands at \[0, 1\]; the rank 1 that saved stood at \[1, 0\]"
    ) as caught:
        restore_plan.load(store, saved(store, b""), mesh, 4, {1: [0, 1]})
    assert caught.value.error.reason == error_pb2.REASON_LAYOUT_MISMATCH
