"""A file that tensors are written into as if it were memory: boxes in any order, each at its place.

Owns: the mapping, keeping little of it resident, and bringing it to the disk. Does not own: where a tensor stands in it.
Invariant: the file has its full length, on disk blocks that are its own, before anything is written into it.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from ckptd.client.copying import Copier
from ckptd.client.loaded_step import StoredTensor, part_of

_DROP_BYTES = 64 << 20
"""After so many bytes the pages written so far leave this process; the kernel writes them out."""


def put(handle: int, data: memoryview | bytes, at: int) -> None:
    """Write all of it at an offset."""
    view = memoryview(data)
    while view:
        done = os.pwrite(handle, view, at)
        view, at = view[done:], at + done


def settle(handle: int) -> None:
    """Bring a file to the disk, and let the page cache forget it: what is read back then comes from the disk."""
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


class MappedFile:
    """A file of known length whose head is written already. Close it, or leave its block.

    Args:
        path: The file.
        nbytes: Its length; what does not fit on the disk fails here.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._dirty = 0
        self._copier = Copier(1)
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(handle, 0, nbytes)
            self._map = mmap.mmap(handle, nbytes)
        finally:
            os.close(handle)
        self._bytes: torch.Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, one: StoredTensor, at: int) -> torch.Tensor:
        """Return the tensor that stands at an offset, a multiple of its element size; writing to it writes the file."""
        assert self._bytes is not None
        return self._bytes[at : at + one.nbytes].view(one.dtype).view(one.shape)

    def write(self, one: StoredTensor, at: int, offset: tuple[int, ...], data: torch.Tensor) -> None:
        """Write a box of the tensor that stands at an offset."""
        if not data.numel():
            return
        self._copier.copy([part_of(self.tensor(one, at), offset, data.shape)], [data])
        self._dirty += data.numel() * data.element_size()
        if self._dirty >= _DROP_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._dirty = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The mapping ends with the last tensor that refers to it.
        self._bytes = None
        if error is not None:
            return
        self._map.flush()
        self._map.madvise(mmap.MADV_DONTNEED)
        handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            settle(handle)
        finally:
            os.close(handle)
