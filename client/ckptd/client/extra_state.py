"""Extra state of modules: which submodule takes which key, and whether what is stored fits that.

Owns: finding the module behind a key of a state_dict, and comparing stored keys with those here. Does not own: reading extra
state (`modules`), or what is done with a difference (`putting_back`). Invariant: that a key has no taker, or two values, is told
before anything is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ckptd.protos import error_pb2

from .alike import alike
from .differences import two_values
from .errors import InvalidRequest
from .resharding import Absent
from .tree import leaves
from .values import MAX_DEPTH

EXTRA_STATE = "_extra_state"
_WRAPPED = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""Where wrappers hold the module whose state_dict they give as their own."""


def taker_of(module: nn.Module, key: str, name: str) -> nn.Module:
    """Return the module that takes the extra state called `key` in the state_dict of `module`.

    Raises:
        InvalidRequest: none does; `key` of the error is `name`.
    """
    found = module
    for part in key.split(".")[:-1]:
        while not isinstance(getattr(found, part, None), nn.Module):
            found = _inside(found, name)
        found = getattr(found, part)
    while type(found).set_extra_state is nn.Module.set_extra_state:
        found = _inside(found, name)
    return found


def _inside(module: nn.Module, name: str) -> nn.Module:
    for attribute in _WRAPPED:
        if isinstance(inner := getattr(module, attribute, None), nn.Module):
            return inner
    raise InvalidRequest(
        f"{name}: {type(module).__qualname__} gives extra state and has no set_extra_state() to take it",
        reason=error_pb2.REASON_LAYOUT_MISMATCH,
        hint=f'write set_extra_state() beside get_extra_state(), or leave it out: drop=("{name}",)',
        key=name,
        phase="restore",
    )


def _is_absent(value: object) -> bool:
    return isinstance(value, Absent)


class ExtraState:
    """The extra state of a module that a restore loads.

    Args:
        takers: Key: its full name, and the module that takes it; without what is not restored.
    """

    def __init__(self, takers: Mapping[str, tuple[str, nn.Module]]) -> None:
        self._takers = takers

    @property
    def keys(self) -> list[str]:
        """The keys that are loaded."""
        return list(self._takers)

    def missing(self, value: object) -> list[str]:
        """Return the full names of keys here that `value` does not have."""
        keys = value if isinstance(value, dict) else ()
        return [full for key, (full, _) in self._takers.items() if key not in keys]

    def taken(self, value: object) -> Iterator[tuple[str, nn.Module, Any]]:
        """Yield full name, module and value of each key that is here and in `value`."""
        for key, (full, module) in self._takers.items():
            if isinstance(value, dict) and key in value:
                yield full, module, value[key]

    def check(self, value: object, seen: dict[int, tuple[str, Any]]) -> None:
        """Check that a module is given one value, with all its tensors.

        Args:
            value: What is to be loaded.
            seen: Module by identity: name and value of those that were checked before; these are added.

        Raises:
            InvalidRequest: one module is here under two names, and stored are two values; or a tensor of one was left out.
        """
        for full, module, item in self.taken(value):
            if any(True for _ in leaves(item, is_leaf=_is_absent, prefix=full, depth=MAX_DEPTH)):
                raise InvalidRequest(
                    f"{full}: a tensor in it is not restored with it",
                    reason=error_pb2.REASON_LAYOUT_MISMATCH,
                    hint="names= must map a module's extra state with the tensors in it",
                    key=full,
                    phase="restore",
                )
            other, first = seen.setdefault(id(module), (full, item))
            if other != full and not alike(first, item):
                raise two_values(full, other)
