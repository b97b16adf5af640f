"""Copying many tensors at once, at the speed of memory.

Owns: batching small tensors, cutting large ones, and the threads that share them, also with other reading of the same
memory. Does not own: what is copied where. Invariants: on return every target holds its source's value; sources are only read;
and when a copy has raised, whatever it was, no thread writes to a target any more.
What is on a device is copied by the caller's thread alone: in others its default stream is current, which waits for none of the
caller's.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from .aside import aside

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


class _Shared:
    """The pieces of one copy that other threads write, until its caller ends it.

    A signal's handler may raise between any two steps of the caller's, also while it hands pieces out. So nothing depends on
    what the caller knows of them, and what it waits on is no lock of Python's, which such an interrupt may leave taken.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = False
        self._writing = 0
        self._written: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def copy(self, pair: Pair) -> None:
        """Write a piece, unless the copy is over; for the copying threads."""
        with self._lock:
            if self._is_over:
                return
            self._writing += 1
        failure: BaseException | None = None
        try:
            _copy(pair)
        except BaseException as raised:  # raised where the copy is waited for
            failure = raised
        with self._lock:
            self._writing -= 1
        self._written.put(failure)

    def wait(self, pieces: int) -> None:
        """Wait until so many pieces are written.

        Raises:
            Exception: The first that writing one raised.
        """
        for _ in range(pieces):
            failure = self._written.get()
            if failure is not None:
                raise failure

    def end(self) -> None:
        """Begin no piece any more, and wait for those that are being written, however often that is interrupted; idempotent."""
        interrupt: BaseException | None = None
        while True:
            try:
                with self._lock:
                    self._is_over = True
                # Counted before it is told: as long as one is being written, there is something to come.
                while self._writing:
                    self._written.get()
                break
            except BaseException as raised:  # raised at the end
                interrupt = raised
        if interrupt is not None:
            raise interrupt


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
        shared = _Shared()
        # Twice: two signals that come at once raise one behind the other, and the second may be the first thing that `end` sees.
        try:
            try:
                self._copy(targets, sources, shared, threaded=threaded)
            finally:
                shared.end()
        finally:
            shared.end()

    def _copy(self, targets: Destinations, sources: Sequence[torch.Tensor], shared: _Shared, *, threaded: bool) -> None:
        with torch.no_grad():
            large = [pair for row, into, size in targets.single for pair in _pieces(into, copyable(sources[row]), size)]
            handed_out = [pair for pair in large if threaded and _is_on_host(pair)]
            self.beside(shared.copy, handed_out)
            for pair in large:
                if not threaded or not _is_on_host(pair):
                    _copy(pair)
            if targets.small:
                torch._foreach_copy_(targets.small, targets.small_sources(sources))
        shared.wait(len(handed_out))

    def beside(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[Future[_Result]]:
        """Begin work on each item in the copying threads, and return at once; copies that follow share them.

        Args:
            work: Must let go of the interpreter's lock to gain anything. What torch keeps per thread is not the caller's
                there: gradients are recorded, and an accelerator's default stream is current.
            items: One call each.
        """
        held = list(items)
        if not held:
            return []
        pool = self._executor()
        begun: list[Future[_Result]] = aside(lambda: [pool.submit(work, item) for item in held])
        return begun

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
