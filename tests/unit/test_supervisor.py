"""A process that ends is noticed at once, once, and never mistaken for another one of the same number."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from ckptd.daemon.supervisor import ProcessWatch

SOON_S = 5.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits until it is killed."""
    with subprocess.Popen(["sleep", "60"]) as made:
        yield made
        made.kill()


def test_the_end_of_a_process_is_told_once_and_before_it_is_reaped(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL is noticed while the process is still a zombie of its parent, and told a single time."""

    async def play() -> None:
        ended = asyncio.Event()
        calls: list[float] = []

        def on_exit() -> None:
            calls.append(time.monotonic())
            ended.set()

        watch = ProcessWatch(process.pid, on_exit)
        assert watch.seen
        await asyncio.sleep(0)
        assert not calls
        process.send_signal(signal.SIGKILL)
        await asyncio.wait_for(ended.wait(), SOON_S)
        assert process.returncode is None, "nobody has reaped it"
        assert not watch.seen
        process.wait()
        await asyncio.sleep(0.02)
        assert len(calls) == 1
        watch.close()

    asyncio.run(play())


def test_a_stopped_process_is_not_dead(process: subprocess.Popen[bytes]) -> None:
    """SIGSTOP pauses a trainer; that is no end."""

    async def play() -> None:
        ended = asyncio.Event()
        watch = ProcessWatch(process.pid, ended.set)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ended.wait(), 0.2)
        assert watch.seen
        watch.close()

    asyncio.run(play())


def test_a_closed_watch_tells_nothing_and_holds_no_descriptor(process: subprocess.Popen[bytes]) -> None:
    """After `close`, any number of times, the process may end unnoticed, and its descriptor is given back."""

    async def play() -> None:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing's own descriptor counts both times
        ended = asyncio.Event()
        watch = ProcessWatch(process.pid, ended.set)
        watch.close()
        watch.close()
        assert not watch.seen
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - see above
        process.kill()
        process.wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ended.wait(), 0.1)

    asyncio.run(play())


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1])
def test_a_process_that_cannot_be_seen_is_not_watched(pid: int) -> None:
    """No number, or one of another pid namespace: `seen` is False, and the end of the stream must tell."""

    async def play() -> None:
        watch = ProcessWatch(pid, lambda: pytest.fail("nobody was watched"))
        assert not watch.seen
        watch.close()

    asyncio.run(play())
