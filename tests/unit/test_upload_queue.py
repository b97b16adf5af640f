"""The queue of uploads, and what is told about a snapshot while its upload runs."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckptd.daemon.held import HeldJob
from ckptd.daemon.snapshots import Snapshot, Stage
from ckptd.daemon.telemetry import EventLog
from ckptd.protos.snapshot_pb2 import HeldSnapshot, IndexRef
from ckptd.storage_backends.memory import MemoryStore

TIMELINE = "00000001-0123456789ab"


def test_a_step_that_is_told_to_be_listed_while_it_is_uploaded_again_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that adopted a listed step must give its slot back when it is needed, and not keep it as one in flight."""
    begun, go_on = threading.Event(), threading.Event()

    def upload(*_: object, **__: object) -> IndexRef:
        begun.set()
        assert go_on.wait(20)
        return IndexRef(key="index/x")

    async def play() -> None:
        ended = asyncio.Event()
        with ThreadPoolExecutor(2) as threads:
            changed: list[Snapshot] = []
            job = HeldJob(
                root="file:///r",
                job="j",
                node="n",
                store=MemoryStore(),
                shm_dir=tmp_path / "shm",
                restore_window_bytes=1 << 20,
                threads=threads,
                log=EventLog(None),
                uploader=cast("Any", SimpleNamespace(upload=upload)),
                on_change=changed.append,
            )
            snapshot = Snapshot(
                about=HeldSnapshot(step=3, timeline=TIMELINE, ranks=[0]), plans={}, stage=Stage.STAGED, resumed=True
            )
            job.snapshots[snapshot.key] = snapshot
            monkeypatch.setattr(job.uploads, "_on_idle", lambda _snapshot: ended.set())
            job.uploads.add(snapshot)
            await asyncio.to_thread(begun.wait, 20)
            job.committed(snapshot)
            assert job.uploads.is_reading(snapshot)
            go_on.set()
            await ended.wait()
            assert snapshot.stage is Stage.COMMITTED

    asyncio.run(play())
