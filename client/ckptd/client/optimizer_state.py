"""How an optimizer's state is stored, and how a state tensor stands here.

Owns: what names and shards do not say of it. Does not own: the optimizer (`optimizers`), its groups on another mesh
(`optimizer_merge`).

A tensor that stands directly under a parameter's state is a shard and nothing more: its name says where it belongs.
Everything else is in the object `<name>`: {"param_groups": hyperparameters with parameter names, "state": {parameter: {key:
value}} for what is no tensor, "empty": {parameter: {key: dtype}} for shards without elements here, which have no row
((dtype, global shape) where that is not the parameter's), "host": keys whose tensors stay on the host beside a parameter
on a device, "device": {parameter: keys of "host" whose tensors do not, of this parameter} where there are any, "local": keys that
hold plain local tensors beside a DTensor, "sharded": {parameter: keys of "local" that hold a DTensor, of this parameter} where
there are any}. A tensor that stands in the state under two names is a shard under the first, and a reference to it in "state"
under the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, empty

from ckptd.protos import error_pb2
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK, Value

from .errors import InvalidRequest
from .modules import ParameterName
from .placements import beside
from .sharding import PLAIN_TYPES, Pieces, is_tensor_leaf, pieces_of
from .state import Segment
from .stored import Stored
from .unchanged import Look

BY_PARAMETER = ("state", "empty", "device", "sharded")
"""What in the object goes by names of parameters."""
Names = Mapping[int, ParameterName]
"""id of a parameter → where it was found."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Seen:
    """How parameters and their state looked when they were last taken apart, and what that gave.

    Attributes:
        names: What the parameters were called; the same object as long as no module changed.
        parameters: Group: identities of its parameters.
        looks: Parameter that is in no module: its own.
        trained: Parameter that is in no module: whether it requires a gradient.
        keys: Parameter: keys of its state; None where it has none.
        state_looks: Of all state tensors in order.
        group_names: Group: names of its parameters.
        held: See `HeldState.as_value`.
        segment: What was collected.
    """

    names: Names
    parameters: list[list[int]]
    looks: list[Look]
    trained: list[bool]
    keys: list[tuple[object, ...] | None]
    state_looks: list[Look]
    group_names: list[list[str]]
    held: dict[str, object]
    segment: Segment


@dataclass(slots=True)
class HeldState:
    """What names and shards do not say of an optimizer's state; see above."""

    state: dict[str, dict[Any, Value]] = field(default_factory=dict)
    empty: dict[str, dict[str, torch.dtype | tuple[torch.dtype, torch.Size]]] = field(default_factory=dict)
    host: set[str] = field(default_factory=set)
    device: dict[str, set[str]] = field(default_factory=dict)
    local: set[str] = field(default_factory=set)
    sharded: dict[str, set[str]] = field(default_factory=dict)

    def add(  # noqa: PLR0917 - one state tensor with everything around it
        self, name: str, key: str, pieces: Pieces, value: object, parameter: torch.Tensor, scope: int
    ) -> tuple[Pieces, int]:
        """Take note of a state tensor and return how it is stored."""
        if parameter.device.type != "cpu":
            if pieces.local.device.type == "cpu":
                self.host.add(key)
            else:
                self.device.setdefault(name, set()).add(key)
        if isinstance(value, DTensor):
            self.sharded.setdefault(name, set()).add(key)
        if scope == SCOPE_GLOBAL and isinstance(parameter, DTensor) and type(value) is torch.Tensor:
            # A plain tensor beside a sharded parameter: its shard if it has the local shape, else the rank's own. A scalar is
            # the same everywhere; beside a parameter that is one, nothing else says that it is a plain one.
            of_parameter = pieces_of(parameter, name)
            if not value.ndim and (parameter.ndim or not of_parameter.boxes):
                return pieces, scope
            if of_parameter.local.shape != value.shape:
                return pieces, SCOPE_PER_RANK
            self.local.add(key)
            pieces = Pieces(pieces.dtype, of_parameter.global_shape, of_parameter.boxes, pieces.local)
        if not pieces.boxes:
            is_alike = pieces.global_shape == tuple(parameter.shape)
            look = pieces.dtype if is_alike else (pieces.dtype, torch.Size(pieces.global_shape))
            self.empty.setdefault(name, {})[key] = look
        return pieces, scope

    def as_value(self) -> dict[str, object]:
        """Return it as a value that can be stored."""
        whole = {"state": self.state, "empty": self.empty, "host": sorted(self.host), "local": sorted(self.local)}
        # Groups may differ: one that is fused or capturable keeps its step counters on the device, any other on the host.
        mixed = {
            "device": {name: sorted(keys & self.host) for name, keys in self.device.items() if keys & self.host},
            "sharded": {name: sorted(keys & self.local) for name, keys in self.sharded.items() if keys & self.local},
        }
        return {**whole, **{word: names for word, names in mixed.items() if names}}


def on_host(value: Mapping[str, Any], parameter: str, key: str) -> bool:
    """Say whether a state tensor stays on the host, by the stored object."""
    return key in value["host"] and key not in value.get("device", {}).get(parameter, ())


def is_local(value: Mapping[str, Any], parameter: str, key: str) -> bool:
    """Say whether a state tensor is a plain local one beside a DTensor, by the stored object."""
    return key in value["local"] and key not in value.get("sharded", {}).get(parameter, ())


def empty_shard(live: object, parameter: torch.Tensor, key: str, look: Any) -> object:
    """Return a shard without elements here: the one that stands there, or one made like the parameter."""
    dtype, shape = look if isinstance(look, tuple) else (look, parameter.shape)
    if is_tensor_leaf(live):
        pieces = pieces_of(live, key)
        if not pieces.boxes and (pieces.dtype, pieces.global_shape) == (dtype, tuple(shape)):
            return live
    if shape == parameter.shape or not isinstance(parameter, DTensor):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    mesh = parameter.device_mesh
    placements = beside(parameter.placements, mesh.shape, parameter.shape, shape)
    return empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)


def check_empty(live: object, parameter: torch.Tensor, name: str, look: Any) -> None:
    """Check that a shard without elements can be held here.

    Raises:
        InvalidRequest: it would have elements here.
    """
    if pieces_of(empty_shard(live, parameter, name, look), name).boxes:
        raise InvalidRequest(
            f"{name}: stored is a shard without elements on this rank, and nothing here says how to hold it",
            reason=error_pb2.REASON_LAYOUT_MISMATCH,
            hint="make the optimizer's state before the restore",
            key=name,
            phase="restore",
        )


def looks_alike(live: torch.Tensor, found: torch.Tensor) -> bool:
    """Say whether a stored tensor can be copied into a living one as it is."""
    # Of another dtype the copy would be a conversion. A parameter may be a rate, and stored is always a plain tensor.
    is_one_kind = type(live) is type(found) or (is_plain_kind(live) and is_plain_kind(found))
    return live.shape == found.shape and live.dtype == found.dtype and is_one_kind


def is_plain_kind(tensor: torch.Tensor) -> bool:
    """Say whether the tensor is a plain one, a parameter, or a buffer: these mean the same."""
    return type(tensor) in PLAIN_TYPES


def device_of(stored: Stored, name: str, parameter: torch.Tensor) -> torch.device:
    """Return where a state tensor is made that does not stand here yet."""
    # Scalars are put where they belong when the object is known; on the host nothing is lost until then.
    return torch.device("cpu") if stored.rows[name][0].global_shape == () else parameter.device


def as_held(tensor: Any, parameter: torch.Tensor, value: Mapping[str, Any], name: str, key: str) -> Any:
    """Return a restored state tensor as the optimizer held it: on the host, or as a plain local tensor.

    Args:
        tensor: It.
        parameter: The one whose state it is.
        value: The stored object.
        name: Of the parameter in it.
        key: Of the state.
    """
    if isinstance(tensor, DTensor) and is_local(value, name, key):
        with torch.no_grad():
            tensor = tensor.to_local()
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
        return tensor
    target = torch.device("cpu") if on_host(value, name, key) else parameter.device
    return tensor if tensor.device == target else tensor.to(target)
