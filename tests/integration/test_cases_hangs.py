"""Faults from the field: somebody hangs. Whoever waits for it says so at the deadline, by name, and can end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fixtures.agents import AgentProcess, Agents
from fixtures.client_job import ClientJob, blank
from fixtures.forked_process import ForkedProcess, python
from fixtures.stored_root import states

from ckptd.chaos.seaweed import SeaweedServer
from ckptd.chaos.store_proxy.handle import StoreProxy
from ckptd.client import Checkpointer, CkptdError, Restored, Unavailable, restoring
from ckptd.daemon.catalog import StepState
from ckptd.storage_backends.fault_script import Fault, FaultKind, Op

pytestmark = pytest.mark.integration

LIMIT_S = 5.0
ENOUGH_S = 60.0


def asked(rank: Checkpointer) -> Restored | None:
    """Restore, with the deadline of these tests."""
    return rank.restore_into(blank(), timeout=LIMIT_S)


def error_of(future: Future[Any]) -> CkptdError:
    """Return what a call raised; it must not hang."""
    error = future.exception(timeout=ENOUGH_S)
    assert isinstance(error, CkptdError), error
    return error


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Every thread that the block started has ended with it: a process could exit."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + ENOUGH_S
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def ended(agent: AgentProcess) -> int:
    """Tell an agent to end, and return its exit code."""
    return agent.kill(signal.SIGTERM)


def test_s035_a_rank_that_never_joins_a_restore_is_named_at_the_deadline(agents: Agents, tmp_path: Path) -> None:
    """The others are told which rank did not come; they can try again, and end."""
    agent = agents.new()
    with no_thread_left(), ClientJob(f"file://{tmp_path}/root", [agent], 3) as job:
        first, last = job.start(0, asked), job.start(2, asked)
        for error in (error_of(first), error_of(last)):
            assert isinstance(error, Unavailable)
            assert error.reason_name == "RANKS_MISSING"
            assert (list(error.ranks), error.phase) == ([1], "restore")
            assert "ranks [1] did not call restore in time" in str(error)
        assert [found for found, _ in job.restore()] == [None] * 3
    assert ended(agent) == 0


def test_s035_a_rank_whose_agent_stands_still_is_named_at_the_deadline(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped in the midst of the fetch: the other rank hears of it by number, its own of where it waits; both end."""
    monkeypatch.setattr(restoring, "_ANSWER_SLACK_S", 2.0)
    root = f"file://{tmp_path}/root"
    saved = agents.new()
    with ClientJob(root, [saved], 2) as job:
        job.wait(job.save(1))
    nodes = [agents.new(), agents.new(start=False)]
    nodes[1].start(env={"CKPTD_FAILPOINTS": "fetcher.before_get=stop"})
    with no_thread_left():
        job = ClientJob(root, nodes)
        calls = [job.start(rank, asked) for rank in range(2)]
        told, own = (error_of(call) for call in calls)
        assert told.reason_name == own.reason_name == "DEADLINE_EXCEEDED"
        assert (list(told.ranks), told.phase, told.step) == ([1], "restore", 1)
        assert "1" in str(told)
        assert (own.rank, own.phase) == (1, "restore")
        assert str(nodes[1].socket) in str(own)
        assert nodes[1].process is not None
        assert state_of_process(nodes[1].process.pid) == "T", "the fault must have fired"
        job.die()
    assert ended(nodes[0]) == 0


def state_of_process(pid: int) -> str:
    """Return the letter of /proc: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def proxied(seaweed_env: SeaweedServer, tmp_path: Path) -> Iterator[StoreProxy]:
    with StoreProxy(seaweed_env.endpoint, tmp_path / "proxy") as proxy:
        yield proxy


@pytest.mark.s3
@pytest.mark.parametrize("what", ["index/", "chunks/"])
def test_s035_a_store_that_never_answers_a_restore_is_named_with_the_object(
    agents: Agents, proxied: StoreProxy, fresh_root: Callable[[], str], what: str
) -> None:
    """It accepts the request and says nothing: both ranks hear of the object at the deadline; all of them can end."""
    root = fresh_root()
    through = {"AWS_ENDPOINT_URL": proxied.endpoint}
    with ClientJob(root, [agents.new(env=through)], 2) as job:
        job.wait(job.save(1))
    agent = agents.new(env=through)
    prefix = root.split("/", 3)[3]
    with no_thread_left():
        job = ClientJob(root, [agent], 2)
        proxied.add(Fault(kind=FaultKind.HANG, op=Op.GET, prefix=f"{prefix}/{what}", times=None))
        for call in [job.start(rank, asked) for rank in range(2)]:
            error = error_of(call)
            assert error.reason_name == "DEADLINE_EXCEEDED"
            assert (error.phase, error.step) == ("restore", 1)
            assert error.key is not None
            assert error.key.startswith(what)
        assert {line["fault"] for line in proxied.done()} == {"hang"}
        job.die()
    assert ended(agent) == 0


@pytest.mark.s3
def test_s035_a_store_that_never_answers_a_save_is_named_with_the_ranks(
    agents: Agents, proxied: StoreProxy, fresh_root: Callable[[], str]
) -> None:
    """The step is given up at commit_timeout_s on every rank; the agent ends although its requests still hang."""
    root = fresh_root()
    agent = agents.new("--drain-s", "1", env={"AWS_ENDPOINT_URL": proxied.endpoint})
    prefix = root.split("/", 3)[3]
    with no_thread_left(), ClientJob(root, [agent], 2, commit_timeout_s=LIMIT_S) as job:
        job.restore()
        proxied.add(Fault(kind=FaultKind.HANG, op=Op.PUT, prefix=f"{prefix}/chunks/", times=None))
        for handle in job.save(1):
            with pytest.raises(CkptdError) as caught:
                handle.wait(timeout=ENOUGH_S)
            assert caught.value.reason_name == "DEADLINE_EXCEEDED"
            assert (list(caught.value.ranks), caught.value.step) == ([0, 1], 1)
            assert "did not finish their upload in time" in str(caught.value)
        assert {line["op"] for line in proxied.done()} == {"put"}
    assert ended(agent) in {0, 3}


COLLECTIVE_S, UPLOAD_S = 5.0, 8.0


def test_s036_an_upload_longer_than_the_collective_timeout_blocks_no_barrier(agents: Agents, tmp_path: Path) -> None:
    """It takes longer than the timeout of gloo; the ranks meet at every step meanwhile, and the save commits."""
    agent = agents.new(start=False)
    agent.start(env={"CKPTD_FAILPOINTS": f"uploader.before_put=delay:{UPLOAD_S}"})
    (tmp_path / "agent.sock").symlink_to(agent.socket)
    script = Path(__file__).parents[1] / "fixtures" / "barrier_ranks.py"
    command = python(script, tmp_path, str(COLLECTIVE_S))
    said = tmp_path / "said"
    started = [
        ForkedProcess(command, kind="rank", env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}, stdout=said)
        for rank in range(2)
    ]
    assert [rank.wait(timeout=240) for rank in started] == [0, 0], said.read_text()[-8000:]
    for rank in range(2):
        seen = json.loads((tmp_path / f"seen.{rank}.json").read_text())
        assert seen["state"] == "durable"
        assert seen["upload"] >= UPLOAD_S, "the store was never slow"
        assert seen["barriers"] > 10
        # One second on a quiet machine. What matters is that no save waits for its upload.
        assert seen["blocked"] < COLLECTIVE_S
    assert states(f"file://{tmp_path}/root") == {1: StepState.COMMITTED}
