"""Records are written once, whatever became of an earlier attempt."""

from __future__ import annotations

import pytest

from ckptd.daemon.errors import DaemonError
from ckptd.daemon.log_writer import put_once
from ckptd.protos import error_pb2
from ckptd.storage_backends.memory import MemoryStore


def test_a_put_that_had_landed_is_done() -> None:
    """The answer was lost for good and the put comes again: our bytes stand there, so it has succeeded."""
    store = MemoryStore()
    put_once(store, "log/x", b"mine")
    put_once(store, "log/x", b"mine")
    assert store.get("log/x") == b"mine"


def test_other_bytes_under_our_name_are_never_replaced() -> None:
    """Two processes with one nonce: the second one ends, and what the first one wrote stands."""
    store = MemoryStore()
    put_once(store, "log/x", b"first")
    with pytest.raises(DaemonError, match="other bytes") as caught:
        put_once(store, "log/x", b"second")
    assert caught.value.error.reason == error_pb2.REASON_INTERNAL
    assert store.get("log/x") == b"first"
