"""How far two arrays of one dtype are apart, as numbers.

Pure. Owns: which dtypes numbers can be made of, and what "apart" means for NaN and infinity. Does not own: where the bytes come
from (`slabs`). Invariant: `different` counts bits, so that it is 0 exactly when the bytes are equal; the rest is about values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_NUMPY = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("float16", "float32", "float64", "complex64", "complex128", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
}
_BFLOAT16 = "bfloat16"


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueDiff:
    """How far two tensors are apart.

    Attributes:
        elements: Elements compared.
        different: Elements whose bits differ.
        max_abs: Largest |a - b|; NaN on one side alone counts in `nan_on_one_side` instead. None for a dtype that
            numpy does not know.
        max_rel: Largest |a - b| / max(|a|, |b|), 0 where both are 0: at most 2, or infinity. None as above.
        nan_on_one_side: Elements that are NaN here and a number there.
    """

    elements: int = 0
    different: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    nan_on_one_side: int = 0

    def __add__(self, other: ValueDiff) -> ValueDiff:
        """Return both together."""
        return ValueDiff(
            elements=self.elements + other.elements,
            different=self.different + other.different,
            max_abs=_larger(self.max_abs, other.max_abs),
            max_rel=_larger(self.max_rel, other.max_rel),
            nan_on_one_side=self.nan_on_one_side + other.nan_on_one_side,
        )


def value_diff(dtype: str, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> ValueDiff:
    """Compare two arrays of one shape, of items that are nothing but bits.

    Args:
        dtype: Torch's name without "torch.".
        a: Elements as they are stored: C-contiguous, little-endian.
        b: The same.
    """
    bits_a, bits_b = _bits(a), _bits(b)
    differs = bits_a != bits_b
    if differs.ndim > 1:
        differs = differs.any(axis=1)
    count = int(np.count_nonzero(differs))
    has_numbers = dtype == _BFLOAT16 or dtype in _NUMPY
    if not has_numbers:
        return ValueDiff(elements=a.size, different=count)
    if not count:
        return ValueDiff(elements=a.size, max_abs=0.0, max_rel=0.0)
    # Only what differs is made numbers of: most often that is little.
    numbers_a, numbers_b = (_numbers(dtype, bits[differs]) for bits in (bits_a, bits_b))
    max_abs, max_rel, nans = _apart(numbers_a, numbers_b)
    return ValueDiff(elements=a.size, different=count, max_abs=max_abs, max_rel=max_rel, nan_on_one_side=nans)


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return one unsigned word an element, or a row of bytes where numpy has no word of that size."""
    flat = np.ascontiguousarray(array).reshape(-1)
    size = array.dtype.itemsize
    return flat.view(f"<u{size}") if size in {1, 2, 4, 8} else flat.view(np.uint8).reshape(array.size, size)


def _numbers(dtype: str, bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    plain = np.ascontiguousarray(bits).reshape(-1)
    if dtype == _BFLOAT16:
        # The upper half of a float32.
        return (plain.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    numbers: npt.NDArray[Any] = plain.view(_NUMPY[dtype])
    if numbers.dtype.kind == "f":
        return numbers.astype(np.float64)
    if numbers.dtype.kind == "c":
        return numbers.astype(np.complex128)
    return numbers.view(np.uint8) if numbers.dtype.kind == "b" else numbers.astype(numbers.dtype.newbyteorder("="))


def _apart(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[float, float, int]:
    """Return the largest absolute and relative difference, and how many are NaN on one side."""
    if a.dtype.kind in "iu":
        # Exact for 64 bits too: the difference of the larger and the smaller, modulo 2**n, fits the unsigned type.
        unsigned = a.dtype.str.replace("i", "u")
        apart = (np.maximum(a, b).view(unsigned) - np.minimum(a, b).view(unsigned)).astype(np.float64)
        a, b = a.astype(np.float64), b.astype(np.float64)
    else:
        nan_a, nan_b = np.isnan(a), np.isnan(b)
        one_side = int((nan_a != nan_b).sum())
        numbers = ~(nan_a | nan_b)
        a, b = a[numbers], b[numbers]
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.where(a == b, 0.0, np.abs(a - b))
        apart[np.isnan(apart)] = np.inf  # of complex numbers with an infinite part
        largest = np.maximum(np.abs(a), np.abs(b))
        return _largest(apart), _largest(_ratio(apart, largest)), one_side
    return _largest(apart), _largest(_ratio(apart, np.maximum(np.abs(a), np.abs(b)))), 0


def _ratio(apart: npt.NDArray[Any], largest: npt.NDArray[Any]) -> npt.NDArray[Any]:
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = apart / largest
    # 0/0 is no difference; infinity against anything else is as far apart as can be.
    return np.where(apart == 0, 0.0, np.where(np.isinf(apart), np.inf, ratio))


def _largest(values: npt.NDArray[Any]) -> float:
    return float(values.max()) if values.size else 0.0


def _larger(one: float | None, other: float | None) -> float | None:
    known = [each for each in (one, other) if each is not None]
    return max(known) if known else None
