"""Steps that have begun: staged, sealed, and decided one at a time in step order (rules R3, R4, R5).

Pure. Does not own: how a step begins (`beginning`). Invariant: the decision of a step is written when every earlier step of
the timeline is decided; nothing is acknowledged before the claims were looked at once more after the write.
"""

from __future__ import annotations

from dataclasses import replace

from ckptd.daemon import history, index, keys, records
from ckptd.daemon.comparisons import Comparisons
from ckptd.daemon.coordinator.effects import Compute, GetMany, ListKeys, Procedure, ProcedureStopped, Put, Wait
from ckptd.daemon.coordinator.state import Over, Phase, RefusedBegin, State, StepRun
from ckptd.daemon.coverage import NotWhole, Whole, whole
from ckptd.daemon.errors import DaemonError, TooLargeError, make_error
from ckptd.protos import error_pb2
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeMessage
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Claim, Committed, IndexRef

DECIDED_KEPT = 64
"""Outcomes that are remembered for a node that was away; its slots hold a few steps at most."""
STORE_RETRY_S = 1.0
"""Pause before a record is put again when the store failed for good on it: the same bytes, so repeating is safe."""


# ---------------------------------------------------------------- staged, sealed, failed


def on_staged(state: State, said: NodeMessage.Staged) -> None:
    """A rank's bytes are its agent's."""
    run = _running(state, said.timeline, said.step)
    if run is None:
        return
    run.staged.add(said.rank)
    if not run.all_staged and not state.missing(run.staged):
        run.all_staged = True
        state.log("staged", step=run.step)
        state.broadcast(CoordinatorMessage(staged=CoordinatorMessage.AllStaged(timeline=said.timeline, step=said.step)))


def on_sealed(state: State, said: NodeMessage.Sealed, node: str) -> None:
    """A node's index is in the store."""
    run = _running(state, said.timeline, said.step)
    if run is not None:
        run.sealed[node] = said.index
        state.log("sealed", step=said.step, node=node)


def on_failed(state: State, said: NodeMessage.StepFailed) -> None:
    """A node cannot finish its part: the step is aborted on all ranks, or refused to them if it was not begun yet."""
    run = _running(state, said.timeline, said.step)
    if run is not None and run.failed is None:
        run.failed = said.error
    of_this_run = said.timeline in ("", str(state.timeline)) and said.error.HasField("rank")
    if run is None and of_this_run and said.step > state.last_begun:
        if said.step not in state.refused_begins:
            state.refused_begins[said.step] = RefusedBegin(error=said.error, untold=set(range(state.world)))
            state.log("begin_refused", step=said.step, error=said.error.message)
        note_told(state, said.error.rank, said.step)
        while len(state.refused_begins) > DECIDED_KEPT:
            del state.refused_begins[next(iter(state.refused_begins))]


def note_told(state: State, rank: int, step: int) -> None:
    """Forget a refused begin once every rank has heard of it: the step may then be tried again."""
    refused = state.refused_begins.get(step)
    if refused is not None:
        refused.untold.discard(rank)
        if not refused.untold:
            del state.refused_begins[step]


def fail_unstaged(state: State, ranks: list[int], why: Error) -> None:
    """Ranks are gone: steps they have not staged cannot become whole any more."""
    for run in state.steps.values():
        lacking = [rank for rank in ranks if rank not in run.staged]
        if lacking and run.failed is None:
            run.failed = Error()
            run.failed.CopyFrom(why)
            run.failed.step = run.step


def _running(state: State, timeline: str, step: int) -> StepRun | None:
    return state.steps.get(step) if timeline == str(state.timeline) else None


# ---------------------------------------------------------------- decide


def decision_is_due(state: State) -> StepRun | None:
    """Return the oldest undecided step when it can be decided (R4: one at a time, in step order)."""
    if state.phase is not Phase.RUNNING or not state.steps or state.claim is None:
        return None
    run = state.steps[min(state.steps)]
    if run.failed is not None or all(node.node in run.sealed for node in state.claim.nodes):
        return run
    if state.now >= run.deadline:
        late = [node.node for node in state.claim.nodes if node.node not in run.sealed]
        ranks = [rank for node in state.claim.nodes if node.node in late for rank in node.ranks]
        run.failed = make_error(
            error_pb2.REASON_DEADLINE_EXCEEDED,
            f"step {run.step}: nodes {late} (ranks {ranks}) did not finish their upload in time",
            step=run.step,
            ranks=ranks,
            node=late[0],
            phase="staged" if run.all_staged else "stage",
        )
        return run
    return None


def decide(state: State, run: StepRun) -> Procedure:
    """Commit or abort one step, then look at the claims again, then tell (R4, R5)."""
    assert state.timeline is not None
    made: Committed | None = None
    data: bytes | None = None
    if run.failed is None:
        made = yield from _proved(state, run)
    key = keys.decision_key(state.timeline, run.step)
    if made is not None:
        pins = yield from put_until_done(state, ListKeys(prefix=keys.PINS_PREFIX, label="list_pins"))
        record = history.decision_record(
            timeline=state.timeline,
            step=run.step,
            committed=made,
            listed=state.listed.keeps,
            quarantined=state.listed.quarantined,
            retention=state.lead.options.retention,
            pins=pins,
            created_at=state.stamp(),
            also_keep=[other.base for other in state.steps.values() if other is not run and other.base is not None],
        )
        try:
            data = records.to_bytes(record)
        except TooLargeError as wrong:  # nobody could read it again, nor anything after it
            run.failed, made = wrong.error, None
            run.failed.step = run.step
        else:
            label = "decision"
            state.writing = list(record.keeps)
    if made is None:
        assert run.failed is not None
        record = history.abort_record(timeline=state.timeline, step=run.step, why=run.failed, created_at=state.stamp())
        data = records.to_bytes(record)
        label = "abort"
    assert data is not None
    put = Put(key=key, data=data, label=label)
    yield from put_until_done(state, put)
    # A node may have said meanwhile that its part has failed: what is written counts, and is what everybody is told.
    why = run.failed if made is None else None
    state.log("decided", step=run.step, committed=made is not None, error=why.message if why is not None else None)
    if fenced_by(state, (yield from look_at_claims(state, ListKeys(prefix=keys.LOG_PREFIX, label="second_look"), put))):
        return
    _note_comparison(state, run, made)
    outcome = CoordinatorMessage.Outcome(timeline=str(state.timeline), step=run.step)
    if made is not None:
        state.listed.keeps = history.with_digest(list(record.keeps), key, data)
        state.writing = None
        state.listed.decisions[(str(state.timeline), run.step)] = made
        _forget_decisions(state)
    else:
        assert run.failed is not None
        outcome.aborted.CopyFrom(run.failed)
        state.over[run.step] = Over(
            why=run.failed, told={rank: known for rank, known in run.told.items() if rank not in run.staged}
        )
    del state.steps[run.step]
    state.decided[run.step] = why
    while len(state.decided) > DECIDED_KEPT:
        del state.decided[next(iter(state.decided))]
    for node in state.nodes.values():
        node.held.pop((str(state.timeline), run.step), None)
    state.log("acknowledged", step=run.step, committed=made is not None)
    state.broadcast(CoordinatorMessage(outcome=outcome))


def _note_comparison(state: State, run: StepRun, made: Committed | None) -> None:
    """Remember what a decision says of the comparison of replicas: it backs later steps, or is owed."""
    if made is not None:
        state.comparisons.note_committed(run.step, made)
        state.schedule.committed(run.step, begun_in=run.round, was_compared=not made.HasField("compared_in"))
    else:
        assert run.failed is not None
        state.comparisons.note_refused(run.step, run.failed)
        state.schedule.aborted(
            begun_in=run.round,
            was_compared=run.compared_in is None,
            differs=run.failed.reason == error_pb2.REASON_REPLICAS_DIFFER,
        )


def _proved(state: State, run: StepRun) -> Procedure:
    """Read the indexes back and prove the step whole; None, with `run.failed` set, when it is not."""
    assert state.claim is not None
    refs = [run.sealed[node.node] for node in state.claim.nodes]
    try:
        blobs = yield GetMany(keys=tuple(ref.key for ref in refs), label="read_indexes")
        # The word this coordinator gave, not what the indexes say of it: None, and all replicas must be there.
        comparisons = None if run.compared_in is None else replace(state.comparisons)
        verdict = yield Compute(function=judge, arguments=(state.claim, run.step, refs, blobs, comparisons))
        history.require_base_listed(run.step, verdict.base, state.listed.keeps)
    except DaemonError as refused:
        run.failed = refused.error
    except Exception as failure:  # the store: this step cannot be proved whole
        run.failed = make_error(
            error_pb2.REASON_STORE_FAILED,
            f"step {run.step}: its indexes cannot be read back: {failure}",
            step=run.step,
            phase="commit",
        )
    else:
        return history.committed(claim=state.claim, whole=verdict, created_at=state.stamp())
    return None


def judge(
    claim: Claim, step: int, refs: list[IndexRef], blobs: list[bytes | None], comparisons: Comparisons | None
) -> Whole:
    """Parse the nodes' indexes and prove that together they are whole. Pure; runs off the event loop.

    Raises:
        DaemonError: an index is damaged, or the step is not whole.
    """
    loaded = {ref.node: [index.load_index(ref, blob)] for ref, blob in zip(refs, blobs, strict=True)}
    verdict = whole(claim, step, loaded, comparisons=comparisons)
    if isinstance(verdict, NotWhole):
        raise DaemonError(verdict.error)
    return verdict


def look_at_claims(state: State, listing: ListKeys, put: Put) -> Procedure:
    """List the log after a record was put, until the listing shows that record or a higher claim.

    One that shows neither is of the past, and its claims are no proof that nobody has taken over: nothing is acknowledged on
    it. One that shows the record shows every claim that was there before it. Or else the store has said that it was put and
    lost it: from the second such look on the same bytes are put once more, as after an answer that was lost.
    """
    assert state.timeline is not None
    looks = 0
    while True:
        log = history.parse_log((yield from put_until_done(state, listing)))
        if log.is_fenced(state.timeline) or log.is_as_new_as(put.key):
            return log
        state.log("stale_listing", prefix=listing.prefix, object=put.key)
        if looks:
            yield from put_until_done(state, put)
        looks += 1
        yield Wait(until=lambda: state.phase is Phase.ENDED, deadline=state.now + STORE_RETRY_S)
        if state.phase is Phase.ENDED:
            raise ProcedureStopped


def fenced_by(state: State, log: history.LogView) -> bool:
    """Look at the claims: a higher one ends this coordinator; nothing of it is acknowledged any more (R4)."""
    assert state.timeline is not None
    if not log.is_fenced(state.timeline):
        return False
    end_fenced(state, log)
    return True


def end_fenced(state: State, log: history.LogView) -> Error:
    """End this coordinator: a newer timeline was claimed. Every node is told."""
    state.fenced = make_error(
        error_pb2.REASON_FENCED,
        f"timeline {state.timeline or state.lead.timeline} was taken over by {log.highest_claim()}",
        hint="this process belongs to an older run of the job; it must end and not be restarted",
        phase="commit",
    )
    state.phase = Phase.ENDED
    state.log("fenced", by=str(log.highest_claim()))
    state.broadcast(CoordinatorMessage(fenced=state.fenced))
    return state.fenced


def put_until_done(state: State, operation: ListKeys | Put) -> Procedure:
    """Repeat an operation until the store answers.

    A record that may have landed must not be replaced by another one of the same key, and later steps wait for this
    one (R4), so there is nothing better to do; saves meanwhile are skipped as busy, on all ranks alike.
    """
    while True:
        try:
            return (yield operation)
        except Exception as failure:  # whatever the store says: see above
            if state.phase is Phase.ENDED:
                raise ProcedureStopped from failure
            if isinstance(failure, DaemonError) and failure.error.reason == error_pb2.REASON_INTERNAL:
                raise  # other bytes stand under this name: no repeating helps, and nothing may be acknowledged
            state.log("store_failed", operation=type(operation).__name__, error=str(failure))
            yield Wait(until=lambda: state.phase is Phase.ENDED, deadline=state.now + STORE_RETRY_S)


def _forget_decisions(state: State) -> None:
    listed = {(ref.timeline, ref.step) for ref in state.listed.keeps}
    state.listed.decisions = {key: value for key, value in state.listed.decisions.items() if key in listed}
