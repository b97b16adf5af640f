"""Rules that a claim or a record can be checked by alone, without reading anything else.

Owns: format version and required features, and what a record must not contradict: its key, its order, itself. Does
not own: how objects are parsed (`records`), or what a record means for history (`history`). Invariant: writers and
readers call the same functions, so nothing is written that a reader would refuse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from ckptd.protos import error_pb2
from ckptd.protos.snapshot_pb2 import Claim, Decision, Mesh, Record, StepRef

from .errors import FormatError
from .keys import ClaimKey, DecisionKey, RecordKey, StartKey, StepId, Timeline, is_node, parse_key, parse_record_key

FORMAT_VERSION = 1
"""Newest version of the format that this program reads, and the one it writes."""
UNCOMPARED_REPLICAS = "uncompared-replicas"
"""Feature of an index in which fingerprints of replicas are zeros on purpose: who does not know it takes them for bits."""
SEGMENTED_FINGERPRINTS = "segmented-fingerprints"
"""Feature of an index in which replicas are compared by a second column, and are zeros in the first: likewise."""
RANK_ORDER = "rank-order"
"""Feature of an index of a mesh whose ranks are not numbered row-major: who does not know it takes ranks for coordinates."""
KNOWN_FEATURES: frozenset[str] = frozenset({UNCOMPARED_REPLICAS, SEGMENTED_FINGERPRINTS, RANK_ORDER})
"""Entries of `required_features` this program knows how to honour."""


def check_version(version: int, features: Iterable[str], where: str) -> None:
    """Refuse what only a newer program can read.

    Raises:
        FormatError: CORRUPT when there is no version, FORMAT_UNSUPPORTED with both numbers or the features' names.
    """
    if version == 0:
        raise corrupt(where, "it has no format version")
    unknown = sorted(set(features) - KNOWN_FEATURES)
    if version > FORMAT_VERSION:
        raise unsupported(where, f"format version {version}; this program reads versions up to {FORMAT_VERSION}")
    if unknown:
        raise unsupported(where, f"it needs the features {', '.join(unknown)}, which this program does not know")


def check_record(record: Record, key: RecordKey) -> None:
    """Refuse a record that contradicts itself or its key. Writers call it too: nothing unreadable is written.

    Raises:
        FormatError: CORRUPT or FORMAT_UNSUPPORTED, names the key and the contradiction.
    """
    where = str(key)
    check_version(record.format_version, record.required_features, where)
    if record.timeline != str(key.timeline):
        raise corrupt(where, f"it says timeline {record.timeline!r}")
    kind = record.WhichOneof("kind")
    if kind is None:
        raise corrupt(where, "it is neither a start record nor a decision")
    if (kind == "start") != isinstance(key, StartKey):
        raise corrupt(where, f"it holds a {kind}")
    listed = [_check_entry(entry, key) for entry in record.keeps]
    if any(older >= newer for older, newer in itertools.pairwise(listed)):
        raise corrupt(where, "the steps it keeps are not in order, or one stands there twice")
    quarantined = {_check_entry(entry.step, key) for entry in record.quarantined}
    if both := quarantined & set(listed):
        raise corrupt(where, f"it both keeps and quarantines {min(both)}")
    if isinstance(key, DecisionKey):
        _check_decision_record(record, key, listed)
    else:
        _check_start_record(record, key, listed)


def _check_decision_record(record: Record, key: DecisionKey, listed: list[StepId]) -> None:
    where = str(key)
    decision = record.decision
    if (decision.step, decision.timeline) != (key.id.step, str(key.id.timeline)):
        raise corrupt(where, f"it decides step {decision.step} of timeline {decision.timeline!r}")
    outcome = decision.WhichOneof("outcome")
    if outcome is None:
        raise corrupt(where, "the decision says neither committed nor aborted")
    if outcome == "aborted" and listed:
        raise corrupt(where, "an abort marker lists steps")
    if outcome == "committed":
        if key.id not in listed:
            raise corrupt(where, "a commit does not list its own step")
        _check_committed(decision, where)


def _check_start_record(record: Record, key: StartKey, listed: list[StepId]) -> None:
    where = str(key)
    start = record.start
    if start.HasField("from"):
        origin = _step_id(getattr(start, "from"), where)
        if origin not in listed:
            raise corrupt(where, f"it goes on from {origin}, which it does not list")
        if start.rollback and listed[-1] != origin:
            raise corrupt(where, f"it rolls back to {origin}, but lists a newer step")
    adopted = []
    for decision in start.adopted:
        if decision.WhichOneof("outcome") != "committed":
            raise corrupt(where, f"it adopts step {decision.step}, which is not committed")
        adopted.append(StepId(parsed_timeline(decision.timeline, where), _step(decision.step, where)))
        _check_committed(decision, where)
    if any(older >= newer for older, newer in itertools.pairwise(adopted)):
        raise corrupt(where, "adopted decisions are not in order")
    if adopted and adopted[-1].timeline >= key.timeline:
        raise corrupt(where, f"it adopts {adopted[-1]}, which is not older than itself")
    own = {step for entry in record.keeps if entry.record_key == where for step in [StepId.of(entry)]}
    own |= {StepId.of(entry.step) for entry in record.quarantined if entry.step.record_key == where}
    if stray := own - set(adopted):
        raise corrupt(where, f"it lists {min(stray)} as decided here, but holds no such decision")


def _check_committed(decision: Decision, where: str) -> None:
    step = StepId(parsed_timeline(decision.timeline, where), _step(decision.step, where))
    committed = decision.committed
    check_mesh(committed.mesh, committed.world, where)
    if not committed.indexes:
        raise corrupt(where, f"step {step.step} names no index")
    nodes: set[str] = set()
    for ref in committed.indexes:
        index = parse_key(ref.key)
        if str(index) != f"index/{step}/{ref.node}.{ref.blake3}.pb":
            raise corrupt(where, f"{ref.key!r} is not the key of an index of {step}")
        nodes.add(ref.node)
    if len(nodes) != len(committed.indexes):
        raise corrupt(where, f"step {step.step} names two indexes of one node")
    if committed.HasField("base") and not _step_id(committed.base, where) < step:
        raise corrupt(where, f"the base of {step} is not older than itself")
    if committed.plan_digest and not _is_digest(committed.plan_digest):
        raise corrupt(where, f"the plan of {step} has no usable digest")
    if committed.HasField("compared_in"):
        compared = _step_id(committed.compared_in, where)
        if compared.timeline != step.timeline or compared >= step:
            raise corrupt(where, f"{step} would have been compared in {compared}, which is no step before it")


def _check_entry(entry: StepRef, key: RecordKey) -> StepId:
    where = str(key)
    step = _step_id(entry, where)
    if (step.timeline, step.step) > key.position:
        raise corrupt(where, f"it lists {step}, which is newer than itself")
    holder = parse_record_key(entry.record_key)
    if isinstance(holder, DecisionKey):
        fits = holder.id == step
    else:
        fits = holder is not None and step.timeline < holder.timeline <= key.timeline
    if not fits:
        raise corrupt(where, f"{entry.record_key!r} cannot hold the decision of {step}")
    is_own = entry.record_key == where
    if is_own != (entry.record_blake3 == "") or not (is_own or _is_digest(entry.record_blake3)):
        raise corrupt(where, f"the entry of {step} has no usable digest of {entry.record_key}")
    return step


def check_claim(claim: Claim, key: ClaimKey) -> None:
    """Refuse a claim that contradicts itself or its key.

    Raises:
        FormatError: CORRUPT or FORMAT_UNSUPPORTED.
    """
    where = str(key)
    check_version(claim.format_version, [], where)
    if claim.timeline != str(key.timeline):
        raise corrupt(where, f"it says timeline {claim.timeline!r}")
    check_mesh(claim.mesh, claim.world, where)
    names = [node.node for node in claim.nodes]
    if len(set(names)) != len(names) or not all(is_node(name) for name in names):
        raise corrupt(where, "its nodes have no usable names, or one stands there twice")
    ranks = sorted(rank for node in claim.nodes for rank in node.ranks)
    if ranks != list(range(claim.world)) or not ranks:
        raise corrupt(where, f"its nodes do not hold the ranks 0..{claim.world - 1} once each")


def check_mesh(mesh: Mesh, world: int, where: str) -> None:
    """Refuse a mesh whose axes and sizes do not make up the world.

    Raises:
        FormatError: CORRUPT.
    """
    if len(mesh.axes) != len(mesh.sizes) or len(set(mesh.axes)) != len(mesh.axes):
        raise corrupt(where, f"mesh axes {list(mesh.axes)} do not go with sizes {list(mesh.sizes)}")
    if world < 1 or math.prod(mesh.sizes) != world:
        raise corrupt(where, f"mesh sizes {list(mesh.sizes)} do not make a world of {world}")
    if len(mesh.rank_order) not in {0, 32}:
        raise corrupt(where, f"the mesh's order of ranks is no SHA-256 but {len(mesh.rank_order)} bytes")


def _step_id(entry: StepRef, where: str) -> StepId:
    return StepId(parsed_timeline(entry.timeline, where), _step(entry.step, where))


def parsed_timeline(text: str, where: str) -> Timeline:
    """Return the timeline an object at `where` names.

    Raises:
        FormatError: CORRUPT.
    """
    try:
        return Timeline.parse(text)
    except ValueError as error:
        raise corrupt(where, str(error)) from None


def _step(step: int, where: str) -> int:
    try:
        return StepId(Timeline(1, "0" * 12), step).step
    except ValueError as error:
        raise corrupt(where, str(error)) from None


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def corrupt(where: str, what: str) -> FormatError:
    """Return the error for an object at `where` that breaks the format."""
    return FormatError.of(
        f"{where}: {what}",
        object=where,
        hint="the object was damaged or not written by ckptd; restore it from a copy of the root",
    )


def unsupported(where: str, what: str) -> FormatError:
    """Return the error for an object at `where` that only a newer program can read."""
    return FormatError.of(
        f"{where}: {what}",
        reason=error_pb2.REASON_FORMAT_UNSUPPORTED,
        object=where,
        hint="use a newer ckptd to read this root",
    )
