"""A restore that does not fit is one error that names everything, and touches nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_agent import FakeAgent
from torch import nn

from ckptd.client import BadStep, CkptdError, InvalidRequest, PerRank, SnapshotCorrupt, SnapshotNotFound
from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Quarantined, StepRef

__all__ = ["fake_agent", "make"]


def test_s017_nothing_to_restore_is_none_and_one_line(
    make: Make, fake_agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """S016: unless it is required, or a step is named; then the error lists what there is."""
    checkpointer = make()
    with caplog.at_level(logging.INFO, "ckptd.client"):
        assert checkpointer.restore() is None
    assert len(caplog.records) == 1
    with pytest.raises(SnapshotNotFound, match="file:///nowhere"):
        checkpointer.restore(required=True)
    checkpointer.save(10).wait()
    with pytest.raises(SnapshotNotFound, match=r"\[10\]"):
        checkpointer.restore(step=50)


def test_bad_steps_beside_which_a_run_has_begun_from_nothing_are_named(
    make: Make, fake_agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """There is nothing to go on from, and the answer is None; but not in silence."""
    why = Error(reason=error_pb2.REASON_CORRUPT, message="rotten")
    fake_agent.fell_back_from = [Quarantined(step=StepRef(step=7), why=why)]
    with caplog.at_level(logging.WARNING, "ckptd.client"):
        assert make().restore() is None
    [record] = caplog.records
    assert ("step 7" in record.getMessage(), "rotten" in record.getMessage()) == (True, True)


def test_s140_what_does_not_fit_is_one_error_with_everything_in_it(make: Make, fake_agent: FakeAgent) -> None:
    """Counts, first five names, both sides; targets are unchanged and the other ranks are told."""
    checkpointer = make()
    saved = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
    checkpointer.track(model=saved)
    checkpointer.save(1).wait()
    checkpointer.close()
    other = nn.ModuleList([*(nn.Linear(3, 2) for _ in range(3)), nn.Linear(2, 2).to(torch.float64), nn.Linear(1, 1)])
    before = [parameter.detach().clone() for parameter in other.parameters()]
    again = make()
    again.track(model=other)
    state = torch.get_rng_state()
    with pytest.raises(InvalidRequest) as caught:
        again.restore()
    text = str(caught.value)
    assert caught.value.reason_name == "LAYOUT_MISMATCH"
    assert "2 missing in the snapshot: model/4.weight, model/4.bias" in text
    assert "5 different: model/0.weight (stored float32[2, 2], here float32[2, 3])" in text
    assert "model/3.weight (stored float32[2, 2], here float64[2, 2])" in text
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert fake_agent.refused[0].reason == error_pb2.REASON_LAYOUT_MISMATCH


def test_s090_strict_is_about_names_on_both_sides(make: Make) -> None:
    """With strict=False both lists come back, and what is not stored keeps its value."""
    checkpointer = make()
    checkpointer.track(model=nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}))
    checkpointer.save(1, {"extra": 1}).wait()
    checkpointer.close()
    other = nn.ModuleDict({"a": nn.Linear(1, 1), "c": nn.Linear(1, 1)})
    kept = other.get_parameter("c.weight").detach().clone()
    again = make()
    again.track(model=other)
    with pytest.raises(InvalidRequest, match=r"2 missing.*model/c.weight.*3 only in the snapshot: extra, model/b"):
        again.restore()
    restored = again.restore(strict=False)
    assert restored is not None
    assert restored.missing == ("model/c.weight", "model/c.bias")
    assert restored.unexpected == ("extra", "model/b.bias", "model/b.weight")
    assert torch.equal(other.get_parameter("c.weight"), kept)


def test_s083_other_prefixes_are_pointed_out(make: Make) -> None:
    """When every name differs by its beginning only."""
    checkpointer = make()
    checkpointer.track(model=nn.ModuleDict({"inner": nn.Linear(1, 1)}))
    checkpointer.save(1).wait()
    checkpointer.close()
    again = make()
    again.track(model=nn.Linear(1, 1))
    with pytest.raises(InvalidRequest) as caught:
        again.restore()
    assert "begin with 'model/inner.'" in caught.value.hint


@pytest.mark.parametrize("strict", [True, False])
def test_other_param_groups_are_refused_before_anything_is_touched(
    make: Make, fake_agent: FakeAgent, strict: bool
) -> None:
    """The restore is told as failed, and the model keeps its values; without strict too, and drop is the way out."""
    net = nn.Linear(1, 1)
    checkpointer = make()
    checkpointer.track(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    checkpointer.save(1).wait()
    checkpointer.close()
    other = nn.Linear(1, 1)
    before = other.weight.detach().clone()
    again = make()
    groups: list[dict[str, Any]] = [{"params": [other.weight]}, {"params": [other.bias]}]
    again.track(model=other, optimizer=torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(InvalidRequest, match="1 param_groups, the optimizer 2") as caught:
        again.restore(strict=strict)
    assert 'drop=("optimizer",)' in caught.value.hint
    assert torch.equal(before, other.weight)
    assert fake_agent.done[-1].HasField("error")
    assert again.restore(strict=strict, drop=("optimizer",)) is not None
    assert torch.equal(net.weight, other.weight)


def test_another_mesh_is_refused(make: Make) -> None:
    """With both meshes in the message."""
    checkpointer = make(mesh={"dp": 1, "tp": 1})
    checkpointer.save(1).wait()
    checkpointer.close()
    with pytest.raises(InvalidRequest, match=r"dp 1 x tp 1.*world 1"):
        make().restore()


def test_s136_bytes_that_are_no_object_are_refused(make: Make, fake_agent: FakeAgent) -> None:
    """A pickle in an object's place runs nothing, and no tensor is touched."""
    net = nn.Linear(1, 1)
    checkpointer = make()
    checkpointer.track(model=net)
    checkpointer.save(1).wait()
    kept = fake_agent.kept[1]
    kept.tail = b"\x80\x04" + b"K" * (len(kept.tail) - 2)
    with torch.no_grad():
        net.weight += 1
    before = net.weight.detach().clone()
    with pytest.raises(SnapshotCorrupt, match="rng: unexpected format"):
        checkpointer.restore()
    assert torch.equal(net.weight, before)


def test_a_restore_that_is_superseded_asks_again(
    make: Make, fake_agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """And says which steps were left, once, with why (S006)."""
    checkpointer = make()
    checkpointer.save(1).wait()
    fake_agent.superseded = 2
    fake_agent.fell_back_from = [
        Quarantined(step=StepRef(step=2, timeline="t"), why=Error(reason=error_pb2.REASON_CORRUPT, message="chunk x"))
    ]
    with caplog.at_level(logging.WARNING, "ckptd.client"):
        restored = checkpointer.restore()
    assert restored is not None
    assert restored.fell_back_from == (BadStep(step=2, timeline="t", why="chunk x"),)
    assert fake_agent.calls.count("Restore") == 3
    assert [record.getMessage() for record in caplog.records] == ["step 2 was left for step 1: chunk x"]


def test_what_was_each_ranks_own_is_not_taken_for_a_global_tensor(make: Make) -> None:
    """Nor the other way round: the error says which is which."""
    checkpointer = make()
    checkpointer.track(model=PerRank(nn.Linear(1, 1)))
    checkpointer.save(1).wait()
    checkpointer.close()
    again = make()
    again.track(model=nn.Linear(1, 1))
    with pytest.raises(InvalidRequest, match="stored as each rank's own, here a piece of a global tensor"):
        again.restore()


def test_an_answer_that_leaves_a_tensor_out_touches_nothing(make: Make, fake_agent: FakeAgent) -> None:
    """It would leave old values among restored ones."""
    net = nn.Linear(1, 1)
    checkpointer = make()
    checkpointer.track(model=net)
    checkpointer.save(1).wait()
    with torch.no_grad():
        net.weight += 1
    before = net.weight.detach().clone()
    fake_agent.left_out = "model/bias"
    with pytest.raises(CkptdError, match="model/bias"):
        checkpointer.restore()
    assert torch.equal(net.weight, before)
