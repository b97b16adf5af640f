"""Which chunks the steps of a record need: the roots of a sweep.

Owns: reading the indexes of listed and quarantined steps, and the keys they refer to. Does not own: deciding what is
deleted (`sweep`). Invariant: the answer holds every chunk of every listed step, or there is no answer.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptd.protos.snapshot_pb2 import Committed, IndexRef, StepRef
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import NotFound

from .errors import CorruptError, FormatError
from .index import chunk_keys, load_index
from .log_reader import NewestRecord, read_committed
from .parallel import in_parallel


class RootGoneError(CorruptError):
    """A record or an index of a listed step is gone or damaged: what it refers to is unknown."""


def needed_chunks(store: ObjectStore, newest: NewestRecord, *, workers: int) -> set[str]:
    """Return the keys of all chunks that listed steps refer to, and quarantined ones where they can be read.

    Raises:
        RootGoneError: a record or an index of a listed step is gone or damaged.
        StorageError: as the store raised it.
    """
    needed: set[str] = set()
    for keys in in_parallel(lambda ref: _of_step(store, newest, ref), newest.listed, workers=workers):
        needed |= keys
    for entry in newest.record.quarantined:
        needed |= _of_quarantined(store, newest, entry.step)
    return needed


def missing_root(error: CorruptError | FormatError, step: int) -> set[str]:
    """Stop: a listed step's index cannot be read (R7).

    Without it nobody knows which chunks the step needs. It may also mean that this is a slow sweep: history went on,
    and another sweep has deleted what this one takes for listed.
    """
    raise RootGoneError.of(
        f"step {step} is listed, but {error}",
        hint="nothing was deleted; run it again if another sweep was at work, else run `ckptd verify --all`",
        step=step,
        object=error.error.object,
    )


def _of_step(store: ObjectStore, newest: NewestRecord, ref: StepRef) -> set[str]:
    needed: set[str] = set()
    try:
        refs: list[IndexRef] = list(read_committed(store, newest, ref).indexes)
    except (CorruptError, FormatError) as error:
        return missing_root(error, ref.step)
    for index in refs:
        try:
            needed |= _of_index(store, index)
        except (CorruptError, FormatError) as error:
            needed |= missing_root(error, ref.step)
    return needed


def _of_quarantined(store: ObjectStore, newest: NewestRecord, ref: StepRef) -> set[str]:
    needed: set[str] = set()
    for index in _indexes_of(store, newest, ref):
        try:
            needed |= _of_index(store, index)
        except (CorruptError, FormatError):
            continue  # it was found bad: this may be why
    return needed


def _indexes_of(store: ObjectStore, newest: NewestRecord, ref: StepRef) -> Iterator[IndexRef]:
    found: Committed
    try:
        found = read_committed(store, newest, ref)
    except (CorruptError, FormatError):
        return
    yield from found.indexes


def _of_index(store: ObjectStore, ref: IndexRef) -> set[str]:
    try:
        data: bytes | None = store.get(ref.key)
    except NotFound:
        data = None
    _, _, sections = load_index(ref, data)
    return chunk_keys(list(sections.values()))
