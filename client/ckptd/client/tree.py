"""Nested state and flat names: how a value's place in nested containers becomes one name, and back.

Owns: the spelling of names, finding the leaves of a nested state, and grafting restored values into it. Does not own:
what a leaf is (the caller says) or how it is stored. Pure. Invariant: `split(join(*path)) == path` for every path of
components, and two different keys of one container never give the same component.

A name is components joined by "/". A text key stands as it is, with "%" and "/" written "%25" and "%2F"; the empty
key is "%e". A position in a list or tuple is its number. Any other key is "%k" and its quoted `repr`, so that `{1: a,
"1": b}` keeps both.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeAlias

Path: TypeAlias = tuple[str, ...]
"""Components of a name, quoted."""

_LONG_BITS = 64
_ESCAPES = (("%", "%25"), ("/", "%2F"))


def _quoted(text: str) -> str:
    for character, escape in _ESCAPES:
        text = text.replace(character, escape)
    return text


def component(key: object) -> str:
    """Return the component of a mapping's key."""
    if type(key) is str:
        if "%" not in key and "/" not in key:
            return key or "%e"
        return _quoted(key)
    # Python refuses to write very long integers in decimal.
    is_long = type(key) is int and key.bit_length() > _LONG_BITS
    return "%k" + (f"{key:#x}" if is_long else _quoted(_spelled(key)))


def _spelled(key: object) -> str:
    try:
        return repr(key)
    except Exception:
        # A long integer in a tuple, or a key's own code. Whether such a key may stand says the caller.
        return f"<{type(key).__qualname__}>"


def text_key(part: str) -> str | None:
    """Return the text key that `component` made `part` of, or None when the key was no text."""
    if "%" not in part:
        return part
    if part == "%e":
        return ""
    if part.startswith("%k"):
        return None
    for character, escape in reversed(_ESCAPES):
        part = part.replace(escape, character)
    return part


def join(*parts: str) -> str:
    """Return the name of a path."""
    return "/".join(parts)


def split(name: str) -> Path:
    """Return the path of a name."""
    return tuple(name.split("/"))


def children(value: object) -> Iterator[tuple[str, object]]:
    """Yield components and values of a container in order; nothing for what is no container."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield component(key), item
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield str(position), item


def leaves(
    value: object, *, is_leaf: Callable[[object], bool], prefix: str, depth: int
) -> Iterator[tuple[str, object]]:
    """Yield (name, leaf) for every value below `value` that `is_leaf` accepts, in order; others are passed over.

    Args:
        value: Nested dicts, lists and tuples.
        is_leaf: Says which values to yield; what it accepts is not looked into.
        prefix: Name of `value` itself.
        depth: Levels to descend at most, so that a state that contains itself ends.
    """
    if is_leaf(value):
        yield prefix, value
    elif depth > 0:
        for part, item in children(value):
            yield from leaves(item, is_leaf=is_leaf, prefix=f"{prefix}/{part}", depth=depth - 1)


def mapped(value: object, change: Callable[[object], object], *, depth: int) -> object:
    """Return `value` with `change` of everything in it: containers hold the results, and stay the same objects but for tuples.

    Args:
        value: Nested dicts, lists and tuples.
        change: Takes a leaf or a container before it is looked into; what is no longer the same object is not looked into.
        depth: Levels to descend at most.
    """
    changed = change(value)
    if changed is not value or depth == 0:
        return changed
    if isinstance(value, dict):
        for key, item in value.items():
            if (made := mapped(item, change, depth=depth - 1)) is not item:
                value[key] = made
    elif isinstance(value, list):
        value[:] = [mapped(item, change, depth=depth - 1) for item in value]
    elif type(value) is tuple:
        made_items = tuple(mapped(item, change, depth=depth - 1) for item in value)
        return made_items if any(a is not b for a, b in zip(made_items, value, strict=True)) else value
    return value


class Grafts:
    """Puts restored values in the place of live ones; mutable containers stay the same objects.

    A live container that stands in several places gets one value: where another one belongs, that is a container of its
    own.

    Args:
        alike: Says whether two restored values are one.
    """

    def __init__(self, alike: Callable[[object, object], bool] = operator.is_) -> None:
        self._alike = alike
        # By identity; the container is held too, so that no other one gets its identity.
        self._used: dict[int, tuple[object, object]] = {}

    def graft(self, target: object, restored: object) -> object:
        """Put `restored` in the place of `target` and return what stands there.

        Dicts and lists of the target's own type stay the same objects and get exactly the restored content, in its order;
        so do mappings of types that are never stored. Everything else is replaced.
        """
        is_mapping = isinstance(restored, dict) and _may_hold(target, restored)
        if not is_mapping and not (isinstance(target, list) and isinstance(restored, list)):
            return restored
        if (used := self._used.get(id(target))) is not None:
            return target if self._alike(used[1], restored) else restored
        self._used[id(target)] = target, restored
        if isinstance(target, list) and isinstance(restored, list):
            length = len(target)
            target[:] = [self.graft(target[i], item) if i < length else item for i, item in enumerate(restored)]
            return target
        assert isinstance(target, MutableMapping)
        assert isinstance(restored, dict)
        # Keys too are the restored ones (True is found as 1), in their order.
        content = [(key, self.graft(target[key], item) if key in target else item) for key, item in restored.items()]
        target.clear()
        for key, item in content:
            target[key] = item
        # Steps of before have no attributes, and said nothing of them: those here stay.
        if attributes := getattr(restored, "__dict__", None):
            vars(target).clear()
            vars(target).update(attributes)
        return target


_STORED_MAPPINGS = frozenset({dict, OrderedDict, Counter, defaultdict})


def _may_hold(target: object, restored: dict[Any, Any]) -> bool:
    if type(target) in _STORED_MAPPINGS:
        return type(target) is type(restored)
    return isinstance(target, MutableMapping)
