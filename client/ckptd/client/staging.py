"""Bringing a rank's state into its slot: the one copy a save costs.

Owns: the copy itself, fingerprints of replicas that this rank does not write, and the trailer. Does not own: which
rows it writes (the plan says), or how bytes get into the slot (`slot_writers`). Invariant: what is staged is the
state at the cut: nothing is read after `Capture.copy_into` has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash

from ckptd.protos import segmented
from ckptd.protos.failpoints import failpoint
from ckptd.protos.snapshot_pb2 import SlotTrailer

from . import hash_in_place
from .config import HashReplicas
from .copying import Copier, copyable
from .state import Collected

_ALIGN = 8
_TAIL_ROUND = 64 << 10
"""Tails are asked for in steps of so many bytes, so that objects that grow a little fit into the same slot."""
_SMALL = 64 << 10
"""Tensors below this many bytes are hashed from one scratch buffer: a call each costs more than the bytes."""
_BATCH = 4 << 20
"""Larger tensors are handed to other threads so many bytes at a time, at least: a thread costs some microseconds."""
_FINGERPRINT_BYTES = 16
_ROW_BYTES = 10
"""Most bytes a row number takes in the trailer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPlan:
    """What this rank writes, by a plan.

    Attributes:
        digest: Of the plan.
        written: Rows this rank writes, ascending.
        offsets: Where each of them stands in the slot's tensor stream, in bytes.
        replicas: Rows that another rank writes, ascending.
    """

    digest: bytes
    written: tuple[int, ...]
    offsets: tuple[int, ...]
    replicas: tuple[int, ...]


def slot_plan(digest: bytes, rank: int, writer: Sequence[int], offset: Sequence[int]) -> SlotPlan:
    """Return this rank's part of a plan, given in the order of its rows."""
    written = tuple(row for row, who in enumerate(writer) if who == rank)
    return SlotPlan(
        digest=digest,
        written=written,
        offsets=tuple(offset[row] for row in written),
        replicas=tuple(row for row, who in enumerate(writer) if who != rank),
    )


class SlotWriter(Protocol):
    """Where staged bytes go. `slot_writers` has one for shared memory and one for a stream."""

    def write_tensors(self, plan: SlotPlan, views: Sequence[torch.Tensor]) -> None:
        """Put each written row's plain bytes (C-contiguous) at its offset; padding between rows is left alone.

        Args:
            plan: What goes where.
            views: Row: the tensor, of the box's shape.
        """

    def write_tail(self, tail: bytes) -> None:
        """Put objects and trailer at the start of the slot's tail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """What stands behind the tensors.

    Attributes:
        data: Objects, zeros up to a multiple of 8, trailer.
        objects_bytes: Of the objects.
        trailer_bytes: Of the trailer.
    """

    data: bytes
    objects_bytes: int
    trailer_bytes: int


class Capture:
    """One rank's state at a cut, to be copied into a slot.

    Args:
        collected: Rows, views and encoded objects.
        metrics: As given to save().
        tags: As given to save().
        versions: Information only.
    """

    def __init__(
        self,
        collected: Collected,
        *,
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        versions: Mapping[str, str],
    ) -> None:
        self.layout = collected.layout
        self._views = collected.views
        self._objects = b"".join(data for _, data in collected.objects)
        self._trailer = SlotTrailer(metrics=metrics, tags=tags, versions=versions)
        at = 0
        for name, data in collected.objects:
            self._trailer.object_names.append(name)
            self._trailer.object_offset.append(at)
            self._trailer.object_length.append(len(data))
            at += len(data)

    def has_any(self, chosen: Callable[[torch.Tensor], bool]) -> bool:
        """Say whether any of the tensors is chosen."""
        return any(chosen(view) for view in self._views)

    @property
    def tail_bytes(self) -> int:
        """Bytes that objects and trailer take at most, whatever the plan will be."""
        trailer = self._trailer.ByteSize() + len(self._views) * (_FINGERPRINT_BYTES + _ROW_BYTES) + 64
        most = len(self._objects) + _ALIGN + trailer
        return -(-most // _TAIL_ROUND) * _TAIL_ROUND

    def copy_into(
        self,
        slot: SlotWriter,
        plan: SlotPlan,
        copier: Copier,
        *,
        compared: bool = True,
        algorithm: str = "",
        in_place: Callable[[torch.Tensor], bool] = lambda _: False,
    ) -> Tail:
        """Copy what this rank writes into its slot, and fingerprint what it does not. Returns the tail it wrote.

        Args:
            slot: Where it goes.
            plan: What this rank writes.
            copier: Its threads fingerprint while the slot is written.
            compared: Whether replicas are compared in this step; else what this rank does not write is not even read.
            algorithm: What they are fingerprinted by, one of `segmented.KNOWN`; "" is xxh3-128.
            in_place: Which of them are fingerprinted where they lie, if the algorithm allows it.
        """
        trailer = SlotTrailer()
        trailer.CopyFrom(self._trailer)
        if compared:
            replicas = [self._views[row] for row in plan.replicas]
            pending = Fingerprints(replicas, copier, algorithm=algorithm, in_place=in_place)
            try:
                slot.write_tensors(plan, self._views)
                if algorithm:
                    trailer.segmented_fingerprints, trailer.segmented_algorithm = pending.result(), algorithm
                else:
                    trailer.replica_fingerprints = pending.result()
            finally:
                pending.join()
            trailer.replica_row.extend(plan.replicas)
        else:
            slot.write_tensors(plan, self._views)
            trailer.uncompared = True
        failpoint("client.before_tail")
        encoded = trailer.SerializeToString()
        padding = bytes(-len(self._objects) % _ALIGN)
        tail = Tail(
            data=self._objects + padding + encoded,
            objects_bytes=len(self._objects),
            trailer_bytes=len(encoded),
        )
        slot.write_tail(tail.data)
        return tail


def plain_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the C-contiguous bytes of a tensor; without a copy where they stand so on the host already."""
    with torch.no_grad():
        plain = copyable(tensor.detach()).resolve_conj().resolve_neg()
        flat = plain.cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def lies_in_place(where: HashReplicas) -> Callable[[torch.Tensor], bool]:
    """Return which tensors are fingerprinted where they lie, by the setting `hash_replicas`."""
    if where == "auto":
        return lambda tensor: tensor.is_cuda
    return lambda _: where == "in-place"


class Fingerprints:
    """The fingerprint of each tensor's plain bytes, begun in the copying threads and ended in the caller's.

    Args:
        tensors: Must not change before `result` has returned.
        copier: Whose threads take the larger ones on the host. Tensors on other devices stay with the caller's thread, whose
            stream they were computed on.
        algorithm: One of `segmented.KNOWN`; "" is xxh3-128.
        in_place: Which tensors are fingerprinted where they lie; xxh3-128 never is. Where a device has no room for that, they
            are brought to the host as all others are.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        copier: Copier,
        *,
        algorithm: str = "",
        in_place: Callable[[torch.Tensor], bool] = lambda _: False,
    ) -> None:
        self._tensors = tensors
        self._digest = segmented.digest if algorithm else xxhash.xxh3_128_digest
        self._sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        self._placed = [at for at, tensor in enumerate(tensors) if in_place(tensor)] if algorithm else []
        moved = sorted(set(range(len(tensors))).difference(self._placed)) if self._placed else range(len(tensors))
        self._small = [at for at in moved if self._sizes[at] < _SMALL]
        large = [at for at in moved if self._sizes[at] >= _SMALL]
        self._near = [at for at in large if tensors[at].device.type == "cpu"]
        self._far = [at for at in large if tensors[at].device.type != "cpu"]
        self._pending = copier.beside(self._digests, self._batches())

    def result(self) -> bytes:
        """Return 16 bytes each, canonical, one after the other."""
        found: list[bytes] = [b""] * len(self._tensors)
        for numbers, digests in [
            self._placed_digests(self._placed) if self._placed else ([], []),
            self._small_digests(self._small),
            self._digests(self._far),
            *(future.result() for future in self._pending),
        ]:
            for at, digest in zip(numbers, digests, strict=True):
                found[at] = digest
        return b"".join(found)

    def join(self) -> None:
        """Wait until no thread reads the tensors any more, whatever became of it; what has not begun is left."""
        for future in self._pending:
            future.cancel()
        wait(self._pending)

    def _batches(self) -> Iterator[list[int]]:
        batch, size = [], 0
        for at in self._near:
            batch.append(at)
            size += self._sizes[at]
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _digests(self, numbers: list[int]) -> tuple[list[int], list[bytes]]:
        return numbers, [self._digest(plain_bytes(self._tensors[at])) for at in numbers]

    def _placed_digests(self, numbers: list[int]) -> tuple[list[int], list[bytes]]:
        try:
            return numbers, hash_in_place.fingerprints([self._tensors[at] for at in numbers])
        except torch.OutOfMemoryError:
            pass  # the error holds on to what there was room for, until here
        return self._digests(numbers)

    def _small_digests(self, numbers: list[int]) -> tuple[list[int], list[bytes]]:
        """Digest from one scratch buffer that one batched call fills."""
        sources = [copyable(self._tensors[at]) for at in numbers]
        spans: list[tuple[int, int]] = []
        end = 0
        for at in numbers:
            begin = -(-end // 16) * 16
            end = begin + self._sizes[at]
            spans.append((begin, end))
        with torch.no_grad():
            scratch = torch.empty(end, dtype=torch.uint8, device="cpu")
            targets = [
                scratch[begin:to].view(source.dtype).view(source.shape)
                for (begin, to), source in zip(spans, sources, strict=True)
            ]
            if targets:
                torch._foreach_copy_(targets, sources)
        data = scratch.numpy().data
        return numbers, [self._digest(data[begin:to]) for begin, to in spans]
