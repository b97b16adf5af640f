"""Segmented fingerprints of tensors where they lie: what comes to the host is 16 bytes a segment, and each tensor's last bytes.

Owns: cutting tensors into segments, the memory that takes, and how often the host waits. Does not own: the arithmetic
(`segment_kernel`), or which tensors are hashed so (`staging`). Invariant: the answer is that of `segmented.digest` over the
tensor's plain bytes at the place in the device's current stream where the call was made.

Nothing but torch operations is issued, in the caller's thread: they come behind all that the caller's stream was given before,
and what it is given later comes behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import xxhash

from ckptd.protos import segmented
from ckptd.protos.segmented import DIGEST_BYTES, SEGMENT_BYTES

from . import segment_kernel
from .copying import copyable

WINDOW_SEGMENTS = 256
"""Segments whose stripes are added up at once, 8 MiB: about three times as much is taken on the device beside them."""
BATCH_SEGMENTS = 16_384
"""Segments that are finished at once, 512 MiB: their block sums take a sixteenth, and the host waits once."""
TAIL_BYTES = 8 << 20
"""So many bytes that fill no segment are gathered before they come to the host in one piece."""


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the segmented fingerprint of each tensor's plain bytes; blocks until the devices have computed them.

    Args:
        tensors: On any devices; their streams are the caller's current ones.

    Raises:
        torch.OutOfMemoryError: a device has no room for the window beside the tensors.
    """
    found = [b""] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(number)
    with torch.no_grad():
        for device, numbers in by_device.items():
            batches = _Batches(device, [tensors[number] for number in numbers])
            for number, one in zip(numbers, batches.run(), strict=True):
                found[number] = one
    return found


class _Batches:
    """The tensors of one device, and what of them has not been finished yet.

    Block sums stand in one buffer, whichever tensors they are of; when it is full, or at the end, all segments in it are
    finished together.
    """

    def __init__(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        segments = sum(size // SEGMENT_BYTES for size in self._sizes)
        self._sums = torch.empty(
            (min(segments, BATCH_SEGMENTS), segment_kernel.BLOCKS, segment_kernel.LANES),
            dtype=torch.int64,
            device=device,
        )
        self._filled = 0
        self._owners: list[tuple[int, int]] = []
        self._tails: list[torch.Tensor] = []
        self._tail_owners: list[int] = []
        self._tail_bytes = 0
        self._digests = [bytearray() for _ in tensors]
        self._last = [b""] * len(tensors)

    def run(self) -> list[bytes]:
        """Return the fingerprints."""
        for number, (tensor, size) in enumerate(zip(self._tensors, self._sizes, strict=True)):
            if not size:
                self._last[number] = xxhash.xxh3_128_digest(b"")
            for piece in _pieces(tensor.detach(), size):
                whole = len(piece) // SEGMENT_BYTES * SEGMENT_BYTES
                if whole:
                    self._add_segments(number, piece[:whole])
                if whole < len(piece):
                    self._add_tail(number, piece[whole:])
        self._finish_segments()
        self._finish_tails()
        return [
            segmented.joined(digests + last, size)
            for digests, last, size in zip(self._digests, self._last, self._sizes, strict=True)
        ]

    def _add_segments(self, number: int, piece: torch.Tensor) -> None:
        # A word that stands across the device's own words cannot be loaded.
        aligned = piece.clone() if piece.storage_offset() % 8 or piece.data_ptr() % 8 else piece
        words = aligned.view(torch.int64).view(-1, segment_kernel.WORDS)
        while len(words):
            room = len(self._sums) - self._filled
            some, words = words[:room], words[room:]
            segment_kernel.block_sums(some, self._sums[self._filled : self._filled + len(some)])
            self._filled += len(some)
            self._owners.append((number, len(some)))
            if self._filled == len(self._sums):
                self._finish_segments()

    def _finish_segments(self) -> None:
        if not self._filled:
            return
        data = segment_kernel.digests(self._sums[: self._filled]).cpu().numpy().tobytes()
        at = 0
        for number, segments in self._owners:
            end = at + segments * DIGEST_BYTES
            self._digests[number] += data[at:end]
            at = end
        self._filled = 0
        self._owners.clear()

    def _add_tail(self, number: int, tail: torch.Tensor) -> None:
        if self._tail_bytes + len(tail) > TAIL_BYTES:
            self._finish_tails()
        self._tails.append(tail)
        self._tail_owners.append(number)
        self._tail_bytes += len(tail)

    def _finish_tails(self) -> None:
        if not self._tails:
            return
        data = torch.cat(self._tails).cpu().numpy().data
        at = 0
        for number, tail in zip(self._tail_owners, self._tails, strict=True):
            self._last[number] = xxhash.xxh3_128_digest(data[at : at + len(tail)])
            at += len(tail)
        self._tails.clear()
        self._tail_owners.clear()
        self._tail_bytes = 0


def _pieces(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yield the plain bytes in order: pieces of whole segments, at most a window each, and behind them what fills none."""
    window = WINDOW_SEGMENTS * SEGMENT_BYTES
    if not size:
        return
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        yield from torch.split(_plain(tensor), window)
        return
    rest: torch.Tensor | None = None
    for part in _parts(tensor, size, window):
        piece = part if rest is None else torch.cat([rest, part])
        whole = len(piece) // SEGMENT_BYTES * SEGMENT_BYTES
        if whole:
            yield piece[:whole]
        # A copy: what is left over would keep all of the piece.
        rest = piece[whole:].clone() if whole < len(piece) else None
    if rest is not None:
        yield rest


def _parts(tensor: torch.Tensor, size: int, window: int) -> Iterator[torch.Tensor]:
    """Yield the plain bytes of a tensor that does not lie in order, in parts of at most a window."""
    if size <= window:
        yield _plain(tensor)
        return
    row = size // len(tensor)
    for some in torch.split(tensor, max(1, window // row)):
        if row > window:
            yield from _parts(some[0], row, window)
        else:
            yield _plain(some)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain bytes where the tensor lies; without a copy where they lie in order."""
    return copyable(tensor).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
