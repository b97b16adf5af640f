"""The segmented fingerprint is one function: the library's on the host, the same bits by torch where the tensor lies."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ckptd.client import hash_in_place, segment_kernel, staging
from ckptd.client.copying import Copier
from ckptd.client.staging import Fingerprints, lies_in_place
from ckptd.protos import segmented
from ckptd.protos.segmented import SEGMENT_BYTES

STRIPE, BLOCK = 64, 1024
EDGES = sorted(
    {
        max(0, base + off)
        for base in (0, STRIPE, 240, BLOCK, SEGMENT_BYTES // 2, SEGMENT_BYTES, 2 * SEGMENT_BYTES, 3 * SEGMENT_BYTES)
        for off in (-BLOCK, -STRIPE, -9, -8, -1, 0, 1, 7, 8, STRIPE, BLOCK)
    }
)
"""Lengths around the places where xxh3 or the cutting does something else."""
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]
lengths = st.one_of(st.sampled_from(EDGES), st.integers(0, 4 * SEGMENT_BYTES))


def data_of(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def plain(tensor: torch.Tensor) -> bytes:
    """Return the C-contiguous bytes, the slow way."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg().reshape(-1)
    return flat.view(torch.uint8).cpu().numpy().tobytes()


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of two segments, batches of three, tails of one and a half: every edge between them is met."""
    monkeypatch.setattr(hash_in_place, "WINDOW_SEGMENTS", 2)
    monkeypatch.setattr(hash_in_place, "BATCH_SEGMENTS", 3)
    monkeypatch.setattr(hash_in_place, "TAIL_BYTES", SEGMENT_BYTES * 3 // 2)


# ---------------------------------------------------------------- the function


@pytest.mark.parametrize("nbytes", [n for n in EDGES if n <= SEGMENT_BYTES])
def test_up_to_one_segment_it_is_xxh3_128(nbytes: int) -> None:
    """So small tensors cost no second call."""
    assert segmented.digest(data_of(1, nbytes)) == xxhash.xxh3_128_digest(data_of(1, nbytes))


@pytest.mark.parametrize("nbytes", [n for n in EDGES if n > SEGMENT_BYTES])
def test_above_it_is_xxh3_128_of_the_segments_digests_and_the_length(nbytes: int) -> None:
    """As docs/format.md says it, so that it can be computed without this program."""
    data = data_of(2, nbytes)
    parts = [xxhash.xxh3_128_digest(data[at : at + 32768]) for at in range(0, nbytes, 32768)]
    assert segmented.digest(data) == xxhash.xxh3_128_digest(b"".join(parts) + nbytes.to_bytes(8, "little"))


def test_its_value_never_changes() -> None:
    """It stands in indexes: a value of each kind, once and for all."""
    data = bytes(range(256)) * 1024
    assert segmented.ALGORITHM == "xxh3-128/32k"
    assert {n: segmented.digest(data[:n]).hex() for n in PINNED} == PINNED


PINNED = {
    0: "99aa06d3014798d86001c324468d497f",
    1: "a6cd5e9392000f6ac44bdff4074eecdb",
    32768: "24e3a063f78ed603396d389124d3090f",
    32769: "0add7e8fae3c99c9ee62b4493f493471",
    262144: "8c89f5937f802a7546f32333414eadb5",
}


@settings(max_examples=40, deadline=None)
@given(lengths, st.integers(0, 99), st.lists(st.integers(1, 80_000), max_size=8))
def test_it_does_not_depend_on_the_pieces_the_bytes_come_in(nbytes: int, seed: int, cuts: list[int]) -> None:
    """Verify reads chunks, an agent whole rows."""
    data, hasher, at = data_of(seed, nbytes), segmented.Hasher(), 0
    for cut in [*cuts, nbytes]:
        hasher.update(memoryview(data)[at : at + cut])
        at = min(at + cut, nbytes)
    assert hasher.digest() == segmented.digest(data)


@pytest.mark.parametrize(("digests", "nbytes"), [(0, 0), (2, 0), (2, 32768), (1, 32769), (3, 65536)])
def test_digests_of_other_segments_are_not_joined(digests: int, nbytes: int) -> None:
    """A kernel that lost a segment must not make a fingerprint."""
    with pytest.raises(ValueError, match="are not those of the segments"):
        segmented.joined(bytes(16 * digests), nbytes)


# ---------------------------------------------------------------- the kernel


@settings(max_examples=25, deadline=None)
@given(st.lists(st.one_of(st.binary(min_size=1, max_size=64), st.integers(0, 2**32)), min_size=1, max_size=5))
@example([b"\xff", b"\x00", b"\xff\xff\xff\xff\x00\x00\x00\x00", b"\x00\x00\x00\x00\xff\xff\xff\xff", b"\x80\x00"])
def test_the_kernel_is_the_library(segments: list[bytes | int]) -> None:
    """Bit for bit, also where every sum and product overflows."""
    made = [
        (one * SEGMENT_BYTES)[:SEGMENT_BYTES] if isinstance(one, bytes) else data_of(one, SEGMENT_BYTES)
        for one in segments
    ]
    words = tensor_of(b"".join(made)).view(torch.int64).view(len(made), segment_kernel.WORDS)
    sums = torch.empty((len(made), segment_kernel.BLOCKS, segment_kernel.LANES), dtype=torch.int64)
    segment_kernel.block_sums(words, sums)
    found = segment_kernel.digests(sums).numpy()
    assert [row.tobytes() for row in found] == [xxhash.xxh3_128_digest(one) for one in made]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(lengths, st.integers(0, 99), st.integers(0, 9)), max_size=6), st.booleans())
def test_tensors_where_they_lie_have_the_fingerprint_of_their_bytes(
    kinds: list[tuple[int, int, int]], narrow: bool
) -> None:
    """Every length around every edge, views that begin anywhere, many together, in narrow windows and in wide ones."""
    with pytest.MonkeyPatch.context() as patch:
        if narrow:
            patch.setattr(hash_in_place, "WINDOW_SEGMENTS", 1)
            patch.setattr(hash_in_place, "BATCH_SEGMENTS", 2)
            patch.setattr(hash_in_place, "TAIL_BYTES", 1000)
        tensors = [tensor_of(data_of(seed, skip + nbytes))[skip:] for nbytes, seed, skip in kinds]
        assert hash_in_place.fingerprints(tensors) == [segmented.digest(plain(tensor)) for tensor in tensors]


def views(dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    """Return tensors of random bytes of a dtype: scalars, none, small and large, in every order their elements may lie in."""
    size = dtype.itemsize
    top = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(size)
    data = torch.randint(0, top, (2 * SEGMENT_BYTES * size,), dtype=torch.uint8, generator=generator).to(device)
    flat = data.view(dtype)
    square = flat[: 3 * 40 * 4 * 100].view(3, 40, 4, 100)
    made = [flat, flat[3:], flat[:0], flat[5], flat[: SEGMENT_BYTES // size], square]
    made += [square.transpose(0, 3), square[:, ::2, :, ::3], square.to(memory_format=torch.channels_last)]
    made += [flat[:3].expand(20_001, 3), flat[:1].expand(2, 30_000), square.permute(3, 1, 0, 2)[1:, 1:]]
    if dtype.is_complex:
        made += [flat.conj(), square.conj().transpose(1, 3), flat.conj().imag]
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_s074_dtypes_and_strides_do_not_matter(dtype: torch.dtype, small_windows: None) -> None:
    """NaN payloads, bools, float8, complex with a conjugate bit; transposed, expanded, sliced, channels_last."""
    made = views(dtype)
    assert hash_in_place.fingerprints(made) == [segmented.digest(plain(tensor)) for tensor in made]


def test_s074_large_tensors_out_of_order_are_not_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expanded tensor takes windows, however long its rows: nothing of its own size is made beside it."""
    monkeypatch.setattr(hash_in_place, "WINDOW_SEGMENTS", 4)
    window = 4 * SEGMENT_BYTES
    sizes: list[int] = []
    real_plain, real_sums = hash_in_place._plain, segment_kernel.block_sums

    def plain_part(tensor: torch.Tensor) -> torch.Tensor:
        part = real_plain(tensor)
        sizes.append(part.untyped_storage().nbytes())
        return part

    def block_sums(words: torch.Tensor, into: torch.Tensor) -> None:
        sizes.append(words.untyped_storage().nbytes())
        real_sums(words, into)

    monkeypatch.setattr(hash_in_place, "_plain", plain_part)
    monkeypatch.setattr(segment_kernel, "block_sums", block_sums)
    base = torch.arange(1 << 14, dtype=torch.float32)
    cases = [
        base.expand(20, 1 << 14),
        base.view(-1, 1).expand(1 << 14, 20),
        base.view(1, 128, 128).expand(20, 128, 128),
        base[: 1 << 13].expand(2, 3, 4, 1 << 13).transpose(0, 2),
    ]
    for tensor in cases:
        sizes.clear()
        assert hash_in_place.fingerprints([tensor]) == [segmented.digest(plain(tensor))]
        assert tensor.numel() * 4 > 4 * window
        assert 0 < max(sizes) < window + SEGMENT_BYTES


def test_many_tensors_are_brought_to_the_host_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits twice for a thousand tensors: once for the segments' digests, once for what is left over."""
    tensors = [tensor_of(data_of(at, SEGMENT_BYTES + at)) for at in range(40)] + [torch.ones(3)] * 960
    waits: list[torch.Tensor] = []
    real = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        waits.append(tensor)
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    hash_in_place.fingerprints(tensors)
    assert len(waits) == 2


# ---------------------------------------------------------------- in a save


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("where", ["host", "in-place"])
def test_a_save_fingerprints_by_the_algorithm_wherever_it_does(where: Any, threads: int) -> None:
    """Small and large, in this thread, in others, and where they lie: one function."""
    tensors = [tensor for dtype in (torch.bfloat16, torch.bool, torch.complex64) for tensor in views(dtype)]
    copier = Copier(threads)
    made = Fingerprints(tensors, copier, algorithm=segmented.ALGORITHM, in_place=lies_in_place(where))
    assert made.result() == b"".join(segmented.digest(plain(tensor)) for tensor in tensors)
    copier.close()


def test_without_an_algorithm_nothing_is_hashed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this version's ranks do beside older ones."""
    monkeypatch.setattr(hash_in_place, "fingerprints", lambda tensors: [b""] if tensors else [])
    copier, tensor = Copier(1), torch.arange(100_000)
    assert Fingerprints([tensor], copier, in_place=lies_in_place("in-place")).result() == xxhash.xxh3_128_digest(
        plain(tensor)
    )
    copier.close()


def test_only_what_lies_on_a_gpu_is_hashed_in_place_by_itself() -> None:
    """`auto` leaves the host's tensors to the library; `host` leaves it all."""
    assert [lies_in_place(where)(torch.ones(1)) for where in ("auto", "host", "in-place")] == [False, False, True]


def test_a_device_without_room_brings_replicas_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The save goes on with the same fingerprints: a check must not be what ends a run that fills its GPU."""
    asked: list[int] = []

    def full(words: torch.Tensor, into: torch.Tensor) -> None:
        asked.append(len(words))
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(segment_kernel, "block_sums", full)
    copier, tensors = Copier(1), [torch.arange(100_000), torch.ones(3)]
    made = Fingerprints(tensors, copier, algorithm=segmented.ALGORITHM, in_place=lies_in_place("in-place"))
    assert made.result() == b"".join(segmented.digest(plain(tensor)) for tensor in tensors)
    assert asked
    copier.close()


def test_s078_inference_tensors_and_gradients_do_not_matter() -> None:
    """Parameters, what was made in inference mode, and a call from within it, in any order."""
    with torch.inference_mode():
        frozen = torch.arange(50_000.0)
        first = hash_in_place.fingerprints([frozen])
    weight = torch.nn.Parameter(torch.arange(50_000.0))
    assert hash_in_place.fingerprints([weight, frozen]) == first * 2
    assert weight.grad is None


# ---------------------------------------------------------------- on a GPU


class _Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that come from a device to the host."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_far = any(isinstance(one, torch.Tensor) and one.is_cuda for one in args)
        if is_far and isinstance(made, torch.Tensor) and not made.is_cuda:
            self.nbytes += made.numel() * made.element_size()
        return made


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def no_plain_bytes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Notes tensors that are brought to the host whole."""
    moved: list[torch.Tensor] = []
    real: Callable[[torch.Tensor], memoryview] = staging.plain_bytes

    def plain_bytes(tensor: torch.Tensor) -> memoryview:
        moved.append(tensor)
        return real(tensor)

    monkeypatch.setattr(staging, "plain_bytes", plain_bytes)
    return moved


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_computes_what_the_library_does(dtype: torch.dtype, no_plain_bytes: list[torch.Tensor]) -> None:
    """Every dtype and order; and of large tensors the digests come to the host, not the bytes."""
    made = views(dtype, "cuda")
    copier = Copier(2)
    prints = Fingerprints(made, copier, algorithm=segmented.ALGORITHM, in_place=lies_in_place("auto")).result()
    copier.close()
    assert prints == b"".join(segmented.digest(plain(tensor)) for tensor in made)
    assert not no_plain_bytes
    large = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    with _Moved() as seen:  # type: ignore[no-untyped-call]
        hash_in_place.fingerprints([large])
    assert 0 < seen.nbytes <= len(large) // 1024


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("side", [False, True])
def test_a_gpu_hashes_what_its_stream_holds_at_the_call(side: bool) -> None:
    """Behind the step before, before the step after, on whichever stream is current; without a wait of the caller's."""
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        weight = torch.zeros(16 << 20, device="cuda")
        for step in range(1, 6):
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            weight += 1
            found = hash_in_place.fingerprints([weight])
            weight *= 1.0
            assert found == [segmented.digest(plain(torch.full((16 << 20,), float(step))))]


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_takes_a_window_beside_the_state() -> None:
    """Whatever the tensors' size: at most 96 MiB more than before."""
    tensor = torch.zeros(2 << 30, dtype=torch.uint8, device="cuda")
    hash_in_place.fingerprints([tensor[: 1 << 20]])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    hash_in_place.fingerprints([tensor])
    assert torch.cuda.max_memory_allocated() - before <= 96 << 20
