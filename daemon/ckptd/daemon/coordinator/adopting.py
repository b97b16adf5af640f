"""Adopting what the timeline before left undecided (rule R2): waiting for its uploads, then taking each step that is whole.

Pure. Does not own: the verdict on a step (`ckptd.daemon.adoption`), nor which record is the newest (`starting`).
"""

from __future__ import annotations

from dataclasses import replace

from ckptd.daemon import history, keys
from ckptd.daemon.comparisons import Comparisons
from ckptd.daemon.coordinator.effects import Compute, GetMany, ListKeys, Procedure, Wait
from ckptd.daemon.coordinator.state import State
from ckptd.daemon.keys import Timeline
from ckptd.daemon.log_view import LogView
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Claim, Record, StepRef

MAX_RESOLVES = 16
"""Times in a row that history is read while something that LIST shows is not there."""


def wait_for_uploads(state: State, claim: Claim, record: Record) -> Procedure:
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


def adopt(
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
