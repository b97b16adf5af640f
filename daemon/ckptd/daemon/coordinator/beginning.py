"""How a step begins: all ranks have asked, a slot is free, the layouts make one plan; go, skip or one error, for all ranks alike.

Pure. Does not own: what becomes of a step that has begun (`saving`). Invariant: nothing was copied before the answer, and
the answer is the same for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from ckptd.daemon import keys
from ckptd.daemon.coordinator.effects import Compute, Procedure, Wait
from ckptd.daemon.coordinator.saving import note_told
from ckptd.daemon.coordinator.state import BeginCall, Over, Phase, State, StepRun
from ckptd.daemon.errors import PlanError, make_error
from ckptd.daemon.keys import StepId
from ckptd.daemon.plan import Plan, plan, plan_digest
from ckptd.protos import error_pb2, segmented
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeMessage
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import IndexRef, StepRef

SEGMENTED_SHARE = 16
"""Replicas are compared by a segmented function where their bytes are at least one part in so many of what is written."""


def on_begin(state: State, call: NodeMessage.Begin) -> None:
    """Note that a rank asks to save; `begin_is_due` says when all have. Asked again after a reconnect: answered again."""
    run = state.steps.get(call.step)
    if run is not None and run.go is not None:
        state.send(state.ranks[call.rank].node, run.go)
        return
    why = state.torn.get(call.step) or _unheard(state, call)
    if why is not None:
        refuse_begin(state, call.rank, call.step, why)
        return
    limit = state.lead.options.begin_timeout_s
    timeout = min(limit, call.timeout_s) if call.timeout_s > 0 else limit
    state.begins[call.rank] = BeginCall(
        step=call.step,
        layout_digest=bytes(call.layout_digest),
        deadline=state.now + timeout,
        segmented_algorithms=tuple(call.segmented_algorithms),
        prefers_segmented=call.prefers_segmented,
    )
    _ask_layout(state, call.rank)  # what was asked for may have been lost with the connection


def _unheard(state: State, call: NodeMessage.Begin) -> Error | None:
    """Return how the step ended, where the answer may have been lost with a session: the rank has attached since."""
    over, known = state.over.get(call.step), state.ranks.get(call.rank)
    if over is None or known is None or call.rank not in over.told or over.told[call.rank] is known:
        return None
    over.told[call.rank] = known
    return over.why


def refuse_begin(state: State, rank: int, step: int, why: Error) -> None:
    """Answer one rank alone: it asks again, its agent having died, for a step that is over; the others never will."""
    answer = CoordinatorMessage.BeginDecision(step=step, timeline=str(state.timeline or ""), go=False, error=why)
    state.send(state.ranks[rank].node, CoordinatorMessage(begin=answer))


def forget_ended(state: State) -> None:
    """All ranks have asked for something else: none of them asks any more for a step that is over."""
    state.torn.clear()
    state.over.clear()


def begin_is_due(state: State) -> bool:
    """Say whether the pending begins can be answered: all ranks asked, or somebody waited too long or cannot come."""
    if not state.begins:
        return False
    if not state.missing(state.begins):
        return True
    if any(call.step in state.refused_begins for call in state.begins.values()):
        return True
    if any(not rank.attached for rank in state.ranks.values()):
        return True
    return state.now >= min(call.deadline for call in state.begins.values())


def admit(state: State) -> Procedure:
    """Answer the pending begins: one answer for all ranks.

    Whatever it waits for, a rank or its node may be gone by then, have failed the step, or ask for another: each wait ends with
    that, and the begins are looked at once more before go is told on them.
    """
    if _is_answered(state):
        return
    step = next(iter(state.begins.values())).step
    deadline = min(call.deadline for call in state.begins.values())

    def wait(until: Callable[[], bool]) -> Wait:
        return Wait(until=lambda: until() or _is_off(state), deadline=deadline)

    if state.phase is Phase.RESOLVED:
        state.start_wanted = True
        yield wait(lambda: state.phase is Phase.RUNNING)
        if _is_answered(state):
            return
    if state.phase is not Phase.RUNNING:
        _answer_begin(state, error=_late(state, step))
        return
    slots = max(1, state.lead.options.slots)
    if len(state.steps) >= slots and state.lead.options.wait_when_busy:
        yield wait(lambda: len(state.steps) < slots)
        if _is_answered(state):
            return
    if len(state.steps) >= slots:
        _answer_begin(state, skipped=_busy(state, step))
        return
    while state.plan is None or state.plan.digest != plan_digest(_layout_digests(state)):
        digests = _layout_digests(state)
        state.layouts_asked = {digest for digest in digests.values() if digest not in state.layouts}
        for rank in digests:
            _ask_layout(state, rank)
        known = yield wait(partial(_are_known_or_others, state, digests))
        state.layouts_asked = set()
        if _is_answered(state):
            return
        if digests != _layout_digests(state):
            continue
        if not known:
            unknown = [rank for rank, digest in digests.items() if digest not in state.layouts]
            message = f"step {step}: the layouts of ranks {unknown} did not arrive in time"
            _answer_begin(
                state,
                error=make_error(error_pb2.REASON_DEADLINE_EXCEEDED, message, step=step, ranks=unknown, phase="begin"),
            )
            return
        layouts = {rank: state.layouts[digest] for rank, digest in digests.items()}
        try:
            state.plan = yield Compute(function=plan, arguments=(layouts, digests))
        except PlanError as wrong:
            wrong.error.step = step
            _answer_begin(state, error=wrong.error)
            return
        state.layouts = {digest: state.layouts[digest] for digest in digests.values()}
        state.log("planned", step=step, plan=state.plan.digest.hex())
        if _is_answered(state):
            return
    _go(state, next(iter(state.begins.values())).step)


def _ask_layout(state: State, rank: int) -> None:
    digest = state.begins[rank].layout_digest
    if digest in state.layouts_asked and digest not in state.layouts:
        need = CoordinatorMessage.NeedLayout(rank=rank, digest=digest)
        state.send(state.ranks[rank].node, CoordinatorMessage(need_layout=need))


def _are_known_or_others(state: State, digests: dict[int, bytes]) -> bool:
    return all(digest in state.layouts for digest in digests.values()) or digests != _layout_digests(state)


def _layout_digests(state: State) -> dict[int, bytes]:
    return {rank: call.layout_digest for rank, call in state.begins.items()}


def _is_off(state: State) -> bool:
    """Say whether what the begins wait for is of no use to them any more."""
    return not begin_is_due(state) or _refusal(state) is not None


def _is_answered(state: State) -> bool:
    """Answer the begins if they are refused; True as well where they are to be looked at anew, some rank having to ask again."""
    if not begin_is_due(state):
        return True
    error = _refusal(state)
    if error is not None:
        _answer_begin(state, error=error)
    return error is not None


def _go(state: State, step: int) -> None:
    assert state.plan is not None
    base = _base(state)
    compared_in = state.schedule.begin(state.plan.digest)
    state.steps[step] = StepRun(
        step=step,
        plan_digest=state.plan.digest,
        base=base,
        begun_at=state.now,
        round=state.schedule.round,
        compared_in=None if compared_in is None else StepRef(step=compared_in, timeline=str(state.timeline)),
        deadline=state.now + state.lead.options.commit_timeout_s,
        told=dict(state.ranks),
    )
    forget_ended(state)
    state.last_begun = step
    state.refused_begins = {number: one for number, one in state.refused_begins.items() if number > step}
    indexes: list[IndexRef] = []
    if base is not None:
        known = state.listed.decisions.get((base.timeline, base.step))
        indexes = list(known.indexes) if known is not None else []
    decision = CoordinatorMessage.BeginDecision(
        step=step,
        timeline=str(state.timeline),
        go=True,
        plan_digest=state.plan.digest,
        compared_in=state.steps[step].compared_in,
        segmented_algorithm=segmented_algorithm(state.begins.values(), state.plan) if compared_in is None else "",
    )
    if base is not None and indexes:
        decision.base.CopyFrom(base)
        decision.base_indexes.extend(indexes)
    else:
        state.steps[step].base = None
    state.begins.clear()
    state.log("begun", step=step, compared=compared_in is None, segmented=decision.segmented_algorithm)
    state.steps[step].go = CoordinatorMessage(begin=decision)
    state.broadcast(CoordinatorMessage(begin=decision))


def _base(state: State) -> StepRef | None:
    """Return the newest listed step that will be listed also by the record that is being written, if one is (R3, R4).

    That one was made before this step began, so it does not keep the base for this step's sake; a base that it drops would be no
    base any more when this step is decided.
    """
    if state.writing is None:
        return state.listed.newest()
    stay = {StepId.of(ref) for ref in state.writing}
    return next((ref for ref in reversed(state.listed.keeps) if StepId.of(ref) in stay), None)


def segmented_algorithm(calls: Collection[BeginCall], plan: Plan) -> str:
    """Return what replicas are compared by in a step that compares them; "": xxh3-128.

    Where one rank would rather not bring its replicas to the host, and all ranks and their agents know the function. For a
    few small replicas beside sharded state it is not worth what agents must read for it.
    """
    if not any(call.prefers_segmented for call in calls):
        return ""
    if not plan.replica_bytes or plan.replica_bytes * SEGMENTED_SHARE < plan.nbytes - plan.replica_bytes:
        return ""
    known = (name for name in segmented.KNOWN if all(name in call.segmented_algorithms for call in calls))
    return next(known, "")


def _refusal(state: State) -> Error | None:
    steps = sorted({call.step for call in state.begins.values()})
    step = steps[0]
    if state.phase is Phase.ENDED:
        return state.fenced or state.refusal or _late(state, step)
    if state.lead.options.read_only:
        return make_error(
            error_pb2.REASON_NOT_ALLOWED,
            f"step {step}: this run is read-only",
            hint="start without read_only=True to save",
            step=step,
            phase="begin",
        )
    for number in steps:
        if number in state.refused_begins:
            return state.refused_begins[number].error
    missing = state.missing(state.begins)
    gone = [rank for rank, known in state.ranks.items() if not known.attached]
    if gone:
        return make_error(
            error_pb2.REASON_RANK_FAILED, f"step {step}: ranks {gone} are gone", step=step, ranks=gone, phase="begin"
        )
    if missing:
        return make_error(
            error_pb2.REASON_RANKS_MISSING,
            f"step {step}: ranks {missing} did not call save in time (ranks {sorted(state.begins)} did)",
            hint="save() must be called by every rank",
            step=step,
            ranks=missing,
            phase="begin",
        )
    if len(steps) > 1:
        by_step = {number: sorted(r for r, call in state.begins.items() if call.step == number) for number in steps}
        return make_error(
            error_pb2.REASON_RANKS_DISAGREE,
            "ranks save different steps: " + ", ".join(f"step {n} on ranks {ranks}" for n, ranks in by_step.items()),
            hint="every rank must save the same step: count steps alike on all of them",
            ranks=state.begins,
            phase="begin",
        )
    if step > keys.MAX_STEP:
        return make_error(
            error_pb2.REASON_INVALID_STEP,
            f"step {step} is not in 0..{keys.MAX_STEP}",
            hint="number steps by optimizer steps, not by tokens or time",
            step=step,
            phase="begin",
        )
    if step <= state.last_begun:
        return make_error(
            error_pb2.REASON_INVALID_STEP,
            f"step {step} was already used: step {state.last_begun} of this run was begun before",
            hint="steps of one run must ascend, each number once",
            step=step,
            phase="begin",
        )
    return None


def _late(state: State, step: int) -> Error:
    return make_error(
        error_pb2.REASON_DEADLINE_EXCEEDED,
        f"step {step}: the timeline did not start in time ({state.phase.value})",
        step=step,
        phase="begin",
    )


def _busy(state: State, step: int) -> Error:
    return make_error(
        error_pb2.REASON_BUSY,
        f"step {step} skipped on all ranks: steps {sorted(state.steps)} are still being uploaded",
        hint="save less often, add slots, or set wait_when_busy",
        step=step,
        phase="begin",
    )


def _answer_begin(state: State, *, error: Error | None = None, skipped: Error | None = None) -> None:
    steps = {call.step for call in state.begins.values()}
    for rank, call in state.begins.items():
        note_told(state, rank, call.step)
    state.begins.clear()
    if skipped is not None:
        forget_ended(state)
        state.over = {step: Over(why=skipped, told=dict(state.ranks)) for step in steps}
        state.last_begun = max(state.last_begun, *steps)
        state.log("skipped", steps=sorted(steps))
    for step in steps:
        answer = CoordinatorMessage.BeginDecision(step=step, timeline=str(state.timeline or ""), go=False)
        answer.error.CopyFrom(error or skipped or Error())
        state.broadcast(CoordinatorMessage(begin=answer))
