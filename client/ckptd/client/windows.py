"""How much of a step is read at once: boxes of tensors packed into windows, large ones cut into slabs.

Pure. Owns: the cuts. Does not own: reading (`step_session`). Invariant: the slabs of a box follow one another, hold each of
its elements once, and each is one contiguous range of its C-contiguous bytes; a window is longer than its limit only where a
single element is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Of slabs in a window: covers every dtype, and cache lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slab:
    """A box within a stored one.

    Attributes:
        position: Of the stored box among those that were asked for.
        offset: Where it begins in the stored box, in elements.
        length: In elements.
        nbytes: Its bytes.
    """

    position: int
    offset: tuple[int, ...]
    length: tuple[int, ...]
    nbytes: int

    @property
    def room(self) -> int:
        """Bytes it takes in a window."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


def slabs(shape: Sequence[int], itemsize: int, limit: int, *, position: int = 0) -> Iterator[Slab]:
    """Cut a box into smaller ones of at most `limit` bytes, in C order; one box where it fits, also without elements.

    Args:
        shape: Of the box.
        itemsize: Bytes of an element.
        limit: Bytes.
        position: Handed on.
    """
    shape = tuple(shape)
    if math.prod(shape) * itemsize <= limit or not shape:
        whole = math.prod(shape) * itemsize
        yield Slab(position=position, offset=(0,) * len(shape), length=shape, nbytes=whole)
        return
    # The first dimension of which one step fits; those before it are walked one by one.
    dim = next((d for d in range(len(shape)) if math.prod(shape[d + 1 :]) * itemsize <= limit), len(shape) - 1)
    step = math.prod(shape[dim + 1 :]) * itemsize
    many = max(1, limit // step)
    for outer in range(math.prod(shape[:dim])):
        place = _place(outer, shape[:dim])
        for at in range(0, shape[dim], many):
            count = min(many, shape[dim] - at)
            yield Slab(
                position=position,
                offset=(*place, at, *(0,) * (len(shape) - dim - 1)),
                length=(*(1,) * dim, count, *shape[dim + 1 :]),
                nbytes=count * step,
            )


def windows(boxes: Iterable[tuple[Sequence[int], int]], limit: int) -> Iterator[list[Slab]]:
    """Pack boxes, given as (shape, itemsize), into windows of at most `limit` bytes, in their order."""
    window: list[Slab] = []
    taken = 0
    # Rounded down, so that a full slab with its padding still fits.
    most = max(ALIGNMENT, limit // ALIGNMENT * ALIGNMENT)
    for position, (shape, itemsize) in enumerate(boxes):
        for slab in slabs(shape, itemsize, most, position=position):
            if window and taken + slab.room > most:
                yield window
                window, taken = [], 0
            window.append(slab)
            taken += slab.room
    if window:
        yield window


def _place(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(shape):
        number, at = divmod(number, size)
        found.append(at)
    return tuple(reversed(found))
