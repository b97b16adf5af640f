"""A store that is laid over another one keeps the contract of stores, and leaves the other alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptd.chaos.overlay import OverlayStore
from ckptd.storage_backends.base import ObjectStore, PutMode
from ckptd.storage_backends.conformance import CHECKS
from ckptd.storage_backends.memory import MemoryStore


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check: Callable[[ObjectStore], None]) -> None:
    """What was put over it is as good as what lies below."""
    check(OverlayStore(MemoryStore()))


def test_what_lies_below_is_read_and_never_written() -> None:
    """Put over, deleted and put again: only the overlay shows it."""
    below = MemoryStore()
    for name in ("a", "b", "c"):
        below.put(f"log/{name}", name.encode())
    over = OverlayStore(below)
    over.put("log/a", b"new", mode=PutMode.OVERWRITE)
    over.delete("log/b")
    over.put("log/d", b"d")
    assert {info.key: info.size for info in over.list("log/")} == {"log/a": 3, "log/c": 1, "log/d": 1}
    assert [over.get(f"log/{name}") for name in "acd"] == [b"new", b"c", b"d"]
    over.put("log/b", b"again")
    assert over.get("log/b") == b"again"
    assert {info.key: below.get(info.key) for info in below.list()} == {"log/a": b"a", "log/b": b"b", "log/c": b"c"}
