"""Compares two stored steps by what they hold: global tensors by name, objects by coordinate.

Owns: what "equal" means across layouts, meshes and jobs, and what must be read to know it. Does not own: reading (`slabs`),
numbers (`value_diff`). Invariants: tensors are called equal only when all their bits are: by the fingerprints of the same
boxes, or by comparing every element; no more is read than that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from .index_checks import FINGERPRINT_BYTES
from .slabs import SlabReader, item_bytes, slabs
from .stored_step import StoredStep
from .tensors import StoredTensor, TensorKey, coordinate_of, stored_tensors
from .tiling import Box
from .value_diff import ValueDiff, value_diff


class What(StrEnum):
    """How something differs."""

    ONLY_A = "only in A"
    ONLY_B = "only in B"
    DTYPE = "dtype"
    SHAPE = "shape"
    BITS = "bits"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDiff:
    """A tensor that differs.

    Attributes:
        key: Its name, and its coordinate where it is a rank's own.
        what: How it differs; a dtype is told before a shape.
        a: As A has it, or None.
        b: As B has it, or None.
        values: How far apart, for `BITS`; None where it was not asked for.
    """

    key: TensorKey
    what: What
    a: StoredTensor | None
    b: StoredTensor | None
    values: ValueDiff | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectDiff:
    """An object that differs: `BITS`, or on one side alone."""

    key: TensorKey
    what: What


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDiff:
    """What two steps have in common, and what not.

    Attributes:
        tensors: Tensors that differ, by name.
        objects: Objects that differ, by name and coordinate.
        equal_tensors: Tensors whose bits are all equal.
        equal_objects: Objects whose bytes are equal.
        read_tensors: Tensors whose bytes had to be read.
    """

    tensors: list[TensorDiff]
    objects: list[ObjectDiff]
    equal_tensors: int
    equal_objects: int
    read_tensors: int

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.tensors and not self.objects


def diff_steps(
    a: tuple[StoredStep, SlabReader],
    b: tuple[StoredStep, SlabReader],
    *,
    values: bool = True,
    objects: bool = True,
    progress: Callable[[int], None] | None = None,
) -> StateDiff:
    """Compare two steps; blocks until all that must be read was read.

    Args:
        a: A step and a reader of it.
        b: The other.
        values: Say how far tensors are apart that differ; else reading stops at the first bit that does, and
            nothing is read of tensors in the same boxes.
        objects: Compare objects too.
        progress: Told of the bytes of each slab that was compared, one side's.

    Raises:
        CorruptError: a chunk of either is gone or changed.
        StorageError: as a store raised it.
    """
    tensors_a, tensors_b = (stored_tensors(step.sections, tuple(step.commit.mesh.axes)) for step, _ in (a, b))
    differing: list[TensorDiff] = []
    read = 0
    for key in sorted({*tensors_a, *tensors_b}):
        one, other = tensors_a.get(key), tensors_b.get(key)
        what = _what(one, other)
        if what is not None or one is None or other is None:
            differing.append(TensorDiff(key=key, what=what or What.BITS, a=one, b=other))
            continue
        doubtful = _doubtful(one, other)
        if not doubtful:
            continue
        found: ValueDiff | None = None
        if values or not _same_boxes(one, other):
            read += 1
            found = _compare(key, (one, a[1]), (other, b[1]), doubtful, values=values, progress=progress)
            if not found.different:
                continue
        differing.append(TensorDiff(key=key, what=What.BITS, a=one, b=other, values=found if values else None))
    objects_a, objects_b = ((_objects(step) if objects else {}) for step, _ in (a, b))
    different_objects = list(_object_diffs(objects_a, objects_b))
    return StateDiff(
        tensors=differing,
        objects=different_objects,
        equal_tensors=len({*tensors_a, *tensors_b}) - len(differing),
        equal_objects=len({*objects_a, *objects_b}) - len(different_objects),
        read_tensors=read,
    )


def _what(a: StoredTensor | None, b: StoredTensor | None) -> What | None:
    """Return how two tensors differ before any bits are looked at."""
    if a is None:
        return What.ONLY_B
    if b is None:
        return What.ONLY_A
    if a.dtype != b.dtype:
        return What.DTYPE
    return What.SHAPE if a.shape != b.shape else None


def _same_boxes(a: StoredTensor, b: StoredTensor) -> bool:
    return a.boxes.keys() == b.boxes.keys()


def _doubtful(a: StoredTensor, b: StoredTensor) -> list[Box]:
    """Return the boxes whose bits may differ: none where both are stored in the same boxes with the same fingerprints."""
    if _same_boxes(a, b):
        return [box for box, fingerprint in a.boxes.items() if b.boxes[box] != fingerprint]
    return [((0,) * len(a.shape), a.shape)]


def _compare(
    key: TensorKey,
    a: tuple[StoredTensor, SlabReader],
    b: tuple[StoredTensor, SlabReader],
    boxes: list[Box],
    *,
    values: bool,
    progress: Callable[[int], None] | None,
) -> ValueDiff:
    total = ValueDiff()
    for box in boxes:
        for slab in slabs(box, item_bytes(a[0])):
            slab_a, slab_b = (reader.read(key, tensor, slab) for tensor, reader in (a, b))
            total += value_diff(a[0].dtype if values else "", slab_a, slab_b)
            if progress is not None:
                progress(slab_a.nbytes)
            if total.different and not values:
                return total
    return total


def _objects(step: StoredStep) -> dict[TensorKey, tuple[int, bytes]]:
    """Return length and fingerprint of every object."""
    axes = tuple(step.commit.mesh.axes)
    found: dict[TensorKey, tuple[int, bytes]] = {}
    for section in step.sections.values():
        coordinate = coordinate_of(section, axes)
        for at, (name, length) in enumerate(zip(section.object_names, section.object_length, strict=True)):
            fingerprint = section.object_fingerprints[at * FINGERPRINT_BYTES : (at + 1) * FINGERPRINT_BYTES]
            found[TensorKey(name, coordinate)] = (length, fingerprint)
    return found


def _object_diffs(a: dict[TensorKey, tuple[int, bytes]], b: dict[TensorKey, tuple[int, bytes]]) -> Iterator[ObjectDiff]:
    for key in sorted({*a, *b}):
        if key not in b:
            yield ObjectDiff(key=key, what=What.ONLY_A)
        elif key not in a:
            yield ObjectDiff(key=key, what=What.ONLY_B)
        elif a[key] != b[key]:
            yield ObjectDiff(key=key, what=What.BITS)
