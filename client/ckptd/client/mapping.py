"""Stored names under other names: what `restore(names=...)` does to what a step holds.

Owns: the rule from old to new names, and the view of a step under new names, an optimizer's parameters included. Does
not own: what fits (`targets`). Pure. Invariant: two stored names never become one, and what is asked of the agent
keeps its stored name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckptd.protos import error_pb2

from .errors import InvalidRequest
from .optimizer_state import BY_PARAMETER
from .stored import Stored
from .tree import component, text_key

Names = Callable[[str], str] | Mapping[str, str]
"""A function from stored names to names here, or old beginnings to new ones."""


class Renaming:
    """The rule from a stored name to the name here.

    Args:
        names: A function, or old beginnings to new ones: the longest that a name begins with is replaced, once. Two
            that end in "/" also stand for the names without it.

    Raises:
        InvalidRequest: neither, or not of texts.
    """

    def __init__(self, names: Names) -> None:
        if isinstance(names, Mapping):
            rules = dict(names)
            if not all(isinstance(text, str) for pair in rules.items() for text in pair):
                raise InvalidRequest(
                    f"names={names!r} is not of texts", hint='write names={"old/": "new/"}', key="names"
                )
            self._rules = sorted(rules.items(), key=lambda rule: len(rule[0]), reverse=True)
            self._function: Callable[[str], str] = self._replaced
        elif callable(names):
            self._function = names
        else:
            raise InvalidRequest(
                f"names={names!r} is neither a function nor a mapping", hint='write names={"old/": "new/"}', key="names"
            )

    def _replaced(self, name: str) -> str:
        for old, new in self._rules:
            if name.startswith(old):
                return new + name[len(old) :]
            if old.endswith("/") and new.endswith("/") and name == old[:-1]:
                return new[:-1]
        return name

    def __call__(self, name: str) -> str:
        """Return the name here.

        Raises:
            InvalidRequest: the function gives no text.
        """
        found = self._function(name)
        if not isinstance(found, str) or not found:
            raise InvalidRequest(f"names: {name!r} was mapped to {found!r}, which is no name", key=name)
        return found


class RenamedStored(Stored):
    """A step whose names are the ones here; its rows keep their stored names.

    Args:
        stored: The step.
        rename: The rule.
        optimizers: Optimizers tracked here: the names of their parameters' tensors, and what the optimizer calls them.

    Raises:
        InvalidRequest: two stored names become one.
    """

    def __init__(self, stored: Stored, rename: Renaming, optimizers: Mapping[str, Mapping[str, str]]) -> None:
        super().__init__((), (), {})
        self._rename, self._optimizers = rename, optimizers
        self.object_sources = _renamed(sorted(stored.objects), rename)
        self.objects = frozenset(self.object_sources)
        self.objects_here = {old: new for new, old in self.object_sources.items()}
        # In their order: rows stand as they were collected. A name may be on several lists.
        names = list(dict.fromkeys([*stored.rows, *stored.own_rows, *stored.aliases]))
        self._known = frozenset(names)
        self._tops = {name.split("/", 1)[0] for name in names}
        self._parameters: dict[tuple[str, str], str] = {}
        tensors = _renamed(names, self._tensor)
        self.tensors_here = {old: new for new, old in tensors.items()}
        self.rows = {new: stored.rows[old] for new, old in tensors.items() if old in stored.rows}
        self.aliases = {
            self.tensors_here[alias]: self.tensors_here.get(target, target) for alias, target in stored.aliases.items()
        }
        if stored.elsewhere is not None:
            objects = {
                rank: [self.objects_here[old] for old in held] for rank, held in stored.elsewhere.objects.items()
            }
            own_rows = {self.tensors_here[old]: rows for old, rows in stored.own_rows.items()}
            self._take_elsewhere(replace(stored.elsewhere, objects=objects, own_rows=own_rows))
        self._index()

    def _tensor(self, name: str) -> str:
        for here in self._optimizers:
            prefix = f"{self.object_sources.get(here, here)}/state/"
            if name.startswith(prefix):
                part, *rest = name.removeprefix(prefix).split("/")
                if (parameter := text_key(part)) is not None:
                    return "/".join([here, "state", component(self.parameter(here, parameter)), *rest])
        return self._rename(name)

    def parameter(self, optimizer: str, name: str) -> str:
        """Return what the optimizer tracked here as `optimizer` calls the parameter that was stored as `name`.

        Raises:
            InvalidRequest: several of its parameters could be meant.
        """
        known = self._parameters.get((optimizer, name))
        if known is None:
            known = self._parameters[optimizer, name] = self._found_parameter(optimizer, name)
        return known

    def _found_parameter(self, optimizer: str, name: str) -> str:
        below = f"{optimizer}/state/"
        own = self._rename(f"{self.object_sources.get(optimizer, optimizer)}/state/{component(name)}")
        if own.startswith(below) and own != below + component(name):
            return text_key(own.removeprefix(below)) or name
        # The rule speaks of tensors: follow the parameter's own tensor to its name here.
        candidates = [f"{top}/{component(name)}" for top in self._tops]
        top, _, rest = name.partition("/")
        if rest and top in self._tops:
            candidates.append(f"{top}/{component(rest)}")
        names = self._optimizers[optimizer]
        found = {
            names[self._rename(full)] for full in candidates if full in self._known and self._rename(full) in names
        }
        if len(found) > 1:
            raise InvalidRequest(
                f"{optimizer}: names maps the parameter {name!r} to several: {', '.join(sorted(found))}",
                hint=f'map "{below}..." itself',
                key=optimizer,
                phase="restore",
            )
        return found.pop() if found else name

    def optimizer_value(self, optimizer: str, value: Any) -> Any:
        """Return an optimizer's stored object with the names of parameters here."""

        def renamed(held: Mapping[str, Any]) -> dict[str, Any]:
            return {self.parameter(optimizer, name): item for name, item in held.items()}

        if not isinstance(value, dict) or not isinstance(value.get("param_groups"), list):
            return value  # refused when it is verified
        groups = [
            {**group, "params": [self.parameter(optimizer, name) for name in group["params"]]}
            for group in value["param_groups"]
        ]
        by_parameter = [key for key in BY_PARAMETER if key in value]  # not all steps have all
        return {**value, "param_groups": groups, **{key: renamed(value[key]) for key in by_parameter}}

    def module_value(self, module: str, value: Any) -> Any:
        """Return a module's stored extra state with the names of its submodules here."""
        if not isinstance(value, dict):
            return value
        source, below = self.object_sources.get(module, module), f"{module}/"
        found: dict[str, Any] = {}
        for key, item in value.items():
            full = self._rename(f"{source}/{component(key)}")
            found[(text_key(full.removeprefix(below)) or key) if full.startswith(below) else key] = item
        return found


def _renamed(names: Iterable[str], rename: Callable[[str], str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for old in names:
        new = rename(old)
        other = found.setdefault(new, old)
        if other != old:
            first, second = sorted((other, old))
            raise InvalidRequest(
                f"names maps both {first!r} and {second!r} to {new!r}",
                reason=error_pb2.REASON_LAYOUT_MISMATCH,
                key=new,
                phase="restore",
            )
    return found
