"""A rank whose agent, or whose coordinator, died in the midst of a restore is answered again; it waits for nobody else."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.coordinated import NODES, Play, Run
from fixtures.node_restores import chosen, node_restore

from ckptd.daemon import restore_plan
from ckptd.daemon.any_mesh import Wanted
from ckptd.daemon.errors import CorruptError, DaemonError
from ckptd.daemon.restore_attempt import Attempt
from ckptd.daemon.restores import NodeRestore
from ckptd.daemon.session import Session
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import FetchedPart, RestoreRequest
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeMessage
from ckptd.protos.error_pb2 import Error


def restoring(*, steps: int = 1) -> tuple[Play, Run]:
    """Return a second run of a job whose ranks have asked to restore."""
    play = Play()
    before = play.run().attach()
    for step in range(1, steps + 1):
        before.save(step)
        before.settle()
    run = play.run().attach()
    ask(run, 0, 1)
    run.settle()
    return play, run


def ask(run: Run, *ranks: int, **more: Any) -> None:
    for rank in ranks:
        run.say(rank, restore=NodeMessage.Restore(rank=rank, **more))


def ready(run: Run, *ranks: int) -> None:
    for rank in ranks:
        run.say(rank, restore_ready=NodeMessage.RestoreReady(rank=rank, attempt=1))


def told(run: Run, rank: int) -> list[str]:
    """Return what the rank's node was told of restoring, and forget it."""
    kinds = [kind for kind in run.kinds(NODES[rank]) if kind.startswith("restore")]
    run.said.clear()
    return kinds


def test_a_restarted_agent_gets_the_offer_again_and_its_ready_counts_anew() -> None:
    """What it was ready with is gone: nobody copies before it is ready once more."""
    _, run = restoring()
    ready(run, 0, 1)
    run.until(lambda operation: getattr(operation, "label", "") == "list_pins_to_start")
    assert told(run, 1) == ["restore_chosen"]
    _, run = restoring()
    ready(run, 1)
    told(run, 1)
    run.hello(1, incarnation="another")
    ask(run, 1)
    assert told(run, 1) == ["restore_chosen"]
    ready(run, 0)
    run.settle()
    assert told(run, 0) == []
    ready(run, 1)
    run.settle()
    assert "restore_go" in told(run, 1)


def test_an_agent_that_dies_after_the_others_were_told_to_copy_is_told_again() -> None:
    """The other ranks have restored and never ask again; this one gets the same step, and may copy as soon as it is ready."""
    _, run = restoring()
    ready(run, 0, 1)
    run.settle()
    assert "restore_go" in told(run, 1)
    run.hello(1, incarnation="another")
    told(run, 1)
    ask(run, 1)
    assert told(run, 1) == ["restore_chosen"]
    ready(run, 1)
    assert [(to, m.restore_go.attempt) for to, m in run.said if m.HasField("restore_go")] == [(NODES[1], 1)]


def test_what_fails_after_the_others_have_copied_fails_there_alone() -> None:
    """The rank that asked again hears why; a rank that has copied hears nothing."""
    _, run = restoring()
    ready(run, 0, 1)
    run.settle()
    told(run, 1)
    bad = Error(reason=error_pb2.REASON_CORRUPT, message="gone")
    ask(run, 1)
    run.said.clear()
    run.say(1, restore_failed=NodeMessage.RestoreFailed(rank=1, attempt=1, error=bad))
    assert [(to, m.restore_error.error.message) for to, m in run.said] == [(NODES[1], "gone")]


@pytest.mark.parametrize("end", ["done", "begin"])
def test_a_rank_that_had_its_answer_asks_for_a_new_one(end: str) -> None:
    """After it has copied, or gone on to save, a restore is another one: it waits for all ranks."""
    _, run = restoring()
    ready(run, 0, 1)
    run.settle()
    for rank in (0, 1):
        if end == "done":
            run.say(rank, restore_done=NodeMessage.RestoreDone(rank=rank, attempt=1))
        else:
            run.say(rank, begin=NodeMessage.Begin(rank=rank, step=9))
    told(run, 0)
    ask(run, 0)
    run.settle()
    assert told(run, 0) == []
    ask(run, 1)
    run.settle()
    assert told(run, 0) == ["restore_chosen"]
    assert run.state.attempt.number == 2


def test_another_question_is_no_repetition() -> None:
    """A rank that asks for a step by number is not answered with what was offered before."""
    _, run = restoring(steps=2)
    told(run, 1)
    ask(run, 1, step=1)
    assert told(run, 1) == []


def test_that_there_is_nothing_is_said_again_until_something_is_saved() -> None:
    """On an empty root too, the rank of a restarted agent must not wait for ranks that train already."""
    run = Play().run().attach()
    ask(run, 0, 1)
    run.settle()
    assert told(run, 1) == ["restore_chosen"]
    ask(run, 1)
    assert told(run, 1) == ["restore_chosen"]
    run.save(1)
    run.settle()
    told(run, 1)
    ask(run, 1)
    run.settle()
    assert told(run, 1) == []
    ask(run, 0)
    run.settle()
    assert run.last("restore_chosen").restore_chosen.step.step == 1


# ---------------------------------------------------------------- the agent


def test_ranks_ask_another_coordinator_process_again() -> None:
    """It knows nothing of the attempt, and may give its number to another step: what waits for it must not take that one."""

    async def play() -> tuple[bool, bool]:
        restores, session = node_restore()
        restores.on_message(chosen(1))
        waiting = asyncio.get_running_loop().create_task(restores.want(session, 1, Wanted(), None))
        await asyncio.sleep(0)
        restores.coordinator_restarted()
        answer = await waiting
        restores.on_message(CoordinatorMessage(restore_go=CoordinatorMessage.RestoreGo(attempt=1)))
        asked = asyncio.get_running_loop().create_task(restores.ask(session, RestoreRequest()))
        await asyncio.sleep(0)
        nothing = CoordinatorMessage.RestoreChosen(attempt=1, found=False)
        restores.on_message(CoordinatorMessage(restore_chosen=nothing))
        return answer[0].superseded, (await asked)[0].found.found

    assert asyncio.run(play()) == (True, False)


def test_an_offer_that_comes_again_answers_a_rank_that_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank's connection broke, not its agent: the step is loaded already, and nothing else would answer."""
    monkeypatch.setattr(
        Attempt, "stored_parts", lambda self, _held, stored, rank, _ranks, _detail: [self.number, stored, rank]
    )

    async def play() -> list[Any]:
        restores, session = node_restore()
        restores.on_message(chosen(1))
        assert restores._attempt is not None
        restores._attempt.loaded.set_result("stored")  # type: ignore[arg-type]
        asked = asyncio.get_running_loop().create_task(restores.ask(session, RestoreRequest()))
        await asyncio.sleep(0)
        restores.on_message(chosen(1))
        return list(await asyncio.wait_for(asked, 10))

    assert asyncio.run(play()) == [1, "stored", 0]


async def ready_again(restores: NodeRestore, session: Session, wanted: Wanted) -> asyncio.Task[list[FetchedPart]]:
    """A rank's connection broke after the coordinator was told that it is ready: it asks, and wants, once more."""
    restores.on_message(chosen(1))
    attempt = restores._attempt
    assert attempt is not None
    attempt.loaded.set_result("stored")  # type: ignore[arg-type]
    first = asyncio.get_running_loop().create_task(restores.want(session, 1, Wanted(), None))
    await asyncio.sleep(0)
    assert attempt.fetching
    first.cancel()
    attempt.plan, attempt.ready = SimpleNamespace(parts=lambda rank: [rank], arena_file=None), True  # type: ignore[assignment]
    asked = asyncio.get_running_loop().create_task(restores.ask(session, RestoreRequest()))
    await asyncio.sleep(0)
    restores.on_message(chosen(1))
    await asyncio.wait_for(asked, 10)
    again = asyncio.get_running_loop().create_task(restores.want(session, 1, wanted, None))
    await asyncio.sleep(0)
    return again


def test_a_wish_that_comes_again_is_ready_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator says go again to a rank that says that it is ready, and nobody else would have this one answered."""
    monkeypatch.setattr(Attempt, "stored_parts", lambda *_: [])
    said: list[NodeMessage] = []

    async def play() -> list[Any]:
        restores, session = node_restore(said)
        again = await ready_again(restores, session, Wanted())
        restores.on_message(CoordinatorMessage(restore_go=CoordinatorMessage.RestoreGo(attempt=1)))
        return list(await asyncio.wait_for(again, 10))

    assert asyncio.run(play()) == [0]
    kinds = [message.WhichOneof("kind") for message in said]
    assert kinds == ["restore_wanted", "restore", "restore_wanted", "restore_ready"]
    assert (said[-1].restore_ready.rank, said[-1].restore_ready.attempt) == (0, 1)


def test_another_wish_is_not_answered_with_what_was_fetched_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are given by row: those of one wish are other tensors' in another one. The restore fails on all ranks."""
    monkeypatch.setattr(Attempt, "stored_parts", lambda *_: [])
    said: list[NodeMessage] = []

    async def play() -> Error:
        restores, session = node_restore(said)
        again = await ready_again(restores, session, Wanted(objects=["other"]))
        error = said[-1].restore_failed.error
        restores.on_message(CoordinatorMessage(restore_error=CoordinatorMessage.RestoreError(attempt=1, error=error)))
        with pytest.raises(DaemonError) as caught:
            await asyncio.wait_for(again, 10)
        return caught.value.error

    assert asyncio.run(play()).reason == error_pb2.REASON_INVALID_ARGUMENT
    assert "restore_ready" not in [message.WhichOneof("kind") for message in said]


@pytest.mark.parametrize("then", ["an older step", "an error"])
def test_a_rank_that_asks_after_two_bad_steps_in_a_row_is_answered(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """A chunk of the newest step is bad, then the index of the next: the answer comes with the third, or as the error of all."""
    monkeypatch.setattr(
        Attempt, "stored_parts", lambda self, _held, stored, rank, _ranks, _detail: [self.number, stored, rank]
    )

    def load(*_: object, **__: object) -> str:
        if attempts[-1].number == 2:
            raise CorruptError.of("the index is gone")
        return "stored"

    monkeypatch.setattr(restore_plan, "load", load)
    attempts: list[Attempt] = []

    async def offered(restores: NodeRestore, number: int) -> None:
        restores.on_message(chosen(number))
        assert restores._attempt is not None
        attempts.append(restores._attempt)
        await restores._load(attempts[-1])

    async def play() -> list[Any]:
        said: list[NodeMessage] = []
        restores, session = node_restore(said)
        restores._held.store = None  # type: ignore[assignment] # not reached
        loop = asyncio.get_running_loop()
        first = loop.create_task(restores.ask(session, RestoreRequest()))
        await asyncio.sleep(0)
        await offered(restores, 1)
        await first
        wants = loop.create_task(restores.want(session, 1, Wanted(), CorruptError.of("a chunk is bad").error))
        await asyncio.sleep(0)
        restores.on_message(chosen(2))
        assert (await wants)[0].superseded
        asks = loop.create_task(restores.ask(session, RestoreRequest()))
        await asyncio.sleep(0)
        assert restores._attempt is not None
        attempts.append(restores._attempt)
        await restores._load(attempts[-1])
        assert said[-1].restore_failed.attempt == 2
        if then == "an error":
            bad = Error(reason=error_pb2.REASON_CORRUPT, message="no good step is left")
            restores.on_message(CoordinatorMessage(restore_error=CoordinatorMessage.RestoreError(attempt=2, error=bad)))
        else:
            await offered(restores, 3)
        try:
            return list(await asyncio.wait_for(asks, 10))
        except DaemonError as error:
            return [error.error.message]

    assert asyncio.run(play()) == ([3, "stored", 0] if then == "an older step" else ["no good step is left"])


@pytest.mark.parametrize("fails", [False, True], ids=["works", "fails"])
def test_what_is_late_for_a_coordinator_that_is_gone_is_not_said_to_the_next(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The next one counts its attempts from one again: it would take the words for its own step's, verified or corrupt."""

    def late(*_: object, **__: object) -> Any:
        if fails:
            raise CorruptError.of("one bit is wrong")
        return "stored"

    def fetched(*_: object, **__: object) -> Any:
        restores._attempt = newer[0]
        late()
        return SimpleNamespace(bytes_by_tier={}, arena_file=None, arena_bytes=0, window_bytes=0)

    monkeypatch.setattr(restore_plan, "load", late)
    monkeypatch.setattr(restore_plan, "fetch", fetched)
    newer: list[Any] = []
    restores, session = node_restore()
    said: list[Any] = []

    async def play() -> bool:
        restores._held.store = restores._held.fetcher = None  # type: ignore[assignment] # not reached
        restores.on_message(chosen(1))
        older = restores._attempt
        assert older is not None
        restores.coordinator_restarted()
        asked = asyncio.get_running_loop().create_task(restores.ask(session, RestoreRequest()))
        await asyncio.sleep(0)
        restores._link.say = said.append  # type: ignore[method-assign, assignment]
        await restores._load(older)
        restores.on_message(chosen(1))
        newer.append(restores._attempt)
        if fails:
            older.loaded.set_result("stored")  # type: ignore[arg-type]
        restores._attempt = older
        older.wants[0] = SimpleNamespace(wanted=Wanted())  # type: ignore[assignment]
        await restores._fetch(older)
        answered = asked.done()
        asked.cancel()
        return answered

    assert asyncio.run(play()) is False
    assert restores._attempt is newer[0]
    assert said == []
