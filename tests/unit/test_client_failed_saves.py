"""A save that cannot be: refused at once, lost without stopping the training, or skipped."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_agent import FakeAgent

from ckptd.client import Aborted, CkptdError, InvalidRequest, SaveHandle, Unavailable
from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error

__all__ = ["fake_agent", "make"]


@pytest.mark.parametrize("step", [-1, 10**12, 1.5, "3", True, None])
def test_s013_steps_that_are_none_are_refused(make: Make, fake_agent: FakeAgent, step: Any) -> None:
    """Before anything else happens; the next proper save works."""
    checkpointer = make()
    with pytest.raises(InvalidRequest) as caught:
        checkpointer.save(step)
    assert caught.value.reason_name == "INVALID_STEP"
    assert "Begin" not in fake_agent.calls
    checkpointer.save(0).wait()


@pytest.mark.parametrize(
    "arguments",
    [{"metrics": {"loss": "high"}}, {"tags": {"a": 1}}, {"timeout": -1.0}, {"timeout": float("nan")}],
)
def test_arguments_are_checked(make: Make, arguments: dict[str, Any]) -> None:
    """By name."""
    with pytest.raises(InvalidRequest):
        make().save(1, **arguments)


def test_a_state_that_cannot_be_stored_fails_the_step_on_all_ranks(make: Make, fake_agent: FakeAgent) -> None:
    """The agent is told with rank and key, nothing was staged, and the next save works."""
    checkpointer = make()
    with pytest.raises(InvalidRequest, match=r"rank 0: bad/0: .*object") as caught:
        checkpointer.save(4, {"bad": [object()]})
    assert (caught.value.key, caught.value.step, caught.value.rank) == ("bad/0", 4, 0)
    assert [(request.step, request.error.rank) for request in fake_agent.failed] == [(4, 0)]
    assert "Begin" not in fake_agent.calls
    checkpointer.save(5, {"good": [1]}).wait()


def test_s033_a_rank_that_raises_while_its_state_is_read_tells_all(make: Make, fake_agent: FakeAgent) -> None:
    """The text has the rank and the message; the cause is kept."""

    class Broken:
        def state_dict(self) -> dict[str, int]:
            raise ValueError("boom")

        def load_state_dict(self, state: object) -> None: ...

    checkpointer = make()
    checkpointer.track(loader=Broken())
    with pytest.raises(Aborted, match=r"rank 0.*loader.*boom") as caught:
        checkpointer.save(4)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.reason_name == "RANK_FAILED"
    assert "boom" in fake_agent.failed[0].error.message


def test_a_save_that_is_lost_does_not_stop_training(
    make: Make, fake_agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """The handle comes back failed, its wait raises, and the next call reports it if nobody waited."""
    checkpointer = make()
    fake_agent.begin_with = Error(reason=error_pb2.REASON_RANKS_MISSING, message="rank 3 did not come", rank=3)
    first, second = checkpointer.save(1), checkpointer.save(2)
    with pytest.raises(Unavailable, match="rank 3 did not come"):
        first.wait()
    assert second.state == "failed"
    fake_agent.begin_with = None
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ckptd.client"):
        checkpointer.save(3).wait()
    assert [record.getMessage()[:25] for record in caplog.records] == ["the save of step 2 failed"]


@pytest.mark.parametrize("reason", ["INVALID_STEP", "RANKS_DISAGREE", "LAYOUT_MISMATCH", "COVERAGE"])
def test_a_call_that_is_wrong_raises_at_once(make: Make, fake_agent: FakeAgent, reason: str) -> None:
    """Repeating it would not help."""
    checkpointer = make()
    fake_agent.begin_with = Error(reason=error_pb2.Reason.Value(f"REASON_{reason}"), message="wrong")
    with pytest.raises(InvalidRequest) as caught:
        checkpointer.save(1)
    assert caught.value.reason_name == reason
    fake_agent.begin_with = None
    checkpointer.save(2).wait()


def test_max_failed_saves_makes_failures_an_error(make: Make, fake_agent: FakeAgent) -> None:
    """Of the class of the last one; on_failure hears of each."""
    seen: list[tuple[int, str]] = []

    def on_failure(handle: SaveHandle, error: CkptdError) -> None:
        seen.append((handle.step, error.reason_name))

    checkpointer = make(max_failed_saves=2, on_failure=on_failure)
    fake_agent.abort_with = Error(reason=error_pb2.REASON_STORE_FAILED, message="the store is full")
    for step in (1, 2):
        with contextlib.suppress(Aborted):
            checkpointer.save(step).wait()
    with pytest.raises(Aborted, match=r"2 saves in a row.*the store is full"):
        checkpointer.save(3)
    assert seen == [(1, "STORE_FAILED"), (2, "STORE_FAILED")]


def test_s024_a_skipped_save_is_no_failure(make: Make, fake_agent: FakeAgent, caplog: pytest.LogCaptureFixture) -> None:
    """It says so, wait raises Aborted with BUSY, and nothing is logged."""
    checkpointer = make(max_failed_saves=1)
    fake_agent.skip = True
    handle = checkpointer.save(1)
    assert handle.skipped
    with pytest.raises(Aborted) as caught:
        handle.wait()
    assert caught.value.reason_name == "BUSY"
    fake_agent.skip = False
    checkpointer.save(2).wait()
    assert not caplog.records


def test_an_agent_that_is_gone_fails_the_save_by_its_deadline(make: Make, fake_agent: FakeAgent) -> None:
    """And says where it should be; nothing hangs."""
    checkpointer = make(connect_timeout_s=0.5)
    fake_agent.stop()
    handle = checkpointer.save(1, timeout=0.5)
    with pytest.raises(Unavailable, match=r"agent"):
        handle.wait()
    with pytest.raises(Unavailable):
        checkpointer.restore(timeout=0.5)


def test_an_interrupt_while_copying_fails_the_step(
    make: Make, fake_agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is torn: the other ranks are told, the interrupt goes on its way, and the next save works."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    checkpointer = make()
    with monkeypatch.context() as patch:
        patch.setattr("ckptd.client.copying.Copier.copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1)
        patch.setattr("ckptd.client.copying.Copier.copy", lambda *_: 1 / 0)
        with pytest.raises(Aborted, match=r"rank 0: copying.*division") as caught:
            checkpointer.save(2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert [request.step for request in fake_agent.failed] == [1, 2]
    assert "Staged" not in fake_agent.calls
    checkpointer.save(3).wait()
