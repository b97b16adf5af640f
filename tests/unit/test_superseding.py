"""Which coordinators of a job end where one agent plays several of them and one has its claim: the older runs' alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from fixtures.coordinated import MESH
from fixtures.raw_rank import run_credentials

from ckptd.daemon.agent import Agent
from ckptd.daemon.coordinator import effects
from ckptd.daemon.coordinator.state import Phase, State
from ckptd.daemon.log_reader import list_log
from ckptd.daemon.runner import CoordinatorRunner
from ckptd.daemon.telemetry import EventLog
from ckptd.protos.agent_pb2 import LeadRequest, RunOptions
from ckptd.protos.coordinator_pb2 import NodeMessage
from ckptd.protos.error_pb2 import Error
from ckptd.storage_backends.base import ObjectStore, PutMode
from ckptd.storage_backends.memory import MemoryStore

CREDENTIALS = run_credentials()
PATIENCE_S = 60.0


class HeldClaim:
    """A store whose put of a claim hangs until it is let go."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.asked = threading.Event()
        self.free = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, data: bytes, *, mode: PutMode = PutMode.CREATE) -> None:
        """Put; a claim not before it is let go."""
        if key.endswith(".claim.json"):
            self.asked.set()
            assert self.free.wait(PATIENCE_S)
        self._store.put(key, data, mode=mode)


class Stage:
    """An agent's coordinators of one job, as `Agent` keeps them; nodes are played by hand."""

    def __init__(self) -> None:
        self.agent: Any = SimpleNamespace(coordinators={})
        self.threads = ThreadPoolExecutor(4)
        self.claimed: list[str] = []
        self.closed: list[str] = []
        self.runners: list[CoordinatorRunner] = []

    async def lead(self, run_id: str, store: Any, *, read_only: bool = False) -> CoordinatorRunner:
        """Play the coordinator of one more run."""

        def on_claimed(runner: CoordinatorRunner) -> None:
            Agent._claimed(self.agent, runner)
            self.claimed.append(run_id)

        def on_closed(runner: CoordinatorRunner) -> None:
            self.closed.append(run_id)
            del self.agent.coordinators[run_id]

        runner = CoordinatorRunner(
            LeadRequest(
                root="memory://superseding",
                run_id=run_id,
                job="job",
                world=2,
                mesh=MESH,
                options=RunOptions(attach_timeout_s=600.0, posthumous_timeout_s=1.0, slots=2, read_only=read_only),
                credentials=CREDENTIALS,
            ),
            store,
            threads=self.threads,
            log=EventLog(None),
            versions={},
            on_claimed=on_claimed,
            on_closed=on_closed,
            node_grace_s=600.0,
        )
        self.agent.coordinators[run_id] = runner
        self.runners.append(runner)
        await runner.start(listen_host="127.0.0.1", advertise_host="127.0.0.1", port=0)
        return runner

    async def close(self) -> None:
        """End everything."""
        for runner in self.runners:
            await runner.stop()
        self.threads.shutdown()


def state_of(runner: CoordinatorRunner) -> State:
    assert runner._coordinator is not None
    return runner._coordinator.state


def come(runner: CoordinatorRunner, *ranks: int) -> None:
    """Ranks attach, each on a node of its own."""
    for rank in ranks:
        hello = NodeMessage.NodeHello(node=f"node{rank}", incarnation="i", hostname="h", run_id=runner.lead.run_id)
        attached = NodeMessage.RankAttached(
            rank=rank, coordinate=[rank], world=2, mesh=MESH, options=runner.lead.options
        )
        say(runner, rank, NodeMessage(hello=hello))
        say(runner, rank, NodeMessage(attached=attached))


def die(runner: CoordinatorRunner, *ranks: int) -> None:
    """Ranks are killed."""
    for rank in ranks:
        gone = NodeMessage.RankGone(rank=rank, clean=False, why=Error(message="killed"))
        say(runner, rank, NodeMessage(gone=gone))


def say(runner: CoordinatorRunner, rank: int, message: NodeMessage) -> None:
    runner._events.put_nowait(effects.NodeSaid(node=f"node{rank}", message=message))


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop run until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - what is waited for is in places that set no event
            await asyncio.sleep(0.005)


def played(play: Callable[[Stage], Awaitable[None]]) -> None:
    async def run() -> None:
        stage = Stage()
        try:
            await play(stage)
        finally:
            await stage.close()

    asyncio.run(run())


def test_an_older_run_whose_claim_comes_late_does_not_end_the_newer_one() -> None:
    """Its trainers are dead, and its slow put lands while the run after it gathers: that one claims above it, and starts."""

    async def play(stage: Stage) -> None:
        truth = MemoryStore("memory://superseding")
        slow = HeldClaim(truth)
        older = await stage.lead("older", slow)
        come(older, 0, 1)
        await until(slow.asked.is_set)
        die(older, 0, 1)
        newer = await stage.lead("newer", truth)
        come(newer, 0)
        await until(lambda: 0 in state_of(newer).ranks)
        slow.free.set()
        await until(lambda: stage.claimed == ["older"])
        come(newer, 1)
        await until(lambda: state_of(newer).phase in (Phase.RESOLVED, Phase.ENDED))
        assert state_of(newer).fenced is None
        assert state_of(newer).timeline == list_log(truth).highest_claim()
        assert "newer" not in stage.closed

    played(play)


def test_a_run_that_has_claimed_ends_the_older_one_and_no_reader() -> None:
    """A reader writes nothing that a claim could fence: it goes on whichever trainer runs; what is of a dead one ends."""

    async def play(stage: Stage) -> None:
        store = MemoryStore("memory://superseding")
        first = await stage.lead("train-1", store)
        come(first, 0, 1)
        await until(lambda: state_of(first).phase is Phase.RESOLVED)
        reader = await stage.lead("eval", store, read_only=True)
        come(reader, 0, 1)
        await until(lambda: state_of(reader).phase is Phase.RESOLVED)
        # One rank alone is left, hanging: it would keep the coordinator of its run.
        die(first, 0)
        second = await stage.lead("train-2", store)
        come(second, 0, 1)
        await until(lambda: state_of(second).phase is Phase.RESOLVED and bool(stage.closed))
        assert stage.claimed == ["train-1", "train-2"]
        assert stage.closed == ["train-1"]
        assert state_of(reader).phase is Phase.RESOLVED
        assert state_of(reader).fenced is None

    played(play)
