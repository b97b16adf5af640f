"""A node's session with the coordinator's runner: however it ends, the coordinator is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from fixtures.raw_rank import run_credentials

from ckptd.daemon.coordinator import effects
from ckptd.daemon.runner import CoordinatorRunner
from ckptd.daemon.session import answered
from ckptd.daemon.telemetry import EventLog
from ckptd.protos.agent_pb2 import LeadRequest, RunOptions
from ckptd.protos.coordinator_pb2 import NodeMessage
from ckptd.storage_backends.memory import MemoryStore

CREDENTIALS = run_credentials()


class Caller:
    """The context of a call that shows the run's token."""

    def invocation_metadata(self) -> list[tuple[str, bytes]]:
        return [("ckptd-token-bin", CREDENTIALS.token)]


def new_runner() -> CoordinatorRunner:
    return CoordinatorRunner(
        LeadRequest(
            run_id="run", job="job", world=1, options=RunOptions(attach_timeout_s=600.0), credentials=CREDENTIALS
        ),
        MemoryStore("memory://runner"),
        threads=ThreadPoolExecutor(1),
        log=EventLog(None),
        versions={},
        on_claimed=lambda _: None,
        on_closed=lambda _: None,
        node_grace_s=60.0,
    )


async def broken_session(turns: int) -> list[effects.Event]:
    """Open a session, break its connection, and let gRPC cancel the handler so many turns of the loop later."""
    runner = new_runner()
    open_, broken = asyncio.Event(), asyncio.Event()

    async def messages() -> AsyncIterator[NodeMessage]:
        yield NodeMessage(hello=NodeMessage.NodeHello(node="node", incarnation="i", run_id="run"))
        open_.set()
        await broken.wait()

    async def handler() -> None:
        context: Any = Caller()
        async for _ in runner.Session(messages(), context):
            pass

    task = asyncio.get_running_loop().create_task(handler())
    await open_.wait()
    broken.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    found = []
    while not runner._events.empty():
        found.append(runner._events.get_nowait())
    return found


@pytest.mark.parametrize("turns", range(8))
def test_a_node_whose_connection_breaks_is_lost_whenever_the_call_is_cancelled(turns: int) -> None:
    """The end of the stream and the cancelling of its handler come in any distance: NodeLost is said once, and last."""
    events = asyncio.run(broken_session(turns))
    assert [type(event).__name__ for event in events] == ["NodeSaid", "NodeLost"]


async def stopped_runner(turns: int) -> set[str]:
    """Stop a runner so many turns of the loop after it got an event; return what still runs after a while."""
    runner = new_runner()
    await runner.start(listen_host="127.0.0.1", advertise_host="127.0.0.1", port=0)
    await asyncio.sleep(0.01)  # it waits for its first event
    runner._events.put_nowait(effects.Tick())
    for _ in range(turns):
        await asyncio.sleep(0)
    stop = asyncio.get_running_loop().create_task(runner.stop(), name="stop")
    _, running = await asyncio.wait({stop}, timeout=10.0)
    return {task.get_name() for task in running}


@pytest.mark.parametrize("turns", range(4))
def test_a_runner_stops_whenever_an_event_comes(turns: int) -> None:
    """An event that comes as the runner is stopped does not keep it running."""
    assert asyncio.run(stopped_runner(turns)) == set()


async def cancelled_call(turns: int) -> bool:
    """Cancel a call that waits for the coordinator so many turns of the loop around its answer; whether it ended so."""
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    call = asyncio.get_running_loop().create_task(answered(answer, 0.0, is_cut_off=lambda: False))
    await asyncio.sleep(0.01)
    answer.set_result("go")
    for _ in range(turns):
        await asyncio.sleep(0)
    was_done = call.done()
    call.cancel()
    await asyncio.wait({call})
    return was_done or call.cancelled()


@pytest.mark.parametrize("turns", range(4))
def test_a_cancelled_call_ends_as_cancelled_whenever_its_answer_comes(turns: int) -> None:
    """A call that is cancelled does not go on with the answer that came at the same moment."""
    assert asyncio.run(cancelled_call(turns))
