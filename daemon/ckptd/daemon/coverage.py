"""Whether the indexes of all nodes make a whole step: one pure function for coordinator, resolver and tests.

Owns: `whole`, the decision that follows from it, and the state digest. Does not own: what follows from layouts alone
(`layouts`), reading indexes, or deciding (`history`). Invariant: `Whole` means one index for every node of the claim;
every rank of the world once; one plan and one base; every element of every global tensor covered exactly once; every
replica compared and equal, or left uncompared on a word that is backed; every byte that a rank leaves to another one
held by it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import blake3
import numpy as np
import numpy.typing as npt

from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error, Reason
from ckptd.protos.snapshot_pb2 import Claim, Committed, IndexHeader, IndexRef, RankSection, StepRef, Totals

from .comparisons import Comparisons
from .errors import DaemonError, make_error
from .index import ChunkRef, chunk_refs
from .index_checks import FINGERPRINT_BYTES
from .keys import StepId, Timeline, index_key
from .layouts import Layouts, layouts_of, row_at
from .tiling import Box, box_text, tiling

__all__ = ["Box", "LoadedIndex", "NotWhole", "Whole", "committed", "tiling", "whole"]

LoadedIndex: TypeAlias = tuple[IndexRef, IndexHeader, dict[int, RankSection]]
"""An index as it was read: how a decision names it, its header, its sections by rank."""

_MAX_COMBINATIONS = 64
"""A restarted agent may leave two indexes of a node; more sets than this are not tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """A step that may be committed: what the decision is made of.

    Attributes:
        indexes: One per node, in the claim's order.
        totals: Sums, information only.
        state_digest: BLAKE3 (hex) over what was saved, see docs/format.md.
        base: The step whose chunks it refers to, or None. Must still be listed when the decision is written (R4).
        compared_in: The step in which the same layout was last compared, or None: it was in this one.
        header: Of the index that holds rank 0: metrics, tags and versions are taken from it.
    """

    indexes: list[IndexRef]
    totals: Totals
    state_digest: str
    base: StepRef | None
    compared_in: StepRef | None
    header: IndexHeader


@dataclass(frozen=True, kw_only=True, slots=True)
class NotWhole:
    """A step that must not be committed, and why."""

    error: Error


class _RefusedError(DaemonError):
    """Carries the reason out of the checks below."""


def whole(
    claim: Claim,
    step: int,
    indexes: Mapping[str, Sequence[LoadedIndex]],
    *,
    base_chunks: Collection[str] | None = None,
    comparisons: Comparisons | None = None,
) -> Whole | NotWhole:
    """Say whether these indexes make step `step` of the claim's timeline whole.

    Where a node has several, sets are tried in the order of their keys and the first whole one counts, so that every
    reader of the same objects comes to the same answer.

    Args:
        claim: The claim of the step's timeline.
        step: The step.
        indexes: What was read from the store, by node. Nodes that the claim does not name are ignored.
        base_chunks: Keys of all chunks the base's indexes refer to, where the caller has them: then a reference that
            does not stand there is refused.
        comparisons: What the caller knows of the comparisons before this step, where this one may go without; never
            taken from its indexes. None: every replica must be compared here.

    Returns:
        Whole, or NotWhole with the error of the first set; its message names node, rank, tensor and box.
    """
    choices = []
    for node in claim.nodes:
        found = sorted(indexes.get(node.node, ()), key=lambda loaded: loaded[0].key)
        if not found:
            text = f"step {step}: node {node.node} ({node.hostname}) with ranks {list(node.ranks)} has no index"
            reason = error_pb2.REASON_RANKS_MISSING
            return NotWhole(error=make_error(reason, text, step=step, node=node.node, ranks=node.ranks, phase="commit"))
        choices.append(found)
    first: NotWhole | None = None
    for chosen in itertools.islice(itertools.product(*choices), _MAX_COMBINATIONS):
        try:
            return _whole_set(claim, step, chosen, base_chunks, comparisons)
        except DaemonError as refused:
            error = Error()
            error.CopyFrom(refused.error)
            error.step, error.phase = step, "commit"
            first = first or NotWhole(error=error)
    assert first is not None  # the product of no choices is one empty set, refused by its missing ranks
    return first


def committed(*, claim: Claim, whole: Whole, created_at: str, posthumous: bool = False) -> Committed:
    """Return the commit of a whole step.

    Args:
        claim: The claim it was checked against.
        whole: The answer of `whole`.
        created_at: RFC 3339, UTC; information only.
        posthumous: Whether a resolver commits it, after the run has ended.
    """
    return Committed(
        indexes=whole.indexes,
        world=claim.world,
        mesh=claim.mesh,
        totals=whole.totals,
        state_digest=whole.state_digest,
        metrics=dict(whole.header.metrics),
        tags=dict(whole.header.tags),
        base=whole.base,
        posthumous=posthumous,
        created_at=created_at,
        versions=dict(whole.header.versions),
        compared_in=whole.compared_in,
        plan_digest=whole.header.plan_digest.hex(),
    )


def _whole_set(
    claim: Claim,
    step: int,
    chosen: Sequence[LoadedIndex],
    base_chunks: Collection[str] | None,
    comparisons: Comparisons | None,
) -> Whole:
    sections: dict[int, RankSection] = {}
    for node, loaded in zip(claim.nodes, chosen, strict=True):
        _check_node(claim, step, node.node, list(node.ranks), loaded)
        sections.update(loaded[2])
    if sorted(sections) != list(range(claim.world)):
        missing = sorted(set(range(claim.world)) - set(sections))
        raise _refused(error_pb2.REASON_RANKS_MISSING, f"step {step}: ranks {missing} have no index", ranks=missing)
    head = next(header for _, header, of_node in chosen if 0 in of_node)
    _check_agreement(chosen, head, step)
    _check_coordinates(sections, step)
    layouts = layouts_of(sections)
    compared_in = _compared_in(chosen, step, comparisons)
    fingerprints = _joined([sections[rank].fingerprints for rank in sorted(sections)])
    if head.segmented_algorithm:
        by_segments = _joined([sections[rank].segmented_fingerprints for rank in sorted(sections)])
        _check_replicas(by_segments, sections, layouts, step)
    else:
        _check_replicas(fingerprints, sections, layouts, step)
    own = StepId(Timeline.parse(claim.timeline), step)
    refs = [ref for section in sections.values() for ref in chunk_refs(section)]
    _check_references(refs, own, base_chunks)
    lengths = {ref.key: ref.length for ref in refs}
    totals = Totals(
        bytes=layouts.nbytes + sum(sum(section.object_length) for section in sections.values()),
        new_bytes=sum(length for key, length in lengths.items() if key.endswith(str(own))),
        tensors=layouts.tensors,
        objects=sum(len(section.object_names) for section in sections.values()),
        chunks=len(lengths),
    )
    return Whole(
        indexes=[ref for ref, _, _ in chosen],
        totals=totals,
        state_digest=_state_digest(layouts, fingerprints, sections),
        base=head.base if head.HasField("base") else None,
        compared_in=compared_in,
        header=head,
    )


def _check_node(claim: Claim, step: int, node: str, ranks: list[int], loaded: LoadedIndex) -> None:
    ref, header, sections = loaded
    where = f"step {step}: the index of node {node}"
    reason = error_pb2.REASON_RANKS_DISAGREE
    if ref.node != node or ref.key != index_key(step, Timeline.parse(claim.timeline), node, ref.blake3):
        raise _refused(error_pb2.REASON_CORRUPT, f"{where} is named {ref.key!r}", node=node)
    if (header.step, header.timeline, header.node) != (step, claim.timeline, node):
        raise _refused(error_pb2.REASON_CORRUPT, f"{where} is of step {header.step}.{header.timeline}", node=node)
    if header.world != claim.world or header.mesh != claim.mesh:
        raise _refused(reason, f"{where} is of another world or mesh than the claim", node=node)
    found = [entry.rank for entry in header.sections]
    if found != ranks or sorted(sections) != ranks:
        raise _refused(reason, f"{where} holds the ranks {found}, the claim says {ranks}", node=node, ranks=ranks)


def _check_agreement(chosen: Sequence[LoadedIndex], head: IndexHeader, step: int) -> None:
    for _, header, sections in chosen:
        both = f"nodes {head.node} and {header.node}"
        if header.plan_digest != head.plan_digest or not header.plan_digest:
            text = f"step {step}: {both} were saved by different plans"
            raise _refused(error_pb2.REASON_RANKS_DISAGREE, text, node=header.node, ranks=sections)
        if _base_of(header) != _base_of(head):
            text = f"step {step}: {both} refer to different bases {_base_of(head)} and {_base_of(header)}"
            raise _refused(error_pb2.REASON_RANKS_DISAGREE, text, node=header.node, ranks=sections)
        if header.segmented_algorithm != head.segmented_algorithm:
            names = [one.segmented_algorithm or "xxh3-128" for one in (head, header)]
            text = f"step {step}: {both} have fingerprints of replicas by {names[0]} and by {names[1]}"
            raise _refused(error_pb2.REASON_RANKS_DISAGREE, text, node=header.node, ranks=sections)


def _compared_in(chosen: Sequence[LoadedIndex], step: int, comparisons: Comparisons | None) -> StepRef | None:
    """Return the step that stands for this one's comparison; None where all replicas have their fingerprints.

    Raises:
        DaemonError: NOT_COMPARED, fingerprints were left out and the caller does not back that; RANKS_DISAGREE, nodes were
            given different words.
    """
    words = [header.compared_in if header.HasField("compared_in") else None for _, header, _ in chosen]
    marked = [
        (number, rank) for number, (_, _, of_node) in enumerate(chosen) for rank in of_node if of_node[rank].uncompared
    ]
    if not marked:
        return None
    ranks = sorted(rank for _, rank in marked)
    word = words[marked[0][0]]
    if any(other is not None and other != word for other in words):
        text = f"step {step}: nodes were told different steps that replicas were last compared in"
        raise _refused(error_pb2.REASON_RANKS_DISAGREE, text, ranks=ranks)
    if word is None or comparisons is None or not comparisons.backs(word, chosen[0][1].plan_digest.hex()):
        told = "nothing" if word is None else f"step {word.step} of {word.timeline}"
        text = (
            f"step {step}: ranks {ranks} did not compare their replicas; what they rely on ({told}) does not allow it"
        )
        raise _refused(error_pb2.REASON_NOT_COMPARED, text, ranks=ranks)
    return comparisons.last()


def _check_coordinates(sections: Mapping[int, RankSection], step: int) -> None:
    seen: dict[tuple[int, ...], int] = {}
    for rank, section in sections.items():
        other = seen.setdefault(tuple(section.coordinate), rank)
        if other != rank:
            text = f"step {step}: ranks {other} and {rank} have one coordinate {list(section.coordinate)}"
            raise _refused(error_pb2.REASON_RANKS_DISAGREE, text, ranks=[other, rank])


def _check_references(refs: Sequence[ChunkRef], own: StepId, base_chunks: Collection[str] | None) -> None:
    lengths: dict[str, int] = {}
    for ref in refs:
        if lengths.setdefault(ref.key, ref.length) != ref.length:
            raise _refused(error_pb2.REASON_CORRUPT, f"{ref.key} is referred to with two lengths", where=ref.key)
    if base_chunks is None:
        return
    for key in lengths:
        if not key.endswith(str(own)) and key not in base_chunks:
            text = f"step {own.step} refers to {key}, which its base does not hold"
            raise _refused(error_pb2.REASON_CORRUPT, text, where=key)


def _joined(columns: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Return the fingerprints of all rows of all sections."""
    return np.frombuffer(b"".join(columns), dtype="<u8").reshape(-1, FINGERPRINT_BYTES // 8)


def _check_replicas(
    fingerprints: npt.NDArray[np.uint64], sections: Mapping[int, RankSection], layouts: Layouts, step: int
) -> None:
    """Compare every replica that has a fingerprint with the row that stands for it."""
    has_one = _fingerprinted(sections)
    differs = (fingerprints != fingerprints[layouts.holder]).any(axis=1) & has_one
    if not differs.any():
        return
    row = int(differs.argmax())
    _, name, box = row_at(sections, row)
    same_box = np.flatnonzero((layouts.holder == layouts.holder[row]) & has_one)
    by_value: dict[bytes, list[int]] = {}
    for replica in same_box:
        rank, _, _ = row_at(sections, int(replica))
        by_value.setdefault(fingerprints[replica].tobytes(), []).append(rank)
    sides = " and ".join(f"ranks {ranks} ({value.hex()[:8]}…)" for value, ranks in by_value.items())
    more = int(differs.sum()) - 1
    text = (
        f"step {step}: tensor {name!r}, box {box_text(box)}: replicas differ between {sides}"
        f"{f'; {more} more rows differ' if more else ''}"
    )
    raise _RefusedError.of(
        text,
        reason=error_pb2.REASON_REPLICAS_DIFFER,
        hint="ranks declared as replicas hold different values: declare the value PerRank, or find what diverged",
        object=name,
        ranks=[rank for ranks in by_value.values() for rank in ranks],
    )


def _fingerprinted(sections: Mapping[int, RankSection]) -> npt.NDArray[np.bool_]:
    """Return which rows have a fingerprint: all, but those that a marked section leaves to another rank."""
    found = []
    for rank in sorted(sections):
        section = sections[rank]
        if section.uncompared:
            found.append(np.asarray(section.writer, dtype=np.int64) == rank)
        else:
            found.append(np.ones(len(section.writer), dtype=np.bool_))
    return np.concatenate(found)


def _state_digest(layouts: Layouts, fingerprints: npt.NDArray[np.uint64], sections: Mapping[int, RankSection]) -> str:
    objects = sorted(
        (list(section.coordinate), name, section.object_fingerprints[at * 16 : at * 16 + 16])
        for section in sections.values()
        for at, name in enumerate(section.object_names)
    )
    text = json.dumps([[at, name] for at, name, _ in objects], separators=(",", ":"), ensure_ascii=False)
    hasher = blake3.blake3(layouts.text_digest)
    hasher.update(fingerprints[layouts.order].tobytes())
    hasher.update(blake3.blake3(text.encode()).digest())
    hasher.update(b"".join(value for _, _, value in objects))
    return hasher.hexdigest()


def _base_of(header: IndexHeader) -> StepId | None:
    return StepId.of(header.base) if header.HasField("base") else None


def _refused(
    reason: Reason.ValueType,
    text: str,
    *,
    node: str = "",
    where: str = "",
    ranks: Collection[int] | Mapping[int, object] = (),
) -> _RefusedError:
    return _RefusedError.of(text, reason=reason, node=node, object=where, ranks=list(ranks))
