"""A node's part in restoring: from the chosen step to verified bytes its ranks can map.

Owns: the answers to Restore and Want of this node's ranks, one attempt at a time, and what the coordinator is told. Does
not own: what an attempt reads and fetches (`restore_attempt`), which step (the coordinator), which bytes (`restore_plan`),
bringing them (`fetcher`). All on the agent's event loop. Invariant: no rank gets a place to copy from before the coordinator
said go, i.e. before every rank's bytes on every node were verified and the start record was written; slots and arena that are
read stay as they are until every rank is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ckptd.daemon import any_mesh
from ckptd.daemon.any_mesh import Wanted
from ckptd.daemon.errors import DaemonError, make_error
from ckptd.daemon.held import HeldJob
from ckptd.daemon.restore_attempt import Ask, Attempt, Want
from ckptd.daemon.restore_plan import Stored
from ckptd.daemon.session import Session, answered
from ckptd.daemon.telemetry import EventLog
from ckptd.daemon.wire_errors import wire_error
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import FetchedPart, RestoreRequest, StoredPart
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeMessage
from ckptd.protos.error_pb2 import Error
from ckptd.protos.failpoints import failpoint
from ckptd.protos.snapshot_pb2 import Committed

if TYPE_CHECKING:
    from ckptd.daemon.run_link import RunLink

T = TypeVar("T")
HEAD_START_S = 2.0
"""A node gives up on the store so much before the coordinator's deadline (at most a fifth of the time): its error, which
names the object, comes first."""


class NodeRestore:
    """The restores of one run on one node."""

    def __init__(self, *, node: str, held: HeldJob, link: RunLink, log: EventLog) -> None:
        self._node = node
        self._held = held
        self._link = link
        self._log = log
        self._asks: dict[int, Ask] = {}
        self._attempt: Attempt | None = None
        self._superseded: set[int] = set()
        self._kept: tuple[Committed, Stored] | None = None
        """The last step's indexes, in a run that only reads: it may read one step in many rounds."""
        self._deadlines: dict[int, float] = {}
        """By rank: when this node gives up on what it asked for, on `time.monotonic`."""
        self._last_failure: tuple[int, Error] | None = None
        """The last attempt that failed on all ranks, for a rank whose Want comes after that was told."""
        self._nothing: int | None = None
        """The attempt that said that there is nothing; None once another one was made."""
        self._done: dict[int, NodeMessage] = {}
        """By rank: that it had its last answer; said again with every session, for one that broke may have lost it."""

    # ------------------------------------------------------------ calls of ranks

    async def ask(self, session: Session, request: RestoreRequest) -> list[StoredPart]:
        """Answer Restore: what was chosen, and what is stored at the rank's coordinate.

        Raises:
            DaemonError: as the coordinator said for all ranks; DEADLINE_EXCEEDED when it does not answer.
        """
        self._link.check_alive()
        timeout = self._timeout(session, request.timeout_s)
        rank = session.rank
        if self._nothing is not None and session.about.HasField("restored"):
            # It knows that there was nothing, and asks anew: a rank does not say that it is done with that.
            self._say_done(NodeMessage.RestoreDone(rank=rank, attempt=self._nothing))
        session.about.ClearField("restored")
        attempt = self._attempt
        offered = attempt if rank in self._superseded else None
        if offered is not None:
            self._superseded.discard(rank)
            if offered.loaded.done():
                offered.told.add(rank)
                stored = offered.loaded.result()
                return offered.stored_parts(self._held, stored, rank, sorted(self._link.ranks), request.detail)
        ask = Ask(request=request, answer=asyncio.get_running_loop().create_future())
        self._asks[rank] = ask
        # Where the next step is offered already, the coordinator waits for no question of this rank: the answer comes with that
        # step, with the one after it where that one cannot be had, or as the error of all.
        if offered is None:
            self._deadlines[rank] = time.monotonic() + timeout - min(HEAD_START_S, timeout / 5)
            self._link.say(self._restore_message(rank, request))
        try:
            return await self._within(ask.answer, timeout, session)
        finally:
            if self._asks.get(rank) is ask:
                del self._asks[rank]

    async def want(self, session: Session, number: int, wanted: Wanted, refused: Error | None) -> list[FetchedPart]:
        """Answer Want: where the verified bytes stand, once all ranks of the run are ready.

        Raises:
            DaemonError: as the coordinator said for all ranks; DEADLINE_EXCEEDED when it does not answer.
        """
        self._link.check_alive()
        attempt = self._attempt
        if self._last_failure is not None and number <= self._last_failure[0]:
            raise DaemonError(self._last_failure[1])
        if attempt is None or attempt.number != number:
            self._superseded.add(session.rank)
            return [FetchedPart(superseded=True)]
        want = Want(wanted=wanted, answer=asyncio.get_running_loop().create_future())
        before = attempt.wants.get(session.rank)
        attempt.wants[session.rank] = want
        if refused is None and attempt.fetching and before is not None and not before.wanted.is_same(wanted):
            refused = _other_wish(session.rank)
        if refused is not None:
            self._failed(attempt, session.rank, refused)
        else:
            self._say_wanted(attempt, session.rank)
            if attempt.ready:  # its connection broke: go is said again to a rank that is ready, and to nobody else
                self._say_ready(attempt, session.rank)
            if not attempt.fetching and set(attempt.wants) >= self._restoring():
                attempt.fetching = True
                self._link.spawn(self._fetch(attempt))
        return await self._within(want.answer, self._timeout(session, 0), session)

    def done(self, session: Session, number: int, error: Error | None) -> None:
        """A rank has copied: when all have, slots and arena may be used again."""
        attempt = self._attempt
        if attempt is None or attempt.number != number:
            if session.about.HasField(
                "restored"
            ):  # the coordinator that made the attempt is no more: the next has to know
                self._link.say_attached(session)
            return
        attempt.done.add(session.rank)
        message = NodeMessage.RestoreDone(rank=session.rank, attempt=number)
        if error is not None:
            message.error.CopyFrom(error)
        self._say_done(message)
        if attempt.done >= self._restoring():
            attempt.release(self._held)
            self._attempt = None

    def _say_done(self, message: NodeMessage.RestoreDone) -> None:
        self._done[message.rank] = NodeMessage(restore_done=message)
        self._link.say(self._done[message.rank])

    def readable(self, file: str, offset: int, nbytes: int) -> memoryview:
        """Return restored bytes for a rank that cannot map files.

        Raises:
            DaemonError: ABORTED, the file is none of this restore, or not any more: the rank asks to restore again.
        """
        plan = self._attempt.plan if self._attempt is not None else None
        if plan is not None and Path(file) in plan.files:
            with contextlib.suppress(FileNotFoundError), Path(file).open("rb") as opened:
                opened.seek(offset)
                return memoryview(opened.read(nbytes))
        raise DaemonError.of(f"{file} is not part of the present restore", reason=error_pb2.REASON_ABORTED, object=file)

    def rank_gone(self, rank: int) -> None:
        """A rank has ended: its calls end, and nobody waits for it to copy."""
        gone = DaemonError.of(f"rank {rank} is gone", reason=error_pb2.REASON_RANK_FAILED, rank=rank)
        self._done.pop(rank, None)
        ask = self._asks.pop(rank, None)
        attempt = self._attempt
        want = attempt.wants.get(rank) if attempt is not None else None
        for waiting in (ask, want):
            if waiting is not None and not waiting.answer.done():
                waiting.answer.set_exception(gone)
        if attempt is not None and attempt.done >= self._restoring():
            attempt.release(self._held)
            self._attempt = None

    # ------------------------------------------------------------ the coordinator's answers

    def say_again(self) -> None:
        """After a reconnect: who is done with the last answer, then every call without one, and what became of it here."""
        for message in self._done.values():
            self._link.say(message)
        for rank, ask in self._asks.items():
            self._link.say(self._restore_message(rank, ask.request))
        if self._attempt is not None:
            for rank in self._attempt.wants.keys() - self._attempt.failed.keys():
                self._say_wanted(self._attempt, rank)
            if self._attempt.ready:
                self._say_ready(self._attempt)
            for rank, error in self._attempt.failed.items():
                self._say_failed(self._attempt, rank, error)

    def coordinator_restarted(self) -> None:
        """Another coordinator process knows nothing of the attempt, and counts its own from one: ranks ask again."""
        before, self._attempt = self._attempt, None
        self._superseded.clear()
        self._last_failure = self._nothing = None
        self._done.clear()
        if before is not None:
            before.release(self._held)
            before.supersede()

    def on_message(self, message: CoordinatorMessage) -> None:
        """Take RestoreChosen, RestoreGo or RestoreError."""
        kind = message.WhichOneof("kind")
        if kind == "restore_chosen":
            self._on_chosen(message.restore_chosen)
        elif kind == "restore_go":
            self._on_go(message.restore_go)
        else:
            error = self._named(message.restore_error)
            self._last_failure = (message.restore_error.attempt, error)
            self._fail_all(error)

    def _on_chosen(self, chosen: CoordinatorMessage.RestoreChosen) -> None:
        before, self._attempt = self._attempt, None
        if before is not None:
            if before.number == chosen.attempt:
                self._attempt = before
                if before.loaded.done():
                    self._answer_asks(before, before.loaded.result())
                return
            before.release(self._held)
            self._superseded |= before.told - set(self._asks)
            before.supersede()
        self._nothing = None if chosen.found else chosen.attempt
        if not chosen.found:
            nothing = StoredPart(found=StoredPart.Found(found=False, attempt=chosen.attempt))
            nothing.found.fell_back_from.extend(chosen.fell_back_from)
            for rank, ask in self._asks.items():
                if not ask.answer.done():
                    self._link.ranks[rank].about.restored.Clear()
                    self._link.ranks[rank].about.restored.SetInParent()
                    ask.answer.set_result([nothing])
            return
        latest = time.monotonic() + self._link.about.options.restore_timeout_s
        deadline = min((self._deadlines.get(rank, latest) for rank in self._link.ranks), default=latest)
        self._attempt = Attempt(chosen=chosen, loaded=asyncio.get_running_loop().create_future(), deadline=deadline)
        self._link.spawn(self._load(self._attempt))

    async def _load(self, attempt: Attempt) -> None:
        """Read what the step's indexes say of this node's ranks, and answer their Restore."""
        about = self._link.about
        failpoint("restores.before_load")
        chosen = attempt.chosen
        try:
            stored = self._kept[1] if self._kept is not None and self._kept[0] == chosen.committed else None
            if stored is None:
                places = {rank: list(session.about.coordinate) for rank, session in sorted(self._link.ranks.items())}
                stored = await attempt.read(self._held.store, about, places)
            if about.options.read_only:
                self._kept = (chosen.committed, stored)
        except Exception as failure:  # told to the coordinator: another step, or an error on all ranks
            self._failed(
                attempt,
                min(self._link.ranks),
                wire_error(failure, phase="restore", step=attempt.chosen.step.step, node=self._node),
            )
            return
        if not attempt.loaded.done():
            attempt.loaded.set_result(stored)
        if self._attempt is attempt:
            self._answer_asks(attempt, stored)

    def _answer_asks(self, attempt: Attempt, stored: Stored) -> None:
        for rank, ask in self._asks.items():
            if not ask.answer.done():
                attempt.told.add(rank)
                ask.answer.set_result(
                    attempt.stored_parts(self._held, stored, rank, sorted(self._link.ranks), ask.request.detail)
                )

    async def _fetch(self, attempt: Attempt) -> None:
        """Plan, fetch and verify what all ranks of the node want."""
        stored = await attempt.loaded
        if self._attempt is not attempt:
            return
        failpoint("restores.before_fetch")
        begun = time.monotonic()
        try:
            attempt.plan = await attempt.fetch(self._held, stored)
        except Exception as failure:  # told to the coordinator: another step, or an error on all ranks
            self._failed(
                attempt,
                min(attempt.wants),
                wire_error(failure, phase="restore", step=attempt.chosen.step.step, node=self._node),
            )
            return
        if self._attempt is not attempt:
            attempt.release(self._held)
            return
        self._log.emit(
            "fetched",
            job=self._held.job,
            step=attempt.chosen.step.step,
            of=attempt.chosen.step.timeline,
            node=self._node,
            bytes=sum(attempt.plan.bytes_by_tier.values()),
            bytes_by_tier=dict(attempt.plan.bytes_by_tier),
            arena_bytes=attempt.plan.arena_bytes,
            window_bytes=attempt.plan.window_bytes,
            seconds=round(time.monotonic() - begun, 6),
        )
        attempt.ready = True
        self._say_ready(attempt)

    def _on_go(self, go: CoordinatorMessage.RestoreGo) -> None:
        attempt = self._attempt
        if attempt is None or attempt.number != go.attempt or attempt.plan is None:
            return
        attempt.hand_out(attempt.plan, go)

    # ------------------------------------------------------------ small pieces

    def _restoring(self) -> set[int]:
        """Return the living ranks that are not done: one that had its bytes from an agent before this one is."""
        return {rank for rank in self._link.live_ranks if not self._link.ranks[rank].about.HasField("restored")}

    def _restore_message(self, rank: int, request: RestoreRequest) -> NodeMessage:
        message = NodeMessage.Restore(
            rank=rank,
            raise_on_corrupt=request.raise_on_corrupt,
            timeout_s=request.timeout_s,
            rollback=request.rollback,
        )
        if request.HasField("step"):
            message.step = request.step
        return NodeMessage(restore=message)

    def _say_wanted(self, attempt: Attempt, rank: int) -> None:
        terms = attempt.wants[rank].wanted.terms
        said = NodeMessage.RestoreWanted(rank=rank, attempt=attempt.number, terms=terms)
        self._link.say(NodeMessage(restore_wanted=said))

    def _named(self, told: CoordinatorMessage.RestoreError) -> Error:
        """Return the error of all ranks, with the names of what no rank asked for."""
        attempt = self._attempt
        if not told.unused or attempt is None or attempt.number != told.attempt or not attempt.loaded.done():
            return told.error
        return any_mesh.with_names(told.error, told.unused, attempt.loaded.result().sections)

    def _say_ready(self, attempt: Attempt, only: int | None = None) -> None:
        for rank in attempt.wants if only is None else [only]:
            self._link.say(NodeMessage(restore_ready=NodeMessage.RestoreReady(rank=rank, attempt=attempt.number)))

    def _failed(self, attempt: Attempt, rank: int, error: Error) -> None:
        """Tell the coordinator, unless the attempt is over: one that started since may have given its number to another step."""
        if self._attempt is not attempt:
            return
        self._log.emit(
            "restore_failed_local", job=self._held.job, node=self._node, error=error.message, object=error.object
        )
        attempt.failed[rank] = error
        self._say_failed(attempt, rank, error)

    def _say_failed(self, attempt: Attempt, rank: int, error: Error) -> None:
        failed = NodeMessage.RestoreFailed(rank=rank, attempt=attempt.number, error=error)
        self._link.say(NodeMessage(restore_failed=failed))

    def _fail_all(self, error: Error) -> None:
        attempt, self._attempt = self._attempt, None
        self._superseded.clear()
        waiting: list[Ask | Want] = [*self._asks.values()]
        if attempt is not None:
            waiting += attempt.wants.values()
            if not attempt.loaded.done():
                attempt.loaded.cancel()
            attempt.release(self._held)
        for one in waiting:
            if not one.answer.done():
                one.answer.set_exception(DaemonError(error))

    def end(self, error: Error) -> None:
        """The run cannot go on."""
        self._fail_all(error)

    def close(self) -> None:
        """The link ends."""
        self._fail_all(DaemonError.of("the run ended", reason=error_pb2.REASON_UNAVAILABLE).error)

    def _timeout(self, session: Session, asked: float) -> float:
        limit = session.about.options.restore_timeout_s
        return min(limit, asked) if asked > 0 else limit

    async def _within(self, answer: asyncio.Future[T], timeout_s: float, session: Session) -> T:
        try:
            return await answered(answer, timeout_s, is_cut_off=lambda: bool(self._link.trouble))
        except TimeoutError:
            raise DaemonError.of(
                f"rank {session.rank}: the restore got no answer within {timeout_s:g} s from the coordinator at "
                f"{self._link.about.endpoint}{self._link.trouble}",
                reason=error_pb2.REASON_DEADLINE_EXCEEDED,
                rank=session.rank,
                node=self._node,
                phase="restore",
            ) from None


def _other_wish(rank: int) -> Error:
    """It was fetched what the rank wanted before: those places mean something else in its new wish."""
    return make_error(
        error_pb2.REASON_INVALID_ARGUMENT,
        f"rank {rank} asks for one step once more, and wants something else of it than before",
        hint="restore again, on all ranks",
        rank=rank,
        phase="restore",
    )
