"""This rank's session with its agent, kept up across broken connections and restarts of the agent.

Owns: leading or finding the coordinator, attaching, the thread that reads events, deadlines of calls, and what a
forked child may do (nothing). Does not own: what is saved or restored. Invariant: every call ends by its deadline;
after `Fenced` or a refusal every call raises that.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import psutil

from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import (
    AttachRequest,
    DetachRequest,
    Event,
    RestoredStep,
    StepInFlight,
)
from ckptd.protos.failpoints import failpoint

from . import embedded
from .aside import aside, settle
from .channel import AgentChannel, connect, error_of, is_lost, was_answered
from .config import Config
from .errors import CkptdError, InvalidRequest, Unavailable, from_wire
from .handles import Ledger
from .leading import Leader, run_options
from .mesh import Topology
from .store_exchange import StoreExchange

_RECONNECT_S = (0.1, 2.0)
_ATTACHED_S = 30.0
"""An agent that answered must give a session within this time, in seconds."""
_RESETTLE_S = 2.0
"""Within this time, in seconds, the event stream tells that the agent has given a session up."""


class SessionLostError(Unavailable):
    """The session of a call is gone; a new one may come. Callers begin again, or let it out as `Unavailable`."""


@dataclass(frozen=True, eq=False, slots=True)
class Attachment:
    """A session on a channel."""

    session: str
    channel: AgentChannel


class Link:
    """The session of one Checkpointer. Calls may come from any thread of the process that made it."""

    def __init__(self, config: Config, topology: Topology, ledger: Ledger) -> None:
        self._config = config
        self._topology = topology
        self._ledger = ledger
        self.exchange = StoreExchange(topology, root=config.root, job=config.job)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._attachment: Attachment | None = None
        self._fatal: CkptdError | None = None
        self._closing = False
        self._timeline = ""
        self.restored: RestoredStep | None = None
        """What this rank restored last; None once it asks for another step, or begins to save."""
        self._stream: Any = None
        self._invitation = AttachRequest()
        self._generation = -1
        self._leader = Leader(config, topology)
        self._thread: threading.Thread | None = None
        _links.add(self)

    @property
    def timeline(self) -> str:
        """The run's timeline, "" until it has one."""
        return self._timeline

    @property
    def is_parents(self) -> bool:
        """Whether this is a forked child, and the session the parent's."""
        return os.getpid() != self._pid

    # ------------------------------------------------------------ opening

    def open(self) -> None:
        """Attach this rank; returns when the agent has taken it in.

        Raises:
            Unavailable: no agent, or rank 0 did not come.
            InvalidRequest: the root, the job or the versions do not fit, or another run is alive.
        """
        deadline = time.monotonic() + self._config.connect_timeout_s
        try:
            channel = connect(self._config, deadline=deadline)
            self._meet(channel)
        except BaseException as failure:  # an interrupt, too: the others wait for rank 0
            if self._topology.rank == 0 and self._generation < 0:
                self.exchange.refuse(_told(failure), generation=0)
            raise
        try:
            self._thread = threading.Thread(target=self._read_events, args=(channel,), name="ckptd-events", daemon=True)
            self._thread.start()
            self.attached(deadline=time.monotonic() + _ATTACHED_S)
        except BaseException:  # an interrupt, too: a session that nobody holds would count as a rank that is there
            self.close(detach=False)
            raise

    def _meet(self, channel: AgentChannel) -> None:
        """Lead the run (rank 0) and tell the others, or find out who leads."""
        if self._topology.rank == 0:
            self._lead(channel)
        elif self._generation < 0:
            limit = self._config.connect_timeout_s + self._config.attach_timeout_s
            failpoint("client.before_invitation")
            self._generation, self._invitation = self.exchange.wait(limit)
        else:
            newer = self.exchange.newest(after=self._generation)
            if newer is not None:
                self._generation, self._invitation = newer

    def _lead(self, channel: AgentChannel) -> None:
        """Lead, and tell the others if the coordinator is elsewhere than before."""
        invitation = self._leader.lead(channel, timeline=self._timeline)
        if invitation.endpoint != self._invitation.endpoint:
            self._invitation = invitation
            self._generation += 1
            failpoint("client.before_publish")
            self.exchange.publish(invitation, generation=self._generation)

    def _attach_request(self, channel: AgentChannel) -> AttachRequest:
        return AttachRequest(
            root=self._config.root,
            job=self._config.job,
            run_id=self._invitation.run_id,
            rank=self._topology.rank,
            world=self._topology.world,
            mesh=self._topology.to_wire(),
            coordinate=self._topology.coordinate,
            pid=self._pid if channel.shares_pids else 0,
            endpoint=self._invitation.endpoint,
            credentials=self._invitation.credentials,
            options=run_options(self._config),
            shared_memory=channel.shared_memory,
            process=f"{self._pid}:{psutil.Process(self._pid).create_time()}",
            restored=self.restored,
            in_flight=[
                StepInFlight(step=handle.step, timeline=handle.timeline)
                for handle in self._ledger.in_flight()
                if handle.timeline
            ],
        )

    # ------------------------------------------------------------ events

    def _read_events(self, channel: AgentChannel) -> None:
        """Read events until the end, attaching again whenever the stream breaks. Runs in its own thread."""
        pause = _RECONNECT_S[0]
        current: AgentChannel | None = channel
        while not self._closing:
            try:
                if current is None:
                    current = connect(self._config, deadline=time.monotonic() + self._config.connect_timeout_s)
                    self._meet(current)
                failpoint("client.before_Attach")
                self._stream = current.stub.Attach(self._attach_request(current))
                if self._closing:  # meanwhile: who closes may not have seen the stream
                    self._stream.cancel()
                for event in self._stream:
                    pause = _RECONNECT_S[0]
                    self._on_event(event, current)
            except grpc.RpcError as failure:
                error = error_of(failure, phase="register")
                if not is_lost(failure) and not isinstance(error, Unavailable):
                    self._end(error)
            except CkptdError as error:
                if not isinstance(error, Unavailable):
                    self._end(error)
            except Exception as error:  # the thread's outermost handler: a caller must hear of it
                self._end(CkptdError(f"the event thread failed: {type(error).__name__}: {error}"))
            self._lose()
            if current is not None:
                current.close()
                current = None
            embedded.reap()
            with self._changed:
                if self._closing or self._fatal is not None:
                    return
                self._changed.wait_for(lambda: self._closing, pause)
            pause = min(2 * pause, _RECONNECT_S[1])

    def _on_event(self, event: Event, channel: AgentChannel) -> None:
        kind = event.WhichOneof("kind")
        failpoint("client.heard_", str(kind))
        if kind == "attached":
            with self._changed:
                self._attachment = Attachment(event.attached.session, channel)
                self._changed.notify_all()
            failpoint("client.after_Attach")
        elif kind == "step":
            self._ledger.on_step(event.step)
        elif kind == "timeline":
            self._timeline = event.timeline
        elif kind == "fenced":
            self._end(from_wire(event.fenced))
        elif kind == "failed":
            self._end(from_wire(event.failed))

    def _lose(self) -> None:
        with self._changed:
            self._attachment = None
            self._changed.notify_all()

    def _end(self, error: CkptdError) -> None:
        """Nothing more can come of this run."""
        with self._changed:
            if self._fatal is None:
                self._fatal = error
            self._changed.notify_all()
        self._ledger.fail_all(error)

    # ------------------------------------------------------------ calls

    def check(self) -> None:
        """Refuse to go on where nothing can come of it.

        Raises:
            Fenced: a newer run has taken over.
            InvalidRequest: the run was refused, the Checkpointer is closed, or this is a forked child.
        """
        if self.is_parents:
            raise InvalidRequest(
                f"this Checkpointer belongs to process {self._pid}; process {os.getpid()} was forked from it",
                hint="save and restore in the training process only, or make a Checkpointer of its own after the fork",
            )
        if self._fatal is not None:
            raise type(self._fatal).like(self._fatal) from self._fatal
        if self._closing:
            raise InvalidRequest("this Checkpointer is closed", hint="make a new one")

    def attached(self, *, deadline: float) -> Attachment:
        """Return the present session, waiting for one.

        Raises:
            CkptdError: see `check`.
            Unavailable: there is none by `deadline` (`time.monotonic`, seconds).
        """
        self.check()
        with self._changed:
            ready = self._changed.wait_for(
                lambda: self._attachment or self._fatal or self._closing, max(0.0, deadline - time.monotonic())
            )
            attachment = self._attachment
        self.check()
        if not ready or attachment is None:
            raise Unavailable(
                f"rank {self._topology.rank} has no session with the agent on {self._config.socket_path}",
                reason=error_pb2.REASON_DEADLINE_EXCEEDED,
                hint="see the agent's log; it may have ended",
                rank=self._topology.rank,
                phase="register",
            )
        return attachment

    def call(self, attachment: Attachment, method: str, request: Any, *, timeout_s: float, phase: str) -> Any:
        """Call the agent and return its reply.

        Args:
            attachment: The session that `request` names.
            method: Name of the RPC.
            request: Message, or an iterator of messages.
            timeout_s: Seconds.
            phase: Said in errors.

        Raises:
            SessionLostError: the session is gone; nothing is known of the call.
            CkptdError: what the agent answered.
        """
        self.check()
        failpoint("client.before_", method)
        try:
            reply = aside(lambda: getattr(attachment.channel.stub, method)(request, timeout=timeout_s))
        except grpc.RpcError as failure:
            raise self._failure(failure, attachment, method, phase) from failure
        except ValueError as closed:  # grpc: "Cannot invoke RPC on closed channel!"
            raise SessionLostError("the connection to the agent was closed", phase=phase) from closed
        failpoint("client.after_", method)
        return reply

    def stream(
        self, attachment: Attachment, method: str, request: Any, *, timeout_s: float, phase: str
    ) -> Iterator[Any]:
        """Call the agent and yield the parts of its answer; see `call`."""
        self.check()
        failpoint("client.before_", method)
        try:
            yield from getattr(attachment.channel.stub, method)(request, timeout=timeout_s)
        except grpc.RpcError as failure:
            raise self._failure(failure, attachment, method, phase) from failure
        except ValueError as closed:
            raise SessionLostError("the connection to the agent was closed", phase=phase) from closed
        failpoint("client.after_", method)

    def _failure(self, failure: grpc.RpcError, attachment: Attachment, method: str, phase: str) -> CkptdError:
        error = error_of(failure, phase=phase)
        if self._fatal is not None:
            return self._fatal
        if error.reason == error_pb2.REASON_DEADLINE_EXCEEDED and not was_answered(failure):
            # So nobody has said who waits for what.
            rank, where = self._topology.rank, str(self._config.socket_path)
            error.message = f"rank {rank}: the agent on {where} did not answer {method} within the deadline"
            error.hint = error.hint or "see whether its process stands still"
            error.rank, error.key = rank, where
        if is_lost(failure):
            return SessionLostError(error.message, phase=phase)
        if error.reason == error_pb2.REASON_UNAVAILABLE:
            # Of the store, say; or the agent does not know the session. Then the event stream breaks too.
            with self._changed:
                moved = self._changed.wait_for(lambda: self._attachment is not attachment, _RESETTLE_S)
            if moved:
                return SessionLostError(error.message, hint=error.hint, phase=phase)
        return error

    # ------------------------------------------------------------ the end

    def close(self, *, detach: bool = True, timeout_s: float = 5.0) -> None:
        """End the session: in order (`detach`), or like a death. Idempotent; does nothing in a forked child."""
        if self.is_parents or self._closing:
            return
        attachment = self._attachment
        with self._changed:
            # Before Detach: the stream ends with it, and must not be opened again.
            self._closing = True
            self._changed.notify_all()
        try:
            if detach and attachment is not None and self._fatal is None:
                failpoint("client.before_Detach")
                with contextlib.suppress(grpc.RpcError, ValueError):  # the agent is gone, and so is the session
                    attachment.channel.stub.Detach(DetachRequest(session=attachment.session), timeout=timeout_s)
                failpoint("client.after_Detach")
        finally:
            # After an interrupt, too: else the agent would have a rank that is there and never comes.
            if self._stream is not None:
                self._stream.cancel()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(timeout_s)

    def _leave_to_parent(self) -> None:
        """Forget everything in a forked child, without ending anything: it is the parent's."""
        _parents_own.append((self._attachment, self._stream, self._thread))
        self._attachment, self._stream, self._thread = None, None, None
        # The lock may have been held by a thread that does not exist here.
        self._changed = threading.Condition()


def _told(failure: BaseException) -> CkptdError:
    return (
        failure if isinstance(failure, CkptdError) else Unavailable(f"rank 0 was interrupted: {type(failure).__name__}")
    )


_links: weakref.WeakSet[Link] = weakref.WeakSet()
_parents_own: list[object] = []
"""In a forked child: what must not be finalized, since that would talk over the parent's connection."""


def close_all() -> None:
    """End every session that is left, like a death: at the interpreter's end, before its threads may not run any more.

    Also those of Checkpointers that were dropped without `close`: their threads hold on to them. A thread that comes back
    from C++ (the job's store, say) while the interpreter ends would abort the process: Python unwinds it out of its wait
    for the GIL, which no C++ destructor survives.
    """
    for link in list(_links):
        link.close(detach=False)
    settle()


def _after_fork_in_child() -> None:
    for link in list(_links):
        link._leave_to_parent()  # noqa: SLF001 - same module


def register_fork_hook(register: Callable[..., None] | None = None) -> None:
    """Make every link step aside in forked children, where processes fork."""
    chosen = register or getattr(os, "register_at_fork", None)
    if chosen is not None:
        chosen(after_in_child=_after_fork_in_child)


register_fork_hook()
