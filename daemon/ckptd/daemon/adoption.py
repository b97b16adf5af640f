"""Which steps of the timeline before it a new timeline adopts (R2).

Pure: functions of the answers of LIST and GET. Owns: candidates by name, and the verdict on each by content. Does not own:
what is whole (`coverage`), or the start record that adopts them (`history`). Invariant: a step is adopted only when it is
of the newest record's own timeline, newer than that record, not aborted, whole, and its base is still listed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Claim, Committed, IndexRef, Record, StepRef

from .comparisons import Comparisons
from .coverage import LoadedIndex, NotWhole, committed, whole
from .entries import require_base_listed, step_of
from .errors import DaemonError
from .index import load_index
from .keys import IndexKey, parse_key


def index_nodes(keys: Iterable[str], timeline: str) -> set[tuple[int, str]]:
    """Return (step, node) for every index of a timeline that a listing shows."""
    found = ((key.id, key.node) for key in map(parse_key, keys) if isinstance(key, IndexKey))
    return {(step.step, node) for step, node in found if str(step.timeline) == timeline}


def candidates(
    *, claim: Claim, record: Record, index_keys: Iterable[str], aborted: Collection[int]
) -> list[tuple[int, list[IndexRef]]]:
    """Return the steps that the next timeline may adopt if they turn out whole, ascending (R2).

    They are of the newest record's own timeline, newer than it, not aborted, and every node of the claim has an index
    there by name. Whatever is of another timeline, or older, is dead for ever.

    Args:
        claim: The claim of the newest record's timeline.
        record: The newest record.
        index_keys: A listing of the indexes, taken after the claim of the new timeline was written.
        aborted: Steps of that timeline, newer than the record, that have a decision: those can only be abort markers.

    Returns:
        For each step its indexes as the listing names them (`bytes` unknown, 0); several of one node where its agent
        restarted.
    """
    by_step: dict[int, list[IndexRef]] = {}
    for key in map(parse_key, index_keys):
        if isinstance(key, IndexKey) and str(key.id.timeline) == record.timeline and key.id.step > step_of(record):
            by_step.setdefault(key.id.step, []).append(IndexRef(node=key.node, key=str(key), blake3=key.digest))
    nodes = {node.node for node in claim.nodes}
    return [
        (step, sorted(refs, key=lambda ref: ref.key))
        for step, refs in sorted(by_step.items())
        if step not in aborted and nodes <= {ref.node for ref in refs}
    ]


def adoption(  # noqa: PLR0917 - the coordinator runs it off its loop, with positional arguments
    claim: Claim,
    step: int,
    refs: Sequence[IndexRef],
    blobs: Sequence[bytes | None],
    listed: Sequence[StepRef],
    created_at: str,
    comparisons: Comparisons | None = None,
) -> Committed | Error:
    """Say whether a candidate is adopted (R2): whole, and its base still listed.

    Args:
        claim: The claim of the step's timeline.
        step: The step.
        refs: Its indexes, as `candidates` named them.
        blobs: Their bytes, in the same order. One that vanished means that history moved: list again instead.
        listed: What the newest record lists, and what was adopted before this step.
        created_at: RFC 3339, UTC; information only.
        comparisons: What the newest record, and what was decided after it, say of comparisons; None: a step whose
            replicas were not compared is not adopted. The answer is to be noted there before the next candidate.

    Returns:
        The posthumous commit, or why there is none.
    """
    loaded: dict[str, list[LoadedIndex]] = {}
    damaged: list[Error] = []
    for ref, blob in zip(refs, blobs, strict=True):
        try:
            loaded.setdefault(ref.node, []).append(load_index(ref, blob))
        except DaemonError as wrong:
            damaged.append(wrong.error)
    found = whole(claim, step, loaded, comparisons=comparisons)
    if isinstance(found, NotWhole):
        return damaged[0] if damaged else found.error
    try:
        require_base_listed(step, found.base, listed)
    except DaemonError as dropped:
        return dropped.error
    return committed(claim=claim, whole=found, created_at=created_at, posthumous=True)
