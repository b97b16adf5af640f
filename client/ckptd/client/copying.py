"""Copying many tensors at once, at the speed of memory.

Owns: batching small tensors, cutting large ones, and the threads that share them. Does not own: what is copied where.
Invariant: on return every target holds its source's value; sources are only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

_LARGE = 1 << 20
"""Tensors of so many bytes are copied one by one; smaller ones in one batched call."""
_PIECE = 16 << 20
"""Large contiguous tensors are cut into pieces of so many bytes, so that the threads share them evenly."""
_THREADED = 32 << 20
"""Below so many bytes the copy is done before other threads have started."""
Pair = tuple[torch.Tensor, torch.Tensor]


def _raw_dtypes() -> frozenset[torch.dtype]:
    # torch cannot copy numbers below eight bits, and makes every bool that is not 0 a 1.
    below_a_byte = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
    return frozenset([torch.bool, *(getattr(torch, name) for name in below_a_byte if hasattr(torch, name))])


_RAW = _raw_dtypes()
"""Dtypes of one byte whose elements are copied as bytes."""


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a view of it whose copy has the same bits."""
    return tensor.view(torch.uint8) if tensor.dtype in _RAW else tensor


class Copier:
    """Copies tensors. One per Checkpointer; not thread-safe.

    Args:
        threads: Threads that copy large tensors.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source into its target of the same shape and dtype, on whatever device either is."""
        small: list[Pair] = []
        large: list[Pair] = []
        total = 0
        for target, source in zip(targets, sources, strict=True):
            size = target.numel() * target.element_size()
            into, out = copyable(target), copyable(source)
            if size >= _LARGE:
                total += size
                large += _pieces(into, out, size)
            elif into.is_conj() or into.is_neg():
                large.append((into, out))  # the batched call takes no such target
            else:
                small.append((into, out))
        # Where torch has threads of its own, a copy is parallel already.
        threaded = total >= _THREADED and self._threads > 1 and torch.get_num_threads() == 1
        with torch.no_grad():
            if threaded:
                pending = [self._executor().submit(_copy, pair) for pair in large]
            else:
                pending = []
                for pair in large:
                    _copy(pair)
            if small:
                torch._foreach_copy_([pair[0] for pair in small], [pair[1] for pair in small])
        for future in pending:
            future.result()

    def _executor(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="ckptd-copy")
        return self._pool

    def close(self) -> None:
        """End the threads; idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _pieces(target: torch.Tensor, source: torch.Tensor, size: int) -> list[Pair]:
    plain = target.is_contiguous() and source.is_contiguous() and not source.is_conj() and not source.is_neg()
    if size <= _PIECE or not plain:
        return [(target, source)]
    step = _PIECE // target.element_size()
    return list(zip(torch.split(target.view(-1), step), torch.split(source.view(-1), step), strict=True))


def _copy(pair: Pair) -> None:
    # no_grad is a thread's own.
    with torch.no_grad():
        pair[0].copy_(pair[1])
