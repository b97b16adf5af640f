"""When a copy has raised, its threads write no more: the slot may be the next save's, and live tensors are the script's."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckptd.client import copying
from ckptd.client.copying import Copier, Pair
from ckptd.client.slot_writers import MESSAGE_BYTES, SharedSlot, SlotMaps, StreamedSlot
from ckptd.client.staging import slot_plan
from ckptd.protos.agent_pb2 import BeginReply, SlotBytes

SIGNAL = signal.SIGUSR2
THREADS = 2
LARGE = 34 << 20
"""Bytes: enough for threads, and three pieces."""


class AlarmError(Exception):
    """Of a signal's handler."""


class Blocked:
    """The copying threads stand still in the midst of a piece until `go`; `events` says when they wrote it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.go = threading.Event()
        self._begun = threading.Semaphore(0)
        write = copying._copy

        def blocked(pair: Pair) -> None:
            self._begun.release()
            assert self.go.wait(60)
            write(pair)
            self.events.append("wrote")

        monkeypatch.setattr(copying, "_copy", blocked)

    def all_begun(self) -> None:
        """Wait until every thread has a piece."""
        for _ in range(THREADS):
            assert self._begun.acquire(timeout=60)


@pytest.fixture
def copier() -> Iterator[Copier]:
    """One that uses threads, as under torchrun."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Copier(THREADS)
    yield made
    made.close()
    torch.set_num_threads(before)


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocked]:
    """Its threads."""
    made = Blocked(monkeypatch)
    yield made
    made.go.set()


class Interrupts:
    """Interrupts the main thread while all copying threads are in a piece, and lets these go on then.

    Args:
        blocked: The threads.
        times: How often.
    """

    def __init__(self, blocked: Blocked, times: int) -> None:
        self._blocked, self._left = blocked, times
        self._handled: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._before = signal.signal(SIGNAL, self._handle)
        self._thread = threading.Thread(target=self._run, args=(times, threading.get_ident()))
        self._thread.start()

    def _handle(self, number: int, _: object) -> None:
        if self._left:
            self._left -= 1
            self._handled.put(number)
            raise AlarmError

    def _run(self, times: int, main: int) -> None:
        self._blocked.all_begun()
        for _ in range(times):
            self._interrupt(main)
        self._blocked.go.set()

    def _interrupt(self, main: int) -> None:
        # One that comes just before the thread begins to wait is seen only with the next one.
        for _ in range(60):
            signal.pthread_kill(main, SIGNAL)
            with contextlib.suppress(queue.Empty):
                self._handled.get(timeout=1)
                return
        raise AssertionError("the handler did not run")

    def close(self) -> None:
        self._thread.join()
        signal.signal(SIGNAL, self._before)


@pytest.fixture(params=[1, 3])
def interrupts(request: pytest.FixtureRequest, blocked: Blocked) -> Iterator[Interrupts]:
    """Once, and while it waits for them already, and then waits again."""
    made = Interrupts(blocked, request.param)
    yield made
    made.close()


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_save_writes_nothing_into_the_next_ones_slot(
    tmp_path: Path, copier: Copier, blocked: Blocked
) -> None:
    """The agent gives the slot to this process again: it takes it that this has stopped. The layout is another one."""
    path, maps = tmp_path / "slot", SlotMaps()
    path.write_bytes(bytes(4096 + LARGE + 64))
    reply = BeginReply(path=str(path), data_offset=4096, tail_offset=4096 + LARGE)
    old = [torch.full((LARGE,), 5, dtype=torch.uint8)]
    with pytest.raises(AlarmError):
        SharedSlot(maps, copier, reply).write_tensors(slot_plan(b"old", 0, [0], [0]), old)
    blocked.events.append("raised")
    new = [torch.full((256,), number, dtype=torch.uint8) for number in range(6, 9)]
    offsets = [LARGE - 256, 0, 20 << 20]
    SharedSlot(maps, copier, reply).write_tensors(slot_plan(b"new", 0, [0] * 3, offsets), new)
    copier.close()
    assert blocked.events == ["wrote"] * THREADS + ["raised"]
    data = path.read_bytes()[4096:]
    assert [set(data[at : at + 256]) for at in offsets] == [{6}, {7}, {8}]


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_restore_writes_nothing_more_into_live_tensors(copier: Copier, blocked: Blocked) -> None:
    """The script begins without the snapshot, and trains on what it set."""
    live = torch.zeros(LARGE, dtype=torch.uint8)
    with pytest.raises(AlarmError):
        copier.copy([live], [torch.full_like(live, 3)])
    blocked.events.append("raised")
    live.fill_(9)
    copier.close()
    assert blocked.events == ["wrote"] * THREADS + ["raised"]
    assert bool((live == 9).all())


def test_a_copy_that_fails_in_the_caller_ends_in_its_threads(
    copier: Copier, blocked: Blocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device's error, say, in what the caller's own thread copies meanwhile."""

    def fails(*_: object) -> None:
        blocked.all_begun()
        blocked.go.set()
        raise RuntimeError("device")

    live = [torch.zeros(LARGE, dtype=torch.uint8), torch.zeros(8)]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", fails)
        with pytest.raises(RuntimeError, match="device"):
            copier.copy(live, [torch.full_like(one, 3) for one in live])
    blocked.events.append("raised")
    live[0].fill_(9)
    copier.close()
    assert blocked.events == ["wrote"] * THREADS + ["raised"]
    assert bool((live[0] == 9).all())


def test_a_piece_that_fails_is_raised_and_the_next_copy_is_whole(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a thread raised is what the caller sees, once no other one writes."""
    write = copying._copy
    events: list[str] = []
    both = threading.Barrier(THREADS)
    failed = threading.Event()

    def fails(pair: Pair) -> None:
        if both.wait(60) == 0:
            failed.set()
            raise RuntimeError("piece")
        assert failed.wait(60)
        write(pair)
        events.append("wrote")

    live = torch.zeros(32 << 20, dtype=torch.uint8)  # two pieces
    source = torch.full_like(live, 3)
    with monkeypatch.context() as patch:
        patch.setattr(copying, "_copy", fails)
        with pytest.raises(RuntimeError, match="piece"):
            copier.copy([live], [source])
    events.append("raised")
    assert events == ["wrote", "raised"]
    copier.copy([live], [source])
    assert torch.equal(live, source)


def test_a_stream_whose_caller_was_interrupted_reads_the_state_no_more() -> None:
    """The call goes on asking for messages in a thread of gRPC's, and training changes the tensors meanwhile."""
    left: list[Iterator[SlotBytes]] = []

    def send(messages: Iterator[SlotBytes]) -> None:
        left.append(messages)
        next(messages)
        raise AlarmError

    slot = StreamedSlot(send, BeginReply(data_offset=4096, tail_offset=4096), session="s", step=1)
    plan = slot_plan(b"p", 0, [0, 0], [0, 4 * MESSAGE_BYTES])
    with pytest.raises(AlarmError):
        slot.write_tensors(plan, [torch.zeros(4 * MESSAGE_BYTES, dtype=torch.uint8), torch.zeros(8)])
    assert list(left[0]) == []
