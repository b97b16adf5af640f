"""What a root holds, from the store alone (R6): for `ls`, `show` and `verify`.

Owns: the state of every step as a reader may believe it. Does not own: printing, or proving bytes (`verify`). Writes nothing,
claims nothing, needs no agent. Invariants: "committed" means listed by the newest record; what is neither listed, nor
quarantined, nor newer than that record is dead and not shown; an answer read while a newer timeline is starting says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Claim, Committed, Job, StepRef
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import NotFound

from .errors import NotFoundError, make_error
from .history import order
from .keys import INDEX_PREFIX, JOB, IndexKey, StepId, Timeline, claim_key, parse_key
from .log_reader import NewestRecord, list_log, read_claim, read_committed, read_newest
from .parallel import in_parallel
from .records import parse_job


class StepState(StrEnum):
    """What a reader may believe of a step."""

    COMMITTED = "committed"
    """Listed by the newest record: restorable."""
    QUARANTINED = "quarantined"
    """Was committed and found bad; not offered, not deleted."""
    UNCOMMITTED = "uncommitted"
    """Every node's index is there, no record lists it: about to be decided, or left by a run that ended."""
    INCOMPLETE = "incomplete"
    """Some node's index is missing: still being uploaded, or left by a run that ended."""
    ABORTED = "aborted"
    """Given up; its marker says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogStep:
    """One step of the root.

    Attributes:
        id: Step and timeline.
        state: See `StepState`.
        ref: The entry of the newest record, for listed and quarantined steps.
        why: What is missing, why it was aborted or quarantined; None where it is committed.
    """

    id: StepId
    state: StepState
    ref: StepRef | None = None
    why: Error | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalog:
    """A root as it was read.

    Attributes:
        job: job.json.
        newest: The newest record; None where nothing was ever started to the end.
        highest: The highest claim, looked at after the record was read.
        steps: All that is shown, ascending by (timeline, step).
    """

    job: Job
    newest: NewestRecord | None
    highest: Timeline | None
    steps: list[CatalogStep]

    @property
    def is_provisional(self) -> bool:
        """Whether a newer timeline is starting: it may adopt steps that are not listed, or go back to older ones."""
        return self.highest is not None and (self.newest is None or self.highest > self.newest.timeline)

    @property
    def latest(self) -> StepId | None:
        """The step a restart goes on from, as far as the newest record says."""
        ref = self.newest.latest if self.newest is not None else None
        return order(ref) if ref is not None else None

    def step(self, number: int | None) -> CatalogStep:
        """Return the step of a number, of its newest timeline; None asks for the latest.

        A committed one is preferred to what was begun under the same number and not committed.

        Raises:
            NotFoundError: there is none; lists those there are.
        """
        found = [step for step in self.steps if number is None or step.id.step == number]
        if number is None:
            found = [step for step in found if step.id == self.latest]
        if not found:
            existing = [step.id.step for step in self.steps if step.state is StepState.COMMITTED]
            what = "no committed step" if number is None else f"no step {number}"
            raise NotFoundError.of(
                f"the root holds {what}",
                hint=f"committed steps: {', '.join(map(str, existing[-20:])) or 'none'}",
                step=number,
            )
        committed = [step for step in found if step.state is StepState.COMMITTED]
        return (committed or found)[-1]


def read_catalog(store: ObjectStore) -> Catalog:
    """Read a root: three listings, the job, the newest record, and the claims of unfinished timelines.

    Raises:
        NotFoundError: the root holds no job.
        FormatError: job.json or the newest record is damaged, or from a newer program.
        DaemonError: STORE_FAILED, LIST shows the past.
        StorageError: as the store raised it.
    """
    job = read_job(store)
    _, newest = read_newest(store)
    # After the record was read (R6), by a listing that is no older.
    highest = list_log(store, after=newest.key if newest is not None else None).highest_claim()
    steps = [*_listed(newest), *_unlisted(store, newest)]
    return Catalog(job=job, newest=newest, highest=highest, steps=sorted(steps, key=lambda step: step.id))


def read_job(store: ObjectStore) -> Job:
    """Return job.json.

    Raises:
        NotFoundError: there is none.
        FormatError: it is damaged, or from a newer program.
        StorageError: as the store raised it.
    """
    try:
        return parse_job(store.get(JOB))
    except NotFound:
        raise NotFoundError.of(
            f"{store.url} holds no job: there is no {JOB}", hint="check the root's URL", object=JOB
        ) from None


def read_commits(store: ObjectStore, catalog: Catalog, *, workers: int) -> Iterator[tuple[CatalogStep, Committed]]:
    """Yield the commit of every committed step, ascending, with a bounded number of requests at once.

    Raises:
        CorruptError: a record is gone or changed.
        StorageError: as the store raised it.
    """
    newest = catalog.newest
    if newest is None:
        return
    steps = [step for step in catalog.steps if step.state is StepState.COMMITTED and step.ref is not None]
    refs = [step.ref for step in steps if step.ref is not None]
    yield from zip(
        steps, in_parallel(lambda ref: read_committed(store, newest, ref), refs, workers=workers), strict=True
    )


def _listed(newest: NewestRecord | None) -> Iterator[CatalogStep]:
    if newest is None:
        return
    for ref in newest.listed:
        yield CatalogStep(id=order(ref), state=StepState.COMMITTED, ref=ref)
    for entry in newest.record.quarantined:
        yield CatalogStep(id=order(entry.step), state=StepState.QUARANTINED, ref=entry.step, why=entry.why)


def _unlisted(store: ObjectStore, newest: NewestRecord | None) -> Iterator[CatalogStep]:
    """Yield steps that are newer than the newest record: what is older and not listed is dead."""
    known = {step.id for step in _listed(newest)}
    nodes: dict[StepId, set[str]] = {}
    for key in map(parse_key, _index_keys(store)):
        if isinstance(key, IndexKey):
            nodes.setdefault(key.id, set()).add(key.node)
    aborted = newest.aborted if newest is not None else {}
    claims: dict[Timeline, Claim | None] = {}
    for step in sorted({*nodes, *aborted}):
        if step in known or (newest is not None and (step.timeline, step.step) < newest.position):
            continue
        if step in aborted:
            yield CatalogStep(id=step, state=StepState.ABORTED, why=aborted[step].why)
            continue
        if step.timeline not in claims:
            claims[step.timeline] = read_claim(store, step.timeline)
        state, why = unfinished(step, claims[step.timeline], nodes[step])
        yield CatalogStep(id=step, state=state, why=why)


def unfinished(step: StepId, claim: Claim | None, nodes: Collection[str]) -> tuple[StepState, Error]:
    """Return what an unlisted step lacks to be committed, by the names of its indexes.

    Args:
        step: The step.
        claim: Its timeline's claim, or None where that is gone.
        nodes: Nodes that have an index.
    """
    number = step.step
    if claim is None:
        key = claim_key(step.timeline)
        text = f"step {number}: {key}, which names its nodes, is gone"
        return StepState.INCOMPLETE, make_error(error_pb2.REASON_CORRUPT, text, step=number, object=key)
    missing = [node for node in claim.nodes if node.node not in nodes]
    if not missing:
        text = f"step {number}: all indexes are there, but no record lists it"
        return StepState.UNCOMMITTED, make_error(error_pb2.REASON_ABORTED, text, step=number)
    parts = [
        f"rank{'s' if len(node.ranks) > 1 else ''} {ranges_text(node.ranks)} (node {node.node}, {node.hostname})"
        for node in missing
    ]
    ranks = [rank for node in missing for rank in node.ranks]
    text = f"step {number}: no index of {'; '.join(parts)}"
    reason = error_pb2.REASON_RANKS_MISSING
    return StepState.INCOMPLETE, make_error(reason, text, step=number, ranks=ranks, node=missing[0].node)


def ranges_text(ranks: Iterable[int]) -> str:
    """Return ranks in short, e.g. "0-3, 8"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _index_keys(store: ObjectStore) -> Iterator[str]:
    return (info.key for info in store.list(INDEX_PREFIX))
