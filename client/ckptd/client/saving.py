"""One save, from the state of this rank to staged bytes.

Owns: the order of calls, and which failures raise. Does not own: reading state (`tracking`), copying (`staging`), or
what happens after (`handles` hears of it). Invariant: whatever fails here, the step is failed on all ranks, and the
next save is not touched by it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import asdict
from typing import Any

import torch

from ckptd.protos import error_pb2, segmented, shard_table
from ckptd.protos.agent_pb2 import (
    BeginReply,
    BeginRequest,
    FailStepRequest,
    LayoutPart,
    PlanRequest,
    SlotBytes,
    StagedRequest,
)
from ckptd.protos.failpoints import failpoint

from .audit import Auditor
from .channel import CKPTD_VERSION
from .config import Config
from .copying import Copier
from .errors import Aborted, CkptdError, Fenced, InvalidRequest, from_wire
from .handles import Ledger, SaveHandle
from .journal import Journal
from .link import Attachment, Link, SessionLostError
from .mesh import Topology
from .slot_writers import SharedSlot, SlotMaps, StreamedSlot
from .staging import Capture, SlotPlan, SlotWriter, lies_in_place, slot_plan
from .state import Layout
from .surroundings import tracked_kinds, untracked
from .tracking import CaptureFailedError, Tracking

_CALL_S = 30.0
"""Calls that wait for nobody else must be answered within this time, in seconds."""
_ANSWER_SLACK_S = 20.0
"""A call's own deadline lies this much behind the agent's, so that the agent's better error arrives first."""
_KEPT_PLANS = 4
_DOUBTFUL_S = 5.0
"""So long an agent that has let a deadline pass is given to hear that the step is over, in seconds."""
_UNANSWERED = frozenset({error_pb2.REASON_DEADLINE_EXCEEDED, error_pb2.REASON_UNAVAILABLE})
"""Reasons that may mean that nobody has said what becomes of a step."""


class _RaisedInCopyError(Exception):
    """The copy raised: the caller must see it, although training could go on."""

    def __init__(self, error: Aborted) -> None:
        super().__init__(str(error))
        self.error = error


class Saver:
    """The saves of one Checkpointer; one at a time."""

    def __init__(
        self,
        *,
        config: Config,
        topology: Topology,
        link: Link,
        ledger: Ledger,
        tracking: Tracking,
        copier: Copier,
        journal: Journal,
        auditor: Auditor,
    ) -> None:
        self._config, self._topology, self._link = config, topology, link
        self._ledger, self._tracking, self._copier, self._journal = ledger, tracking, copier, journal
        self._auditor = auditor
        self._in_place = lies_in_place(config.hash_replicas)
        self._maps = SlotMaps()
        self._plans: dict[bytes, SlotPlan] = {}
        self._put: tuple[str, Layout] | None = None
        self._preference: tuple[Layout, bool] | None = None
        self._has_told = False

    def save(
        self,
        step: int,
        state: MutableMapping[str, Any] | None,
        *,
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        timeout_s: float | None,
    ) -> SaveHandle:
        """Save; see `Checkpointer.save`."""
        begun = time.monotonic()
        self._link.check()
        self._link.restored = None
        handle = SaveHandle(step, default_timeout_s=self._config.commit_timeout_s)
        try:
            capture = self._capture(step, state, metrics, tags)
        except CkptdError:
            raise  # all ranks were told
        except BaseException:
            self._interrupted(handle)
            raise
        try:
            self._stage(handle, capture, timeout_s)
        except (InvalidRequest, Fenced) as error:
            self._ledger.withdraw(handle, error)
            raise
        except _RaisedInCopyError as raised:
            raise raised.error from raised.__cause__
        except CkptdError as error:
            self._ledger.fail(handle, error)
        self._journal.emit(
            "save_returned",
            step=step,
            timeline=handle.timeline,
            state=handle.state,
            skipped=handle.skipped,
            error=handle.error and handle.error.reason_name,
            seconds=round(time.monotonic() - begun, 6),
        )
        return handle

    def _capture(
        self, step: int, state: MutableMapping[str, Any] | None, metrics: Mapping[str, float], tags: Mapping[str, str]
    ) -> Capture:
        try:
            self._auditor.at_save(state)
            self._tell_surroundings(step, state)
            collected = self._tracking.collect(state)
        except CaptureFailedError as failure:
            error = Aborted(
                f"rank {self._topology.rank}: reading the state of {failure.name!r} raised {failure}",
                reason=error_pb2.REASON_RANK_FAILED,
                step=step,
                rank=self._topology.rank,
                key=failure.name,
                phase="stage",
            )
            self._fail_step(step, error)
            raise error from failure.__cause__
        except InvalidRequest as refusal:
            refused = InvalidRequest.like(refusal, f"rank {self._topology.rank}: {refusal.message}")
            refused.step, refused.rank, refused.phase = step, self._topology.rank, "stage"
            self._fail_step(step, refused)
            raise refused from refusal
        versions = {"ckptd": CKPTD_VERSION, "torch": str(torch.__version__)}
        return Capture(collected, metrics=metrics, tags=tags, versions=versions)

    def _tell_surroundings(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Write once into the event log what is tracked, and what the callers hold besides; a save never fails of it."""
        if self._has_told or not self._journal.is_on:
            return
        self._has_told = True
        with contextlib.suppress(Exception):
            things = self._auditor.things(state)
            self._journal.emit(
                "audited",
                step=step,
                tracked=tracked_kinds(things),
                untracked=[asdict(one) for one in untracked(sys._getframe(1), things)],  # noqa: SLF001 - documented
            )

    def _interrupted(self, handle: SaveHandle) -> None:
        """Tell all ranks that this one will not go on with the step: a signal's handler raised, say.

        The coordinator may let the step begin all the same, and every later one waits until it is decided.
        """
        stopped = Aborted(
            f"rank {self._topology.rank} was interrupted",
            reason=error_pb2.REASON_RANK_FAILED,
            step=handle.step,
            rank=self._topology.rank,
        )
        self._ledger.withdraw(handle, stopped)
        self._fail_step(handle.step, stopped)

    def _fail_step(self, step: int, error: CkptdError, *, limits_s: tuple[float, float] = (_CALL_S, _CALL_S)) -> None:
        """Tell all ranks, best effort: they would else wait for this one until their deadline.

        Idempotent, so a new session is told again: an agent that died may not have passed it on. An interrupt does not keep
        it from being told, but is not lost either.

        Args:
            step: It fails on all ranks.
            error: Why.
            limits_s: How long a session is waited for, and then an answer, in seconds.
        """
        try:
            self._tell_failed(step, error, limits_s)
        except BaseException:
            self._tell_failed(step, error, limits_s)
            raise

    def _tell_failed(self, step: int, error: CkptdError, limits_s: tuple[float, float]) -> None:
        deadline = time.monotonic() + limits_s[0]
        while True:
            try:
                attachment = self._link.attached(deadline=deadline)
                request = FailStepRequest(session=attachment.session, step=step, error=error.to_wire())
                self._link.call(attachment, "FailStep", request, timeout_s=limits_s[1], phase="stage")
            except SessionLostError:
                if time.monotonic() < deadline:
                    continue
            except CkptdError:
                pass
            return

    def _stage(self, handle: SaveHandle, capture: Capture, timeout_s: float | None) -> None:
        reply: BeginReply | None = None
        try:
            attachment, reply = self._begin(handle.step, capture, timeout_s)
            if not reply.go:
                self._ledger.skip(handle, Aborted.like(from_wire(reply.skipped)))
                return
            handle.timeline = reply.timeline
            self._ledger.register(handle)
            plan = self._plan(attachment, reply, capture.layout)
            slot = self._slot(attachment, reply, handle.step)
            failpoint("client.before_copy")
            tail = capture.copy_into(
                slot,
                plan,
                self._copier,
                compared=not reply.leave_uncompared,
                algorithm=_known(reply.segmented_algorithm),
                in_place=self._in_place,
            )
            self._staged(
                attachment,
                StagedRequest(
                    step=handle.step,
                    slot=reply.slot,
                    objects_bytes=tail.objects_bytes,
                    trailer_bytes=tail.trailer_bytes,
                ),
            )
        except CkptdError as error:
            if reply is not None:
                self._fail_step(handle.step, error)
            elif error.reason in _UNANSWERED:
                # It may begin all the same, later. Without a session it cannot: who is gone is missed by all.
                self._fail_step(handle.step, error, limits_s=(0.0, _DOUBTFUL_S))
            raise
        except Exception as failure:
            if reply is None:  # nothing was copied: not the state's fault, but an interrupt's
                self._interrupted(handle)
                raise
            aborted = Aborted(
                f"rank {self._topology.rank}: copying the state raised {type(failure).__name__}: {failure}",
                reason=error_pb2.REASON_RANK_FAILED,
                step=handle.step,
                rank=self._topology.rank,
                phase="stage",
            )
            self._fail_step(handle.step, aborted)
            self._ledger.withdraw(handle, aborted)
            raise _RaisedInCopyError(aborted) from failure
        except BaseException:
            # An interrupt, say: the slot may be torn, and the other ranks must not wait for it.
            self._interrupted(handle)
            raise

    def _begin(self, step: int, capture: Capture, timeout_s: float | None) -> tuple[Attachment, BeginReply]:
        """Ask until there is an answer; nothing has been copied, so a new session may ask again."""
        limit = self._config.begin_timeout_s if timeout_s is None else min(timeout_s, self._config.begin_timeout_s)
        deadline = time.monotonic() + limit
        prefers_segmented = self._prefers_segmented(capture)
        while True:
            attachment = self._link.attached(deadline=deadline)
            left = max(0.1, deadline - time.monotonic())
            request = BeginRequest(
                session=attachment.session,
                step=step,
                layout_digest=capture.layout.digest,
                tail_bytes=capture.tail_bytes,
                timeout_s=left,
                segmented_algorithms=segmented.KNOWN,
                prefers_segmented=prefers_segmented,
            )
            try:
                self._put_layout(attachment, capture.layout)
                reply: BeginReply = self._link.call(
                    attachment, "Begin", request, timeout_s=left + _ANSWER_SLACK_S, phase="begin"
                )
            except SessionLostError:
                if time.monotonic() >= deadline:
                    raise
                continue
            except CkptdError as error:
                # All that ask are answered together: ranks that have yet to hear that the step before is over ask for that one.
                if error.step in {None, step} or time.monotonic() >= deadline:
                    raise
                continue
            return attachment, reply

    def _prefers_segmented(self, capture: Capture) -> bool:
        """Say whether any tensor lies where it is better hashed in place; asked again when the layout is another one."""
        if self._preference is None or self._preference[0] is not capture.layout:
            self._preference = (capture.layout, capture.has_any(self._in_place))
        return self._preference[1]

    def _put_layout(self, attachment: Attachment, layout: Layout) -> None:
        """Make the layout known, unless this session knows it: it is the same object exactly when nothing changed."""
        if self._put is not None and self._put[0] == attachment.session and self._put[1] is layout:
            return
        self._link.call(
            attachment, "PutLayout", _layout_parts(attachment.session, layout), timeout_s=_CALL_S, phase="begin"
        )
        self._put = (attachment.session, layout)

    def _plan(self, attachment: Attachment, reply: BeginReply, layout: Layout) -> SlotPlan:
        known = self._plans.get(reply.plan_digest)
        if known is not None:
            return known
        writer: list[int] = []
        offset: list[int] = []
        request = PlanRequest(session=attachment.session, plan_digest=reply.plan_digest)
        for part in self._link.stream(attachment, "GetPlan", request, timeout_s=_CALL_S, phase="begin"):
            writer.extend(part.writer)
            offset.extend(part.stream_offset)
        if not len(writer) == len(offset) == len(layout.rows):
            raise CkptdError(f"the plan has {len(writer)} rows, the layout {len(layout.rows)}", phase="begin")
        while len(self._plans) >= _KEPT_PLANS:
            del self._plans[next(iter(self._plans))]
        made = self._plans[reply.plan_digest] = slot_plan(reply.plan_digest, self._topology.rank, writer, offset)
        return made

    def _slot(self, attachment: Attachment, reply: BeginReply, step: int) -> SlotWriter:
        if attachment.channel.shared_memory:
            return SharedSlot(self._maps, self._copier, reply)

        def send(messages: Iterator[SlotBytes]) -> None:
            self._link.call(
                attachment, "WriteSlot", messages, timeout_s=self._config.begin_timeout_s + _CALL_S, phase="stage"
            )

        return StreamedSlot(send, reply, session=attachment.session, step=step)

    def _staged(self, attachment: Attachment, request: StagedRequest) -> None:
        """Hand the slot over. Idempotent, so a new session may say it again: the agent adopts slots."""
        deadline = time.monotonic() + _CALL_S
        while True:
            request.session = attachment.session
            try:
                self._link.call(attachment, "Staged", request, timeout_s=_CALL_S, phase="stage")
            except SessionLostError:
                if time.monotonic() >= deadline:
                    raise
                attachment = self._link.attached(deadline=deadline)
            else:
                return

    def close(self) -> None:
        """Forget slots and plans."""
        self._maps.close()
        self._plans.clear()


def _known(algorithm: str) -> str:
    """Return what replicas are to be fingerprinted by.

    Raises:
        CkptdError: Begin named no such function.
    """
    if algorithm and algorithm not in segmented.KNOWN:
        raise CkptdError(f"the agent asks for fingerprints by {algorithm!r}, which was not offered", phase="stage")
    return algorithm


def _layout_parts(session: str, layout: Layout) -> Iterator[LayoutPart]:
    for number, rows in enumerate(shard_table.split(layout.table)):
        part = LayoutPart(rows=rows)
        if number == 0:
            part.session, part.digest = session, layout.digest
            part.aliases.CopyFrom(layout.aliases)
        yield part
