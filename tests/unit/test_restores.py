"""A node's part in restoring: what a rank hears that comes late."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.raw_rank import options

from ckptd.daemon.any_mesh import Wanted
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.restores import NodeRestore
from ckptd.daemon.session import Session
from ckptd.daemon.telemetry import EventLog
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import AttachRequest
from ckptd.protos.coordinator_pb2 import CoordinatorMessage
from ckptd.protos.error_pb2 import Error


def node_restore() -> tuple[NodeRestore, Session]:
    """Return the restores of a run with one rank here, and its session; nothing is loaded."""
    about = AttachRequest(rank=0, world=2, options=options())
    session = Session(token="token", about=about)
    link: Any = SimpleNamespace(
        about=about,
        ranks={0: session},
        live_ranks=[0],
        trouble="",
        check_alive=lambda: None,
        say=lambda _message: None,
        spawn=lambda work: work.close(),
    )
    held: Any = SimpleNamespace(job="job", snapshots={}, arena=SimpleNamespace(release=lambda: None))
    return NodeRestore(node="node", held=held, link=link, log=EventLog(None)), session


def chosen(attempt: int) -> CoordinatorMessage:
    return CoordinatorMessage(restore_chosen=CoordinatorMessage.RestoreChosen(attempt=attempt, found=True))


@pytest.mark.parametrize("attempts", [1, 2], ids=["the attempt itself", "a later one"])
def test_a_rank_that_wants_after_the_restore_failed_hears_why(attempts: int) -> None:
    """Another node found the damage first: the rank gets that error, and is not told to ask again all alone."""

    async def play() -> Error:
        restores, session = node_restore()
        for attempt in range(1, attempts + 1):
            restores.on_message(chosen(attempt))
        bad = Error(reason=error_pb2.REASON_CORRUPT, message="chunks/aa is damaged")
        restores.on_message(
            CoordinatorMessage(restore_error=CoordinatorMessage.RestoreError(attempt=attempts, error=bad))
        )
        with pytest.raises(DaemonError) as caught:
            await restores.want(session, 1, Wanted(), None)
        return caught.value.error

    assert asyncio.run(play()).reason == error_pb2.REASON_CORRUPT


def test_a_rank_that_wants_a_step_that_was_left_is_told_to_ask_again() -> None:
    """An older step was chosen meanwhile: the rank asks once more and gets that one."""

    async def play() -> bool:
        restores, session = node_restore()
        restores.on_message(chosen(1))
        restores.on_message(chosen(2))
        answer = await restores.want(session, 1, Wanted(), None)
        return answer[0].superseded

    assert asyncio.run(play())
