"""The coordinator of one timeline: `apply(event, now) -> effects`.

Pure: no I/O, no clock, no threads. Two lanes run protocol procedures: *history* (claim, resolve, start record, restore,
decisions: strictly one after the other) and *admission* (begins), so that saves are answered while a decision waits for a slow
store. Everything else is noting what nodes say (`nodes`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

from ckptd.daemon.comparisons import parse_policy
from ckptd.daemon.coordinator import beginning, nodes, restoring, saving, starting
from ckptd.daemon.coordinator.comparing import Schedule
from ckptd.daemon.coordinator.effects import (
    Close,
    Do,
    Done,
    Effect,
    Event,
    LayoutReceived,
    NodeLost,
    NodeSaid,
    Procedure,
    ProcedureStopped,
    Superseded,
    Tick,
    Wait,
)
from ckptd.daemon.coordinator.state import Phase, State
from ckptd.daemon.errors import make_error
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import LeadRequest
from ckptd.protos.coordinator_pb2 import CoordinatorMessage

HISTORY = "history"
ADMISSION = "admission"


class Coordinator:
    """One process's claim on one timeline. See the module docstring; drive it from one thread."""

    def __init__(
        self,
        lead: LeadRequest,
        *,
        incarnation: str,
        endpoint: str,
        certificate_sha256: str,
        nonce: Callable[[], str],
        stamp: Callable[[], str],
        now: float,
        versions: dict[str, str] | None = None,
        node_grace_s: float = 30.0,
    ) -> None:
        self.state = State(
            lead=lead,
            incarnation=incarnation,
            endpoint=endpoint,
            certificate_sha256=certificate_sha256,
            nonce=nonce,
            stamp=stamp,
            started_at=now,
            versions=versions or {},
            schedule=Schedule(every=parse_policy(lead.options.verify_replicas)),
            node_grace_s=node_grace_s,
            now=now,
        )
        self._lanes: dict[str, Procedure | None] = {HISTORY: None, ADMISSION: None}
        self._waits: dict[str, Wait] = {}
        self._closed = False

    def apply(self, event: Event, now: float) -> list[Effect]:
        """Take one event, return what is to be done. `now` is monotonic seconds and never goes back."""
        state = self.state
        state.now = max(state.now, now)
        if isinstance(event, NodeSaid):
            nodes.on_node(state, event.node, event.message)
        elif isinstance(event, NodeLost):
            nodes.on_lost(state, event.node, event.incarnation)
        elif isinstance(event, LayoutReceived):
            state.layouts[event.digest] = event.rows
        elif isinstance(event, Done):
            self._resume(event.lane, event.result, event.error)
        elif isinstance(event, Superseded):
            self._supersede()
        else:
            assert isinstance(event, Tick)
        self._time()
        self._advance()
        effects, state.effects = state.effects, []
        return effects

    def _supersede(self) -> None:
        """A newer run has its claim: what the look at the claims would find, sooner."""
        state = self.state
        state.superseded = True
        if state.phase is not Phase.ENDED:
            state.phase = Phase.ENDED
            state.fenced = make_error(
                error_pb2.REASON_FENCED,
                f"timeline {state.timeline or '(none yet)'} was taken over by a newer run on the same agent",
                hint="this process belongs to an older run of the job; it must end and not be restarted",
            )
            state.log("fenced", by="a newer run on this agent")
            state.broadcast(CoordinatorMessage(fenced=state.fenced))

    # ------------------------------------------------------------ procedures

    def _resume(self, lane: str, result: object, error: BaseException | None) -> None:
        procedure = self._lanes[lane]
        if procedure is None:
            return
        try:
            operation = procedure.throw(error) if error is not None else procedure.send(result)
        except (StopIteration, ProcedureStopped):
            self._lanes[lane] = None
            return
        except Exception as bug:
            self._lanes[lane] = None
            if self.state.phase is not Phase.ENDED:
                text = f"coordinator: {type(bug).__name__}: {bug}"
                starting.refuse(self.state, make_error(error_pb2.REASON_INTERNAL, text))
            self.state.log("internal_error", error="".join(traceback.format_exception(bug)))
            return
        if isinstance(operation, Wait):
            self._waits[lane] = operation
        else:
            self.state.effects.append(Do(lane=lane, operation=operation))

    def _start(self, lane: str, procedure: Procedure) -> None:
        self._lanes[lane] = procedure
        self._resume(lane, None, None)

    def _advance(self) -> None:
        """Run what can run until nothing moves any more."""
        moved = True
        while moved:
            moved = False
            for lane in self._lanes:
                wait = self._waits.get(lane)
                if wait is not None:
                    held = wait.until()
                    if held or (wait.deadline is not None and self.state.now >= wait.deadline):
                        del self._waits[lane]
                        self._resume(lane, held, None)
                        moved = True
                elif self._lanes[lane] is None:
                    procedure = self._next(lane)
                    if procedure is not None:
                        self._start(lane, procedure)
                        moved = True

    def _next(self, lane: str) -> Procedure | None:
        state = self.state
        if lane == ADMISSION:
            waiting = state.phase in (Phase.GATHERING, Phase.STARTING)
            return beginning.admit(state) if not waiting and beginning.begin_is_due(state) else None
        if state.phase is Phase.GATHERING:
            if state.lead.timeline and not state.has_looked:
                return starting.look_for_newer_run(state)
            complete = not state.missing(state.ranks) and all(rank.attached for rank in state.ranks.values())
            return starting.start(state) if complete else None
        if restoring.restore_is_due(state):
            return restoring.restore(state)
        if state.phase is Phase.RESOLVED and state.start_wanted and not state.lead.options.read_only:
            return starting.write_start_record(state, origin=state.listed.newest(), rollback=False)
        run = saving.decision_is_due(state)
        return saving.decide(state, run) if run is not None else None

    # ------------------------------------------------------------ time

    def _time(self) -> None:
        state = self.state
        if state.phase is Phase.GATHERING and state.now >= state.started_at + state.lead.options.attach_timeout_s:
            missing = state.missing(number for number, rank in state.ranks.items() if rank.attached)
            if missing:
                error = make_error(
                    error_pb2.REASON_RANKS_MISSING,
                    f"ranks {missing} of {state.world} did not attach within {state.lead.options.attach_timeout_s:g} s",
                    ranks=missing,
                    phase="register",
                )
                starting.refuse(state, error)
        nodes.give_up_lost(state)
        self._close_when_over()

    def _close_when_over(self) -> None:
        state = self.state
        if not self._closed and self._is_over():
            self._closed = True
            ended = "refused" if state.refusal else "all ranks have ended"
            state.effects.append(Close(why="fenced" if state.fenced else ended))

    def _is_over(self) -> bool:
        state = self.state
        # One that ended before a rank had come has to tell those that will.
        is_known = bool(state.ranks) or state.now >= state.started_at + state.lead.options.attach_timeout_s
        if state.superseded or (state.phase is Phase.ENDED and state.live_ranks() == 0 and is_known):
            return True
        idle = not state.steps and self._lanes[HISTORY] is None
        return bool(state.ranks) and state.live_ranks() == 0 and idle
