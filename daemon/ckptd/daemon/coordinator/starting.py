"""The start of a timeline: claim first, then resolve, then a start record (rules R1, R2).

Pure. Does not own: how a timeline is claimed (`claiming`), and how what was left undecided is adopted (`adopting`). Invariant:
history is read only after the claim is written and only once no higher claim was seen; the start record is the first thing of the
timeline after the claim; nothing is told to anybody before the claims were looked at once more after it.
"""

from __future__ import annotations

from ckptd.daemon import history, keys, records
from ckptd.daemon.comparisons import Comparisons
from ckptd.daemon.coordinator import claiming
from ckptd.daemon.coordinator.adopting import MAX_RESOLVES, adopt, wait_for_uploads
from ckptd.daemon.coordinator.beginning import refuse_begin
from ckptd.daemon.coordinator.effects import Get, ListKeys, Procedure, Put
from ckptd.daemon.coordinator.saving import end_fenced, fenced_by, look_at_claims, put_until_done
from ckptd.daemon.coordinator.state import Listed, Phase, State
from ckptd.daemon.errors import DaemonError, TooLargeError, make_error
from ckptd.daemon.keys import StepId, Timeline
from ckptd.daemon.log_view import LogView
from ckptd.daemon.wire_errors import wire_error
from ckptd.protos import error_pb2
from ckptd.protos.coordinator_pb2 import CoordinatorMessage
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Aborted, Record, StepRef


def look_for_newer_run(state: State) -> Procedure:
    """A coordinator that comes back, its run's timeline being known: ends in ENDED when another run has claimed since.

    The ranks may have heard of it, and be gone: whoever is left must not wait for them, and must not be restarted.
    """
    state.has_looked = True
    try:
        log = history.parse_log((yield ListKeys(prefix=keys.LOG_PREFIX, label="list_claims")))
        highest = log.highest_claim()
        if highest is None or highest <= Timeline.parse(state.lead.timeline):
            return
        data = yield Get(key=keys.claim_key(highest), label="read_other_claim")
        claim = records.parse_claim(data, keys.claim_key(highest)) if data is not None else None
    except Exception:  # the store is away, say: the start itself looks again, and tells what is wrong
        return
    if claim is not None and claim.run_id != state.lead.run_id and state.phase is Phase.GATHERING:
        end_fenced(state, log)


def start(state: State) -> Procedure:
    """Take a timeline and read history; ends in RESOLVED, or refused."""
    state.phase = Phase.STARTING
    try:
        refused = yield from claiming.open_job(state)
        if refused is None and not state.lead.options.read_only:
            refused = yield from claiming.claim_timeline(state)
        if refused is None:
            yield from resolve(state)
    except DaemonError as wrong:
        refused = wrong.error
    except Exception as failure:  # the store: the run cannot start
        refused = wire_error(failure, phase="register")
        refused.object = refused.object or state.lead.root
    if refused is not None:
        refuse(state, refused)
        return
    if state.has_ended:  # meanwhile: a rank came back with another mesh, say, and all were told
        return
    state.phase = Phase.RESOLVED
    state.log(
        "resolved",
        listed=[ref.step for ref in state.listed.keeps],
        adopted=[ref.step for ref, _ in state.adopted],
    )


def refuse(state: State, error: Error) -> None:
    """End: the run cannot start."""
    state.refusal = error
    state.phase = Phase.ENDED
    state.log("refused", error=error.message)
    state.broadcast(CoordinatorMessage(refused=error))


def write_start_record(state: State, *, origin: StepRef | None, rollback: bool) -> Procedure:
    """Write the start record, look at the claims, tell the nodes; ends in RUNNING, or ENDED when fenced (R2)."""
    assert state.timeline is not None
    record = history.start_record(
        timeline=state.timeline,
        run_id=state.lead.run_id,
        listed=state.listed.keeps,
        adopted=state.adopted,
        origin=origin,
        rollback=rollback,
        quarantined=state.listed.quarantined,
        retention=state.lead.options.retention,
        pins=(yield from put_until_done(state, ListKeys(prefix=keys.PINS_PREFIX, label="list_pins_to_start"))),
        created_at=state.stamp(),
    )
    key = keys.start_key(state.timeline)
    try:
        data = records.to_bytes(record)
    except TooLargeError as wrong:
        refuse(state, wrong.error)
        return
    put = Put(key=key, data=data, label="start_record")
    yield from put_until_done(state, put)
    if fenced_by(
        state, (yield from look_at_claims(state, ListKeys(prefix=keys.LOG_PREFIX, label="look_after_start"), put))
    ):
        return
    state.listed.keeps = history.with_digest(list(record.keeps), key, data)
    state.listed.quarantined = history.quarantined_with_digest(record, key, data)
    for ref, committed in state.adopted:
        state.listed.decisions[(ref.timeline, ref.step)] = committed
        state.log("adopted", step=ref.step, of=ref.timeline)
    state.adopted = []
    state.comparisons = Comparisons(timeline=str(state.timeline))
    for node in state.nodes.values():  # whatever is of older timelines is decided now
        node.held = {key: held for key, held in node.held.items() if key[0] == str(state.timeline)}
    state.phase = Phase.RUNNING
    state.log("started", origin=origin.step if origin is not None else None)
    announce(state)


def announce(state: State, node: str | None = None) -> None:
    """Tell one node, or all, that the timeline runs and what counts of older ones.

    Of each step only what it is: there may be as many as a record lists, and a node has no use for where their decisions stand.
    """
    told = state.told
    if told is None or told[0] is not state.listed.keeps:
        # Half a second for 100,000 steps: not for each node that comes back.
        keeps = [StepRef(step=ref.step, timeline=ref.timeline) for ref in state.listed.keeps]
        started = CoordinatorMessage.Started(timeline=str(state.timeline), keeps=keeps)
        told = state.told = state.listed.keeps, CoordinatorMessage(started=started)
    message = told[1]
    if node is None:
        state.broadcast(message)
    else:
        state.send(node, message)


def resolve(state: State) -> Procedure:
    """R2: the newest record of older timelines, then whole undecided steps of its timeline, ascending.

    Where something vanished between LIST and GET history has moved, and is read again; or the store has lost it and LIST shows it
    for ever. So it ends: a step of which an index stays away is not adopted, as it might have been declined in any case.

    Raises:
        DaemonError: FENCED, a higher claim is there; CORRUPT, the claim of the newest record's timeline is gone; UNAVAILABLE, the
            newest record is listed and not there; STORE_FAILED as in `log_with_claim`.
    """
    for number in range(1, MAX_RESOLVES + 1):
        if number > 2:  # once at once: a sweep that has moved on is not waited for
            yield claiming.pause(state)
        log = yield from claiming.log_with_claim(
            state, ListKeys(prefix=keys.LOG_PREFIX, label="list_log"), state.timeline
        )
        if state.timeline is not None and log.is_fenced(state.timeline):
            raise DaemonError(end_fenced(state, log))
        newest, vanished = yield from _newest_record(log, state.timeline)
        if vanished is not None:
            continue
        if newest is None:
            state.listed, state.adopted = Listed(), []
            return
        key, record, data, aborted = newest
        state.listed = Listed(
            keeps=history.with_digest(list(record.keeps), key, data),
            quarantined=history.quarantined_with_digest(record, key, data),
        )
        if state.lead.options.read_only:
            return
        claim_key = keys.claim_key(Timeline.parse(record.timeline))
        claim_data = yield Get(key=claim_key, label="read_newest_claim")
        if claim_data is None:
            raise DaemonError.of(
                f"{claim_key} is gone, but its timeline has records",
                reason=error_pb2.REASON_CORRUPT,
                hint="claims are never deleted by ckptd: restore the object",
                object=claim_key,
                phase="register",
            )
        claim = records.parse_claim(claim_data, claim_key)
        # The coordinator of a living run came back: its ranks have restored, and wait to hear how their saves ended.
        state.start_wanted = claim.run_id == state.lead.run_id
        begun = _begun_before(state, record) if state.start_wanted else set()
        yield from wait_for_uploads(state, claim, record)
        comparisons = Comparisons.of_history(record, aborted)
        again = yield from adopt(state, claim, record, log, comparisons, is_last=number == MAX_RESOLVES)
        if not again:
            _give_up_torn(state, begun - {ref.step for ref, _ in state.adopted})
            return
    raise DaemonError.of(
        f"{state.lead.root}: LIST shows {vanished!r}, the newest record, and GET does not find it, {MAX_RESOLVES} times",
        reason=error_pb2.REASON_UNAVAILABLE,
        hint="the store must be strongly consistent; check that nothing else deletes under the root",
        object=vanished,
        phase="register",
    )


def _begun_before(state: State, record: Record) -> set[int]:
    """Return the undecided steps of the same run that some node has slots of: its ranks were told go, and do not ask again."""
    held = {(timeline, step) for node in state.nodes.values() for timeline, step in node.held}
    return {step for timeline, step in held if timeline == record.timeline and step > history.step_of(record)}


def _give_up_torn(state: State, steps: set[int]) -> None:
    """Tell ranks that ask once more for such a step, now or later, that it is over: they would wait for the others for ever."""
    for step in sorted(steps):
        state.torn[step] = make_error(
            error_pb2.REASON_ABORTED,
            f"step {step} was begun before the coordinator restarted, and is not whole",
            step=step,
            phase="begin",
        )
    for rank, call in list(state.begins.items()):
        if call.step in state.torn:
            del state.begins[rank]
            refuse_begin(state, rank, call.step, state.torn[call.step])


def _newest_record(log: LogView, before: Timeline | None) -> Procedure:
    """Return ((key, record, bytes, abort markers newer than it) | None, the key of what vanished meanwhile | None).

    A decision object may be an abort marker: only its content tells.
    """
    aborted: dict[StepId, Aborted] = {}
    for key in map(str, log.record_keys(before)):
        data = yield Get(key=key, label="read_newest")
        if data is None:
            return None, key
        record = records.parse_record(data, key)
        if history.is_record(record):
            return (key, record, data, aborted), None
        aborted[StepId(Timeline.parse(record.timeline), record.decision.step)] = record.decision.aborted
    return None, None
