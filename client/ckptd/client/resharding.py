"""What was each rank's own, on another mesh: equal everywhere, merged or split by the user's hook, or refused.

Owns: putting the stored ranks' objects of a step side by side, and choosing one value from them. Does not own: global
tensors (`targets` wants the boxes that are here), how an optimizer joins its groups. Invariant: no rank's value is
taken for another's unless all were equal bit by bit, or a hook said so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from ckptd.protos import error_pb2
from ckptd.protos.snapshot_pb2 import Value

from .alike import bits, tensor_text
from .errors import InvalidRequest, SnapshotCorrupt
from .reshard_hooks import ReshardHook, StoredPiece
from .stored import Elsewhere
from .targets import Targets
from .values import decode
from .wanted import ObjectKey


class Absent:
    """Stands for a tensor that another stage holds; only an optimizer's merge meets it."""


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
            self._data.setdefault(targets.object_here(name), {})[rank or 0] = data

    @property
    def names(self) -> list[str]:
        """Names of the objects."""
        return sorted(self._data)

    def data(self, name: str) -> Mapping[int, bytes]:
        """Return each stored rank's encoded object."""
        return self._data[name]

    def values(self, name: str, *, lenient: bool = False) -> dict[int, Any]:
        """Return each stored rank's value, as the thing tracked as `name` takes it.

        Raises:
            SnapshotCorrupt: bytes that are no value.
        """
        return {
            rank: self._targets.value(name, decoded(name, data, functools.partial(self._tensor, rank, lenient)))
            for rank, data in sorted(self._data[name].items())
        }

    def _tensor(self, rank: int, lenient: bool, stored_name: str) -> object:
        name = self._targets.tensor_here(stored_name)
        if name in self._targets.resharding:
            return self._targets.tensors[name]  # what a hook made of all ranks' own
        own = self._targets.own_tensors.get((rank, name))
        if own is not None:
            return own
        if name in self._targets.tensors:
            return self._targets.tensors[name]
        if lenient and (name in self._targets.stored.rows or name in self._targets.stored.own_rows):
            return Absent()  # another stage's, and not asked for here
        raise ValueError(f"it refers to a tensor {name!r} that is not stored")

    def reshard_tensors(self) -> None:
        """Let hooks make this rank's tensors of those that were each rank's own. Nothing live is changed.

        Raises:
            InvalidRequest: a hook gave what does not fit.
        """
        targets = self._targets
        for name, (hook, _) in targets.resharding.items():
            ranks = sorted(targets.stored.own_rows[name])
            targets.resharded(name, hook(self._pieces({r: targets.own_tensors[r, name] for r in ranks}), self._here))

    @property
    def _here(self) -> Mapping[str, int]:
        return self.elsewhere.here

    def _pieces(self, values: Mapping[int, Any]) -> list[StoredPiece]:
        where = self.elsewhere.coordinates
        return [StoredPiece(coordinate=where[rank], value=value) for rank, value in values.items()]

    def are_equal(self, name: str) -> bool:
        """Say whether all ranks that hold the object held the same, its own tensors included."""
        own: dict[int, list[tuple[str, str]]] = {}
        for below, owners in self._targets.stored.own_below(name):
            for rank in owners:
                tensor = self._targets.own_tensors[rank, below]
                own.setdefault(rank, []).append((below, tensor_text(tensor)))
        return len({(data, tuple(own.get(rank, ()))) for rank, data in self._data[name].items()}) == 1

    def one(self, name: str, *, hook: ReshardHook | None, is_per_rank: bool) -> Any:
        """Return the value for this rank.

        Raises:
            InvalidRequest: the stored ranks held different ones and there is no hook; or each rank's own was declared.
        """
        values = self.values(name)
        if hook is not None:
            return hook(self._pieces(values), self._here)
        if not is_per_rank and self.are_equal(name):
            return next(iter(values.values()))
        raise undecided(name, self.elsewhere, is_per_rank=is_per_rank)

    def keys(self, name: str) -> list[str]:
        """Return the keys of a module's extra state that any stored rank held."""
        values = self.values(name, lenient=True).values()
        return sorted({key for value in values if isinstance(value, dict) for key in value})

    def of_module(self, name: str, keys: Iterable[str], *, hook: ReshardHook | None) -> Any:
        """Return a module's extra state, key by key: ranks of a pipeline hold those of their own submodules.

        Args:
            name: Of the module.
            keys: What is here; the tensors of these were asked for.
            hook: Gets of each rank what it held of these keys.

        Raises:
            InvalidRequest: the stored ranks that held a key held different values, and there is no hook.
        """
        wanted = set(keys)
        values = {
            rank: {key: item for key, item in value.items() if key in wanted}
            for rank, value in self.values(name, lenient=True).items()
            if isinstance(value, dict)
        }
        if hook is not None:
            return hook(self._pieces(values), self._here)
        found: dict[str, Any] = {}
        for value in values.values():
            for key, item in value.items():
                if bits(found.setdefault(key, item)) != bits(item):
                    raise undecided(name, self.elsewhere, key=key)
        return found


def undecided(name: str, elsewhere: Elsewhere, *, is_per_rank: bool = False, key: str = "") -> InvalidRequest:
    """Return the error for a value that differs between the stored ranks, or was declared to, and has no hook."""
    ranks = len(elsewhere.holders(name))
    held = "is declared to be each rank's own" if is_per_rank else f"was not the same on its {ranks} ranks"
    what = f"{name}: step {elsewhere.step} was saved on another mesh, and "
    return InvalidRequest(
        f"{what}{f'{key} in it' if key else 'this entry'} {held}: nothing says what belongs here",
        reason=error_pb2.REASON_LAYOUT_MISMATCH,
        hint=f'on_reshard("{name}", hook) merges or splits the stored values; restore(drop=("{name}",)) leaves '
        "it as it is here",
        step=elsewhere.step,
        key=name,
        phase="restore",
    )
