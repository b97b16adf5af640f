"""Whether boxes cover a global tensor exactly once.

Owns: the geometry and its error, which names tensor, elements and ranks. Does not own: where boxes come from. Pure.
Invariant: None means that every element lies in exactly one of the boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error

from .errors import make_error

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths in elements, one entry per dimension."""

_MAX_ELEMENTS = 1 << 62
"""Longest dimension: positions stay inside 64-bit signed arithmetic."""
_MAX_CELLS = 1 << 20
"""A hole is located on the grid of all box edges; beyond this many cells it is only counted."""


def box_text(box: Box) -> str:
    """Return a box as slices, e.g. "[0:4, 8:16]"."""
    return "[" + ", ".join(f"{at}:{at + length}" for at, length in zip(*box, strict=True)) + "]"


def tiling(name: str, global_shape: Sequence[int], boxes: Mapping[Box, Sequence[int]]) -> Error | None:
    """Say what keeps `boxes` from covering the tensor exactly once, or None.

    Args:
        name: The tensor, for the message.
        global_shape: Its shape, in elements.
        boxes: Distinct boxes, each with the ranks that hold it.

    Returns:
        LAYOUT_MISMATCH for a box outside the tensor, COVERAGE for elements that are held twice or never; or None.
    """
    shape = tuple(global_shape)
    for box, ranks in boxes.items():
        if not is_inside(box, shape):
            text = f"tensor {name!r}: box {box_text(box)} is not inside its shape {list(shape)}"
            return make_error(error_pb2.REASON_LAYOUT_MISMATCH, text, object=name, ranks=ranks)
    # An empty box covers nothing and disturbs nobody.
    filled = [box for box in boxes if math.prod(box[1])]
    if pair := _overlap(filled):
        first, second = pair
        ranks = sorted({*boxes[first], *boxes[second]})
        text = (
            f"tensor {name!r} of shape {list(shape)}: boxes {box_text(first)} of ranks {list(boxes[first])} and "
            f"{box_text(second)} of ranks {list(boxes[second])} overlap"
        )
        return make_error(
            error_pb2.REASON_COVERAGE,
            text,
            hint="declare values that differ between ranks as PerRank, or correct the offsets",
            object=name,
            ranks=ranks,
        )
    # Inside, disjoint, and as large together as the whole: then nothing is left out.
    missing = math.prod(shape) - sum(math.prod(box[1]) for box in filled)
    if missing:
        where = _hole(shape, filled)
        ranks = sorted({rank for box in boxes for rank in boxes[box]})
        text = (
            f"tensor {name!r} of shape {list(shape)}: {missing} elements are held by no rank"
            f"{f', among them {where}' if where else ''} (ranks {ranks} hold the rest)"
        )
        return make_error(error_pb2.REASON_COVERAGE, text, object=name, ranks=ranks)
    return None


def is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box has the tensor's dimensions and does not leave it."""
    offset, length = box
    return len(offset) == len(length) == len(shape) and all(
        at >= 0 and size >= 0 and at + size <= end <= _MAX_ELEMENTS
        for at, size, end in zip(offset, length, shape, strict=True)
    )


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, or None. All boxes are filled, distinct and of one tensor."""
    if len(boxes) < 2 or _is_on_grid(boxes):
        return None
    lows: npt.NDArray[np.int64] = np.array([box[0] for box in boxes], dtype=np.int64)
    highs: npt.NDArray[np.int64] = lows + np.array([box[1] for box in boxes], dtype=np.int64)
    for row in range(len(boxes) - 1):
        meets = ((lows[row + 1 :] < highs[row]) & (highs[row + 1 :] > lows[row])).all(axis=1)
        if meets.any():
            return boxes[row], boxes[row + 1 + int(meets.argmax())]
    return None


def _is_on_grid(boxes: Sequence[Box]) -> bool:
    """Whether the boxes are cells of one grid: distinct boxes are then disjoint. True for every regular sharding."""
    for dim in range(len(boxes[0][0])):
        cuts = sorted({(offset[dim], length[dim]) for offset, length in boxes})
        if any(at + length > after for (at, length), (after, _) in itertools.pairwise(cuts)):
            return False
    return True


def _hole(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """Return one uncovered cell of the grid that all edges make, or "" where the grid is too fine to look at."""
    edges = [
        sorted({0, end, *(b[0][dim] for b in boxes), *(b[0][dim] + b[1][dim] for b in boxes)})
        for dim, end in enumerate(shape)
    ]
    if math.prod(len(cuts) - 1 for cuts in edges) > _MAX_CELLS:
        return ""
    places = [{cut: at for at, cut in enumerate(cuts)} for cuts in edges]
    covered = np.zeros([len(cuts) - 1 for cuts in edges], dtype=bool)
    for offset, length in boxes:
        cell = tuple(slice(place[at], place[at + size]) for place, at, size in zip(places, offset, length, strict=True))
        covered[cell] = True
    at = [int(n) for n in np.unravel_index(int(np.argmin(covered)), covered.shape)]
    low = tuple(cuts[n] for cuts, n in zip(edges, at, strict=True))
    return box_text((low, tuple(cuts[n + 1] - cuts[n] for cuts, n in zip(edges, at, strict=True))))
