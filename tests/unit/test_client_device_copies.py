"""Bytes of tensors on a device are taken and put by the caller's thread: elsewhere its stream is not current."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.client import copying, slot_writers
from ckptd.client.copying import Copier, Pair
from ckptd.client.slot_writers import SharedSlot, SlotMaps, StreamedSlot
from ckptd.client.staging import slot_plan
from ckptd.protos.agent_pb2 import BeginReply, SlotBytes

BYTES = 40 << 20
cuda: Any = torch.cuda
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """As torchrun sets it, so that large copies are shared among the copying threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_only_pairs_on_the_host_are_handed_to_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a device, from one, and on one: by the caller; those on the host are shared as before."""
    copied: list[tuple[set[str], bool]] = []

    def copy(pair: Pair) -> None:
        here = threading.current_thread() is threading.main_thread()
        copied.append(({tensor.device.type for tensor in pair}, here))

    monkeypatch.setattr(copying, "_copy", copy)
    host, device = torch.empty(BYTES, dtype=torch.uint8), torch.empty(BYTES, dtype=torch.uint8, device="meta")
    copier = Copier(2)
    copier.copy([host, device, host, device], [host, host, device, device])
    copier.close()
    found = {(*sorted(devices), here) for devices, here in copied}
    assert found == {("cpu", False), ("cpu", "meta", True), ("meta", True)}


@pytest.mark.parametrize("batch_bytes", [1, 1 << 20])
def test_without_shared_memory_too_the_caller_takes_what_is_on_a_device(
    monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    """Messages are made in a thread of gRPC's: what is on the host is read there, one tensor at a time."""
    taken: list[tuple[str, bool]] = []

    def plain_bytes(tensor: torch.Tensor) -> memoryview:
        taken.append((tensor.device.type, threading.current_thread() is threading.main_thread()))
        return memoryview(bytes([len(taken)]) * tensor.numel())

    written = bytearray(4096 + 64 * 4)

    def send(parts: Iterator[SlotBytes]) -> None:
        def consume() -> None:
            for part in parts:
                written[part.offset : part.offset + len(part.data)] = part.data

        thread = threading.Thread(target=consume)
        thread.start()
        thread.join()

    monkeypatch.setattr(slot_writers, "plain_bytes", plain_bytes)
    monkeypatch.setattr(slot_writers, "_DEVICE_BYTES", batch_bytes)
    views = [torch.empty(8, dtype=torch.uint8, device=device) for device in ("meta", "cpu", "meta", "cpu")]
    plan = slot_plan(b"plan", 0, [0] * 4, [0, 64, 128, 192])
    StreamedSlot(send, BeginReply(data_offset=4096), session="s", step=1).write_tensors(plan, views)
    assert sorted(taken) == [("cpu", False)] * 2 + [("meta", True)] * 2
    assert all(bytes(written[at : at + 8]) == bytes([written[at]]) * 8 != bytes(8) for at in range(4096, 4352, 64))


def later(device: torch.Tensor, value: int) -> None:
    """Fill a tensor on the current stream, long after this has returned."""
    cuda._sleep(500_000_000)
    device.fill_(value)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("stream", [False, True])
def test_a_save_on_a_stream_of_the_callers_comes_behind_what_it_was_given(tmp_path: Path, stream: bool) -> None:
    """A value that the caller's stream has yet to write is what is stored."""
    device = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    path = tmp_path / "slot"
    path.write_bytes(bytes(4096 + BYTES))
    reply = BeginReply(path=str(path), data_offset=4096)
    copier = Copier(2)

    def send(parts: Iterator[SlotBytes]) -> None:
        def consume() -> None:
            with path.open("r+b") as file:
                for part in parts:
                    file.seek(part.offset)
                    file.write(part.data)

        thread = threading.Thread(target=consume)
        thread.start()
        thread.join()

    with torch.cuda.stream(cuda.Stream()):
        later(device, 7)
        slot = StreamedSlot(send, reply, session="s", step=1) if stream else SharedSlot(SlotMaps(), copier, reply)
        slot.write_tensors(slot_plan(b"plan", 0, [0], [0]), [device])
    copier.close()
    assert path.read_bytes()[4096:] == bytes([7]) * BYTES


@pytest.mark.gpu
@needs_cuda
def test_a_restore_on_a_stream_of_the_callers_comes_behind_what_it_was_given() -> None:
    """What the caller's stream has yet to write does not overwrite what is restored."""
    device = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    copier = Copier(2)
    with torch.cuda.stream(cuda.Stream()):
        later(device, 7)
        copier.copy([device], [torch.full((BYTES,), 3, dtype=torch.uint8)])
    torch.cuda.synchronize()
    copier.close()
    assert torch.equal(device, torch.full_like(device, 3))
