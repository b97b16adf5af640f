"""The life of a Checkpointer against an agent in this process: its session, its end, its forked children."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from pathlib import Path

import pytest
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_agent import FakeAgent
from torch import nn

from ckptd.client import Checkpointer, Fenced, InvalidRequest, Unavailable
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import Event
from ckptd.protos.error_pb2 import Error

__all__ = ["fake_agent", "make"]


def test_fenced_reaches_handles_and_every_later_call(make: Make, fake_agent: FakeAgent) -> None:
    """This process is a zombie; its exit code is documented."""
    fake_agent.hold.set()
    checkpointer = make()
    handle = checkpointer.save(1)
    fake_agent.tell(Event(fenced=Error(reason=error_pb2.REASON_FENCED, message="timeline 2 has taken over")))
    with pytest.raises(Fenced, match="timeline 2"):
        handle.wait()
    with pytest.raises(Fenced):
        checkpointer.save(2)
    with pytest.raises(Fenced):
        checkpointer.restore()
    assert Fenced.exit_code == 7


def test_an_agent_that_restarts_is_attached_again(make: Make, fake_agent: FakeAgent) -> None:
    """The same run leads and attaches again as the same process; layouts are put again; the handle in flight hears its end."""
    checkpointer = make(begin_timeout_s=20.0)
    checkpointer.track(model=nn.Linear(2, 2))
    fake_agent.hold.set()
    first = checkpointer.save(1)
    fake_agent.restart()
    fake_agent.hold.clear()
    second = checkpointer.save(2)
    second.wait()
    assert [request.run_id for request in fake_agent.led] == [fake_agent.led[0].run_id] * 2
    assert len({(request.process, request.run_id, request.endpoint) for request in fake_agent.attached}) == 1
    assert fake_agent.calls.count("PutLayout") >= 2
    fake_agent.decide(1)
    first.wait()


def test_s111_no_agent_is_an_error_that_names_the_socket(make: Make, fake_agent: FakeAgent) -> None:
    """At construction, within the deadline."""
    fake_agent.stop()
    with pytest.raises(Unavailable, match="no agent listens") as caught:
        make(connect_timeout_s=0.2)
    assert str(fake_agent.socket) in str(caught.value)
    with pytest.raises(InvalidRequest, match="107"):
        Checkpointer("file:///x", job="j", socket="/tmp/" + "x" * 150)  # type: ignore[arg-type]


def test_s138_no_version_in_common_is_an_error_with_both(make: Make, fake_agent: FakeAgent) -> None:
    """Before anything else is said."""
    fake_agent.version = 9
    with pytest.raises(InvalidRequest, match="version 9") as caught:
        make()
    assert caught.value.reason_name == "VERSION_MISMATCH"


def test_a_refused_run_raises_where_it_is_made(make: Make, fake_agent: FakeAgent) -> None:
    """The agent's words and reason come through."""
    fake_agent.refuse_with = Error(
        reason=error_pb2.REASON_JOB_MISMATCH, message="the root belongs to 'other'", hint="choose another root"
    )
    with pytest.raises(InvalidRequest, match="the root belongs to 'other'") as caught:
        make()
    assert caught.value.hint == "choose another root"


def test_a_run_that_is_refused_later_fails_every_call(make: Make, fake_agent: FakeAgent) -> None:
    """Another run is alive, say."""
    checkpointer = make()
    fake_agent.hold.set()
    handle = checkpointer.save(1)
    fake_agent.tell(Event(failed=Error(reason=error_pb2.REASON_JOB_ALIVE, message="another run is alive")))
    with pytest.raises(InvalidRequest, match="another run is alive"):
        handle.wait()
    with pytest.raises(InvalidRequest, match="another run is alive"):
        checkpointer.save(2)


def test_forked_children_are_told_and_the_parent_goes_on(make: Make) -> None:
    """S113: every call in the child raises at once, closing does nothing, and the parent's save commits."""
    checkpointer = make()
    checkpointer.save(1).wait()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                checkpointer.save(2)
            except InvalidRequest as error:
                os.write(writer, str(error).encode())
                checkpointer.close()
                code = 0
        os._exit(code)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    text = os.read(reader, 10_000).decode()
    os.close(reader)
    assert os.waitstatus_to_exitcode(status) == 0
    assert "was forked" in text
    checkpointer.save(2).wait()


def test_only_one_call_at_a_time(make: Make, fake_agent: FakeAgent) -> None:
    """Two saves at once have no order."""
    inside, go = threading.Event(), threading.Event()

    class Slow:
        def state_dict(self) -> dict[str, int]:
            inside.set()
            assert go.wait(10)
            return {}

        def load_state_dict(self, state: object) -> None: ...

    checkpointer = make()
    checkpointer.track(slow=Slow())
    thread = threading.Thread(target=checkpointer.save, args=(1,))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(InvalidRequest, match="another thread"):
        checkpointer.restore()
    go.set()
    thread.join(10)


def test_close_waits_then_detaches_and_later_calls_raise(
    make: Make, fake_agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """What is not durable by the deadline is named."""
    checkpointer = make()
    fake_agent.hold.set()
    checkpointer.save(1)
    with caplog.at_level(logging.WARNING, "ckptd.client"):
        checkpointer.close(timeout=0.01)
    assert "before step 1 was durable" in caplog.text
    assert fake_agent.calls[-1] == "Detach"
    caplog.clear()
    checkpointer.close()  # by default it waits for commit_timeout_s, which is longer than a test may take
    assert caplog.text == ""
    with pytest.raises(InvalidRequest, match="closed"):
        checkpointer.save(2)


def test_an_exception_in_the_with_block_is_no_orderly_end(make: Make, fake_agent: FakeAgent) -> None:
    """The stream ends without Detach: the other ranks hear of a death."""
    with pytest.raises(RuntimeError), make():
        raise RuntimeError("training failed")
    assert "Detach" not in fake_agent.calls


def test_several_checkpointers_are_independent(make: Make, fake_agent: FakeAgent) -> None:
    """Each has a run of its own; closing one leaves the other."""
    one = make()
    run = fake_agent.led[-1].run_id
    one.close()
    two = make()
    assert fake_agent.led[-1].run_id != run
    two.save(1).wait()


def test_events_are_logged_where_asked(make: Make, tmp_path: Path) -> None:
    """One JSON line for each save and restore, and one for what the first save found around it."""
    log = tmp_path / "events.jsonl"
    checkpointer = make(client_event_log=log)
    checkpointer.save(1).wait()
    checkpointer.restore()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["kind"], line["step"], line["rank"], line["job"]) for line in lines] == [
        ("audited", 1, 0, "job"),
        ("save_returned", 1, 0, "job"),
        ("restored", 1, 0, "job"),
    ]
