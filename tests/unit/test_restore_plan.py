"""What a node reads of a step that is to be restored, where the step is not what its record says."""

from __future__ import annotations

import pytest
from fixtures.at_rest import build_node, make_claim, put_claim, small_state, timeline

from ckptd.daemon import restore_plan
from ckptd.daemon.errors import CorruptError
from ckptd.daemon.keys import StepId
from ckptd.protos.coordinator_pb2 import CoordinatorMessage
from ckptd.protos.snapshot_pb2 import Committed, Mesh, StepRef
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
        restore_plan.load(store, chosen, mesh, world, [1])
