"""Copying parts of a chunk to where they are wanted: ranges, and runs with gaps that are gathered without them.

Owns: the copy. Does not own: which bytes, and that they were verified. Invariants: exactly the bytes of the box that the chunk
holds are written, each to its place; work in Python is per dimension, not per row, and large copies let other threads run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .chunks import ALIGNMENT
from .columns import Ints

Bytes = npt.NDArray[np.uint8]
_FEW = 16
"""So many ranges are copied one by one; more of them by a list of places."""
_WORDS: dict[int, np.dtype[np.unsignedinteger]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Nested repetitions of a contiguous run of bytes, as they stand in a stream; compact, it is the runs alone.

    Attributes:
        first: First byte.
        run: Bytes of a run.
        counts: Outermost first.
        strides: Bytes from one repetition to the next; at least what is inside one spans.
    """

    first: int
    run: int
    counts: Sequence[int]
    strides: Sequence[int]


def gather(chunk: Bytes, at: int, box: Box, target: Bytes) -> None:
    """Copy what a chunk holds of a box to its places in the compact box.

    Args:
        chunk: Contiguous bytes of a stream.
        at: Where they begin in the stream.
        box: In the same stream.
        target: The whole compact box; places that the chunk says nothing of are left as they are.
    """
    levels = [(count, stride) for count, stride in zip(box.counts, box.strides, strict=True) if count != 1]
    # What one entry of each level spans in the stream and takes in the target; the last is the run.
    spans, sizes = [box.run], [box.run]
    for count, stride in reversed(levels):
        spans.insert(0, (count - 1) * stride + spans[0])
        sizes.insert(0, count * sizes[0])
    end = at + len(chunk)

    def copy(level: int, first: int, into: int) -> None:
        if level == len(levels):
            low, high = max(first, at), min(first + box.run, end)
            if low < high:
                target[into + low - first : into + high - first] = chunk[low - at : high - at]
            return
        count, stride = levels[level]
        span, size = spans[level + 1], sizes[level + 1]
        # Entries that lie wholly in the chunk are copied at once; at most one on either side is cut by its ends.
        low = max(0, -((first - at) // stride))
        high = max(low, min(count, (end - first - span) // stride + 1))
        if low < high:
            shape = [high - low, *(inside for inside, _ in levels[level + 1 :]), box.run]
            steps = [stride, *(inside for _, inside in levels[level + 1 :]), 1]
            _copy(chunk[first + low * stride - at :], shape, steps, target[into + low * size :])
        begin = max(0, (at - first - span) // stride + 1)
        behind = min(count, -((first - end) // stride))
        for entry in (*range(begin, min(low, behind)), *range(max(high, begin), behind)):
            copy(level + 1, first + entry * stride, into + entry * size)

    copy(0, box.first, 0)


def copy_ranges(chunk: Bytes, begins: Ints, ends: Ints, into: Ints, target: Bytes) -> None:
    """Copy ranges of a chunk, ascending, each to its place in `target`; many at once where all is aligned.

    Args:
        chunk: Contiguous bytes.
        begins: Of each range, in the chunk.
        ends: As begins.
        into: Where each begins in `target`.
        target: At least what is needed.
    """
    sizes = ends - begins
    places = np.concatenate((begins, sizes, into))
    is_packed = len(begins) > _FEW and not (places % ALIGNMENT).any() and (into[:-1] + sizes[:-1] == into[1:]).all()
    if not is_packed:
        for begin, end, at in zip(begins.tolist(), ends.tolist(), into.tolist(), strict=True):
            target[at : at + end - begin] = chunk[begin:end]
        return
    # Both sides as rows of one alignment: which rows, one behind the other.
    units = sizes // ALIGNMENT
    rows = np.arange(int(units.sum())) + np.repeat(begins // ALIGNMENT - (np.cumsum(units) - units), units)
    whole = chunk[: len(chunk) // ALIGNMENT * ALIGNMENT].reshape(-1, ALIGNMENT)
    out = target[int(into[0]) : int(into[-1] + sizes[-1])].reshape(-1, ALIGNMENT)
    np.take(whole, rows, axis=0, out=out, mode="clip")


def _copy(source: Bytes, shape: list[int], steps: list[int], target: Bytes) -> None:
    """Copy a box of bytes, contiguous in its last dimension, to a contiguous place; in words where all is aligned."""
    word = math.gcd(8, shape[-1], *steps[:-1], source.ctypes.data, target.ctypes.data)
    kind = _WORDS[word]
    shape, steps = [*shape[:-1], shape[-1] // word], [*steps[:-1], word]
    out: npt.NDArray[np.unsignedinteger] = np.ndarray(shape, kind, buffer=target)
    out[...] = np.ndarray(shape, kind, buffer=source, strides=steps)
