"""Windows: every element once, in C order, each slab one range of bytes, none larger than the limit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from ckptd.client.cli.arguments import root_url, size_of
from ckptd.client.windows import ALIGNMENT, Slab, slabs, windows

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def elements(slab: Slab, shape: tuple[int, ...]) -> list[int]:
    """Return the positions in the flat tensor that a slab holds."""
    box = tuple(slice(at, at + length) for at, length in zip(slab.offset, slab.length, strict=True))
    return [int(at) for at in np.arange(math.prod(shape)).reshape(shape)[box].reshape(-1)]


@given(shape=SHAPES, itemsize=st.sampled_from([1, 2, 4, 8, 16]), limit=st.integers(1, 300))
def test_slabs_are_the_tensor_in_order(shape: tuple[int, ...], itemsize: int, limit: int) -> None:
    """One after the other they hold 0, 1, 2, ...; a slab is over the limit only with a single element."""
    seen: list[int] = []
    for slab in slabs(shape, itemsize, limit, position=3):
        held = elements(slab, shape)
        assert slab.position == 3
        assert slab.nbytes == len(held) * itemsize
        assert slab.nbytes <= limit or len(held) == 1
        seen += held
    assert seen == list(range(math.prod(shape)))


@given(shapes=st.lists(SHAPES, max_size=8), limit=st.integers(ALIGNMENT, 2000))
def test_windows_hold_every_tensor_once_and_not_more_than_the_limit(shapes: list[tuple[int, ...]], limit: int) -> None:
    """Padding counted; in the order of the tensors; also those without elements."""
    found = list(windows([(shape, 4) for shape in shapes], limit))
    assert all(sum(slab.room for slab in window) <= limit for window in found)
    flat = [slab for window in found for slab in window]
    most = limit // ALIGNMENT * ALIGNMENT
    assert flat == [slab for at, shape in enumerate(shapes) for slab in slabs(shape, 4, most, position=at)]


def test_a_large_tensor_is_read_in_as_few_rows_as_fit() -> None:
    """Whole rows first; where a row is too large, parts of rows; the last may be shorter."""
    assert [(slab.offset, slab.length) for slab in slabs((5, 10), 1, 20)] == [
        ((0, 0), (2, 10)),
        ((2, 0), (2, 10)),
        ((4, 0), (1, 10)),
    ]
    assert [(slab.offset, slab.length) for slab in slabs((2, 5), 2, 6)] == [
        ((0, 0), (1, 3)),
        ((0, 3), (1, 2)),
        ((1, 0), (1, 3)),
        ((1, 3), (1, 2)),
    ]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("2GiB", 2 << 30), ("1.5MB", 1_500_000), ("500", 500), ("1 TiB", 1 << 40), ("3kb", 3000)],
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    """Decimal without an i, binary with it."""
    assert size_of(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5XB", "0", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """As wrong usage."""
    with pytest.raises(typer.BadParameter, match="size"):
        size_of(text)


def test_a_plain_path_is_a_root() -> None:
    """As for the other verbs; what it holds that URLs cannot is quoted."""
    assert root_url("/data/run 1%") == "file:///data/run%201%25"
    assert root_url("s3://bucket/x") == "s3://bucket/x"
