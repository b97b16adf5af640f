"""The claim of a timeline, and the job it is of (rule R1).

Pure. Owns: job.json, the courtesy of not starting beside a run that is alive, and the claim itself. Does not own: what is read
once it is written (`starting`). Invariant: no listing of the log counts that does not show the claim, or a higher one.
"""

from __future__ import annotations

import contextlib

from ckptd.daemon import history, keys, records
from ckptd.daemon.coordinator.effects import Get, ListKeys, Probe, Procedure, Put, Wait
from ckptd.daemon.coordinator.saving import STORE_RETRY_S
from ckptd.daemon.coordinator.state import Phase, State
from ckptd.daemon.errors import DaemonError, make_error
from ckptd.daemon.keys import Timeline
from ckptd.daemon.log_view import MAX_LOOKS, stale_listing
from ckptd.daemon.record_checks import FORMAT_VERSION
from ckptd.protos import error_pb2
from ckptd.protos.snapshot_pb2 import Claim, ClaimNode
from ckptd.storage_backends.errors import StorageError

ALIVE_GRACE_S = 10.0
"""How long a start waits for a run that seems alive to die: ranks that torchrun is just ending are alive for a moment."""
HALF_ALIVE_GRACE_S = 40.0
"""The same for a run of which some ranks have ended: those left may hang on a node whose connection is given up after 30 s."""


def open_job(state: State) -> Procedure:
    """Read job.json, and make it where there is none: a root holds one job."""
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
            yield pause(state)
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


def claim_timeline(state: State) -> Procedure:
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
        claim = claim_of(state, timeline)
        put = Put(key=keys.claim_key(timeline), data=records.to_bytes(claim), label="claim")
        yield put
        listing = ListKeys(prefix=keys.LOG_PREFIX, label="look_after_claim")
        log = yield from log_with_claim(state, listing, timeline, put)
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


def pause(state: State) -> Wait:
    """Wait before the store is asked again."""
    return Wait(until=lambda: state.phase is Phase.ENDED, deadline=state.now + STORE_RETRY_S)


def log_with_claim(state: State, listing: ListKeys, timeline: Timeline | None, put: Put | None = None) -> Procedure:
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
        yield pause(state)
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


def claim_of(state: State, timeline: Timeline) -> Claim:
    """Return what the claim of a timeline says of this run."""
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
