"""A save ends once, and a failure is reported once."""

from __future__ import annotations

import logging
import threading

import pytest

from ckptd.client.errors import Aborted, CkptdError, Fenced, InvalidRequest, Unavailable
from ckptd.client.handles import Ledger, SaveHandle
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import Event
from ckptd.protos.error_pb2 import Error

T = "00000001-aaaaaaaaaaaa"


def handle_of(ledger: Ledger, step: int, timeline: str = T) -> SaveHandle:
    handle = SaveHandle(step, default_timeout_s=5)
    handle.timeline = timeline
    ledger.register(handle)
    return handle


def told(
    step: int, state: Event.State.ValueType, *, reason: error_pb2.Reason.ValueType | None = None
) -> Event.StepState:
    event = Event.StepState(step=step, timeline=T, state=state)
    if reason is not None:
        event.error.CopyFrom(Error(reason=reason, message="it went wrong", rank=2))
    return event


def test_levels_are_reached_in_order_and_waited_for() -> None:
    """From another thread too; durable includes staged."""
    ledger = Ledger(None)
    handle = handle_of(ledger, 1)
    assert handle.state == "copied"
    waiter = threading.Thread(target=handle.wait)
    waiter.start()
    ledger.on_step(told(1, Event.STAGED))
    handle.wait("staged", 0)
    assert str(handle.state) == "staged"
    assert not handle.done()
    ledger.on_step(told(1, Event.COMMITTED))
    waiter.join(5)
    assert not waiter.is_alive()
    assert handle.done()
    ledger.on_step(told(1, Event.ABORTED, reason=error_pb2.REASON_ABORTED))
    assert str(handle.state) == "durable"
    assert ledger.in_flight() == []


def test_a_wait_ends_by_its_deadline_and_says_where_the_save_is() -> None:
    """And the save may still come."""
    ledger = Ledger(None)
    handle = handle_of(ledger, 7)
    with pytest.raises(Unavailable, match=r"step 7 is not durable after 0.01 s; it is copied") as caught:
        handle.wait(timeout=0.01)
    assert caught.value.reason_name == "DEADLINE_EXCEEDED"
    ledger.on_step(told(7, Event.COMMITTED))
    handle.wait()


@pytest.mark.parametrize("level", ["peer", "everywhere"])
def test_other_levels_are_refused(level: str) -> None:
    """Peer comes later."""
    with pytest.raises(InvalidRequest, match=level):
        SaveHandle(1, default_timeout_s=1).wait(level)  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", [error_pb2.REASON_STORE_FAILED, error_pb2.REASON_DEADLINE_EXCEEDED])
def test_an_aborted_step_raises_aborted_with_its_reason(reason: error_pb2.Reason.ValueType) -> None:
    """Whatever lost it, the step is gone; the reason says why."""
    ledger = Ledger(None)
    handle = handle_of(ledger, 1)
    ledger.on_step(told(1, Event.ABORTED, reason=reason))
    with pytest.raises(Aborted, match="it went wrong") as caught:
        handle.wait()
    assert caught.value.reason == reason
    assert (caught.value.step, caught.value.rank) == (1, 2)


def test_a_failure_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """By wait, or else in the log of the next call, never both."""
    ledger = Ledger(None)
    waited, silent = handle_of(ledger, 1), handle_of(ledger, 2)
    for step in (1, 2):
        ledger.on_step(told(step, Event.ABORTED, reason=error_pb2.REASON_ABORTED))
    with pytest.raises(Aborted):
        waited.wait()
    with caplog.at_level(logging.WARNING, "ckptd.client"):
        ledger.report()
        ledger.report()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["the save of step 2 failed"]
    assert silent.error is not None


def test_on_failure_replaces_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It is called once per save; what it raises is logged and harms nothing."""
    seen: list[tuple[int, str]] = []

    def on_failure(handle: SaveHandle, error: CkptdError) -> None:
        seen.append((handle.step, error.reason_name))
        raise RuntimeError("mine")

    ledger = Ledger(on_failure)
    handle_of(ledger, 1)
    ledger.on_step(told(1, Event.ABORTED, reason=error_pb2.REASON_NODE_LOST))
    ledger.report()
    assert seen == [(1, "NODE_LOST")]
    assert "on_failure raised" in caplog.text


def test_failures_in_a_row_raise_only_when_asked() -> None:
    """A durable save in between starts the count again; skipped ones do not count."""
    ledger = Ledger(None)
    for step in (1, 2):
        handle_of(ledger, step)
        ledger.on_step(told(step, Event.ABORTED, reason=error_pb2.REASON_ABORTED))
    ledger.check_failures(None)
    ledger.check_failures(3)
    ledger.skip(SaveHandle(3, default_timeout_s=1), Aborted("busy", reason=error_pb2.REASON_BUSY))
    with pytest.raises(Aborted, match="2 saves in a row"):
        ledger.check_failures(2)
    handle_of(ledger, 4)
    ledger.on_step(told(4, Event.COMMITTED))
    ledger.check_failures(1)


def test_an_event_that_overtakes_the_answer_to_begin_is_kept() -> None:
    """And one of another timeline is not mixed up with this save."""
    ledger = Ledger(None)
    ledger.on_step(told(5, Event.ABORTED, reason=error_pb2.REASON_RANK_FAILED))
    assert handle_of(ledger, 5).state == "failed"
    other = handle_of(ledger, 6, "00000002-bbbbbbbbbbbb")
    ledger.on_step(told(6, Event.COMMITTED))
    assert other.state == "copied"


def test_all_saves_end_when_nothing_more_will_be_heard() -> None:
    """Fenced reaches every handle."""
    ledger = Ledger(None)
    handles = [handle_of(ledger, step) for step in (1, 2)]
    ledger.fail_all(Fenced("gone"))
    for handle in handles:
        with pytest.raises(Fenced):
            handle.wait()
    assert ledger.drain(0) == []
