"""One optimizer object out of those of all stored ranks, for a rank of another mesh.

Pure. Owns: matching param_groups by the names of their parameters, and refusing what the stored ranks did not agree
about. Does not own: state tensors, which are global by name. Invariant: nothing is chosen: what is merged was equal on
all ranks that had it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from ckptd.protos import error_pb2

from .alike import bits
from .errors import InvalidRequest
from .optimizer_state import is_local, on_host
from .resharding import Absent

_SHOWN = 3
GIVEN_NAMES = "param_names"
"""Where torch keeps the names of `Optimizer(model.named_parameters())`, in the order of "params"."""


def merged(name: str, values: Sequence[Mapping[str, Any]], here: Sequence[AbstractSet[str]]) -> dict[str, Any]:
    """Return the object of the rank whose param_groups hold the names `here`.

    Args:
        name: Of the optimizer.
        values: The stored ranks' objects, see `optimizers`.
        here: The parameters of each group on this rank.

    Raises:
        InvalidRequest: a parameter that no stored rank knew; hyperparameters or state values that differ between the
            ranks that had them.
    """
    all_here: AbstractSet[str] = set().union(*here)
    known = {each for value in values for group in value["param_groups"] for each in group["params"]}
    strange = sorted(all_here - known)
    if strange:
        raise _error(
            name,
            f"{len(strange)} parameters are in no param_group of the snapshot: {', '.join(strange[:_SHOWN])}",
            key=f"{name}/param_groups",
            hint="build the optimizer with the same param_groups as the run that saved",
        )
    host, local = (sorted({key for value in values for key in value[word]}) for word in ("host", "local"))
    whole = {
        "param_groups": [_group(name, number, params, values, len(here)) for number, params in enumerate(here)],
        "state": _state(name, values, all_here),
        # A shard without elements there may have some here: all state tensors are asked for by name.
        "empty": {},
        "host": host,
        "local": local,
    }
    mixed = {
        "device": _otherwise(host, on_host, values, all_here),
        "sharded": _otherwise(local, is_local, values, all_here),
    }
    return {**whole, **{word: names for word, names in mixed.items() if names}}


def _otherwise(
    keys: Sequence[str],
    holds: Callable[[Mapping[str, Any], str, str], bool],
    values: Sequence[Mapping[str, Any]],
    here: AbstractSet[str],
) -> dict[str, list[str]]:
    """Return the keys that hold for no rank which had the parameter, where they do for others of theirs."""
    if not keys:
        return {}
    kept: dict[str, set[str]] = {parameter: set() for parameter in here}
    for value in values:
        for group in value["param_groups"]:
            for parameter in here & set(group["params"]):
                kept[parameter] |= {key for key in keys if holds(value, parameter, key)}
    return {parameter: left for parameter, held in sorted(kept.items()) if (left := sorted(set(keys) - held))}


def _group(
    name: str, number: int, params: AbstractSet[str], values: Sequence[Mapping[str, Any]], groups: int
) -> dict[str, Any]:
    found = [group for value in values for group in value["param_groups"] if params & set(group["params"])]
    if not params:
        # No name says which group it is: its number does, where all ranks numbered alike.
        numbered = [value["param_groups"] for value in values]
        found = [each[number] for each in numbered if len(each) == groups]
        if len({bits(_hyperparameters(group)) for group in found}) != 1:
            return {"params": []}
    _check_equal(f"{name}/param_groups/{number}", [_hyperparameters(group) for group in found])
    made: dict[str, Any] = {"params": sorted(params), **_hyperparameters(found[0])}
    given = {parameter: one for group in found for parameter, one in given_names(group).items()}
    if params and params <= given.keys():
        made[GIVEN_NAMES] = [given[parameter] for parameter in made["params"]]
    return made


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in {"params", GIVEN_NAMES}}


def given_names(group: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that the script gave the parameters of a stored group, by the canonical ones; those go by position."""
    names = group.get(GIVEN_NAMES)
    if not isinstance(names, list | tuple) or len(names) != len(group["params"]):
        return {}
    return dict(zip(group["params"], names, strict=True))


def _state(name: str, values: Sequence[Mapping[str, Any]], here: AbstractSet[str]) -> dict[str, dict[Any, Any]]:
    found: dict[str, list[dict[Any, Any]]] = {}
    for value in values:
        for parameter, state in value["state"].items():
            if parameter in here:
                found.setdefault(parameter, []).append(state)
    for parameter, states in found.items():
        if any(isinstance(each, Absent) for state in states for each in state.values()):
            raise _error(name, f"nested state of {parameter} is not stored", key=f"{name}/state/{parameter}")
        _check_equal(f"{name}/state/{parameter}", states)
    return {parameter: states[0] for parameter, states in found.items()}


def _check_equal(key: str, held: Sequence[Mapping[Any, Any]]) -> None:
    names = sorted({str(each) for one in held for each in one})
    differing = [each for each in names if len({_bits_of(one, each) for one in held}) > 1]
    if differing:
        raise _error(
            key,
            f"the ranks that saved did not agree about {', '.join(differing[:_SHOWN])}",
            key=f"{key}/{differing[0]}",
            hint="one value for all parameters of a group, on all ranks, can be taken to another mesh",
        )


def _bits_of(one: Mapping[Any, Any], name: str) -> Iterable[bytes]:
    return tuple(bits(value) for key, value in one.items() if str(key) == name)


def _error(name: str, text: str, *, key: str, hint: str = "") -> InvalidRequest:
    return InvalidRequest(
        f"{name}: {text}", reason=error_pb2.REASON_LAYOUT_MISMATCH, hint=hint, key=key, phase="restore"
    )
