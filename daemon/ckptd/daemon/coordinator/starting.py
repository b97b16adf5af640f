"""The start of a timeline: claim first, then resolve, then a start record (rules R1, R2).

Pure. Invariant: history is read only after the claim is written and only once no higher claim was seen; the start
record is the first thing of the timeline after the claim; nothing is told to anybody before the claims were looked at once
more after it.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from ckptd.daemon import history, keys, records
from ckptd.daemon.comparisons import Comparisons
from ckptd.daemon.coordinator.beginning import refuse_begin
from ckptd.daemon.coordinator.effects import Compute, Get, GetMany, ListKeys, Probe, Procedure, Put, Wait
from ckptd.daemon.coordinator.saving import STORE_RETRY_S, end_fenced, fenced_by, look_at_claims, put_until_done
from ckptd.daemon.coordinator.state import Listed, Phase, State
from ckptd.daemon.errors import DaemonError, TooLargeError, make_error
from ckptd.daemon.keys import StepId, Timeline
from ckptd.daemon.log_view import MAX_LOOKS, LogView, stale_listing
from ckptd.daemon.record_checks import FORMAT_VERSION
from ckptd.daemon.wire_errors import wire_error
from ckptd.protos import error_pb2
from ckptd.protos.coordinator_pb2 import CoordinatorMessage
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Aborted, Claim, ClaimNode, Record, StepRef
from ckptd.storage_backends.errors import StorageError

ALIVE_GRACE_S = 10.0
"""How long a start waits for a run that seems alive to die: ranks that torchrun is just ending are alive for a moment."""
HALF_ALIVE_GRACE_S = 40.0
"""The same for a run of which some ranks have ended: those left may hang on a node whose connection is given up after 30 s."""
MAX_RESOLVES = 16
"""Times in a row that history is read while something that LIST shows is not there."""


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
        refused = yield from _job(state)
        if refused is None and not state.lead.options.read_only:
            refused = yield from _claim(state)
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


# ---------------------------------------------------------------- job.json and claim


def _job(state: State) -> Procedure:
    data = yield Get(key=keys.JOB, label="read_job")
    if data is None:
        if state.lead.options.read_only:
            return None
        data = yield from _made_job(state)
    job = records.parse_job(data)
    # A run that only reads may take whatever job the root holds.
    if job.job != state.lead.job and (state.lead.job or not state.lead.options.read_only):
        return make_error(
            error_pb2.REASON_JOB_MISMATCH,
            f"{state.lead.root} belongs to job {job.job!r}, not to {state.lead.job!r}",
            hint="one root holds one job: choose another root, or the job's own name",
            object=keys.JOB,
            phase="register",
        )
    return None


def _made_job(state: State) -> Procedure:
    """Put job.json and return what stands there then; once more where the store has said that it was put and lost it.

    Raises:
        DaemonError: STORE_FAILED, the store goes on to lose it.
    """
    made = records.job_bytes(state.lead.job, created_at=state.stamp(), version=state.versions.get("ckptd", ""))
    put = Put(key=keys.JOB, data=made, label="job")
    for look in range(MAX_LOOKS):
        if look:
            yield _pause(state)
        # Another start may be making it at this moment, with another time in it: what stands there is read next.
        with contextlib.suppress(DaemonError):
            if look:
                yield from _put_again(state, put)
            else:
                yield put
        data = yield Get(key=keys.JOB, label="reread_job")
        if data is not None:
            return data
    raise DaemonError.of(
        f"{state.lead.root}: {keys.JOB} was put {MAX_LOOKS} times and is not there",
        reason=error_pb2.REASON_STORE_FAILED,
        hint="the store answers for what it does not keep: check what stands between, and that nothing deletes under the root",
        object=keys.JOB,
        phase="register",
    )


def _claim(state: State) -> Procedure:
    """R1: take a higher number than any there is, in an object of our own, before history is read."""
    asked: Timeline | None = None
    while True:
        log = history.parse_log((yield ListKeys(prefix=keys.LOG_PREFIX, label="list_claims")))
        highest = log.highest_claim()
        # Of each claim: one that has won the race against ours is of a run that is alive as a rule.
        if highest is not None and highest != asked and not state.lead.options.takeover:
            refused = yield from _other_run(state, highest)
            if refused is not None:
                return refused
            asked = highest
        _require_ranks(state)
        timeline = Timeline(number=log.next_number(), nonce=state.nonce())
        claim = _claim_of(state, timeline)
        put = Put(key=keys.claim_key(timeline), data=records.to_bytes(claim), label="claim")
        yield put
        listing = ListKeys(prefix=keys.LOG_PREFIX, label="look_after_claim")
        log = yield from _log_with_claim(state, listing, timeline, put)
        highest = log.highest_claim()
        if highest is None or highest <= timeline:
            state.timeline, state.claim = timeline, claim
            state.log("claimed", number=timeline.number)
            return None


def _require_ranks(state: State) -> None:
    """Refuse to claim where ranks have ended, as they may where a start stood still meanwhile.

    Without them nothing can come of it, and its claim would fence the run that was started in its place.

    Raises:
        DaemonError: RANKS_MISSING.
    """
    gone = sorted(number for number, rank in state.ranks.items() if not rank.attached)
    if gone:
        raise DaemonError.of(
            f"ranks {gone} ended before the run had claimed its timeline",
            reason=error_pb2.REASON_RANKS_MISSING,
            ranks=gone,
            phase="register",
        )


def _put_again(state: State, put: Put) -> Procedure:
    """Put once more what the store has taken and does not show; that it fails now says nothing: it may stand there since."""
    try:
        yield put
    except StorageError as failure:
        state.log("store_failed", operation=type(put).__name__, error=str(failure))


def _pause(state: State) -> Wait:
    """Wait before the store is asked again."""
    return Wait(until=lambda: state.phase is Phase.ENDED, deadline=state.now + STORE_RETRY_S)


def _log_with_claim(state: State, listing: ListKeys, timeline: Timeline | None, put: Put | None = None) -> Procedure:
    """List the log; where a claim was put before, until the listing shows it or a higher one: an older one hides history.

    One that shows neither is of the past, or else the store has said that the claim was put and lost it: from the second such
    look on the same bytes are put once more, where another look follows and the run's ranks are still there. What counts is the
    listing after that, so nothing is believed earlier.

    Args:
        state: The coordinator's.
        listing: How to list the log.
        timeline: The one that was claimed, or None where nothing is.
        put: The claim's put, where it may be done again.

    Raises:
        DaemonError: STORE_FAILED, LIST goes on to show the past; RANKS_MISSING, ranks ended before the claim was put again.
    """
    for look in range(1, MAX_LOOKS + 1):
        log = history.parse_log((yield listing))
        if timeline is None or log.is_as_new_as(keys.claim_key(timeline)):
            return log
        state.log("stale_listing", prefix=listing.prefix, object=keys.claim_key(timeline))
        if look == MAX_LOOKS:
            break
        if look > 1 and put is not None:
            _require_ranks(state)
            yield from _put_again(state, put)
        yield _pause(state)
    assert timeline is not None
    raise DaemonError(stale_listing(keys.claim_key(timeline), state.lead.root))


def _other_run(state: State, highest: Timeline) -> Procedure:
    """Refuse a start beside a run that is visibly alive. A courtesy: safety stays with the claims."""
    data = yield Get(key=keys.claim_key(highest), label="read_other_claim")
    if data is None:
        return None
    claim = records.parse_claim(data, keys.claim_key(highest))
    if claim.run_id == state.lead.run_id or not claim.endpoint:
        return None
    begun = state.now
    while True:
        answer = yield Probe(claim=claim)
        if answer is None or answer[0] != claim.run_id or answer[1] == 0:
            return None
        if state.now >= begun + (ALIVE_GRACE_S if answer[1] >= claim.world else HALF_ALIVE_GRACE_S):
            return make_error(
                error_pb2.REASON_JOB_ALIVE,
                f"another run of job {state.lead.job!r} is alive: its coordinator at {claim.endpoint} has {answer[1]} ranks",
                hint="end it first, or start with takeover=True",
                phase="register",
            )
        yield Wait(until=lambda: state.phase is Phase.ENDED, deadline=state.now + 0.5)


def _claim_of(state: State, timeline: Timeline) -> Claim:
    by_node: dict[str, list[int]] = {}
    for rank in sorted(state.ranks):
        by_node.setdefault(state.ranks[rank].node, []).append(rank)
    return Claim(
        format_version=FORMAT_VERSION,
        timeline=str(timeline),
        run_id=state.lead.run_id,
        job=state.lead.job,
        world=state.world,
        mesh=state.lead.mesh,
        nodes=[
            ClaimNode(node=node, ranks=ranks, hostname=state.nodes[node].hostname)
            for node, ranks in sorted(by_node.items())
        ],
        endpoint=state.endpoint,
        created_at=state.stamp(),
        certificate_sha256=state.certificate_sha256,
    )


# ---------------------------------------------------------------- resolve


def resolve(state: State) -> Procedure:
    """R2: the newest record of older timelines, then whole undecided steps of its timeline, ascending.

    Where something vanished between LIST and GET history has moved, and is read again; or the store has lost it and LIST shows it
    for ever. So it ends: a step of which an index stays away is not adopted, as it might have been declined in any case.

    Raises:
        DaemonError: FENCED, a higher claim is there; CORRUPT, the claim of the newest record's timeline is gone; UNAVAILABLE, the
            newest record is listed and not there; STORE_FAILED as in `_log_with_claim`.
    """
    for number in range(1, MAX_RESOLVES + 1):
        if number > 2:  # once at once: a sweep that has moved on is not waited for
            yield _pause(state)
        log = yield from _log_with_claim(state, ListKeys(prefix=keys.LOG_PREFIX, label="list_log"), state.timeline)
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
        yield from _posthumous(state, claim, record)
        comparisons = Comparisons.of_history(record, aborted)
        again = yield from _adopt(state, claim, record, log, comparisons, is_last=number == MAX_RESOLVES)
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


def _posthumous(state: State, claim: Claim, record: Record) -> Procedure:
    """Wait, bounded, for uploads of the newest record's timeline that still run on the nodes that have come back."""

    def pending(index_keys: set[tuple[int, str]]) -> list[int]:
        steps = {step for node in state.nodes.values() for timeline, step in node.held if timeline == record.timeline}
        return [
            step
            for step in sorted(steps)
            if step > history.step_of(record) and _may_become_whole(state, claim, step, index_keys)
        ]

    there = history.index_nodes((yield ListKeys(prefix=keys.INDEX_PREFIX, label="list_uploads")), record.timeline)
    if pending(there):
        state.log("waiting_for_uploads", steps=pending(there))
        yield Wait(until=lambda: not pending(there), deadline=state.now + state.lead.options.posthumous_timeout_s)


def _may_become_whole(state: State, claim: Claim, step: int, there: set[tuple[int, str]]) -> bool:
    """Say whether a step is not yet whole but every node that lacks an index is uploading its own."""
    running = False
    held = state.held_by(claim.timeline, step)
    for node in claim.nodes:
        if (step, node.node) in there:
            continue
        mine = held.get(node.node)
        if mine is None or mine.HasField("failed") or not set(node.ranks) <= set(mine.ranks):
            return False
        running = running or not mine.HasField("index")
    return running


def _adopt(
    state: State, claim: Claim, record: Record, log: LogView, comparisons: Comparisons, *, is_last: bool
) -> Procedure:
    """Adopt whole undecided steps in ascending order; True when something vanished meanwhile: begin again.

    The last time, a step of which an index is not there is passed over.
    """
    listing = yield ListKeys(prefix=keys.INDEX_PREFIX, label="list_candidates")
    # Newer than the newest record, in its own timeline, and no record: these are abort markers.
    decided = log.decision_keys(Timeline.parse(record.timeline))
    aborted = {step for step, _ in decided if step > history.step_of(record)}
    state.adopted = []
    for step, refs in history.candidates(claim=claim, record=record, index_keys=listing, aborted=aborted):
        blobs = yield GetMany(keys=tuple(ref.key for ref in refs), label="read_candidates")
        vanished = [ref for ref, blob in zip(refs, blobs, strict=True) if blob is None]
        if vanished and not is_last:
            return True
        if vanished:
            # What it would have shown is unknown: steps behind it are not taken uncompared on the word of one before it.
            comparisons.differed = max(comparisons.differed, step)
            text = f"step {step}: LIST shows {vanished[0].key!r}, and GET does not find it, {MAX_RESOLVES} times"
            state.log("not_adopted", step=step, of=record.timeline, error=text)
            continue
        listed = [*state.listed.keeps, *(ref for ref, _ in state.adopted)]
        arguments = (claim, step, refs, blobs, listed, state.stamp(), replace(comparisons))
        verdict = yield Compute(function=history.adoption, arguments=arguments)
        if isinstance(verdict, Error):
            comparisons.note_refused(step, verdict)
            state.log("not_adopted", step=step, of=record.timeline, error=verdict.message)
            continue
        assert state.timeline is not None
        comparisons.note_committed(step, verdict)
        ref = StepRef(step=step, timeline=record.timeline, record_key=keys.start_key(state.timeline))
        state.adopted.append((ref, verdict))
        state.listed.keeps.append(ref)
        state.listed.decisions[(ref.timeline, ref.step)] = verdict
    return False
