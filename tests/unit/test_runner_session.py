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
from ckptd.daemon.telemetry import EventLog
from ckptd.protos.agent_pb2 import LeadRequest
from ckptd.protos.coordinator_pb2 import NodeMessage
from ckptd.storage_backends.memory import MemoryStore

CREDENTIALS = run_credentials()


class Caller:
    """The context of a call that shows the run's token."""

    def invocation_metadata(self) -> list[tuple[str, bytes]]:
        return [("ckptd-token-bin", CREDENTIALS.token)]


async def broken_session(turns: int) -> list[effects.Event]:
    """Open a session, break its connection, and let gRPC cancel the handler so many turns of the loop later."""
    runner = CoordinatorRunner(
        LeadRequest(run_id="run", job="job", credentials=CREDENTIALS),
        MemoryStore("memory://runner"),
        threads=ThreadPoolExecutor(1),
        log=EventLog(None),
        versions={},
        on_claimed=lambda _: None,
        on_closed=lambda _: None,
        node_grace_s=60.0,
    )
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
