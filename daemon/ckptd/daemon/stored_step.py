"""One committed step as it lies in the store: its commit and every node's index.

Owns: reading and checking them (R6). Does not own: the tensors' bytes, or which step is meant (`catalog`). Reads only, needs
no agent. Invariant: what is returned has the digests it is listed with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckptd.protos import error_pb2
from ckptd.protos.snapshot_pb2 import Committed, IndexRef, Job, RankSection
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import NotFound

from .catalog import CatalogStep, StepState, read_catalog
from .coverage import LoadedIndex
from .errors import CorruptError, DaemonError, FormatError, NotFoundError
from .index import check_ref, load_index
from .keys import StepId
from .log_reader import read_committed


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredStep:
    """A committed step.

    Attributes:
        job: The root's job.json.
        id: Step and timeline.
        commit: What its record says.
        indexes: Of all nodes, in the record's order; whole files.
        sections: Of all ranks.
    """

    job: Job
    id: StepId
    commit: Committed
    indexes: list[LoadedIndex]
    sections: dict[int, RankSection]


def read_stored_step(store: ObjectStore, number: int | None = None) -> StoredStep:
    """Read a committed step, the latest one without a number.

    Raises:
        NotFoundError: there is none.
        DaemonError: ABORTED or RANKS_MISSING when no record lists it, CORRUPT when it is quarantined.
        CorruptError: its record or an index is gone or changed; a step that is dropped meanwhile looks so
            (`dropped_or_corrupt`).
        FormatError: one of them breaks the format.
        StorageError: as the store raised it.
    """
    catalog = read_catalog(store)
    step = catalog.step(number)
    if step.state is not StepState.COMMITTED or step.ref is None or catalog.newest is None:
        raise _not_committed(step)
    commit = read_committed(store, catalog.newest, step.ref)
    indexes = [load_index(ref, read_index_bytes(store, ref)) for ref in commit.indexes]
    sections: dict[int, RankSection] = {}
    for _, _, of_node in indexes:
        sections.update(of_node)
    return StoredStep(job=catalog.job, id=step.id, commit=commit, indexes=indexes, sections=sections)


def read_index_bytes(store: ObjectStore, ref: IndexRef) -> bytes:
    """Return the bytes of an index that a commit names.

    Raises:
        CorruptError: it is gone, or has another length or digest.
        StorageError: as the store raised it.
    """
    try:
        data: bytes | None = store.get(ref.key)
    except NotFound:
        data = None
    return check_ref(ref, data)


@contextmanager
def dropped_or_corrupt(store: ObjectStore, number: int | None) -> Iterator[None]:
    """Tell a step that was dropped while it was read from one that is corrupt: a running job drops, a sweep deletes.

    Raises:
        NotFoundError: instead of CorruptError or FormatError, where the step is no longer listed.
    """
    step = read_catalog(store).step(number)
    try:
        yield
    except (CorruptError, FormatError):
        now = {one.id: one.state for one in read_catalog(store).steps}
        if step.state is StepState.COMMITTED and now.get(step.id) is not StepState.COMMITTED:
            raise NotFoundError.of(f"step {step.id.step} was dropped while it was read", step=step.id.step) from None
        raise


def _not_committed(step: CatalogStep) -> DaemonError:
    if step.state is StepState.QUARANTINED:
        reason = error_pb2.REASON_CORRUPT
    elif step.state is StepState.INCOMPLETE:
        reason = error_pb2.REASON_RANKS_MISSING
    else:
        reason = error_pb2.REASON_ABORTED
    why = step.why.message if step.why is not None else "no record lists it"
    return DaemonError.of(
        f"step {step.id.step} is {step.state}: {why}",
        reason=reason,
        hint="`ckptd ls` shows which steps are committed",
        step=step.id.step,
    )
