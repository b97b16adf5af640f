"""A signal's handler that raises in the midst of a call leaves no other rank waiting for this one, and the next call works."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_agent import FakeAgent
from torch import nn

from ckptd.client import Checkpointer, CkptdError, InvalidRequest, Unavailable
from ckptd.client.link import Link
from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error

__all__ = ["fake_agent", "make"]

SIGNAL = signal.SIGUSR2


class Interrupts:
    """Sends this process a signal whose handler raises; `sent` counts how often it did."""

    def __init__(self, raises: type[BaseException]) -> None:
        self.sent = 0
        self._raises = raises
        self._heard = threading.Event()
        self._before = signal.signal(SIGNAL, self._handle)

    def _handle(self, *_: object) -> None:
        self.sent += 1
        self._heard.set()
        raise self._raises

    def send(self, *_: object, **__: object) -> None:
        """Send it from any thread, and return when the main thread's handler has run."""
        self._heard.clear()
        os.kill(os.getpid(), SIGNAL)
        assert threading.current_thread() is threading.main_thread() or self._heard.wait(60)

    def close(self) -> None:
        signal.signal(SIGNAL, self._before)


@pytest.fixture(params=[KeyboardInterrupt, TimeoutError])
def interrupts(request: pytest.FixtureRequest) -> Iterator[Interrupts]:
    """One of them."""
    made = Interrupts(request.param)
    yield made
    made.close()


RAISED = (KeyboardInterrupt, TimeoutError)


@contextlib.contextmanager
def at(agent: FakeAgent, call: str, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Act when the agent has got a call, once, before it is answered."""
    checked, left = agent._check, [act]

    def check(session: str, context: Any) -> None:
        checked(session, context)
        if agent.calls[-1] == call and left:
            left.pop()()

    with monkeypatch.context() as patch:
        patch.setattr(agent, "_check", check)
        yield
    assert not left, f"the agent got no {call}"


@pytest.mark.parametrize("call", ["PutLayout", "Begin", "Staged"])
def test_an_interrupt_in_any_call_of_a_save_fails_the_step_on_all_ranks(
    make: Make, fake_agent: FakeAgent, interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The step may begin without this rank and would wait for it for commit_timeout_s; with it every later one would."""
    checkpointer = make()
    with at(fake_agent, call, interrupts.send, monkeypatch), pytest.raises((*RAISED, Exception)) as caught:
        checkpointer.save(1, {"a": torch.ones(2)})
    assert interrupts.sent == 1
    raised = [caught.value, caught.value.__cause__]
    assert any(isinstance(one, RAISED) for one in raised)
    assert call == "Staged" or isinstance(caught.value, RAISED)
    assert [(told.step, told.error.rank) for told in fake_agent.failed] == [(1, 0)]
    checkpointer.save(2, {"a": torch.ones(2)}).wait()  # events still come: no lock of gRPC's was left taken


class Stops:
    """Its state is read while a signal comes."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def state_dict(self) -> dict[str, int]:
        self.act()
        return {}

    def load_state_dict(self, state: object) -> None: ...


def test_an_interrupt_while_the_state_is_read_fails_the_step(make: Make, fake_agent: FakeAgent) -> None:
    """Ranks that have begun to wait are told at once, not after begin_timeout_s."""
    interrupts = Interrupts(KeyboardInterrupt)
    try:
        checkpointer = make()
        stops = Stops(interrupts.send)
        checkpointer.track(stops=stops)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1)
    finally:
        interrupts.close()
    assert [(told.step, told.error.rank) for told in fake_agent.failed] == [(1, 0)]
    assert not fake_agent.begun
    stops.act = lambda: None
    checkpointer.save(2).wait()


def test_an_interrupt_while_the_others_are_told_does_not_keep_it_from_them(
    make: Make, fake_agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C twice: they are told all the same."""
    interrupts = Interrupts(KeyboardInterrupt)
    calls: list[str] = []
    call = Link.call

    def twice(link: Link, attachment: Any, method: str, request: Any, **how: Any) -> Any:
        calls.append(method)
        if calls.count(method) == 1 and method in {"Begin", "FailStep"}:
            interrupts.send()
        return call(link, attachment, method, request, **how)

    try:
        checkpointer = make()
        with monkeypatch.context() as patch:
            patch.setattr(Link, "call", twice)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(1)
    finally:
        interrupts.close()
    assert interrupts.sent == 2
    assert [told.step for told in fake_agent.failed] == [1]


def test_a_begin_that_nobody_answered_is_over_for_all_ranks(make: Make, fake_agent: FakeAgent) -> None:
    """The coordinator may answer after this rank's deadline: it would count on a rank that does not wait any more."""
    checkpointer = make()
    fake_agent.begin_with = Error(reason=error_pb2.REASON_DEADLINE_EXCEEDED, message="the coordinator did not answer")
    with pytest.raises(Unavailable):
        checkpointer.save(1).wait()
    assert [told.step for told in fake_agent.failed] == [1]
    fake_agent.begin_with = Error(reason=error_pb2.REASON_RANKS_MISSING, message="rank 3 did not come")
    with pytest.raises(Unavailable):
        checkpointer.save(2).wait()
    assert [told.step for told in fake_agent.failed] == [1]  # told to all already


def test_an_answer_about_the_step_before_is_none(make: Make, fake_agent: FakeAgent) -> None:
    """A rank that was interrupted goes on to its next save while others still ask for the step that it failed."""

    class Begun(list[Any]):
        def append(self, request: Any) -> None:
            super().append(request)
            if len(self) == 3:
                fake_agent.begin_with = None

    fake_agent.begun = Begun()
    fake_agent.begin_with = Error(reason=error_pb2.REASON_RANK_FAILED, message="rank 0 was interrupted", step=1)
    checkpointer = make()
    checkpointer.save(2).wait()
    assert [request.step for request in fake_agent.begun] == [2, 2, 2]
    fake_agent.begin_with = Error(reason=error_pb2.REASON_RANK_FAILED, message="rank 1 was interrupted", step=3)
    with pytest.raises(CkptdError, match="rank 1 was interrupted"):
        checkpointer.save(3).wait()
    assert len(fake_agent.begun) == 4


@pytest.mark.parametrize("when", ["prepared", "wanted", "decoded"])
def test_an_interrupt_in_a_restore_is_told(
    make: Make, fake_agent: FakeAgent, interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Before the agent knows what this rank wants it refuses the step for all; after that it says that it will not copy."""
    checkpointer = make()
    model = nn.Linear(2, 2)
    checkpointer.track(model=model)
    checkpointer.save(1).wait()
    before = model.weight.detach().clone()
    where = {
        "prepared": "ckptd.client.targets.Targets.check",
        "wanted": "ckptd.client.restoring.take_part",
        "decoded": "ckptd.client.putting_back.Restoring.decode",
    }
    with monkeypatch.context() as patch:
        patch.setattr(where[when], interrupts.send)
        with pytest.raises(RAISED):
            checkpointer.restore()
    assert interrupts.sent == 1
    assert len(fake_agent.refused) == (when == "prepared")
    assert [done.error.message != "" for done in fake_agent.done] == [True][: when != "prepared"]
    checkpointer.restore()
    assert torch.equal(model.weight, before)


def test_an_interrupt_in_close_ends_the_session_all_the_same(
    make: Make, fake_agent: FakeAgent, interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that stays would count as a rank that is there and does not come."""
    checkpointer = make()
    monkeypatch.setattr("ckptd.client.link.DetachRequest", interrupts.send)
    with pytest.raises(RAISED):
        checkpointer.close()
    assert interrupts.sent == 1
    assert ended(checkpointer)
    with pytest.raises(InvalidRequest, match="closed"):
        checkpointer.save(1)


def ended(checkpointer: Checkpointer) -> bool:
    """Say whether the thread that reads events has ended."""
    thread = checkpointer._link._thread
    return thread is not None and not thread.is_alive()


def test_an_interrupt_while_a_session_is_waited_for_leaves_none(
    make: Make, fake_agent: FakeAgent, interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script has no Checkpointer to close: what was begun is ended, and it can make another one."""
    links: list[Link] = []

    def attached(link: Link, *, deadline: float) -> None:
        links.append(link)
        interrupts.send()

    with monkeypatch.context() as patch:
        patch.setattr(Link, "attached", attached)
        with pytest.raises(RAISED):
            make()
    thread = links[0]._thread
    assert thread is not None
    assert not thread.is_alive()
    fake_agent.restart()  # its events go to whichever stream asks first, and it may not know yet that one is no more
    make().save(1).wait()
