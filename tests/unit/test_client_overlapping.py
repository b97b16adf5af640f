"""Live tensors whose elements share memory: which they are, and what they hold after a restore."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckptd.client.overlapping import overlaps, settle

__all__ = ["fake_agent", "make"]


class Masked(nn.Module):
    """Has an expanded buffer."""

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.full((3, 1), value, dtype=dtype).expand(3, 4))


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


@pytest.fixture
def no_luck() -> Iterator[None]:
    """Fresh memory holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=before)


@pytest.mark.usefixtures("no_luck")
def test_an_expanded_tensor_is_cast(make: Make) -> None:
    """Chosen and stored in another dtype: it gets what was stored, not what stood in memory on the way."""
    saving = make()
    saving.track(model=Masked(1.5, torch.float32))
    saving.save(5).wait()
    saving.close()
    here = Masked(2.5, torch.bfloat16)
    again = make()
    again.track(model=here)
    assert again.restore(only="model", cast=True) is not None
    assert torch.equal(here.mask, torch.full((3, 4), 1.5, dtype=torch.bfloat16))
