"""What a root says after a run: claims, decisions, the steps that are listed, and whether each is of one cut.

Owns: reading, and plain values for the checkers. Does not own: judgement. Reads the store alone, claims nothing, and
finds the newest record by its name itself: the rules are few, and a judge should not borrow the accused's memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import blake3

from ckptd.chaos.leftovers import leftovers, temporary_files
from ckptd.chaos.saved import SavedState, saved_names
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.index import chunk_refs, read_index
from ckptd.daemon.keys import ClaimKey, IndexKey, StepId, parse_key, parse_record_key
from ckptd.daemon.records import decisions_of, is_abort, parse_record
from ckptd.protos.snapshot_pb2 import Committed, Decision, RankSection, Record
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import StorageError
from ckptd.storage_backends.urls import open_store


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionFact:
    """One decision that stands in the log.

    Attributes:
        step: What it decides.
        timeline: Timeline the step was saved in.
        committed: Whether the step counts.
        state_digest: Of the state, hex; empty for an abort.
        record: Key of the record that holds it.
    """

    step: int
    timeline: str
    committed: bool
    state_digest: str
    record: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RootFacts:
    """What stands in a root.

    Attributes:
        timelines: Claimed ones, oldest first.
        decisions: All that stand in the log, adopted ones too.
        listed: Restorable steps: (step, timeline), oldest first.
        newest: Key of the newest record; empty if there is none.
        keep_last: Retention's; 0 keeps all.
        keep_every: Retention's; 0 is off.
        problems: What contradicts "one cut" or cannot be read, each a sentence.
        torn: Listed steps that are among them: (step, timeline).
        checked_bytes: Chunk bytes whose digest was checked.
        objects: All objects.
        garbage: How many of them a sweep would delete.
        unaccounted: Objects and files that would stay though nothing needs them.
        sweep_takes_needed: Objects that a sweep would delete though the newest record needs them.
        sweep_error: Why a sweep would not run; empty if it would.
        saved: What each listed step holds by name, oldest first; empty where nobody asked, or where it is not whole.
    """

    timelines: tuple[str, ...] = ()
    decisions: tuple[DecisionFact, ...] = ()
    listed: tuple[tuple[int, str], ...] = ()
    newest: str = ""
    keep_last: int = 0
    keep_every: int = 0
    problems: tuple[str, ...] = ()
    torn: tuple[tuple[int, str], ...] = ()
    checked_bytes: int = 0
    objects: int = 0
    garbage: int = 0
    unaccounted: tuple[str, ...] = ()
    sweep_takes_needed: tuple[str, ...] = ()
    sweep_error: str = ""
    saved: tuple[SavedState, ...] = ()

    def state_digests(self) -> dict[int, str]:
        """Return the state digest of every listed step."""
        listed = set(self.listed)
        return {fact.step: fact.state_digest for fact in self.decisions if (fact.step, fact.timeline) in listed}


def read_root(url: str, variables: Mapping[str, str], *, by_name: bool = False) -> RootFacts:
    """Read a root; `variables` are those a process needs to reach its store.

    Args:
        url: The root.
        variables: For the store.
        by_name: Say too what each listed step holds, by name.

    Raises:
        StorageError: The store cannot be reached.
    """
    with _environment(variables), open_store(url) as store:
        facts = facts_of(store, by_name=by_name)
    return replace(facts, unaccounted=(*facts.unaccounted, *temporary_files(url)))


def read_root_by_name(url: str, variables: Mapping[str, str]) -> RootFacts:
    """Read a root with what each of its steps holds; see `read_root`."""
    return read_root(url, variables, by_name=True)


def facts_of(store: ObjectStore, *, by_name: bool = False) -> RootFacts:
    """Read an open store; what is damaged becomes a problem, not an error.

    Raises:
        StorageError: The store cannot be reached.
    """
    problems: list[str] = []
    timelines, records = [], []
    for info in store.list("log/"):
        key = parse_key(info.key)
        if isinstance(key, ClaimKey):
            timelines.append(str(key.timeline))
        record_key = parse_record_key(info.key)
        if record_key is not None:
            try:
                records.append((record_key.position, info.key, parse_record(store.get(info.key), info.key)))
            except DaemonError as error:
                problems.append(str(error))
    records.sort(key=lambda entry: entry[0])
    counting = [(key, record) for _, key, record in records if not is_abort(record)]
    newest_key, newest = counting[-1] if counting else ("", Record())
    committed = {
        (decision.step, decision.timeline): decision.committed
        for _, record in counting
        for decision in decisions_of(record)
    }
    chunks = _Chunks(store, keeps=by_name)
    refs: set[str] = set()
    saved: list[SavedState] = []
    torn = []
    for entry in newest.keeps:
        found = committed.get((entry.step, entry.timeline))
        if found is None:
            wrong = [f"step {entry.step} of {entry.timeline} is listed, but no record decides it"]
        else:
            ranks: dict[int, RankSection] = {}
            wrong = _cut_problems(store, StepId.of(entry), found, chunks, refs=refs, whole=ranks)
            if by_name and not wrong:
                names = saved_names(ranks, found.mesh.axes, chunks.get)
                saved.append(SavedState(step=entry.step, timeline=entry.timeline, names=names))
        problems += wrong
        if wrong:
            torn.append((entry.step, entry.timeline))
    bad = [entry.step for entry in newest.quarantined]
    for ref in bad:
        if (found := committed.get((ref.step, ref.timeline))) is not None:
            # What is wrong with it is known: only what it refers to is asked.
            _cut_problems(store, StepId.of(ref), found, chunks, refs=refs, whole={})
    kept = {StepId.of(ref) for ref in [*newest.keeps, *bad]}
    left = leftovers(store, parse_record_key(newest_key), kept=kept, refs=refs)
    return RootFacts(
        timelines=tuple(timelines),
        decisions=tuple(_fact(decision, key) for _, key, record in records for decision in decisions_of(record)),
        listed=tuple((entry.step, entry.timeline) for entry in newest.keeps),
        newest=newest_key,
        keep_last=newest.retention.keep_last,
        keep_every=newest.retention.keep_every,
        problems=tuple(problems),
        torn=tuple(torn),
        checked_bytes=chunks.checked_bytes,
        objects=left.objects,
        garbage=left.garbage,
        unaccounted=left.unaccounted,
        sweep_takes_needed=left.sweep_takes_needed,
        sweep_error=left.sweep_error,
        saved=tuple(saved),
    )


_SMALL_BYTES = 1 << 16
"""Chunks of objects are mostly shorter; of longer ones a second read costs less than the memory."""


class _Chunks:
    """Checks each chunk once, however many steps refer to it; small ones may be kept, for objects are read from them."""

    def __init__(self, store: ObjectStore, *, keeps: bool = False) -> None:
        self._store, self._keeps = store, keeps
        self._kept: dict[str, bytes] = {}
        self._verdicts: dict[str, str] = {}
        self.checked_bytes = 0

    def problem(self, key: str, digest: bytes, length: int) -> str:
        """Return what is wrong with a chunk; empty if nothing is."""
        if key not in self._verdicts:
            self._verdicts[key] = self._look(key, digest, length)
        return self._verdicts[key]

    def get(self, key: str) -> bytes:
        """Return a chunk that was found good."""
        return self._kept.get(key) or self._store.get(key)

    def _look(self, key: str, digest: bytes, length: int) -> str:
        try:
            data = self._store.get(key)
        except StorageError as error:
            return f"{key}: {error}"
        self.checked_bytes += len(data)
        if self._keeps and len(data) <= _SMALL_BYTES:
            self._kept[key] = data
        if len(data) != length:
            return f"{key}: {len(data)} bytes instead of {length}"
        return "" if blake3.blake3(data).digest() == digest else f"{key}: the bytes do not have their digest"


def _cut_problems(
    store: ObjectStore,
    step: StepId,
    committed: Committed,
    chunks: _Chunks,
    *,
    refs: set[str],
    whole: dict[int, RankSection],
) -> list[str]:
    """Return what speaks against a step being whole and of one cut.

    Adds to `refs` the keys that it refers to, and to `whole` its sections.
    """
    problems, ranks = [], []
    for ref in committed.indexes:
        key = parse_key(ref.key)
        refs.add(ref.key)
        if not isinstance(key, IndexKey) or key.id != step:
            problems.append(f"step {step}: its decision names {ref.key}, which is of another step")
            continue
        try:
            header, sections = read_index(store, key)
        except (DaemonError, StorageError) as error:
            problems.append(f"step {step}: {error}")
            continue
        if (header.step, header.timeline, header.world) != (step.step, str(step.timeline), committed.world):
            problems.append(f"step {step}: {ref.key} is of step {header.step} of {header.timeline}")
        ranks += sorted(sections)
        whole |= sections
        refs |= {chunk.key for section in sections.values() for chunk in chunk_refs(section)}
        wrong = [
            chunks.problem(chunk.key, chunk.digest, chunk.length)
            for section in sections.values()
            for chunk in chunk_refs(section)
        ]
        problems += [f"step {step}: {text}" for text in wrong if text]
    if not problems and sorted(ranks) != list(range(committed.world)):
        problems.append(f"step {step}: it holds the ranks {sorted(ranks)}, not 0..{committed.world - 1} once each")
    return problems


def _fact(decision: Decision, record: str) -> DecisionFact:
    return DecisionFact(
        step=decision.step,
        timeline=decision.timeline,
        committed=decision.WhichOneof("outcome") == "committed",
        state_digest=decision.committed.state_digest,
        record=record,
    )


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Let this process reach a store the way its children do."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
