"""A node's part in restoring: what a rank hears that comes late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fixtures.node_restores import chosen, node_restore

from ckptd.daemon.any_mesh import Wanted
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.restore_plan import Stored
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import WantPart, WantTerms
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeMessage
from ckptd.protos.error_pb2 import Error


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


def test_what_a_rank_wants_is_said_at_once_and_again_after_a_reconnect() -> None:
    """With its terms, and before it is ready: the coordinator must hear of a wish before it lets anybody copy."""

    async def play() -> list[NodeMessage]:
        said: list[NodeMessage] = []
        restores, session = node_restore(said)
        restores.on_message(chosen(3))
        wanted = Wanted()
        wanted.take(WantPart(terms=WantTerms(strict=True, unused=b"\x40")))
        call = asyncio.create_task(restores.want(session, 3, wanted, None))
        await asyncio.sleep(0)
        restores.say_again()
        call.cancel()
        return said

    said = [message.restore_wanted for message in asyncio.run(play())]
    assert [(one.rank, one.attempt, one.terms.strict, one.terms.unused) for one in said] == [(0, 3, True, b"\x40")] * 2


def test_nothing_is_fetched_after_the_restore_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks' wishes were found not to fit before this node began to fetch: no rank would ever say that it has copied."""

    async def play() -> list[NodeMessage]:
        said: list[NodeMessage] = []
        restores, session = node_restore(said)
        fetching: list[Any] = []
        monkeypatch.setattr(restores._link, "spawn", fetching.append)
        restores.on_message(chosen(1))
        attempt = restores._attempt
        assert attempt is not None
        attempt.loaded.set_result(Stored(sections={}))
        fetching.pop().close()
        call = asyncio.create_task(restores.want(session, 1, Wanted(), None))
        await asyncio.sleep(0)
        monkeypatch.setattr("ckptd.daemon.restore_plan.fetch", lambda *_args, **_more: pytest.fail("fetched"))
        wrong = Error(reason=error_pb2.REASON_LAYOUT_MISMATCH, message="1 only in the snapshot")
        restores.on_message(CoordinatorMessage(restore_error=CoordinatorMessage.RestoreError(attempt=1, error=wrong)))
        with pytest.raises(DaemonError):
            await call
        said.clear()
        await fetching.pop()
        return said

    assert asyncio.run(play()) == []
