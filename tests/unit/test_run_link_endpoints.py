"""An agent finds its run's coordinator again where that came back at another port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from fixtures.raw_rank import options, run_credentials

from ckptd.daemon.run_link import RunLink
from ckptd.daemon.runner import CoordinatorRunner
from ckptd.daemon.session import Session
from ckptd.daemon.telemetry import EventLog
from ckptd.protos.agent_pb2 import AttachRequest, LeadRequest, RunOptions
from ckptd.storage_backends.memory import MemoryStore

CREDENTIALS = run_credentials()
NOBODY = "127.0.0.1:1"
PATIENCE_S = 60.0


async def leading(threads: ThreadPoolExecutor) -> CoordinatorRunner:
    """Start the run's coordinator at a port of its own."""
    runner = CoordinatorRunner(
        LeadRequest(
            run_id="run", job="job", world=3, options=RunOptions(attach_timeout_s=600.0), credentials=CREDENTIALS
        ),
        MemoryStore("memory://endpoints"),
        threads=threads,
        log=EventLog(None),
        versions={},
        on_claimed=lambda _: None,
        on_closed=lambda _: None,
        node_grace_s=600.0,
    )
    await runner.start(listen_host="127.0.0.1", advertise_host="127.0.0.1", port=0)
    return runner


def about(rank: int, endpoint: str) -> AttachRequest:
    return AttachRequest(
        job="job",
        run_id="run",
        rank=rank,
        world=3,
        endpoint=endpoint,
        credentials=CREDENTIALS,
        options=options(),
    )


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop run until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - what is waited for is in places that set no event
            await asyncio.sleep(0.005)


def test_the_coordinator_is_found_where_any_rank_says_that_it_is() -> None:
    """Also where a rank that has not heard of its new place attaches after one that has; and again when it moves again."""

    async def play() -> None:
        threads = ThreadPoolExecutor(2)
        first = await leading(threads)
        held: Any = SimpleNamespace(snapshots={}, job="job")
        link = RunLink(
            about(0, NOBODY), node="node", incarnation="i", held=held, log=EventLog(None), on_closed=lambda _: None
        )

        def incarnation(runner: CoordinatorRunner) -> str:
            assert runner._coordinator is not None
            return runner._coordinator.state.incarnation

        async def goes_to(runner: CoordinatorRunner) -> None:
            await until(lambda: link._coordinator == incarnation(runner))

        try:
            for rank, endpoint in enumerate((NOBODY, first.endpoint, NOBODY)):
                link.attach(Session(token=str(rank), about=about(rank, endpoint)))
            await goes_to(first)
            await first.stop()
            second = await leading(threads)
            try:
                assert second.endpoint != first.endpoint
                link.attach(Session(token="again", about=about(1, second.endpoint)))
                await goes_to(second)
                await until(lambda: link.trouble == "")
                assert link.about.endpoint == second.endpoint, "errors name it"
            finally:
                await second.stop()
        finally:
            link.close()
            await first.stop()
            for task in list(link._tasks):
                task.cancel()
            await asyncio.gather(*link._tasks, return_exceptions=True)
            threads.shutdown()

    asyncio.run(play())
