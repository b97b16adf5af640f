"""What would be left in a root after a sweep, and whether anything needs it. Reads, deletes nothing.

Owns: the count of objects. Does not own: judgement. The sweep is asked what it would delete; what is needed is found
here, from the newest record and the indexes of the steps it lists, without the sweep's own rules. Invariant: evidence
of a run is never deleted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ckptd.chaos.overlay import OverlayStore
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.keys import ChunkKey, DecisionKey, IndexKey, RecordKey, StepId, parse_key
from ckptd.daemon.offline import write_start
from ckptd.daemon.sweep import SweepStoppedError, sweep
from ckptd.storage_backends.base import RESERVED_FOLDER, ObjectStore
from ckptd.storage_backends.probe import is_probe


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftovers:
    """What stands in a root, by who needs it.

    Attributes:
        objects: All objects.
        garbage: How many of them a sweep would delete.
        unaccounted: Keys that would stay though nothing needs them.
        sweep_takes_needed: Keys that the sweep would delete though the newest record needs them.
        sweep_error: Why a sweep would not run; empty if it would.
    """

    objects: int = 0
    garbage: int = 0
    unaccounted: tuple[str, ...] = ()
    sweep_takes_needed: tuple[str, ...] = ()
    sweep_error: str = ""


def leftovers(
    store: ObjectStore, newest: RecordKey | None, *, kept: Collection[StepId], refs: Collection[str]
) -> Leftovers:
    """Look at every object of a root that nobody writes to.

    Args:
        store: The root.
        newest: Key of its newest record.
        kept: Steps that this record lists, and those it has quarantined.
        refs: Keys of indexes and chunks that these steps refer to.

    Raises:
        StorageError: The store cannot be reached.
    """
    keys = [info.key for info in store.list("")]
    try:
        swept = _swept(store)
    except DaemonError as error:
        return Leftovers(objects=len(keys), sweep_error=str(error))
    needed = frozenset(refs)
    return Leftovers(
        objects=len(keys),
        garbage=len(swept),
        unaccounted=tuple(
            key for key in sorted(keys) if key not in swept and key not in needed and not _stays(key, newest, kept)
        ),
        sweep_takes_needed=tuple(sorted(swept & needed)),
    )


def _swept(store: ObjectStore) -> set[str]:
    """Return the keys that a sweep would delete; where a start died after its claim, as after `ckptd sweep --claim`.

    A process that was paused before its claim and woken after the job's end may claim, and find its ranks gone.
    """
    try:
        plan = sweep(store, dry_run=True)
    except SweepStoppedError:
        settled = OverlayStore(store)
        write_start(settled, created_at="1970-01-01T00:00:00Z", give_up=True)
        plan = sweep(settled, dry_run=True)
    return {info.key for info in plan.delete}


def _stays(key: str, newest: RecordKey | None, kept: Collection[StepId]) -> bool:
    """Whether a key stays by its name alone: claims, start records, pins, what a newer record or sweep will decide about."""
    if is_probe(key):
        return True  # of an agent that was killed as it tried the store: a sweep takes it when it is a day old
    parsed = parse_key(key)
    if parsed is None:
        return False  # foreign: in a root that only the harness's job wrote to, nobody put it there on purpose
    if not isinstance(parsed, ChunkKey | IndexKey | DecisionKey):
        return True
    # Newer than the newest record: undecided, or aborted; a next record or start says which.
    is_open = newest is None or (parsed.id.timeline, parsed.id.step) > newest.position
    return is_open or (isinstance(parsed, DecisionKey) and parsed.id in kept)


def temporary_files(url: str) -> tuple[str, ...]:
    """Return the files of writers that died which still lie in a root of local files; none for other stores."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        return ()
    folder = Path(unquote(parts.path)) / RESERVED_FOLDER
    return tuple(sorted(f"{RESERVED_FOLDER}/{path.name}" for path in folder.iterdir())) if folder.is_dir() else ()
