"""Copies one committed step into a root of its own, which is a job's root like any other.

Owns: what such a root holds, in which order it is written, and what a target may hold already. Does not own: reading the step
(`stored_step`). Every name is kept, also those of chunks that bear an older step's: an index's bytes, and with them its name and
the state digest, stay as they were saved, and a sweep of the copy keeps what the listed index refers to (R7). The step's own
timeline is claimed in the copy and its decision lists the step alone, so that readers, sweeps and the next start find what
the protocol's rules promise. Invariants: all that is written follows from the step alone, so that a copy that was cut off, or two
at once, end in the same bytes; the decision is written last, after everything it names was read with its digest and seen in the
target with its length.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import blake3

from ckptd.protos import error_pb2
from ckptd.protos.snapshot_pb2 import Claim, ClaimNode, Decision, Record, Retention, StepRef
from ckptd.storage_backends.base import ObjectStore, PutMode
from ckptd.storage_backends.errors import AlreadyExists, NotFound, Truncated

from .catalog import read_job
from .errors import CorruptError, DaemonError, FencedError, FormatError
from .index import ChunkRef, chunk_refs
from .keys import JOB, claim_key, decision_key
from .log_reader import list_log, read_claim
from .log_writer import put_once
from .parallel import in_parallel
from .records import FORMAT_VERSION, to_bytes
from .stored_step import StoredStep, read_index_bytes

READERS = 4
"""Chunks under way at once; each is held whole, up to 64 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyPlan:
    """What the copy's root holds when it is done.

    Attributes:
        step: The step.
        job: Bytes of job.json.
        claim: Bytes of the claim of the step's timeline.
        chunks: Every chunk the step refers to, once.
        decision: Bytes of the record that lists the step.
    """

    step: StoredStep
    job: bytes
    claim: bytes
    chunks: list[ChunkRef]
    decision: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.length for chunk in self.chunks)

    def keys(self) -> set[str]:
        """Return the names of all objects."""
        timeline = self.step.id.timeline
        log = {JOB, claim_key(timeline), decision_key(timeline, self.step.id.step)}
        return log | {ref.key for ref, _, _ in self.step.indexes} | {chunk.key for chunk in self.chunks}


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """What a copy did.

    Attributes:
        objects: Objects the root holds.
        nbytes: Bytes of all chunks.
        put_bytes: Bytes of the chunks that were not there before.
    """

    objects: int
    nbytes: int
    put_bytes: int


def plan_copy(source: ObjectStore, step: StoredStep) -> CopyPlan:
    """Say what the copy of a step holds; reads the claim of its timeline.

    Raises:
        StorageError: as the store raised it.
    """
    chunks = {chunk.key: chunk for section in step.sections.values() for chunk in chunk_refs(section)}
    return CopyPlan(
        step=step,
        job=to_bytes(step.job),
        claim=to_bytes(_claim(source, step)),
        chunks=[chunks[key] for key in sorted(chunks)],
        decision=to_bytes(_decision(step)),
    )


def copy_step(
    source: ObjectStore,
    target: ObjectStore,
    plan: CopyPlan,
    *,
    readers: int = READERS,
    progress: Callable[[int], None] | None = None,
) -> Copied:
    """Copy a step; blocks until it is durable in the target, where it can be listed, proved and restored.

    May be cut off at any point and called again: what is there with its length is not copied twice.

    Args:
        source: The root the step lies in.
        target: An empty root, or one that an earlier copy of this very step has begun.
        plan: What `plan_copy` made of the step.
        readers: Chunks under way at once, 64 MiB of memory each.
        progress: Told of the bytes of each chunk that is there, from several threads.

    Raises:
        DaemonError: NOT_ALLOWED, the target holds something else; JOB_MISMATCH, it is another job's;
            STORE_FAILED, it lost what was put.
        CorruptError: a chunk of the source is gone, or does not have its digest; the copy is not committed.
        FencedError: a job was started in the target meanwhile.
        StorageError: as the store raised it; calling again goes on.
    """
    there = _held(target, plan)
    timeline, number = plan.step.id.timeline, plan.step.id.step
    put_once(target, JOB, plan.job)
    put_once(target, claim_key(timeline), plan.claim)
    copied = _copy_chunks(source, target, plan, there, readers=readers, progress=progress)
    for ref, _, _ in plan.step.indexes:
        _put(target, ref.key, read_index_bytes(source, ref))
    # Nothing else may stand here when the decision makes the root a job's; R4's look at the claims follows it.
    _held(target, plan)
    put_once(target, decision_key(timeline, number), plan.decision)
    view = list_log(target, after=decision_key(timeline, number))
    if view.is_fenced(timeline):
        raise FencedError.of(
            f"{target.url}: timeline {view.highest_claim()} was claimed while the step was copied",
            hint="a job was started in the target before the copy was done: choose an empty root",
        )
    return Copied(objects=len(plan.keys()), nbytes=plan.nbytes, put_bytes=copied)


def _copy_chunks(
    source: ObjectStore,
    target: ObjectStore,
    plan: CopyPlan,
    there: dict[str, int],
    *,
    readers: int,
    progress: Callable[[int], None] | None,
) -> int:
    buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    missing = [chunk for chunk in plan.chunks if chunk.key not in there]
    for _ in range(min(readers, len(missing))):
        buffers.put(bytearray(max(chunk.length for chunk in missing)))

    def copy(chunk: ChunkRef) -> int:
        buffer = buffers.get()
        try:
            piece = memoryview(buffer)[: chunk.length]
            _read(source, chunk, piece)
            _put(target, chunk.key, piece)
        finally:
            buffers.put(buffer)
        if progress is not None:
            progress(chunk.length)
        return chunk.length

    for chunk in plan.chunks:
        if chunk.key in there:
            _check_length(chunk.key, there[chunk.key], chunk.length)
            if progress is not None:
                progress(chunk.length)
    return sum(in_parallel(copy, missing, workers=readers))


def _read(source: ObjectStore, chunk: ChunkRef, piece: memoryview) -> None:
    try:
        source.get_into(chunk.key, piece)
    except NotFound:
        raise CorruptError.of(f"chunk {chunk.key} is gone", object=chunk.key) from None
    except Truncated as error:
        raise CorruptError.of(f"chunk {chunk.key}: {error.message}", object=chunk.key) from None
    if blake3.blake3(piece).digest() != chunk.digest:
        raise CorruptError.of(f"chunk {chunk.key} does not have the digest in its name", object=chunk.key)


def _put(target: ObjectStore, key: str, data: bytes | memoryview) -> None:
    """Put an object whose name holds its digest, and see that it is there."""
    with suppress(AlreadyExists):  # of an earlier copy, or one beside this one: the name says what it holds
        target.put(key, data, mode=PutMode.CREATE)
    _check_length(key, target.head(key).size, len(data))


def _check_length(key: str, found: int, expected: int) -> None:
    if found != expected:
        raise DaemonError.of(
            f"{key} has {found} bytes in the target, {expected} were to be there",
            reason=error_pb2.REASON_STORE_FAILED,
            hint="the target changed or lost it: copy into an empty root",
            object=key,
        )


def _held(target: ObjectStore, plan: CopyPlan) -> dict[str, int]:
    """Return what of the copy the target holds already, by key with its length; refuse anything else."""
    known = plan.keys()
    there: dict[str, int] = {}
    stranger = ""
    for info in target.list():
        if info.key in known:
            there[info.key] = info.size
        else:
            stranger = stranger or info.key
    if JOB in there and (job := read_job(target)).job != plan.step.job.job:
        raise DaemonError.of(
            f"{target.url} belongs to job {job.job!r}, not to {plan.step.job.job!r}",
            reason=error_pb2.REASON_JOB_MISMATCH,
            hint="copy into an empty root",
        )
    if stranger:
        raise DaemonError.of(
            f"{target.url} holds {stranger}, which is no part of step {plan.step.id.step}",
            reason=error_pb2.REASON_NOT_ALLOWED,
            hint="copy into an empty root",
        )
    return there


def _claim(source: ObjectStore, step: StoredStep) -> Claim:
    """Return the claim of the step's timeline as the copy holds it: of a run that cannot be asked whether it is alive."""
    try:
        found = read_claim(source, step.id.timeline)
    except FormatError:
        found = None
    if found is not None:
        # The first start in the copy must not be refused because the job it was copied from is alive.
        found.ClearField("endpoint")
        found.ClearField("certificate_sha256")
        return found
    # A step is restored without its claim, so a root may have lost it.
    nodes = [ClaimNode(node=ref.node, ranks=sorted(sections)) for ref, _, sections in step.indexes]
    commit = step.commit
    return Claim(
        format_version=FORMAT_VERSION,
        timeline=str(step.id.timeline),
        job=step.job.job,
        world=commit.world,
        mesh=commit.mesh,
        nodes=nodes,
        created_at=commit.created_at,
    )


def _decision(step: StoredStep) -> Record:
    timeline, number = step.id.timeline, step.id.step
    entry = StepRef(step=number, timeline=str(timeline), record_key=decision_key(timeline, number))
    return Record(
        format_version=FORMAT_VERSION,
        timeline=str(timeline),
        decision=Decision(step=number, timeline=str(timeline), committed=step.commit),
        keeps=[entry],
        retention=Retention(),
        created_at=step.commit.created_at,
    )
