"""Bringing a rank's state into its slot: the one copy a save costs.

Owns: the copy itself, fingerprints of replicas that this rank does not write, and the trailer. Does not own: which
rows it writes (the plan says), or how bytes get into the slot (`slot_writers`). Invariant: what is staged is the
state at the cut: nothing is read after `Capture.copy_into` has returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash

from ckptd.protos.failpoints import failpoint
from ckptd.protos.snapshot_pb2 import SlotTrailer

from .copying import copyable
from .state import Collected

_ALIGN = 8
_TAIL_ROUND = 64 << 10
"""Tails are asked for in steps of so many bytes, so that objects that grow a little fit into the same slot."""
_SMALL = 64 << 10
"""Tensors below this many bytes are hashed from one scratch buffer: a call each costs more than the bytes."""
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

    @property
    def tail_bytes(self) -> int:
        """Bytes that objects and trailer take at most, whatever the plan will be."""
        trailer = self._trailer.ByteSize() + len(self._views) * (_FINGERPRINT_BYTES + _ROW_BYTES) + 64
        most = len(self._objects) + _ALIGN + trailer
        return -(-most // _TAIL_ROUND) * _TAIL_ROUND

    def copy_into(self, slot: SlotWriter, plan: SlotPlan) -> Tail:
        """Copy what this rank writes into its slot, and fingerprint what it does not. Returns the tail it wrote."""
        slot.write_tensors(plan, self._views)
        failpoint("client.before_tail")
        trailer = SlotTrailer()
        trailer.CopyFrom(self._trailer)
        trailer.replica_row.extend(plan.replicas)
        trailer.replica_fingerprints = fingerprints([self._views[row] for row in plan.replicas])
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


def fingerprints(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return the xxh3-128 of each tensor's plain bytes (16 bytes each, canonical), one after the other."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    small = [number for number, size in enumerate(sizes) if size < _SMALL]
    found: list[bytes] = [b""] * len(tensors)
    with torch.no_grad():
        scratch = torch.empty(sum(sizes[number] + 16 for number in small), dtype=torch.uint8, device="cpu")
        targets, spans, at = [], [], 0
        for number in small:
            tensor, end = copyable(tensors[number]), at + sizes[number]
            targets.append(scratch[at:end].view(tensor.dtype).view(tensor.shape))
            spans.append((number, at, end))
            at = end + -end % 16
        if targets:
            torch._foreach_copy_(targets, [copyable(tensors[number]) for number in small])
    data = scratch.numpy().data
    for number, begin, end in spans:
        found[number] = xxhash.xxh3_128_digest(data[begin:end])
    for number, tensor in enumerate(tensors):
        if sizes[number] >= _SMALL:
            found[number] = xxhash.xxh3_128_digest(plain_bytes(tensor))
    return b"".join(found)
