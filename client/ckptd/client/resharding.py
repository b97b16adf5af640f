"""What was each rank's own, on another mesh: equal everywhere, merged or split by the user's hook, or refused.

Owns: putting the stored ranks' objects of a step side by side, and choosing one value from them. Does not own: global
tensors (`targets` wants the boxes that are here), how an optimizer joins its groups. Invariant: no rank's value is
taken for another's unless all were equal bit by bit, or a hook said so.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from google.protobuf.message import DecodeError
from torch.distributed.tensor import DTensor

from ckptd.protos import error_pb2
from ckptd.protos.snapshot_pb2 import Value

from .errors import InvalidRequest, SnapshotCorrupt
from .sharding import is_tensor_leaf
from .stored import Elsewhere
from .targets import ObjectKey, Targets
from .values import decode, encode


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class StoredPiece:
    """What one stored rank held of a tracked entry.

    Attributes:
        coordinate: Its place on the mesh that saved, axis by axis.
        value: What `state_dict()` gave there.
    """

    coordinate: Mapping[str, int]
    value: Any


ReshardHook = Callable[[Sequence[StoredPiece], Mapping[str, int]], object]
"""Takes all stored pieces, ordered by stored rank, and this rank's coordinate; returns the value to load here."""


class Absent:
    """Stands for a tensor that another stage holds; only an optimizer's merge meets it."""


def bits(value: object) -> bytes:
    """Return bytes that are equal exactly for equal values: types, order, floats and tensors bit by bit."""

    def sink(name: str, leaf: object) -> str:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
            return f"{leaf.dtype} {tuple(leaf.shape)} {_sha(leaf)}"
        return name

    return encode(value, "", is_tensor=is_tensor_leaf, tensor=sink).SerializeToString(deterministic=True)


def _sha(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(plain.numpy().data).hexdigest()


def decoded(name: str, data: bytes, tensor: Callable[[str], object]) -> Any:
    """Return the value of stored bytes.

    Raises:
        SnapshotCorrupt: they are none.
    """
    try:
        return decode(Value.FromString(data), tensor=tensor)
    except (DecodeError, KeyError, ValueError, TypeError) as error:
        raise SnapshotCorrupt(
            f"{name}: unexpected format of a stored object: {error}",
            reason=error_pb2.REASON_CORRUPT,
            key=name,
            phase="restore",
        ) from error


class Gathered:
    """All stored ranks' objects of a step of another mesh.

    Args:
        elsewhere: The step.
        targets: Its `own_tensors` are filled.
        objects: Encoded objects.
    """

    def __init__(self, elsewhere: Elsewhere, targets: Targets, objects: Mapping[ObjectKey, bytes]) -> None:
        self.elsewhere = elsewhere
        self._targets = targets
        self._data: dict[str, dict[int, bytes]] = {}
        for (name, rank), data in objects.items():
            self._data.setdefault(name, {})[rank or 0] = data

    @property
    def names(self) -> list[str]:
        """Names of the objects."""
        return sorted(self._data)

    def data(self, name: str) -> Mapping[int, bytes]:
        """Return each stored rank's encoded object."""
        return self._data[name]

    def values(self, name: str, *, lenient: bool = False) -> dict[int, Any]:
        """Return each stored rank's value.

        Raises:
            SnapshotCorrupt: bytes that are no value.
        """
        return {
            rank: decoded(name, data, functools.partial(self._tensor, rank, lenient))
            for rank, data in sorted(self._data[name].items())
        }

    def _tensor(self, rank: int, lenient: bool, name: str) -> object:
        own = self._targets.own_tensors.get((rank, name))
        if own is not None:
            return own
        if name in self._targets.tensors:
            return self._targets.tensors[name]
        if lenient:
            return Absent()
        raise ValueError(f"it refers to a tensor {name!r} that is not stored")

    def are_equal(self, name: str) -> bool:
        """Say whether all ranks that hold the object held the same, its own tensors included."""
        own: dict[int, list[tuple[str, str]]] = {}
        for below, owners in self._targets.stored.own_below(name):
            for rank in owners:
                tensor = self._targets.own_tensors[rank, below]
                own.setdefault(rank, []).append((below, f"{tensor.dtype} {tuple(tensor.shape)} {_sha(tensor)}"))
        return len({(data, tuple(own.get(rank, ()))) for rank, data in self._data[name].items()}) == 1

    def one(self, name: str, *, hook: ReshardHook | None, is_per_rank: bool) -> Any:
        """Return the value for this rank.

        Raises:
            InvalidRequest: the stored ranks held different ones and there is no hook; or each rank's own was declared.
        """
        values = self.values(name)
        if hook is not None:
            where = self.elsewhere.coordinates
            pieces = [StoredPiece(coordinate=where[rank], value=value) for rank, value in values.items()]
            return hook(pieces, self.elsewhere.here)
        if not is_per_rank and self.are_equal(name):
            return next(iter(values.values()))
        held = "is declared to be each rank's own" if is_per_rank else f"was not the same on its {len(values)} ranks"
        raise InvalidRequest(
            f"{name}: step {self.elsewhere.step} was saved on another mesh, and this entry {held}: "
            "nothing says what belongs here",
            reason=error_pb2.REASON_LAYOUT_MISMATCH,
            hint=f'on_reshard("{name}", hook) merges or splits the stored values; restore(drop=("{name}",)) leaves '
            "it as it is here",
            step=self.elsewhere.step,
            key=name,
            phase="restore",
        )
