"""Fresh memory that stands in for live tensors which share theirs, until all of a restore was fetched and verified.

Owns: which live tensors of a restore share memory, and their values until they are given. Does not own: telling
whether elements meet, or giving one tensor its value (`overlapping`); what is fetched (`targets`). Invariant: nothing
live is changed before `settle`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ckptd.protos import error_pb2

from .copying import copyable, writing
from .differences import tied
from .errors import InvalidRequest
from .overlapping import Settled, held, overlaps, settle, sharing
from .sharding import memory_of
from .staging import plain_bytes


class StandIns:
    """The live tensors of one restore that share memory.

    Args:
        apart: Names whose live tensors share memory with those of other names, and the number of their group, see
            `sharing`.
    """

    def __init__(self, apart: Mapping[str, int]) -> None:
        self._apart = apart
        self._filled: list[tuple[str, torch.Tensor]] = []
        self._kept: list[tuple[str, torch.Tensor, bool]] = []
        self._values: dict[str, list[Settled]] = {}

    def filled(self, name: str, leaf: object, local: torch.Tensor, *, is_shown: bool = False) -> torch.Tensor | None:
        """Note a live tensor that will be filled; return fresh memory for its value, None: it can be filled in place.

        Args:
            name: Its name.
            leaf: The live leaf.
            local: Its local tensor.
            is_shown: Whether the value is needed before anything live is touched.
        """
        self._filled.append((name, local))
        return self._stand_in(name, leaf, local) if is_shown or name in self._apart or overlaps(local) else None

    def forget(self, name: str) -> None:
        """Leave the live tensor called `name` as it is after all."""
        self._values.pop(name, None)

    def kept(self, name: str, leaf: object, local: torch.Tensor, *, goes_along: bool) -> None:
        """Note a live tensor that stays as it is, though what is filled may share its memory; see `Targets.keep`."""
        self._kept.append((name, local, goes_along))
        if name in self._apart:
            put(self._stand_in(name, leaf, local), local)

    def tie(self, owner: str, leaf: object) -> None:
        """Say that `leaf` gets the value of the tensor called `owner` too."""
        if owner in self._values:
            self._values[owner].append((held(leaf), self._values[owner][0][1]))

    def value(self, name: str) -> torch.Tensor | None:
        """Return the memory that stands in for the tensor called `name`; None: nothing does."""
        return self._values[name][0][1] if name in self._values else None

    def _stand_in(self, name: str, leaf: object, local: torch.Tensor) -> torch.Tensor:
        apart = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        self._values[name] = [(held(leaf), apart)]
        return apart

    def standing(self) -> list[torch.Tensor]:
        """Return the local tensors that are filled in place and those that stay as they are."""
        found = [*(tensor for _, tensor in self._filled), *(tensor for _, tensor, _ in self._kept)]
        # What was settled may have got memory of its own.
        return found + [live for pairs in self._values.values() for live, _ in pairs]

    def sharing(self) -> dict[str, int]:
        """Return the names whose live tensors share memory with those of other names, and the number of their group.

        Raises:
            InvalidRequest: one is dropped, and the same memory is filled under another name.
        """
        owners = {memory_of(tensor): name for name, tensor in self._filled} if self._kept else {}
        kept: list[tuple[str, torch.Tensor]] = []
        for name, tensor, goes_along in self._kept:
            if (owner := owners.get(memory_of(tensor))) is None:
                kept.append((name, tensor))
            elif not goes_along:
                raise tied("drop", name, owner)
        found = sharing([*self._filled, *kept])
        filled = {found[name] for name, _ in self._filled if name in found}
        return {name: group for name, group in found.items() if group in filled}

    def check(self) -> None:
        """Check that one tensor is to hold one value. What stands in must be filled; nothing live is touched.

        Raises:
            InvalidRequest: stored are two values for it.
        """
        seen: dict[int, tuple[str, torch.Tensor]] = {}
        for name in self._apart:
            for live, value in self._values.get(name, ()):
                other, first = seen.setdefault(id(live), (name, value))
                if first is not value and plain_bytes(first) != plain_bytes(value):
                    raise InvalidRequest(
                        f"{name}: stored apart from {other} and with other values, here one tensor is both",
                        reason=error_pb2.REASON_LAYOUT_MISMATCH,
                        hint="restore them into tensors of their own, or leave one out",
                        key=name,
                        phase="restore",
                    )

    def settle(self) -> None:
        """Give the live tensors their values. For when everything was copied."""
        groups: dict[int, list[Settled]] = {}
        for name, pairs in self._values.items():
            for live, value in pairs:
                settle(live, value, beside=groups.setdefault(self._apart[name], []) if name in self._apart else [])


def put(into: torch.Tensor, made: torch.Tensor) -> None:
    """Copy one tensor into another, bit for bit where the dtypes are equal."""
    if into.dtype == made.dtype:
        into, made = copyable(into), copyable(made)
    with writing(into):
        into.copy_(made)
