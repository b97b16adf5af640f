"""Names of nested state can be read back, and never collide."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckptd.client.tree import component, graft, join, leaves, split, text_key

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
    out = graft(target, {"list": [9], "deep": {"x": 5, "y": 6}, "new": (1,)})
    assert out is target
    assert target == {"list": [9], "deep": {"x": 5, "y": 6}, "new": (1,)}
    assert target["list"] is inner
    assert target["deep"] is deep
