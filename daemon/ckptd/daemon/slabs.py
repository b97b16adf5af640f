"""Reads boxes of a stored step's tensors, whatever the layout they were saved in, in bounded memory.

Owns: cutting a tensor into slabs, and putting a slab together from the chunks that hold it. Does not own: which bytes those
are (`reshard`). Invariants: every chunk is compared with its digest before a byte of it is used; memory is one slab and
the chunks kept at hand, whatever the size of the tensor. A reader is for one thread.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt

from ckptd.protos import shard_table
from ckptd.protos.shard_table import ShardRow
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import NotFound, Truncated

from .errors import CorruptError
from .index import ChunkRef, chunk_refs
from .reshard import StoredRows
from .stored_step import StoredStep
from .tensors import StoredTensor, TensorKey, coordinate_of
from .tiling import Box

SLAB_BYTES = 4 << 20
"""Largest slab: small, because numbers are compared as float64, which takes several times as much."""
AT_HAND_BYTES = 256 << 20
"""Chunks kept after they were read: the next slab most often goes on in them."""

Slab = npt.NDArray[Any]


class SlabReader:
    """Reads boxes of one step's tensors.

    Args:
        store: The root.
        step: The step.
        at_hand_bytes: Bytes of chunks to keep; one chunk, up to 64 MiB, is always kept.
    """

    def __init__(self, store: ObjectStore, step: StoredStep, *, at_hand_bytes: int = AT_HAND_BYTES) -> None:
        self._store = store
        self._rows = StoredRows(step.sections)
        axes = tuple(step.commit.mesh.axes)
        self._rank_at = {coordinate_of(section, axes): rank for rank, section in step.sections.items()}
        self._chunks = {rank: chunk_refs(section) for rank, section in step.sections.items()}
        self._starts = {rank: [chunk.stream_offset for chunk in chunks] for rank, chunks in self._chunks.items()}
        self._at_hand: OrderedDict[str, bytes] = OrderedDict()
        self._at_hand_bytes = 0
        self._most_bytes = at_hand_bytes

    def read(self, key: TensorKey, tensor: StoredTensor, box: Box) -> Slab:
        """Return the elements of a box in its shape, as items of the dtype's size whose values mean nothing.

        Raises:
            CorruptError: a chunk is gone or changed.
            PlanError: elements of the box are not stored.
            StorageError: as the store raised it.
        """
        size = item_bytes(tensor)
        # Whole words where numpy has them: it copies and compares opaque items one by one.
        kind = np.dtype(f"<u{size}" if size in {1, 2, 4, 8} else f"V{size}")
        slab = np.empty(box[1], dtype=kind)
        want = ShardRow(
            name=tensor.alias_of or key.name,
            dtype=tensor.dtype,
            global_shape=tensor.shape,
            offset=box[0],
            length=box[1],
            scope=tensor.scope,
            nbytes=slab.nbytes,
        )
        own = self._rank_at.get(key.coordinate)
        for piece in self._rows.pieces(shard_table.build([want]), own):
            data = self._bytes(piece.rank, piece.stream_offset, piece.nbytes)
            found = np.frombuffer(data, dtype=kind).reshape(piece.source[1])
            into, of = _shared(box, piece.source)
            slab[into] = found[of]
        return slab

    def _bytes(self, rank: int, offset: int, nbytes: int) -> memoryview | bytearray:
        """Return a range of a rank's stream: of one chunk as it is, of several joined."""
        at = bisect.bisect_right(self._starts[rank], offset) - 1
        first = self._chunks[rank][at]
        begin = offset - first.stream_offset
        if begin + nbytes <= first.length:
            return memoryview(self._chunk(first))[begin : begin + nbytes]
        data = bytearray(nbytes)
        done = 0
        while done < nbytes:
            chunk = self._chunks[rank][at]
            begin = offset + done - chunk.stream_offset
            part = memoryview(self._chunk(chunk))[begin : begin + nbytes - done]
            data[done : done + len(part)] = part
            done += len(part)
            at += 1
        return data

    def _chunk(self, chunk: ChunkRef) -> bytes:
        held = self._at_hand.get(chunk.key)
        if held is not None:
            self._at_hand.move_to_end(chunk.key)
            return held
        while self._at_hand and self._at_hand_bytes + chunk.length > self._most_bytes:
            self._at_hand_bytes -= len(self._at_hand.popitem(last=False)[1])
        data = _read(self._store, chunk)
        self._at_hand[chunk.key] = data
        self._at_hand_bytes += len(data)
        return data


def item_bytes(tensor: StoredTensor) -> int:
    """Return the bytes of one element; 1 for a tensor without elements."""
    elements = sum(math.prod(length) for _, length in tensor.boxes)
    return tensor.nbytes // elements if elements else 1


def slabs(box: Box, item: int, *, slab_bytes: int = SLAB_BYTES) -> Iterator[Box]:
    """Yield boxes that tile `box` in C order, none of more than `slab_bytes` unless it is one element.

    The first dimension that is longer than one is halved, so that what a slab shares with a stored box stays small in
    the stored stream too, however the tensor was cut.
    """
    offset, length = box
    elements = math.prod(length)
    if not elements:
        return
    if elements * item <= slab_bytes or elements == 1:
        yield box
        return
    dim = next(at for at, size in enumerate(length) if size > 1)
    half = length[dim] // 2
    first = (*length[:dim], half, *length[dim + 1 :])
    second = (*length[:dim], length[dim] - half, *length[dim + 1 :])
    behind = (*offset[:dim], offset[dim] + half, *offset[dim + 1 :])
    yield from slabs((offset, first), item, slab_bytes=slab_bytes)
    yield from slabs((behind, second), item, slab_bytes=slab_bytes)


def _read(store: ObjectStore, chunk: ChunkRef) -> bytes:
    try:
        data = store.get(chunk.key)
    except NotFound:
        raise CorruptError.of(f"chunk {chunk.key} is gone", object=chunk.key) from None
    except Truncated as error:
        raise CorruptError.of(f"chunk {chunk.key}: {error.message}", object=chunk.key) from None
    if len(data) != chunk.length or blake3.blake3(data).digest() != chunk.digest:
        raise CorruptError.of(f"chunk {chunk.key} does not have the digest in its name", object=chunk.key)
    return data


def _shared(box: Box, source: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return what two boxes share, as slices of each."""
    lows = tuple(map(max, box[0], source[0]))
    highs = tuple(min(a + n, b + m) for a, n, b, m in zip(*box, *source, strict=True))

    def of(offset: tuple[int, ...]) -> tuple[slice, ...]:
        return tuple(slice(low - at, high - at) for low, high, at in zip(lows, highs, offset, strict=True))

    return of(box[0]), of(source[0])
