"""Faults from the field: tensors of every dtype, shape and stride, on real agents, from memory and from the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.two_nodes import TwoNodes, stored_bytes
from torch import nn
from torch._subclasses import FakeTensorMode

from ckptd.client import InvalidRequest

pytestmark = pytest.mark.integration

QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)} - QUANTIZED, key=str)
"""Every dtype this torch has, numbers below eight bits among them."""


def bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of random bits: NaN payloads, infinities, subnormals, -0.0 and bools that are neither 0 nor 1."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(("transport", "tier"), [("shm", "memory"), ("shm", "store"), ("stream", "store")])
def test_s078_every_dtype_and_shape_comes_back_bit_for_bit(
    two_nodes: TwoNodes, tmp_path: Path, transport: str, tier: str
) -> None:
    """bf16 with NaN payloads, float8, complex, unsigned, numbers of four bits; (), empty, one element; made or in place."""
    shapes = [(), (0,), (3, 0, 2), (1,), (1, 1), (7,), (5, 3), (70_001,)]
    state: dict[str, Any] = {
        str(dtype): [bits(dtype, shape, number) for number, shape in enumerate(shapes)] for dtype in DTYPES
    }
    assert len(state) >= 40
    two_nodes.saved(tmp_path, state, transport=transport)
    made: dict[str, Any] = dict.fromkeys(state)
    filled: dict[str, Any] = {
        name: [
            torch.zeros(t.numel() * t.element_size(), dtype=torch.uint8).view(t.dtype).view(t.shape) for t in tensors
        ]
        for name, tensors in state.items()
    }
    targets = {name: list(tensors) for name, tensors in filled.items()}
    for answer in (made, filled):
        two_nodes.restored(tmp_path, answer, tier=tier, transport=transport)
        for name, tensors in state.items():
            for want, got in zip(tensors, answer[name], strict=True):
                assert (got.dtype, got.shape) == (want.dtype, want.shape)
                same = got.view(torch.uint8) if got.ndim else got.view(1).view(torch.uint8)
                there = want.view(torch.uint8) if want.ndim else want.view(1).view(torch.uint8)
                assert torch.equal(same, there), f"{name} {tuple(want.shape)}"
    assert all(a is b for name in state for a, b in zip(filled[name], targets[name], strict=True))


def test_s073_only_the_bytes_of_a_view_are_stored(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """Ten elements of ten million, eight chunks of one tensor, and a row and a column of a large one."""
    large, cut, square = torch.arange(10_000_000.0), torch.rand(80_000), torch.rand(1000, 1000)
    state: dict[str, Any] = {
        "view": large[5_000_000:5_000_010],
        "chunks": list(cut.chunk(8)),
        "row": square[3],
        "column": square[:, 3],
        "module": nn.ParameterDict({"p": nn.Parameter(large[7:17])}),
    }
    plain = 4 * (10 + 80_000 + 1000 + 1000 + 10)
    two_nodes.saved(tmp_path, state)
    assert stored_bytes(tmp_path) < 1.1 * plain + (64 << 10)
    got: dict[str, Any] = {**dict.fromkeys(state), "module": nn.ParameterDict({"p": nn.Parameter(torch.zeros(10))})}
    two_nodes.restored(tmp_path, got)
    assert torch.equal(got["view"], state["view"])
    assert all(torch.equal(a, b) for a, b in zip(got["chunks"], state["chunks"], strict=True))
    assert torch.equal(got["row"], square[3])
    assert torch.equal(got["column"], square[:, 3])
    assert torch.equal(got["module"]["p"], state["module"]["p"])
    assert got["view"].untyped_storage().nbytes() == 40


STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.transpose(0, 2),
    "channels_last": lambda t: t.reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "step": lambda t: t[:, ::2, 1::2],
    "expanded": lambda t: t[:1].expand(7, -1, -1),
    "windows": lambda t: t.reshape(-1).as_strided((10, 5), (1, 1)),
    "conjugate": lambda t: torch.complex(t, t + 1).conj(),
    "negated": lambda t: torch.complex(t, t + 1).conj().imag,
}


@pytest.mark.parametrize("kind", ["plain", "module"])
def test_s074_strides_do_not_matter_on_either_side(two_nodes: TwoNodes, tmp_path: Path, kind: str) -> None:
    """Each kind of strides is saved, and restored in place into the same kind and into dense memory, and from dense."""

    def held(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        if kind == "plain":
            return {"t": dict(tensors), "after": torch.full((3,), tensors["step"].sum().item())}
        module = nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        return {"t": module}

    def values(state: dict[str, Any]) -> dict[str, torch.Tensor]:
        found = state["t"]
        return dict(found) if isinstance(found, dict) else dict(found.named_buffers())

    base, blank = torch.arange(120.0).reshape(5, 4, 6), torch.full((5, 4, 6), -1.0)
    want = {name: view(base.clone()) for name, view in STRIDES.items()}
    dense = {
        name: tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        for name, tensor in want.items()
    }
    other = {name: tensor + torch.arange(float(tensor.numel())).reshape(tensor.shape) for name, tensor in dense.items()}
    for step, (saved, expected) in enumerate([(want, dense), (dense, dense), (other, other)]):
        folder = tmp_path / str(step)
        two_nodes.saved(folder, held(saved))
        for target in (
            {name: view(blank.clone()) for name, view in STRIDES.items()},
            {n: torch.zeros_like(t) for n, t in dense.items()},
        ):
            live = held(target)
            two_nodes.restored(folder, live)
            for name, tensor in values(live).items():
                assert torch.equal(tensor, expected[name]), f"{name}, round {step}"
                if kind == "module":
                    assert tensor is target[name]


def test_s074_memory_that_is_shared_stays_shared_where_the_value_allows_it(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """An expanded buffer still sees its base after the restore; where the stored one differs, it gets its own memory."""

    class Net(nn.Module):
        def __init__(self, start: float) -> None:
            super().__init__()
            self.register_buffer("base", torch.arange(3.0).unsqueeze(1) + start)
            self.register_buffer("wide", self.get_buffer("base").expand(3, 4))
            self.register_buffer("again", self.get_buffer("base").expand(3, 4))

    two_nodes.saved(tmp_path, {"net": Net(5.0)})
    live = Net(0.0)
    two_nodes.restored(tmp_path, {"net": live})
    for name in ("wide", "again"):
        assert torch.equal(live.get_buffer(name), Net(5.0).get_buffer(name))
        assert live.get_buffer(name).data_ptr() == live.get_buffer("base").data_ptr()


def test_s074_numpy_arrays_of_any_strides_come_back(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """Negative strides, transposed, stepped, broadcast, read-only; equal values, shape and dtype, and writable."""
    base = np.arange(24, dtype=np.float16).reshape(4, 6)
    fixed = base.copy()
    fixed.flags.writeable = False
    state: dict[str, Any] = {
        "arrays": [base[::-1, ::-2], base.T, base[1::2], np.broadcast_to(base[0], (3, 6)), fixed, base[:0], np.array(3)]
    }
    two_nodes.saved(tmp_path, state)
    got: dict[str, Any] = {"arrays": None}
    two_nodes.restored(tmp_path, got)
    for want, have in zip(state["arrays"], got["arrays"], strict=True):
        assert (have.dtype, have.shape) == (want.dtype, want.shape)
        assert have.tobytes() == want.tobytes()
        have[...] = 0
    assert base.sum() == 276


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2)


def out_of_a_transform() -> torch.Tensor:
    kept: list[torch.Tensor] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return x.sum()

    torch.func.grad(noted)(torch.ones(2))
    return kept[0]


def freed() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.ones(2, device="meta"), "on the meta device"),
        (lambda: torch.eye(3).to_sparse(), "of layout sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "of layout sparse_csr"),
        (lambda: torch.ones(3).to_mkldnn(), "of layout _mkldnn"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            "of the subclass .*NestedTensor",
        ),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"quantized \(qint8\)"),
        (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.quint8), r"quantized \(quint8\)"),
        (fake, "of the subclass .*FakeTensor"),
        (nn.UninitializedParameter, "of the subclass .*UninitializedParameter"),
        (out_of_a_transform, "inside a transform"),
        (freed, "whose memory was freed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kinds_that_have_no_plain_bytes_are_refused_before_any_upload(
    two_nodes: TwoNodes, tmp_path: Path, make: Callable[[], torch.Tensor], kind: str
) -> None:
    """Key and kind stand in the error, wherever the tensor stands; nothing is uploaded, and the next save works."""
    odd = make()
    module = nn.Module()
    if isinstance(odd, nn.Parameter):
        module.register_parameter("odd", odd)
    else:
        module.register_buffer("odd", odd)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter]["odd"] = odd
    states: dict[str, dict[str, Any]] = {
        "deep/0/odd": {"deep": [{"odd": odd}]},
        "net/odd": {"net": module},
        "sgd/state/%230/odd": {"sgd": optimizer},
    }
    with two_nodes.on(two_nodes.first, tmp_path) as checkpointer:
        for step, (key, state) in enumerate(states.items()):
            with pytest.raises(InvalidRequest, match=f"a tensor {kind}.* cannot be stored") as caught:
                checkpointer.save(step, {"fine": torch.ones(9), **state})
            assert caught.value.key in (key, key.replace("%23", "#"))
            assert key.rsplit("/", 1)[1] in str(caught.value)
        assert stored_bytes(tmp_path) == 0
        assert not list((tmp_path / "index").rglob("*.pb"))
        checkpointer.save(9, {"fine": torch.ones(9)}).wait()
