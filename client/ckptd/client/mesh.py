"""Who takes part: this rank, the world, and its coordinate on the mesh.

Owns: reading them from a `DeviceMesh`, axis sizes, a process group, or their absence. Does not own: how tensors are
sharded. No communication. Invariant: sizes multiply to the world, and ranks are 0..world-1 within the group that
saves together.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from ckptd.protos.snapshot_pb2 import Mesh

from .config import launched_world
from .errors import InvalidRequest

WHOLE_AXIS = "world"
"""Name of the only axis where no mesh was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """This rank among those that save together.

    Attributes:
        rank: In the group.
        world: Ranks of the group.
        axes: Axis names, slowest first.
        sizes: Size of each axis.
        coordinate: This rank's, one entry per axis.
        members: Global ranks of the group, in group order.
        store: The job's own key-value store; None where one process is the world.
        order: The group's ranks by coordinate, row-major; empty where they are 0, 1, 2 and so on.
    """

    rank: int
    world: int
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    members: tuple[int, ...]
    store: Store | None
    order: Sequence[int] = ()

    @property
    def place(self) -> dict[str, int]:
        """Return the coordinate, axis by axis."""
        return dict(zip(self.axes, self.coordinate, strict=True))

    def to_wire(self) -> Mesh:
        """Return the message."""
        told = hashlib.sha256(struct.pack(f"<{self.world}I", *self.order)).digest() if self.order else b""
        return Mesh(axes=self.axes, sizes=self.sizes, rank_order=told)


def topology(mesh: DeviceMesh | Mapping[str, int] | None, process_group: ProcessGroup | None) -> Topology:
    """Return who takes part.

    Args:
        mesh: The job's device mesh, or axis sizes, slowest first (ranks are then numbered row-major).
        process_group: The ranks that save together; default: all.

    Raises:
        InvalidRequest: a launcher started several ranks but there is no process group, or the mesh does not cover the
        group.
    """
    rank, members, store = _group(process_group)
    order: Sequence[int] = ()
    if isinstance(mesh, DeviceMesh):
        axes, sizes, coordinate, order = _of_device_mesh(mesh, members)
    elif mesh is not None:
        axes, sizes = tuple(mesh), tuple(int(size) for size in mesh.values())
        _check_size(sizes, axes, len(members))
        coordinate = _row_major(rank, sizes)
    else:
        axes, sizes, coordinate = (WHOLE_AXIS,), (len(members),), (rank,)
    return Topology(
        rank=rank,
        world=len(members),
        axes=axes,
        sizes=sizes,
        coordinate=coordinate,
        order=order,
        members=members,
        store=store if len(members) > 1 else None,
    )


def _group(process_group: ProcessGroup | None) -> tuple[int, tuple[int, ...], Store | None]:
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None or launched_world() > 1:
            raise InvalidRequest(
                f"a launcher started {launched_world()} ranks, but torch.distributed is not initialized",
                hint="call torch.distributed.init_process_group() before Checkpointer(...)",
            )
        return 0, (0,), None
    members = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    mine = dist.get_rank()
    if mine not in members:
        raise InvalidRequest(
            f"rank {mine} is not in the process group {list(members)}",
            hint="make the Checkpointer on the ranks of the group only",
            rank=mine,
        )
    # The store that the ranks met in: it serves every rank and needs no collective.
    store: Store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
    return members.index(mine), members, store


def _of_device_mesh(
    mesh: DeviceMesh, members: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    sizes = tuple(int(size) for size in mesh.shape)
    axes = tuple(mesh.mesh_dim_names or (f"axis{number}" for number in range(len(sizes))))
    _check_size(sizes, axes, len(members))
    by_coordinate = [int(rank) for rank in torch.as_tensor(mesh.mesh).flatten().tolist()]
    ranks = set(by_coordinate)
    coordinate = mesh.get_coordinate()
    if ranks != set(members) or coordinate is None:
        raise InvalidRequest(
            f"the mesh holds the ranks {sorted(ranks)[:8]}, the group that saves holds {sorted(members)[:8]}",
            hint="pass the mesh of exactly the ranks that save together",
        )
    number = {rank: at for at, rank in enumerate(members)}
    order = tuple(number[rank] for rank in by_coordinate)
    return axes, sizes, tuple(int(place) for place in coordinate), () if order == tuple(range(len(order))) else order


def _check_size(sizes: tuple[int, ...], axes: tuple[str, ...], world: int) -> None:
    if not sizes or any(size < 1 for size in sizes) or math.prod(sizes) != world:
        named = " x ".join(f"{axis} {size}" for axis, size in zip(axes, sizes, strict=True)) or "no axes"
        raise InvalidRequest(
            f"the mesh {named} covers {math.prod(sizes)} ranks, but {world} save together",
            hint="pass the whole mesh, not a slice of it; process_group= for a subset of the job",
        )


def _row_major(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    places = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        places.append(place)
    return tuple(reversed(places))
