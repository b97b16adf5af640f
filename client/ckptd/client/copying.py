"""Copying many tensors at once, at the speed of memory.

Owns: batching small tensors, cutting large ones, and the threads that share them, also with other reading of the same
memory. Does not own: what is copied where. Invariant: on return every target holds its source's value; sources are only read.
What is on a device is copied by the caller's thread alone: in others its default stream is current, which waits for none of the
caller's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

_LARGE = 1 << 20
"""Tensors of so many bytes are copied one by one; smaller ones in one batched call."""
_PIECE = 16 << 20
"""Large contiguous tensors are cut into pieces of so many bytes, so that the threads share them evenly."""
_THREADED = 32 << 20
"""Below so many bytes the copy is done before other threads have started."""
Pair = tuple[torch.Tensor, torch.Tensor]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def _raw_dtypes() -> frozenset[torch.dtype]:
    # torch cannot copy numbers below eight bits, and makes every bool that is not 0 a 1.
    below_a_byte = [*(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), "float4_e2m1fn_x2"]
    return frozenset([torch.bool, *(getattr(torch, name) for name in below_a_byte if hasattr(torch, name))])


_RAW = _raw_dtypes()
"""Dtypes of one byte whose elements are copied as bytes."""


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a view of it whose copy has the same bits."""
    return tensor.view(torch.uint8) if tensor.dtype in _RAW else tensor


def writing(target: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return the mode in which a live tensor may be written in place, on any thread."""
    # What was made in inference mode takes no writes outside of it.
    return torch.inference_mode() if target.is_inference() else torch.no_grad()


class Destinations:
    """Where rows are copied to, told apart once: many saves write the same slot.

    Args:
        tensors: Row: its target.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.rows = len(tensors)
        self.small: list[torch.Tensor] = []
        self.small_rows: list[int] = []
        self.raw: list[int] = []
        self.single: list[tuple[int, torch.Tensor, int]] = []
        for row, target in enumerate(tensors):
            size, into = target.numel() * target.element_size(), copyable(target)
            # The batched call takes no such target.
            if size >= _LARGE or into.is_conj() or into.is_neg() or into.is_inference():
                self.single.append((row, into, size))
                continue
            if into is not target:
                self.raw.append(len(self.small))
            self.small.append(into)
            self.small_rows.append(row)
        self.large_bytes = sum(size for _, _, size in self.single)

    def small_sources(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sources of the small targets, in their order."""
        found = [sources[row] for row in self.small_rows]
        for at in self.raw:
            found[at] = copyable(found[at])
        return found


class Copier:
    """Copies tensors. One per Checkpointer; not thread-safe.

    Args:
        threads: Threads that copy large tensors.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def copy(self, targets: Sequence[torch.Tensor] | Destinations, sources: Sequence[torch.Tensor]) -> None:
        """Copy each source into its target of the same shape and dtype, on whatever device either is.

        What is on a device is copied on the caller's current stream.
        """
        if not isinstance(targets, Destinations):
            targets = Destinations(targets)
        if len(sources) != targets.rows:
            raise ValueError(f"{len(sources)} tensors to copy, {targets.rows} places for them")
        # Where torch has threads of its own, a copy is parallel already.
        threaded = targets.large_bytes >= _THREADED and self._threads > 1 and torch.get_num_threads() == 1
        with torch.no_grad():
            large = [pair for row, into, size in targets.single for pair in _pieces(into, copyable(sources[row]), size)]
            pending = [self._executor().submit(_copy, pair) for pair in large if _is_on_host(pair)] if threaded else []
            for pair in large:
                if not threaded or not _is_on_host(pair):
                    _copy(pair)
            if targets.small:
                torch._foreach_copy_(targets.small, targets.small_sources(sources))
        for future in pending:
            future.result()

    def beside(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[Future[_Result]]:
        """Begin work on each item in the copying threads, and return at once; copies that follow share them.

        Args:
            work: Must let go of the interpreter's lock to gain anything. What torch keeps per thread is not the caller's
                there: gradients are recorded, and an accelerator's default stream is current.
            items: One call each.
        """
        return [self._executor().submit(work, item) for item in items]

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


def _is_on_host(pair: Pair) -> bool:
    return pair[0].device.type == pair[1].device.type == "cpu"


def _copy(pair: Pair) -> None:
    with writing(pair[0]):
        pair[0].copy_(pair[1])
