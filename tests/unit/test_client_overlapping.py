"""Live tensors whose elements share memory: which they are, and what they hold after a restore."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptd.client.overlapping import overlaps, settle


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=4))
def test_only_tensors_with_two_elements_at_one_place_overlap(dims: list[tuple[int, int]]) -> None:
    """Whatever sizes and strides: the answer is that of counting all places."""
    shape, strides = [size for size, _ in dims], [stride for _, stride in dims]
    tensor = torch.zeros(200).as_strided(shape, strides)
    places = torch.arange(200).as_strided(shape, strides)
    assert overlaps(tensor) == (len(set(places.reshape(-1).tolist())) < tensor.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_an_expanded_tensor_takes_any_value(dtype: torch.dtype) -> None:
    """Memory stays shared where all elements that share a place are equal, bit for bit; else it is separated."""
    base = torch.zeros(3, 1).to(dtype)
    live = base.expand(3, 4)
    value = torch.tensor([[1.0], [0.0], [1.0]]).to(dtype).expand(3, 4).contiguous()
    settle(live, value)
    assert torch.equal(live, value)
    assert torch.equal(base, value[:, :1])
    value[0, 3] = 0
    settle(live, value)
    assert torch.equal(live, value)
    assert base.data_ptr() != live.data_ptr()


def test_equal_is_said_of_bits() -> None:
    """-0.0 equals 0.0, and yet they are two values."""
    base = torch.ones(1)
    live = base.expand(2)
    settle(live, torch.tensor([0.0, -0.0]))
    assert torch.equal(torch.signbit(live), torch.tensor([False, True]))
    assert base.item() == 1
