"""A session that reads one stored step, in rounds of bounded size, with an agent of its own.

Owns: the agent, the session, and one round: Restore, Want, copy, RestoreDone. Does not own: which rows a round asks for
(`opened_step`). Invariant: the run is read-only, so nothing is claimed or written; all rounds read the same step of the same
timeline; bytes reach a target only after the agent has verified them.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence

import torch

from ckptd.protos.agent_pb2 import RestoreDoneRequest, RestoreRequest, StoredPart

from .config import Config
from .copying import Copier
from .errors import CkptdError, SnapshotCorrupt, SnapshotNotFound
from .fetched import Fetched, FetchedPiece, check_complete, take_part, want_parts
from .handles import Ledger
from .link import Link
from .mesh import Topology
from .private_agent import PrivateAgent
from .restored_files import RestoredFiles, SharedFiles, StreamedFiles
from .stored_boxes import StoredBoxes
from .wanted import ObjectKey, Wanted

_CALL_S = 30.0
_ANSWER_SLACK_S = 20.0
_SPARE_BYTES = 256 << 20
"""Shared memory beside the window: whole chunks stand there while they are verified."""
PHASE = "load"


def lone_topology() -> Topology:
    """Return the place of a process that reads alone, whatever process group it may be in.

    Its only axis has a name that no job has: so every step comes as one of another mesh, each global tensor whole.
    """
    axis = f"reader-{secrets.token_hex(4)}"
    return Topology(rank=0, world=1, axes=(axis,), sizes=(1,), coordinate=(0,), members=(0,), store=None)


class StepSession:
    """Reads one step. Not thread-safe; close it.

    Args:
        config: Settings; `read_only`, `socket` and `embedded` are set here.
        step: A step, or None for the newest.
        window_bytes: What one round asks for at most.

    Attributes:
        found: What the agent said of the step.
        stored: What the step holds.
        read_bytes: Bytes the agent has brought so far, those of whole chunks.

    Raises:
        SnapshotNotFound: there is no such step, or none at all.
        CkptdError: see `loading.open_step`.
    """

    def __init__(self, config: Config, *, step: int | None, window_bytes: int) -> None:
        self.read_bytes = 0
        self._agent = PrivateAgent(
            room=2 * window_bytes + _SPARE_BYTES, deadline=time.monotonic() + config.connect_timeout_s
        )
        settings = {"socket": self._agent.socket, "embedded": False, "read_only": True, "takeover": False}
        self._config = config.model_copy(update=settings)
        self._topology = lone_topology()
        self._copier = Copier(config.copy_threads)
        self._link = Link(self._config, self._topology, Ledger(None))
        self.found = StoredPart.Found()
        try:
            self._link.open()
            self.stored = self._open(step)
        except BaseException:
            self.close()
            raise

    def _open(self, step: int | None) -> StoredBoxes:
        """Choose the step, and end the first round without asking for anything."""
        answer = StoredBoxes()
        with self._hinted():
            attachment = self._link.attached(deadline=time.monotonic() + _CALL_S)
            request = self._request(attachment.session, step)
            request.detail = RestoreRequest.BOXES
            for part in self._link.stream(attachment, "Restore", request, timeout_s=self._limit, phase=PHASE):
                answer.take(part)
            if not answer.found.found:
                raise SnapshotNotFound(
                    f"there is no step under {self._config.root}", hint="check the root", phase=PHASE
                )
            self.found = answer.found
            self._end_round(self._want(answer.found.attempt, [], []), answer.found.attempt)
        answer.finish()
        return answer

    def fetch(self, wanted: Sequence[Wanted], objects: Sequence[ObjectKey] = ()) -> dict[ObjectKey, bytes]:
        """Fill the views of `wanted`, and return encoded objects; one round.

        Raises:
            SnapshotCorrupt: bytes are not what was saved, or an object is gone. Views may be filled in part.
            Unavailable: the store cannot be reached, or the agent is gone.
        """
        with self._hinted():
            attempt = self._ask_again()
            fetched = self._want(attempt, list(wanted), list(objects))
            files = self._files(fetched)
            try:
                self._fill(fetched.pieces, files)
                return {key: files.read(*place).numpy().tobytes() for key, place in fetched.objects.items()}
            finally:
                files.close()
                self._end_round(fetched, attempt)

    @property
    def _limit(self) -> float:
        return self._config.restore_timeout_s + _ANSWER_SLACK_S

    def _request(self, session: str, step: int | None) -> RestoreRequest:
        limit = self._config.restore_timeout_s
        # What was read so far is of this step: another one is no way out.
        return RestoreRequest(session=session, step=step, raise_on_corrupt=True, timeout_s=limit)

    def _ask_again(self) -> int:
        attachment = self._link.attached(deadline=time.monotonic() + _CALL_S)
        request = self._request(attachment.session, self.found.step)
        request.detail = RestoreRequest.NOTHING
        found = StoredPart.Found()
        for part in self._link.stream(attachment, "Restore", request, timeout_s=self._limit, phase=PHASE):
            if part.HasField("found"):
                found = part.found
        if (found.step, found.timeline) != (self.found.step, self.found.timeline):
            raise CkptdError(
                f"step {self.found.step} of {self.found.timeline} was read, and then {found.step} of {found.timeline}",
                step=self.found.step,
                phase=PHASE,
            )
        attempt: int = found.attempt
        return attempt

    def _want(self, attempt: int, wanted: list[Wanted], objects: list[ObjectKey]) -> Fetched:
        attachment = self._link.attached(deadline=time.monotonic() + _CALL_S)
        messages = want_parts(attachment.session, attempt, wanted, objects)
        fetched = Fetched(pieces=[], objects={}, bytes_by_tier={})
        for part in self._link.stream(attachment, "Want", messages, timeout_s=self._limit, phase=PHASE):
            if part.superseded:
                raise CkptdError("another step was chosen while this one was read", step=self.found.step, phase=PHASE)
            take_part(part, wanted, objects, fetched)
        check_complete(fetched, wanted, objects)
        return fetched

    def _end_round(self, fetched: Fetched, attempt: int) -> None:
        self.read_bytes += sum(fetched.bytes_by_tier.values())
        with contextlib.suppress(CkptdError):
            attachment = self._link.attached(deadline=time.monotonic() + _CALL_S)
            request = RestoreDoneRequest(session=attachment.session, attempt=attempt)
            self._link.call(attachment, "RestoreDone", request, timeout_s=_CALL_S, phase=PHASE)

    def _files(self, fetched: Fetched) -> RestoredFiles:
        attachment = self._link.attached(deadline=time.monotonic() + _CALL_S)
        if attachment.channel.shared_memory:
            return SharedFiles(fetched.heads)
        return StreamedFiles(
            lambda request: self._link.stream(attachment, "ReadRestored", request, timeout_s=self._limit, phase=PHASE),
            attachment.session,
        )

    def _fill(self, pieces: Sequence[FetchedPiece], files: RestoredFiles) -> None:
        held = [piece for piece in pieces if piece.nbytes]
        targets = [piece.target() for piece in held]
        sources = [piece.source(files.read(piece.path, piece.at, piece.nbytes)) for piece in held]
        with torch.no_grad():
            self._copier.copy(targets, sources)

    @contextlib.contextmanager
    def _hinted(self) -> Iterator[None]:
        """Say of a corrupt step what else it may be: the agent speaks of falling back, which a reader does not do."""
        try:
            yield
        except SnapshotCorrupt as error:
            error.hint = (
                "its job may have dropped the step meanwhile (`ckptd ls`); else `ckptd verify` lists what is bad"
            )
            raise

    def close(self) -> None:
        """End the session and its agent; idempotent."""
        self._link.close()
        self._copier.close()
        self._agent.close()
