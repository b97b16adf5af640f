"""One restore, from the agent's answer to filled tensors and loaded objects.

Owns: the order of calls, attempts that are superseded by an older step, and copying pieces into place. Does not own:
what fits (`targets`), or which step is chosen (the coordinator). Invariant: no target is touched before all ranks'
bytes were found and verified, and this rank's checks have passed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import RestoreDoneRequest, RestoredStep, RestoreRequest, StoredPart, WantPart, WantTerms
from ckptd.protos.failpoints import failpoint

from .config import Config
from .copying import Copier
from .errors import CkptdError, InvalidRequest, SnapshotNotFound
from .fetched import Fetched, FetchedPiece, check_complete, take_part, want_parts
from .journal import Journal
from .link import Attachment, Link, SessionLostError
from .mesh import Topology
from .restored import BadStep, Question, Restored
from .restored_files import RestoredFiles, SharedFiles, StreamedFiles, read_all
from .stored import StoredParts
from .targets import Targets
from .tracking import Tracking
from .wish_terms import terms_of, unused_by_all

log = logging.getLogger("ckptd.client")

_CALL_S = 30.0
_ANSWER_SLACK_S = 20.0
_TOLD_AGAIN_S = 5.0
"""How long a rank that has restored waits for an agent that just died, to tell the next one, in seconds."""


@dataclass(frozen=True, eq=False, slots=True)
class _Asked:
    """One attempt's circumstances; `deadline` on `time.monotonic`, seconds."""

    attachment: Attachment
    question: Question
    state: MutableMapping[str, Any] | None
    deadline: float


class WantSaid:
    """What a rank says it wants, and whether all of it was said."""

    def __init__(self, parts: Iterator[WantPart]) -> None:
        self._parts = parts
        self.all_of_it = False

    def parts(self) -> Iterator[WantPart]:
        """Yield it."""
        yield from self._parts
        self.all_of_it = True


class Restorer:
    """The restores of one Checkpointer; one at a time."""

    def __init__(
        self,
        *,
        config: Config,
        topology: Topology,
        link: Link,
        tracking: Tracking,
        copier: Copier,
        journal: Journal,
    ) -> None:
        self._config, self._topology, self._link = config, topology, link
        self._tracking, self._copier, self._journal = tracking, copier, journal

    def restore(self, question: Question, state: MutableMapping[str, Any] | None) -> Restored | None:
        """Restore; see `Checkpointer.restore`."""
        begun = time.monotonic()
        deadline = begun + question.timeout_s
        while True:
            attachment = self._link.attached(deadline=deadline)
            try:
                answer = self._ask(attachment, question, deadline)
                if not answer.found.found:
                    self._link.restored = RestoredStep()
                    self._nothing(question, answer.found)
                    return None
                restored = self._attempt(_Asked(attachment, question, state, deadline), answer)
            except SessionLostError:
                if time.monotonic() >= deadline:
                    raise
                continue
            if restored is not None:
                self._report(restored, time.monotonic() - begun)
                return restored

    def _nothing(self, question: Question, found: StoredPart.Found) -> None:
        if question.required or question.step is not None:
            asked = "snapshot" if question.step is None else f"step {question.step}"
            raise SnapshotNotFound(
                f"there is no {asked} of job {self._config.job!r} under {self._config.root}",
                hint="check the root; without required=True an empty one gives None",
                step=question.step,
                phase="restore",
            )
        for bad in found.fell_back_from:
            log.warning("step %d is there, and is not restored: it was found bad: %s", bad.step.step, bad.why.message)
        log.info("nothing to restore: job %r has no snapshot under %s yet", self._config.job, self._config.root)

    def _report(self, restored: Restored, seconds: float) -> None:
        for bad in restored.fell_back_from:
            log.warning("step %d was left for step %d: %s", bad.step, restored.step, bad.why)
        self._journal.emit(
            "restored",
            step=restored.step,
            timeline=restored.timeline,
            tier=restored.tier,
            bytes_by_tier=dict(restored.bytes_by_tier),
            seconds=round(seconds, 6),
        )

    def _ask(self, attachment: Attachment, question: Question, deadline: float) -> StoredParts:
        self._link.restored = None
        left = max(0.1, deadline - time.monotonic())
        request = RestoreRequest(
            session=attachment.session,
            step=question.step,
            raise_on_corrupt=question.on_corrupt == "raise",
            timeout_s=left,
            rollback=question.rollback,
        )
        answer = StoredParts()
        for part in self._link.stream(
            attachment, "Restore", request, timeout_s=left + _ANSWER_SLACK_S, phase="restore"
        ):
            answer.take(part)
        return answer

    def _attempt(self, asked: _Asked, answer: StoredParts) -> Restored | None:
        """Restore this step, or return None when another one was chosen meanwhile."""
        attachment, question, deadline, found = asked.attachment, asked.question, asked.deadline, answer.found
        try:
            self._check_mesh(found)
            stored = answer.stored(self._topology.place, self._topology.world)
            restoring = self._tracking.restoring(stored, asked.state, question.chosen, question.drop)
            missing, unexpected = restoring.targets.check(strict=question.strict, step=found.step)
            terms = terms_of(question, stored, restoring.targets, restoring.tracked)
        except CkptdError as error:
            self._refuse(attachment, found.attempt, error)
            raise
        except BaseException as failure:  # of a signal handler, too: the other ranks wait for this one
            text = f"preparing the restore raised {type(failure).__name__}: {failure}"
            self._refuse(attachment, found.attempt, CkptdError(text, rank=self._topology.rank, phase="restore"))
            raise
        fetched = self._want(attachment, found.attempt, restoring.targets, terms, deadline)
        if fetched is None:
            return None
        files = self._files(attachment, deadline, fetched)
        try:
            if stored.other_mesh:
                unused = unused_by_all(fetched.unused, stored, strict=question.strict, step=found.step)
                unexpected = restoring.targets.here(unused)
            failpoint("client.before_copy_in")
            # Some go into fresh memory: other ranks' own, which what is decoded may depend on, and what is to share
            # memory here. Checks come between these and the live tensors.
            self._fill([piece for piece in fetched.pieces if piece.wanted.is_fresh], files)
            restoring.decode({key: files.read(*place).numpy().tobytes() for key, place in fetched.objects.items()})
            missing, unexpected = restoring.with_extra(missing, unexpected, strict=question.strict, step=found.step)
            restoring.targets.check_shared()
            failpoint("client.before_fill")
            self._fill([piece for piece in fetched.pieces if not piece.wanted.is_fresh], files)
        except SessionLostError:
            raise  # asked again, and until then this rank is one that was not answered
        except BaseException as failure:  # of a signal handler, too: the other ranks wait for this one
            text = f"rank {self._topology.rank}: {type(failure).__name__}: {failure}"
            told = failure if isinstance(failure, CkptdError) else CkptdError(text, rank=self._topology.rank)
            self._done(attachment, found.attempt, told)
            raise
        finally:
            files.close()
        self._link.restored = RestoredStep(step=found.step, timeline=found.timeline)
        self._done(attachment, found.attempt, None)
        failpoint("client.before_load")
        restoring.load()
        return Restored(
            step=found.step,
            timeline=found.timeline,
            tier=found.tier,
            metrics=dict(found.metrics),
            tags=dict(found.tags),
            fell_back_from=tuple(
                BadStep(step=bad.step.step, timeline=bad.step.timeline, why=bad.why.message)
                for bad in found.fell_back_from
            ),
            missing=missing,
            unexpected=unexpected,
            left_out=restoring.targets.left_out(),
            bytes_by_tier=fetched.bytes_by_tier,
            dropped=question.drop,
        )

    def _check_mesh(self, found: StoredPart.Found) -> None:
        here, there = self._topology.to_wire(), found.mesh
        if not found.other_mesh and (found.world, there) != (self._topology.world, here):
            names = [
                " x ".join(f"{axis} {size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=False))
                for mesh in (there, here)
            ]
            raise InvalidRequest(
                f"step {found.step} was saved by {found.world} ranks ({names[0]}); here are {self._topology.world} "
                f"({names[1]}), and this node's agent cannot restore on another mesh",
                reason=error_pb2.REASON_LAYOUT_MISMATCH,
                hint="update the agent, or restore with the mesh that saved",
                step=found.step,
                phase="restore",
            )

    def _refuse(self, attachment: Attachment, attempt: int, error: CkptdError) -> None:
        """Tell all ranks that this one cannot use the step, best effort."""
        wire = error.to_wire()
        wire.rank = self._topology.rank
        part = WantPart(session=attachment.session, attempt=attempt, refused=wire)
        with contextlib.suppress(CkptdError):
            for _ in self._link.stream(attachment, "Want", iter([part]), timeout_s=_CALL_S, phase="restore"):
                pass

    def _want(
        self, attachment: Attachment, attempt: int, targets: Targets, terms: WantTerms, deadline: float
    ) -> Fetched | None:
        said = WantSaid(want_parts(attachment.session, attempt, targets.wanted, targets.objects, terms))
        parts = self._link.stream(
            attachment,
            "Want",
            said.parts(),
            timeout_s=max(0.1, deadline - time.monotonic()) + _ANSWER_SLACK_S,
            phase="restore",
        )
        fetched = Fetched(pieces=[], objects={}, bytes_by_tier={})
        try:
            for part in parts:
                if part.superseded:
                    return None
                take_part(part, targets.wanted, targets.objects, fetched)
        except CkptdError:
            raise
        except BaseException as failure:
            stopped = CkptdError(f"rank {self._topology.rank} was interrupted: {failure!r}", phase="restore")
            if said.all_of_it:  # then it may be that all have been answered: this one will not copy
                self._done(attachment, attempt, stopped)
            else:
                self._refuse(attachment, attempt, stopped)
            raise
        check_complete(fetched, targets.wanted, targets.objects)
        return fetched

    def _files(self, attachment: Attachment, deadline: float, fetched: Fetched) -> RestoredFiles:
        if attachment.channel.shared_memory:
            return SharedFiles(fetched.heads)
        return StreamedFiles(
            lambda request: self._link.stream(
                attachment,
                "ReadRestored",
                request,
                timeout_s=max(_CALL_S, deadline - time.monotonic()),
                phase="restore",
            ),
            attachment.session,
        )

    def _fill(self, pieces: list[FetchedPiece], files: RestoredFiles) -> None:
        held = [piece for piece in pieces if piece.nbytes]
        targets = [piece.target() for piece in held]
        read = read_all(files, [(piece.path, piece.at, piece.nbytes) for piece in held])
        sources = [piece.source(data) for piece, data in zip(held, read, strict=True)]
        with torch.no_grad():
            self._copier.copy(targets, sources)

    def _done(self, attachment: Attachment, attempt: int, error: CkptdError | None) -> None:
        """Say that the buffers may go, and what was restored. The answer does not change that, so nothing is raised.

        An agent that died meanwhile is waited for a moment: ranks that had no answer yet ask again, and are answered
        only once whoever is asked then knows that this one does not ask any more.
        """
        request = RestoreDoneRequest(attempt=attempt, restored=self._link.restored)
        if error is not None:
            request.error.CopyFrom(error.to_wire())
        with contextlib.suppress(CkptdError):
            try:
                request.session = attachment.session
                self._link.call(attachment, "RestoreDone", request, timeout_s=_CALL_S, phase="restore")
            except SessionLostError:
                again = self._link.attached(deadline=time.monotonic() + _TOLD_AGAIN_S)
                request.session = again.session
                self._link.call(again, "RestoreDone", request, timeout_s=_CALL_S, phase="restore")
