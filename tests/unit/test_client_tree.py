"""Names of nested state can be read back, and never collide."""

from __future__ import annotations

from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.client.tree import Grafts, component, join, leaves, split, text_key

keys = st.text() | st.integers() | st.binary() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_a_path_of_text_keys_comes_back(path: list[str]) -> None:
    """Slashes, per cents and empty keys included."""
    assert [text_key(part) for part in split(join(*map(component, path)))] == path


@given(keys, keys)
def test_different_keys_have_different_components(a: object, b: object) -> None:
    """So `{1: x, "1": y}` keeps both, and `{1: x, True: y}` cannot be."""
    if type(a) is not type(b) or a != b:
        assert component(a) != component(b)


def test_leaves_come_in_order_with_their_names() -> None:
    """Depth is limited, so that a state that contains itself ends."""
    state: dict[str, Any] = {"a": [1, {"b": 2}], "c": (3,), "d": "no"}
    state["self"] = state
    found = list(leaves(state, is_leaf=lambda v: isinstance(v, int), prefix="s", depth=3))
    assert found[:3] == [("s/a/0", 1), ("s/a/1/b", 2), ("s/c/0", 3)]
    assert all(name.startswith("s/self/") for name, _ in found[3:])


def test_graft_keeps_the_containers_and_replaces_the_content() -> None:
    """What the caller holds stays the same object; what was not stored goes away."""
    inner = [1, 2, 3]
    target: dict[str, Any] = {"list": inner, "gone": 1, "deep": {"x": 0}}
    deep = target["deep"]
    out = Grafts().graft(target, {"list": [9], "deep": {"x": 5, "y": 6}, "new": (1,)})
    assert out is target
    assert target == {"list": [9], "deep": {"x": 5, "y": 6}, "new": (1,)}
    assert target["list"] is inner
    assert target["deep"] is deep


@pytest.mark.parametrize(
    "stored",
    [
        {"b": 2, "a": 1},
        OrderedDict(b=2, a=1),
        Counter("ab"),
        defaultdict(int, {"b": 2, "a": 1}),
        {True: "x", 0: "y"},
        {1.0: "x", False: "y"},
        [1, {"b": 2, "a": 1}],
        (1, 2),
        5,
    ],
    ids=repr,
)
def test_graft_gives_types_keys_and_order_of_what_was_stored(stored: Any) -> None:
    """Whatever stands there: another type is replaced; of its own type it is the same object with that content."""
    stands: list[Any] = [
        {"a": 0, "b": 0, "c": 0},
        OrderedDict(a=0, b=0),
        Counter("abc"),
        defaultdict(set, {"a": 0}),
        {1: 0, 0: 1},
        [0, {"a": 0, "b": 0}, 3],
        (0,),
        bytearray(b"ab"),
        deque([1, 2]),
        None,
    ]
    for target in stands:
        out = Grafts().graft(target, stored)
        assert type(out) is type(stored)
        assert repr(list(out.items()) if isinstance(out, dict) else out) == repr(
            list(stored.items()) if isinstance(stored, dict) else stored
        )
        assert (out is target) == (type(target) is type(stored) and isinstance(stored, dict | list))


def test_a_mapping_of_a_type_that_is_never_stored_is_filled() -> None:
    """Such a thing can only stand where a dict was saved: a configuration, say, that the script reads."""
    target: ChainMap[str, int] = ChainMap({"a": 1, "b": 2})
    assert Grafts().graft(target, {"b": 5, "c": 6}) is target
    assert dict(target) == {"b": 5, "c": 6}


def test_a_key_that_cannot_be_spelled_has_a_component() -> None:
    """Long integers in tuples, which Python refuses to write, and keys whose own code raises."""

    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert component((10**5000,)) == "%k<tuple>"
    assert component(Mute()).endswith("Mute>")
