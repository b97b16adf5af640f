"""Staged bytes are the plain bytes of every tensor, at their place and nowhere else."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.client.copying import Copier
from ckptd.client.slot_writers import SharedSlot, SlotMaps, StreamedSlot
from ckptd.client.staging import Capture, Fingerprints, SlotPlan, plain_bytes, slot_plan
from ckptd.client.state import Collected
from ckptd.protos.agent_pb2 import BeginReply, SlotBytes

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of random bytes: NaN payloads, infinities and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """Return the C-contiguous bytes, the slow way."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def staged(folder: Path, views: list[torch.Tensor], *, stream: bool, threads: int = 1) -> tuple[bytes, SlotPlan]:
    """Return the slot's bytes after staging, with 0xEE where nothing was written."""
    offsets, at = [], 0
    for view in views:
        offsets.append(at)
        at += -(-view.numel() * view.element_size() // 64) * 64 + 64
    plan = slot_plan(b"plan", 0, [0] * len(views), offsets)
    path = folder / "slot"
    path.write_bytes(b"\xee" * (4096 + at + 64))
    reply = BeginReply(path=str(path), data_offset=4096, data_bytes=at, tail_offset=4096 + at)
    if stream:

        def send(parts: Iterator[SlotBytes]) -> None:
            with path.open("r+b") as file:
                for part in parts:
                    file.seek(part.offset)
                    file.write(part.data)

        StreamedSlot(send, reply, session="s", step=1).write_tensors(plan, views)
    else:
        copier = Copier(threads)
        SharedSlot(SlotMaps(), copier, reply).write_tensors(plan, views)
        copier.close()
    return path.read_bytes(), plan


def check(data: bytes, plan: SlotPlan, views: list[torch.Tensor]) -> None:
    """Every row stands at its offset, and every other byte was left alone."""
    expected = bytearray(b"\xee" * len(data))
    for offset, view in zip(plan.offsets, views, strict=True):
        expected[4096 + offset : 4096 + offset + view.numel() * view.element_size()] = raw(view)
    assert data == bytes(expected)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_s078_every_dtype_is_staged_bit_by_bit(tmp_path: Path, dtype: torch.dtype, stream: bool) -> None:
    """NaN payloads, subnormals, -0.0; scalars, empty and one-element tensors."""
    views = [tensor_of(dtype, shape, seed) for seed, shape in enumerate([(), (1,), (1, 1), (3, 5), (0, 2), (129,)])]
    data, plan = staged(tmp_path, views, stream=stream)
    check(data, plan, views)


@pytest.mark.parametrize("stream", [False, True])
def test_s074_strides_do_not_matter(tmp_path: Path, stream: bool) -> None:
    """Transposed, expanded, sliced with steps, channels_last, conjugated, negated."""
    base = torch.arange(240, dtype=torch.float32).reshape(2, 3, 5, 8)
    complex_base = torch.complex(base[0, 0], base[1, 0])
    views = [
        base.transpose(0, 3),
        base[:, ::2, :, ::3],
        torch.ones(3).expand(4, 3),
        base.to(memory_format=torch.channels_last),
        base.permute(3, 1, 0, 2)[1:, 1:],
        complex_base.conj(),
        complex_base.conj().imag,
        torch.nn.Parameter(base.clone()).detach(),
    ]
    data, plan = staged(tmp_path, views, stream=stream)
    check(data, plan, views)


def test_large_tensors_are_cut_among_threads(tmp_path: Path) -> None:
    """With one torch thread and many bytes, the copy threads share them and lose nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        big = torch.arange(6 << 20, dtype=torch.int64)
        views = [big, big[: 3 << 20].reshape(3, -1).t(), torch.ones(3)]
        data, plan = staged(tmp_path, views, stream=False, threads=2)
    finally:
        torch.set_num_threads(threads)
    check(data, plan, views)


def test_a_slot_that_was_made_anew_is_mapped_anew(tmp_path: Path) -> None:
    """S106: the agent may replace the file when sizes change; bytes go to the one that is there."""
    maps, copier = SlotMaps(), Copier(1)
    path = tmp_path / "slot"
    for size in (4096 + 64, 4096 + 640, 4096 + 64):
        path.unlink(missing_ok=True)
        path.write_bytes(bytes(size))
        reply = BeginReply(path=str(path), data_offset=4096, tail_offset=4096 + 32)
        slot = SharedSlot(maps, copier, reply)
        slot.write_tensors(slot_plan(b"p", 0, [0], [0]), [torch.full((4,), size, dtype=torch.int64)])
        slot.write_tail(b"tail")
        data = path.read_bytes()
        assert data[4096:4128] == size.to_bytes(8, "little") * 4
        assert data[4128:4132] == b"tail"


def test_a_slot_that_was_replaced_under_another_name_is_let_go(tmp_path: Path) -> None:
    """The agent unlinks it: mapped, it would take its room in shared memory until the end. Those still there stay mapped."""
    maps = SlotMaps()
    kept = tmp_path / "kept"
    kept.write_bytes(bytes(4096))
    first = maps.slot(str(kept))
    for number in range(3):
        path = tmp_path / f"slot{number}"
        path.write_bytes(bytes(8192))
        maps.slot(str(path))
        path.unlink()
    last = tmp_path / "last"
    last.write_bytes(bytes(8192))
    maps.slot(str(last))
    mapped = [
        line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
    ]
    assert sorted(mapped) == [str(kept), str(last)]
    assert maps.slot(str(kept)) is first


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=3).map(tuple)), min_size=0, max_size=8
    ),
    st.integers(0, 1000),
)
def test_fingerprints_are_xxh3_of_the_plain_bytes(kinds: list[tuple[torch.dtype, tuple[int, ...]]], seed: int) -> None:
    """Whatever the dtype, shape and strides: the agents compute the same over the bytes they hold."""
    tensors = [tensor_of(dtype, shape, seed + number) for number, (dtype, shape) in enumerate(kinds)]
    tensors += [tensor.t() for tensor in tensors if tensor.ndim == 2]
    tensors.append(torch.arange(40_000).reshape(200, 200).t())
    expected = b"".join(xxhash.xxh3_128(raw(tensor)).digest() for tensor in tensors)
    copier = Copier(2)
    assert Fingerprints(tensors, copier).result() == expected
    copier.close()


def test_fingerprints_do_not_depend_on_who_computes_them() -> None:
    """Small ones in one go, large ones in batches on other threads: each stands at its place, whatever is done first."""
    sizes = [3, 70_000, 0, 5 << 20, 65_535, 65_536, 9 << 20, 100_000, 1]
    tensors = [tensor_of(torch.uint8, (size,), at) for at, size in enumerate(sizes)]
    expected = [xxhash.xxh3_128_digest(raw(tensor)) for tensor in tensors]
    for threads in (1, 2, 7):
        copier = Copier(threads)
        for _ in range(3):
            assert Fingerprints(tensors, copier).result() == b"".join(expected)
        copier.close()


def test_no_thread_reads_a_tensor_after_a_save_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the slot cannot be written, what has not begun is left, and what has is waited for: the caller may go on."""
    started, cancelled, done = threading.Event(), threading.Event(), []

    def slow(tensor: torch.Tensor) -> memoryview:
        started.set()
        assert cancelled.wait(30)
        for _ in range(8):
            xxhash.xxh3_128_digest(plain_bytes(tensor))
        done.append(tensor)
        return memoryview(b"")

    class Full:
        def write_tensors(self, _: SlotPlan, views: Sequence[torch.Tensor]) -> None:
            assert started.wait(30)
            raise OSError(f"no room for {len(views)}")

        def write_tail(self, tail: bytes) -> None:
            raise AssertionError(tail)

    monkeypatch.setattr("ckptd.client.staging.plain_bytes", slow)
    tensors = [torch.zeros(8 << 20, dtype=torch.uint8) for _ in range(3)]
    copier = Copier(1)
    pending: list[Future[Any]] = []

    def beside(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Future[Any]]:
        pending.extend(Copier.beside(copier, work, items))
        pending[-1].add_done_callback(lambda _: cancelled.set())
        return pending

    monkeypatch.setattr(copier, "beside", beside)
    collected = Collected(layout=None, views=tensors, objects=())  # type: ignore[arg-type]  # the plan is given
    capture = Capture(collected, metrics={}, tags={}, versions={})
    plan = SlotPlan(digest=b"d", written=(), offsets=(), replicas=(0, 1, 2))
    with pytest.raises(OSError, match="no room for 3"):
        capture.copy_into(Full(), plan, copier)
    assert len(done) == 1
    assert done[0] is tensors[0]
    assert [future.cancelled() for future in pending] == [False, True, True]
    copier.close()


def test_plain_bytes_do_not_copy_what_stands_right_already() -> None:
    """A large replica costs no second copy of itself."""
    tensor = torch.zeros(10)
    view = plain_bytes(tensor)
    tensor[0] = 1
    assert bytes(view[:4]) == b"\x00\x00\x80\x3f"


def test_a_plan_says_what_is_written_and_what_is_not() -> None:
    """Rows ascending, offsets of the written ones only."""
    plan = slot_plan(b"d", 1, [1, 0, 1, 2], [0, 7, 64, 9])
    assert (plan.written, plan.offsets, plan.replicas) == ((0, 2), (0, 64), (1, 3))
