"""Killing processes and servers in the middle of a put."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from ckptd.storage_backends.retrying import RetryingStore, RetryPolicy
from ckptd.storage_backends.urls import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptd.chaos.seaweed import SeaweedServer
    from ckptd.storage_backends.base import ObjectStore

OBJECT_BYTES = 4 << 20

# Puts objects whose every byte is their number, from two threads, until it is killed.
WRITER = f"""
import itertools, os, sys, threading
from ckptd.storage_backends.urls import open_store
store = open_store(sys.argv[1])
def work(thread):
    for number in itertools.count():
        store.put(f"{{thread}}/{{number:04d}}", bytes([number % 256]) * {OBJECT_BYTES})
        os.write(1, f"{{thread}}/{{number:04d}}\\n".encode())
threading.Thread(target=work, args=(1,)).start()
work(0)
"""


def acknowledged_before_kill(url: str, seed: int) -> list[str]:
    """Start a writer, kill it after a few acknowledged puts and a random moment; returns their keys."""
    moment = random.Random(seed)
    with subprocess.Popen([sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        killer = threading.Timer(60, writer.kill)
        killer.start()
        keys = [writer.stdout.readline().strip() for _ in range(moment.randint(1, 4))]
        # The moment within the next put is what is random, so the clock is the right trigger here.
        late = threading.Timer(moment.uniform(0, 0.05), writer.kill)
        late.start()
        keys += writer.stdout.read().split()
        killer.cancel()
        late.join()
    return keys


def check_whole(store: ObjectStore, acknowledged: list[str]) -> None:
    listed = {info.key: info.size for info in store.list()}
    assert set(acknowledged) <= set(listed)
    for key, size in listed.items():
        number = int(key.split("/")[1]) % 256
        assert size == OBJECT_BYTES
        assert store.get(key) == bytes([number]) * OBJECT_BYTES
        store.delete(key)


@pytest.mark.integration
@pytest.mark.parametrize("seed", range(10))
def test_s002_a_killed_process_leaves_whole_objects_only_on_disk(tmp_path: Path, seed: int) -> None:
    """After SIGKILL at a random moment every object of a file store is whole and none acknowledged is lost."""
    url = f"file://{tmp_path}/root"
    keys = acknowledged_before_kill(url, seed)
    assert keys, f"seed {seed}"
    check_whole(open_store(url), keys)


@pytest.mark.s3
@pytest.mark.parametrize("seed", range(5))
def test_s002_a_killed_process_leaves_whole_objects_only_on_s3(fresh_root: Callable[[], str], seed: int) -> None:
    """After SIGKILL at a random moment every object in a bucket is whole and none acknowledged is lost."""
    url = fresh_root()
    keys = acknowledged_before_kill(url, seed)
    assert keys, f"seed {seed}"
    with open_store(url) as store:
        check_whole(store, keys)


@pytest.mark.s3
def test_a_paused_server_makes_a_put_wait_and_succeed(
    seaweed_env: SeaweedServer, fresh_root: Callable[[], str]
) -> None:
    """A server that stands still for longer than a request may take is survived by trying again."""
    tried = threading.Event()

    def note_the_pause(seconds: float) -> None:
        tried.set()
        tried.wait(seconds)

    policy = RetryPolicy(first_pause=timedelta(milliseconds=50), longest_pause=timedelta(milliseconds=200))
    with open_store(fresh_root(), retry=None, options={"small_timeout_s": "0.5"}) as bare:
        store = RetryingStore(bare, policy, sleep=note_the_pause)
        seaweed_env.pause()
        try:
            worker = threading.Thread(target=store.put, args=("key", b"ours"))
            worker.start()
            assert tried.wait(30)
        finally:
            seaweed_env.resume()
        worker.join(60)
        assert not worker.is_alive()
        assert store.get("key") == b"ours"
