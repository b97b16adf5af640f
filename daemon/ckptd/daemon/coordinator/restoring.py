"""Restore: one step for all ranks, verified on every node before any target is touched.

Pure. Invariant: the start record is written when every rank's bytes are found and verified and all their wishes fit
together (`terms`), and before any rank is told to copy; a step found bad is quarantined and the next older listed one is
tried, unless the caller forbade it; when steps are listed but none is good, the answer is an error each time, never
"nothing there".
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptd.daemon import history, records
from ckptd.daemon.coordinator import starting
from ckptd.daemon.coordinator.beginning import forget_ended
from ckptd.daemon.coordinator.effects import Get, Procedure, Wait
from ckptd.daemon.coordinator.restore_words import tell
from ckptd.daemon.coordinator.state import Attempt, Phase, RestoreCall, State
from ckptd.daemon.errors import DaemonError, make_error
from ckptd.daemon.wire_errors import wire_error
from ckptd.protos import error_pb2
from ckptd.protos.coordinator_pb2 import CoordinatorMessage
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Committed, Quarantined, StepRef

_SHOWN = 5


def restore_is_due(state: State) -> bool:
    """Say whether the pending restores can be answered."""
    if not state.restores or state.phase in (Phase.GATHERING, Phase.STARTING):
        return False
    if not state.missing(state.restores) or any(not rank.attached for rank in state.ranks.values()):
        return True
    if _restored_by_others(state) is not None:
        return True
    return state.now >= min(call.deadline for call in state.restores.values())


def _restored_by_others(state: State) -> tuple[str, int] | None:
    """Return what all ranks that do not ask have restored, where those that ask want just that; None otherwise.

    The coordinator that answered them died before all had their answer: the others will not ask again, unless one that asks
    had its answer too. Timeline and step, ("", 0) where there was nothing.
    """
    if any(call.anew for call in state.restores.values()):
        return None
    others = {rank.restored for number, rank in state.ranks.items() if number not in state.restores}
    if state.missing(state.ranks) or len(others) != 1 or len({call.question for call in state.restores.values()}) != 1:
        return None
    (restored,) = others
    if restored is None:
        return None
    step = next(iter(state.restores.values())).step
    newest = state.listed.newest()
    wanted = (
        restored[1] == step if step is not None else restored == ((newest.timeline, newest.step) if newest else ("", 0))
    )
    return restored if wanted else None


def restore(state: State) -> Procedure:
    """Answer the pending restores: the same step for all ranks."""
    restored = _restored_by_others(state)
    error = _refusal(state) if restored is None else None
    calls = dict(state.restores)
    state.restores.clear()
    if error is not None:
        _fail(state, error)
        return
    call = next(iter(calls.values()))
    deadline = min(pending.deadline for pending in calls.values())
    error = yield from _read_anew(state, call)
    if error is not None:
        _fail(state, error)
        return
    if state.phase is Phase.RESOLVED and state.listed.doubted:
        _trust_again(state)
    candidates, error = _candidates(state, call)
    if restored is not None:
        candidates = [ref for ref in candidates if (ref.timeline, ref.step) == restored]
    if error is not None:
        _fail(state, error)
        return
    is_fixed = call.step is not None or restored is not None  # no older one will do
    for ref in candidates:
        bad = [] if is_fixed else _newer_doubted(state, ref)
        committed, wrong = yield from _decision(state, ref)
        if committed is not None:
            wrong = yield from _attempt(state, ref, committed, bad, call.question, deadline, set(calls))
            if wrong is None:
                yield from _finish(state, ref, rollback=call.rollback)
                if not state.missing(calls):
                    forget_ended(state)
                return
        assert wrong is not None
        if wrong.reason != error_pb2.REASON_CORRUPT or call.raise_on_corrupt or is_fixed:
            attempt = state.attempt
            _fail(state, wrong, unused=attempt.unused if attempt is not None and attempt.failed is wrong else b"")
            return
        state.log("quarantined", step=ref.step, of=ref.timeline, error=wrong.message)
        _quarantine(state, Quarantined(step=ref, why=wrong))
    if state.listed.doubted and not is_fixed:
        _fail(state, _none_good(state))
        return
    if state.phase is Phase.RESOLVED and not state.lead.options.read_only:
        yield from starting.write_start_record(state, origin=None, rollback=False)
        if state.has_ended:
            return
    state.attempts += 1
    # A run that was told of bad steps has begun from nothing all the same, and left no other step: its choice, and no secret.
    left = [] if is_fixed else _newest_first(state.listed.quarantined)
    chosen = CoordinatorMessage.RestoreChosen(attempt=state.attempts, found=False, fell_back_from=left)
    offer = CoordinatorMessage(restore_chosen=chosen)
    state.attempt = Attempt(number=state.attempts, offer=offer, question=call.question)
    state.failed_restore = None
    state.log("restore_chosen", step=None)
    tell(state, offer)
    if not state.missing(calls):
        forget_ended(state)


def _read_anew(state: State, call: RestoreCall) -> Procedure:
    """Read history again for a run that only reads: others write it meanwhile. The error when the store cannot be read.

    Not for a step that is known: it may be read in many rounds, and is the same in each.
    """
    if not state.lead.options.read_only or call.step in {ref.step for ref in state.listed.keeps}:
        return None
    try:
        yield from starting.resolve(state)
    except DaemonError as wrong:
        return wrong.error
    except Exception as failure:  # the store: told to all ranks
        return wire_error(failure, phase="restore")
    return None


def _attempt(  # noqa: PLR0917 - one caller, which has just made them
    state: State,
    ref: StepRef,
    committed: Committed,
    bad: list[Quarantined],
    question: tuple[int | None, bool, bool],
    deadline: float,
    asking: set[int],
) -> Procedure:
    """Offer a step to the nodes of all ranks that ask, and wait until these are ready; the error when it cannot be had."""
    state.attempts += 1
    chosen = CoordinatorMessage.RestoreChosen(
        attempt=state.attempts, found=True, step=ref, committed=committed, fell_back_from=bad
    )
    offer = CoordinatorMessage(restore_chosen=chosen)
    attempt = state.attempt = Attempt(number=state.attempts, step=ref.step, offer=offer, question=question)
    state.log("restore_chosen", step=ref.step, of=ref.timeline, attempt=attempt.number)
    have = set(state.missing(asking))
    attempt.ready |= have
    attempt.done |= have
    state.failed_restore = None
    # What was asked meanwhile, of a session that broke and came back, is answered by this.
    state.restores = {
        rank: call for rank, call in state.restores.items() if rank not in asking or call.question != question
    }
    tell(state, offer, sorted({state.ranks[rank].node for rank in asking}) if have else None)

    def settled() -> bool:
        gone = any(not rank.attached for rank in state.ranks.values())
        return attempt.failed is not None or gone or not state.missing(attempt.ready)

    yield Wait(until=settled, deadline=deadline)
    if attempt.failed is not None:
        return attempt.failed
    missing = state.missing(attempt.ready)
    if not missing:
        return None
    gone = [rank for rank, known in state.ranks.items() if not known.attached]
    if gone:
        return make_error(
            error_pb2.REASON_RANK_FAILED,
            f"restore of step {ref.step}: ranks {gone} are gone",
            step=ref.step,
            ranks=gone,
            phase="restore",
        )
    return make_error(
        error_pb2.REASON_DEADLINE_EXCEEDED,
        f"restore of step {ref.step}: ranks {missing} were not ready in time",
        step=ref.step,
        ranks=missing,
        phase="restore",
    )


def _finish(state: State, ref: StepRef, *, rollback: bool) -> Procedure:
    attempt = state.attempt
    assert attempt is not None
    if state.phase is Phase.RESOLVED and not state.lead.options.read_only:
        yield from starting.write_start_record(state, origin=ref, rollback=rollback)
        if state.has_ended:
            return
    state.log("restore_go", step=ref.step, attempt=attempt.number)
    # A rank whose agent is of an older version is ready without a word of what it wants.
    unused = attempt.terms.unused() if not state.missing(attempt.terms.said) else None
    go = CoordinatorMessage.RestoreGo(attempt=attempt.number, unused=unused)
    attempt.go = CoordinatorMessage(restore_go=go)
    state.broadcast(attempt.go)
    state.listed.doubted.clear()


def _candidates(state: State, call: RestoreCall) -> tuple[list[StepRef], Error | None]:
    newest_first = list(reversed(state.listed.keeps))
    if call.step is None:
        return newest_first, None
    found = [ref for ref in newest_first if ref.step == call.step]
    if not found:
        existing = [ref.step for ref in state.listed.keeps]
        return [], make_error(
            error_pb2.REASON_NOT_FOUND,
            f"there is no step {call.step}; existing steps: {existing or 'none'}",
            hint="choose one of them, or restore the newest by naming none",
            step=call.step,
            phase="restore",
        )
    if state.lead.options.read_only:
        return found[:1], None
    newer = [ref.step for ref in newest_first if history.order(ref) > history.order(found[0])]
    if state.phase is Phase.RESOLVED:
        if newer and not call.rollback:
            return [], make_error(
                error_pb2.REASON_INVALID_ARGUMENT,
                f"step {call.step} is older than listed steps {_few(newer)}; going on from it would drop them",
                hint="pass rollback=True to drop them, or read_only=True to look only",
                step=call.step,
                phase="restore",
            )
        return found[:1], None
    # Only a start record drops what is newer, and this timeline has its own: the next start would go on from there.
    if call.rollback:
        newer += state.steps  # they may yet be committed
    if newer:
        return [], make_error(
            error_pb2.REASON_INVALID_ARGUMENT,
            f"step {call.step} is older than steps {_few(newer)}, and this run goes on already: it cannot drop them",
            hint="only the first restore of a run goes back: start the job again (or make a new Checkpointer on every rank) "
            "and pass rollback=True there, or read_only=True to look only",
            step=call.step,
            phase="restore",
        )
    return found[:1], None


def _few(steps: Iterable[int]) -> str:
    """Return steps as an error shows them: thousands may be newer."""
    shown = sorted(steps)
    return str(shown) if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} and {len(shown) - _SHOWN} more"


def _decision(state: State, ref: StepRef) -> Procedure:
    """Return (decision, None), or (None, error) when its record is bad."""
    known = state.listed.decisions.get((ref.timeline, ref.step))
    if known is not None:
        return known, None
    try:
        data = yield Get(key=ref.record_key, label="read_decision")
        committed = records.committed_of(ref, data)
    except DaemonError as wrong:
        return None, wrong.error
    except Exception as failure:
        return None, make_error(
            error_pb2.REASON_UNAVAILABLE,
            f"record {ref.record_key} cannot be read: {failure}",
            step=ref.step,
            object=ref.record_key,
            phase="restore",
        )
    state.listed.decisions[(ref.timeline, ref.step)] = committed
    return committed, None


def _quarantine(state: State, entry: Quarantined) -> None:
    state.listed.keeps = [ref for ref in state.listed.keeps if history.order(ref) != history.order(entry.step)]
    state.listed.quarantined.append(entry)
    state.listed.doubted.append(entry)


def _trust_again(state: State) -> None:
    """Before the start record only a restore that failed says that steps are bad, and what it met with may have passed."""
    listed = state.listed
    doubted = {history.order(entry.step) for entry in listed.doubted}
    listed.keeps = sorted([*listed.keeps, *(entry.step for entry in listed.doubted)], key=history.order)
    listed.quarantined = [entry for entry in listed.quarantined if history.order(entry.step) not in doubted]
    listed.doubted = []


def _newer_doubted(state: State, ref: StepRef) -> list[Quarantined]:
    """Return what is left for `ref`, newest first."""
    return _newest_first(entry for entry in state.listed.doubted if history.order(entry.step) > history.order(ref))


def _newest_first(entries: Iterable[Quarantined]) -> list[Quarantined]:
    return sorted(entries, key=lambda entry: history.order(entry.step), reverse=True)


def _none_good(state: State) -> Error:
    """There are steps, and this process found all of them bad: now, or in a restore before this one."""
    bad = _newest_first(state.listed.doubted)
    steps = [entry.step.step for entry in bad]
    return make_error(
        error_pb2.REASON_CORRUPT,
        f"no good step is left: {steps} were found bad; the newest: {bad[0].why.message}",
        hint="see `ckptd verify`; nothing was deleted",
        step=steps[0],
        phase="restore",
    )


def _refusal(state: State) -> Error | None:
    if state.phase is Phase.ENDED:
        over = make_error(
            error_pb2.REASON_UNAVAILABLE, "the run has ended: a newer one took its place", phase="restore"
        )
        return state.fenced or state.refusal or over
    missing = state.missing(state.restores)
    if missing:
        return make_error(
            error_pb2.REASON_RANKS_MISSING,
            f"ranks {missing} did not call restore in time (ranks {sorted(state.restores)} did)",
            hint="restore() must be called by every rank",
            ranks=missing,
            phase="restore",
        )
    asked = {call.question for call in state.restores.values()}
    if len(asked) > 1:
        return make_error(
            error_pb2.REASON_RANKS_DISAGREE,
            f"ranks ask for different restores (step, raise_on_corrupt, rollback): {sorted(map(str, asked))}",
            hint="every rank must call restore() with the same arguments",
            ranks=state.restores,
            phase="restore",
        )
    return None


def _fail(state: State, error: Error, *, unused: bytes = b"") -> None:
    state.attempt = None
    state.restores.clear()  # an agent that hears of this gives up whatever its ranks ask; another one says it again
    state.log("restore_failed", error=error.message)
    told = CoordinatorMessage.RestoreError(attempt=state.attempts, error=error, unused=unused)
    state.failed_restore = CoordinatorMessage(restore_error=told)
    tell(state, state.failed_restore)
