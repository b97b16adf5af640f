"""What an agent says to the coordinator again after the link between them was broken."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from fixtures.raw_rank import options, run_credentials

from ckptd.daemon.run_link import RunLink
from ckptd.daemon.session import Session
from ckptd.daemon.snapshots import Snapshot
from ckptd.daemon.telemetry import EventLog
from ckptd.protos.agent_pb2 import AttachRequest
from ckptd.protos.coordinator_pb2 import NodeMessage
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import HeldSnapshot


def about(rank: int) -> AttachRequest:
    """Return a rank's attach to a coordinator that nobody plays."""
    return AttachRequest(
        job="job",
        run_id="run",
        rank=rank,
        world=2,
        endpoint="127.0.0.1:1",
        credentials=run_credentials(),
        options=options(),
    )


async def said_after_reconnect(act: Any) -> list[NodeMessage]:
    """Let two ranks attach and something happen while the link is broken; return what the next session begins with."""
    held: Any = SimpleNamespace(snapshots={}, job="job")
    link = RunLink(about(0), node="node", incarnation="i", held=held, log=EventLog(None), on_closed=lambda _: None)
    sessions = [Session(token=str(rank), about=about(rank)) for rank in range(2)]
    for session in sessions:
        link.attach(session)
    act(link, held, sessions)
    said: asyncio.Queue[NodeMessage | None] = asyncio.Queue()
    link._out = said
    link._say_everything()
    link.close()
    for task in list(link._tasks):
        task.cancel()
    found = [said.get_nowait() for _ in range(said.qsize())]
    return [message for message in found if message is not None]


def test_a_rank_that_died_while_the_link_was_broken_is_said_to_be_gone() -> None:
    """Else the coordinator would call it alive for ever, and wait for it at every save."""

    def dies(link: RunLink, held: Any, sessions: list[Session]) -> None:
        link.gone(sessions[1], clean=False, why="its process ended")

    said = asyncio.run(said_after_reconnect(dies))
    assert [message.WhichOneof("kind") for message in said] == ["hello", "attached", "gone"]
    assert (said[1].attached.rank, said[2].gone.rank, said[2].gone.clean) == (0, 1, False)
    assert "its process ended" in said[2].gone.why.message


def test_a_step_that_a_rank_gave_up_while_the_link_was_broken_is_said_to_have_failed() -> None:
    """The hello carries the failure, so that the step ends for all ranks before its deadline."""

    def gives_up(link: RunLink, held: Any, sessions: list[Session]) -> None:
        snapshot = Snapshot(about=HeldSnapshot(timeline="00000001-aaaaaaaaaaaa", step=7, run_id="run"), plans={})
        held.snapshots[snapshot.key] = snapshot
        link.saves.fail_step(sessions[1], 7, Error(message="boom"))

    said = asyncio.run(said_after_reconnect(gives_up))
    (one,) = said[0].hello.held
    assert (one.step, one.failed.message, one.failed.rank) == (7, "boom", 1)


def test_a_step_that_a_rank_cannot_begin_is_said_again_to_whoever_leads_then() -> None:
    """The coordinator may have died with the word: the other ranks would wait for this one until their deadline."""

    def gives_up(link: RunLink, held: Any, sessions: list[Session]) -> None:
        link.saves.fail_step(sessions[1], 7, Error(message="boom"))

    said = asyncio.run(said_after_reconnect(gives_up))
    failed = said[-1].failed
    assert (failed.timeline, failed.step, failed.error.message, failed.error.rank) == ("", 7, "boom", 1)


def test_what_a_rank_has_restored_is_said_with_it() -> None:
    """Until it asks for another step, or begins to save: a coordinator that comes back has to know."""

    def restored(link: RunLink, held: Any, sessions: list[Session]) -> None:
        sessions[1].about.restored.step = 4
        link.restores.done(sessions[1], 1, None)
        sessions[0].about.restored.step = 4
        link.saves.fail_step(sessions[0], 5, Error(message="boom"))

    said = asyncio.run(said_after_reconnect(restored))
    assert [(m.attached.rank, m.attached.HasField("restored")) for m in said if m.HasField("attached")] == [
        (0, False),
        (1, True),
    ]
