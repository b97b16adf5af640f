"""The mesh, and cutting a stage along it: tensor-parallel first, experts next, FSDP2 around what is left.

| parameter | tp > 1 | dp > 1 |
|---|---|---|
| attention, dense feed-forward, head | DTensor over tp | FSDP2 adds dp, giving a 2-D DTensor |
| embeddings, norms, routers | equal on all tp ranks | FSDP2: DTensor over dp |
| experts | equal on all tp ranks | DTensor, dim 0 (expert's number) sharded over dp_shard |

An axis of size 1 cuts nothing: with dp_replicate = dp_shard = 1 there is no FSDP2, and in one process every
parameter is a plain tensor.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from moe.model import Mixture, Stage

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where this process stands: its coordinate and size on each axis, and the mesh if there are others."""

    mesh: DeviceMesh | None
    sizes: dict[str, int]
    coord: dict[str, int]

    @staticmethod
    def join(sizes: dict[str, int], timeout: timedelta) -> "Place":
        """Meet the other processes; the axes in `sizes` are those of `AXES`, in that order."""
        world = 1
        for size in sizes.values():
            world *= size
        if world == 1:
            return Place(mesh=None, sizes=sizes, coord=dict.fromkeys(AXES, 0))
        dist.init_process_group("gloo", timeout=timeout)
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=AXES)
        return Place(mesh=mesh, sizes=sizes, coord={axis: mesh.get_local_rank(axis) for axis in AXES})

    @property
    def rank(self) -> int:
        """Rank in the whole job."""
        return 0 if self.mesh is None else dist.get_rank()

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this rank is the first of its pipeline stage: 0 on every other axis."""
        return not any(index for axis, index in self.coord.items() if axis != "pp")

    @property
    def data_part(self) -> tuple[int, int]:
        """Which part of a batch this rank's stage works on, and of how many."""
        index = self.coord["dp_replicate"] * self.sizes["dp_shard"] + self.coord["dp_shard"]
        return index, self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    def group(self, axis: str) -> ProcessGroup | None:
        """The ranks that differ from this one on `axis` alone; None where there are no others."""
        return None if self.mesh is None or self.sizes[axis] == 1 else self.mesh.get_group(axis)

    def sum(self, values: torch.Tensor, *axes: str) -> torch.Tensor:
        """Add up `values` in place over the axes, one after the other; all ranks get the same bits."""
        for axis in axes:
            if (group := self.group(axis)) is not None:
                dist.all_reduce(values, group=group)
        return values

    def data_mesh(self) -> DeviceMesh | None:
        """The part of the mesh on which FSDP2 and the experts live: dp_shard, with dp_replicate if it is used."""
        if self.mesh is None or self.data_part[1] == 1:
            return None
        return self.mesh["dp_replicate", "dp_shard"] if self.sizes["dp_replicate"] > 1 else self.mesh["dp_shard"]


def cut(stage: Stage, place: Place) -> None:
    """Turn the parameters of a whole stage into this rank's part of them, in place."""
    if place.mesh is not None and place.sizes["tp"] > 1:
        for layer in stage.layers.values():
            _cut_columns_rows(layer, place.mesh["tp"])
        if stage.last:
            _parallelize(stage.head, place.mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    data_mesh = place.data_mesh()
    if data_mesh is None:
        return
    experts: set[nn.Parameter] = set()
    for mixture in stage.mixtures():
        mixture.group = place.group("dp_shard")
        experts |= _spread_experts(mixture, data_mesh, place)
    for layer in stage.layers.values():
        fully_shard(layer, mesh=data_mesh, reshard_after_forward=False, ignored_params=experts)
    fully_shard(stage, mesh=data_mesh, reshard_after_forward=False, ignored_params=experts)


def _cut_columns_rows(layer: nn.Module, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {"attn.qkv": ColwiseParallel(), "attn.out": RowwiseParallel()}
    if not isinstance(layer.ff, Mixture):
        plan |= {"ff.up": ColwiseParallel(), "ff.down": RowwiseParallel()}
    _parallelize(layer, mesh, plan)


def _parallelize(module: nn.Module, mesh: DeviceMesh, plan: ParallelStyle | dict[str, ParallelStyle]) -> None:
    # Every rank has made the same first values from the seed, so none has to be sent.
    parallelize_module(module, mesh, plan, src_data_rank=None)


def _spread_experts(mixture: Mixture, mesh: DeviceMesh, place: Place) -> set[nn.Parameter]:
    shard, shards = place.coord["dp_shard"], place.sizes["dp_shard"]
    placements: list[Placement] = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    for name, whole in list(mixture.experts.named_parameters()):
        mine = whole.detach().chunk(shards)[shard].clone()
        setattr(mixture.experts, name, nn.Parameter(DTensor.from_local(mine, mesh, placements, run_check=False)))
    return set(mixture.experts.parameters())


def set_last_micro(stage: Stage, last: bool) -> None:
    """Tell FSDP2 whether the next backward is the step's last: only then gradients are reduced over dp."""
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(last)
        stage.set_is_last_backward(last)
