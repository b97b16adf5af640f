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


class Destinations:
    """Where rows are copied to, told apart by size once: many saves write the same slot.

    Args:
        tensors: Row: its target.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        sizes = [target.numel() * target.element_size() for target in tensors]
        small = [row for row, size in enumerate(sizes) if size < _LARGE]
        self.rows = len(tensors)
        self.small = [tensors[row] for row in small]
        self.small_rows = small
        self.large = [(row, tensors[row], size) for row, size in enumerate(sizes) if size >= _LARGE]
        self.large_bytes = sum(size for _, _, size in self.large)


class Copier:
    """Copies tensors. One per Checkpointer; not thread-safe.

    Args:
        threads: Threads that copy large tensors.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def copy(self, targets: Sequence[torch.Tensor] | Destinations, sources: Sequence[torch.Tensor]) -> None:
        """Copy each source into its target of the same shape and dtype, on whatever device either is."""
        if not isinstance(targets, Destinations):
            targets = Destinations(targets)
        if len(sources) != targets.rows:
            raise ValueError(f"{len(sources)} tensors to copy, {targets.rows} places for them")
        # Where torch has threads of its own, a copy is parallel already.
        threaded = targets.large_bytes >= _THREADED and self._threads > 1 and torch.get_num_threads() == 1
        with torch.no_grad():
            large = [pair for row, target, size in targets.large for pair in _pieces(target, sources[row], size)]
            if threaded:
                pending = [self._executor().submit(_copy, pair) for pair in large]
            else:
                pending = []
                for pair in large:
                    _copy(pair)
            if targets.small:
                torch._foreach_copy_(targets.small, [sources[row] for row in targets.small_rows])
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
