"""The boxes of all ranks tile the global tensor exactly, and each view holds what its box says."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from fixtures.cut_tensors import chunked, local_of
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.client.errors import InvalidRequest
from ckptd.client.placements import _is_by_fsdp, boxes_of_placements
from ckptd.client.sharding import Pieces, Sharded, pieces_of
from ckptd.client.tracking import Tracking


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    """Draw a global shape, a mesh and placements."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    one = (
        st.just(Replicate())
        | dims.map(Shard)
        | st.tuples(dims, st.integers(1, 4)).map(lambda pair: _StridedShard(pair[0], split_factor=pair[1]))
    )
    return shape, mesh, tuple(draw(st.tuples(*[one] * len(mesh))))


def held(pieces: Pieces, whole: torch.Tensor, counts: torch.Tensor) -> None:
    """Check the pieces against the global tensor and count the elements they hold."""
    for box, view in zip(pieces.boxes, pieces.views(), strict=True):
        index = tuple(slice(o, o + n) for o, n in zip(box.offset, box.length, strict=True))
        assert view.shape == box.length
        assert torch.equal(view, whole[index])
        counts[index] += 1


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_s076_boxes_of_all_ranks_tile_the_tensor_for_any_mesh_and_placements(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    """Every element is held by as many ranks as there are replicas, and each view equals the global tensor at its box."""
    shape, mesh, placements = layout
    # FSDP2's pattern is cut in the other order: its own test below.
    assume(not any(hasattr(p, "split_factor") for p in placements) or not _is_by_fsdp(mesh, placements))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    counts = torch.zeros(shape, dtype=torch.int64)
    for at in itertools.product(*map(range, mesh)):
        local = local_of(whole, mesh, at, placements)
        boxes = boxes_of_placements(shape, mesh, at, placements, tuple(local.shape))
        held(Pieces(whole.dtype, shape, boxes, local), whole, counts)
    replicas = math.prod(n for n, p in zip(mesh, placements, strict=True) if isinstance(p, Replicate))
    assert bool((counts == replicas).all())


def test_neighbouring_pieces_are_one_box() -> None:
    """FSDP2 over tensor parallelism, even: one box and one row, not one for each stride."""
    boxes = boxes_of_placements((16, 3), (2, 4), (1, 2), (_StridedShard(0, split_factor=4), Shard(0)), (2, 3))
    assert [(box.offset, box.length) for box in boxes] == [((10, 0), (2, 3))]
    whole = boxes_of_placements((6,), (2,), (0,), (_StridedShard(0, split_factor=6),), (6,))
    assert [(box.offset, box.length) for box in whole] == [((0,), (6,))]


@settings(max_examples=200, deadline=None)
@example(size=38, tp=4, dp=4, width=1)  # the shapes agree in either order, the contents do not
@given(size=st.integers(1, 40), tp=st.integers(1, 4), dp=st.integers(1, 4), width=st.integers(1, 3))
def test_uneven_fsdp_over_tp_is_read_in_the_order_it_was_made(size: int, tp: int, dp: int, width: int) -> None:
    """Where left to right does not give the local shape, FSDP's split of a tensor-parallel shard is found right to left."""
    whole = torch.arange(size * width).reshape(size, width)
    placements = (_StridedShard(0, split_factor=tp), Shard(0))
    counts = torch.zeros(size, width, dtype=torch.int64)
    for i, j in itertools.product(range(dp), range(tp)):
        local = chunked(chunked(whole, tp, 0)[j], dp, 0)[i]
        boxes = boxes_of_placements((size, width), (dp, tp), (i, j), placements, tuple(local.shape))
        held(Pieces(whole.dtype, (size, width), boxes, local), whole, counts)
    assert bool((counts == 1).all())


@pytest.fixture
def world() -> Iterator[int]:
    """A process group of eight ranks, of which this process is one and the others do nothing."""
    store = FakeStore()
    dist.init_process_group("fake", rank=3, world_size=8, store=store)
    try:
        yield 8
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(1)),
        (Replicate(), Shard(0)),
        (_StridedShard(0, split_factor=4), Shard(0)),
        (Shard(1), Replicate()),
        (Shard(0), Shard(0)),
        (_StridedShard(1, split_factor=2), Replicate()),
    ],
)
@pytest.mark.parametrize("shape", [(16, 8), (7, 5), (1, 1), (8, 3, 2)])
def test_real_dtensors_agree_with_torchs_own_cut(
    world: int, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> None:
    """For a DTensor that torch itself has made of a global tensor, boxes say where each local element came from."""
    mesh = DeviceMesh("cpu", torch.arange(world).reshape(2, 4), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = local_of(whole, (2, 4), tuple(coordinate), placements)
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    counts = torch.zeros(shape, dtype=torch.int64)
    pieces = pieces_of(tensor, "t")
    held(pieces, whole, counts)
    assert int(counts.sum()) == local.numel()
    assert pieces.global_shape == shape


def test_a_rank_outside_the_mesh_holds_no_box(world: int) -> None:
    """So pipeline stages may list tensors of a submesh they are not part of."""
    mesh = DeviceMesh("cpu", [0, 1])
    tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    assert pieces_of(tensor, "t").boxes == ()


def test_a_partial_tensor_is_refused_with_its_key(world: int) -> None:
    """It holds addends, not values."""
    mesh = DeviceMesh("cpu", torch.arange(world))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(InvalidRequest, match=r"model/w.*Partial") as caught:
        pieces_of(tensor, "model/w")
    assert caught.value.key == "model/w"


class OwnDTensor(DTensor):
    """A distributed tensor that may mean something else."""


def local_kinds() -> dict[str, tuple[torch.Tensor, str]]:
    """Return local tensors of eight elements whose bytes are not their values, and what is said of them."""
    freed = torch.ones(1)
    freed.untyped_storage().resize_(0)
    return {
        "meta": (torch.ones(1, device="meta"), "on the meta device"),
        "freed": (freed, "whose memory was freed"),
        "subclass": (torch.ones(1).as_subclass(Own), "of the subclass .*Own"),
        "waits": (AsyncCollectiveTensor(torch.ones(1)), "of the subclass .*AsyncCollectiveTensor"),
    }


class Own(torch.Tensor):
    """A tensor that may mean something else."""


def test_a_distributed_tensor_of_another_kind_is_refused(world: int) -> None:
    """A subclass, and one whose local tensor is none whose bytes are its value: by key and kind."""
    mesh = DeviceMesh("cpu", torch.arange(world))
    odd = DTensor.from_local(torch.ones(1), mesh, [Shard(0)], run_check=False)
    odd.__class__ = OwnDTensor
    with pytest.raises(InvalidRequest, match=r"of the subclass .*OwnDTensor"):
        pieces_of(odd, "w")
    for local, kind in local_kinds().values():
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        with pytest.raises(InvalidRequest, match=f"model/w: a tensor {kind}") as caught:
            pieces_of(tensor, "model/w")
        assert caught.value.key == "model/w"


def test_one_memory_held_in_several_ways_is_no_tie(world: int) -> None:
    """As a shard, as a replica and as a plain tensor it has other values; held alike twice it has one."""
    mesh = DeviceMesh("cpu", torch.arange(world))
    local = torch.ones(2)

    def held(*placements: Placement) -> DTensor:
        return DTensor.from_local(local, mesh, placements, run_check=False)

    module = torch.nn.Module()
    for name, tensor in {"a": held(Shard(0)), "b": held(Replicate()), "c": local, "d": held(Shard(0))}.items():
        module.register_buffer(name, tensor)
    tracking = Tracking()
    tracking.add("m", module)
    layout = tracking.collect(None).layout
    assert [(row.name, row.global_shape) for row in layout.rows] == [("m/a", (16,)), ("m/b", (2,)), ("m/c", (2,))]
    assert (list(layout.aliases.alias), list(layout.aliases.target)) == (["m/d"], ["m/a"])


def test_a_local_tensor_that_does_not_fit_is_refused(world: int) -> None:
    """Padding is never stored as data."""
    mesh = DeviceMesh("cpu", torch.arange(world))
    tensor = DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False, shape=torch.Size([9]), stride=(1,))
    with pytest.raises(InvalidRequest, match="do not give"):
        pieces_of(tensor, "w")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0,), (0, 3), (4, 0)])
def test_s075_scalars_and_empty_tensors_have_one_whole_box(shape: tuple[int, ...]) -> None:
    """Shape () stays ()."""
    pieces = pieces_of(torch.zeros(shape), "t")
    assert pieces.global_shape == shape
    assert [(box.offset, box.length) for box in pieces.boxes] == [((0,) * len(shape), shape)]


def test_sharded_says_where_a_plain_tensor_stands() -> None:
    """And is refused where it would stand outside."""
    pieces = pieces_of(Sharded(torch.ones(2, 3), (4, 3), (2, 0)), "t")
    assert [(box.offset, box.length) for box in pieces.boxes] == [((2, 0), (2, 3))]
    assert pieces_of(Sharded(torch.ones(0, 3), (4, 3), (4, 0)), "t").boxes == ()
    for shape, offsets in [((4, 3), (3, 0)), ((4, 3), (-1, 0)), ((4,), (0,)), ((4, 3), (0,))]:
        with pytest.raises(InvalidRequest, match="does not lie"):
            pieces_of(Sharded(torch.ones(2, 3), shape, offsets), "t")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: torch.ones(2, device="meta"), "meta"),
        (lambda: torch.ones(2, 2).to_sparse(), "sparse"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
    ],
)
def test_tensors_whose_bytes_are_not_their_value_are_refused_by_kind(make: object, word: str) -> None:
    """The key and the kind stand in the message."""
    with pytest.raises(InvalidRequest, match=f"model/w: a tensor .*{word}") as caught:
        pieces_of(make(), "model/w")  # type: ignore[operator]
    assert caught.value.key == "model/w"
