"""The memory driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckptd.storage_backends.conformance import CHECKS
from ckptd.storage_backends.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.storage_backends.base import ObjectStore


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("put_if_absent", [True, False])
def test_memory_keeps_the_contract(check: Callable[[ObjectStore], None], put_if_absent: bool) -> None:
    """The memory driver passes every check, with and without put-if-absent."""
    check(MemoryStore("test", put_if_absent=put_if_absent))


def test_memory_is_shared_by_name() -> None:
    """Two opens of one name are one store; other names and private stores are others."""
    MemoryStore.shared("one").put("key", b"x")
    assert MemoryStore.shared("one").get("key") == b"x"
    assert list(MemoryStore.shared("two").list()) == []
    assert list(MemoryStore("one").list()) == []
