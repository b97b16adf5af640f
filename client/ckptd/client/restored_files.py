"""Reading restored bytes: from shared memory, or from a stream where there is none.

Owns: mapping the files an agent names, and reading pieces of them. Does not own: which bytes are wanted; they are
verified by the agent. Invariants: the agent's files are never changed: they are mapped privately; and what is read is what the
agent verified, also when it dies, or gives the restore up, in the midst: files of restores never change, and of a slot this
process says that it reads it, and looks whether it still holds the step.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import ReadRestoredRequest, SlotBytes
from ckptd.storage_backends import file_locks

from .errors import Aborted, CkptdError
from .link import SessionLostError


class RestoredFiles(Protocol):
    """Where verified bytes stand."""

    def read(self, path: str, offset: int, nbytes: int) -> torch.Tensor:
        """Return bytes of a file as a tensor of uint8; valid until `close`.

        Raises:
            SessionLostError: The agent gave the file up before this process had it; ask again.
        """

    def close(self) -> None:
        """Say that nothing is read any more; idempotent."""


_RUN = 8 << 20
_GAP = 64 << 10
"""Pieces no further apart than this many bytes are read as one run of at most `_RUN` bytes: a call each costs more."""


def read_all(files: RestoredFiles, places: Sequence[tuple[str, int, int]]) -> list[torch.Tensor]:
    """Return the bytes at each place (path, offset, bytes), as `RestoredFiles.read` does, with few reads."""
    found: dict[int, torch.Tensor] = {}
    run: list[int] = []
    path, begin, end = "", 0, 0

    def take() -> None:
        data = files.read(path, begin, end - begin) if run else None
        for number in run:
            assert data is not None
            at = places[number][1] - begin
            found[number] = data[at : at + places[number][2]]
        run.clear()

    for number in sorted(range(len(places)), key=places.__getitem__):
        where, at, nbytes = places[number]
        if where != path or at > end + _GAP or max(end, at + nbytes) - begin > _RUN:
            take()
            path, begin, end = where, at, at
        run.append(number)
        end = max(end, at + nbytes)
    take()
    return [found[number] for number in range(len(places))]


def _short(path: str, offset: int, nbytes: int, found: int) -> CkptdError:
    return CkptdError(f"the agent's file {path} ends at {found}, before {offset} + {nbytes}", key=path, phase="restore")


class SharedFiles:
    """Files in shared memory.

    Args:
        heads: By file: what it must begin with, once this process has said that it reads it.
    """

    def __init__(self, heads: Mapping[str, bytes]) -> None:
        self._heads = heads
        self._files: dict[str, torch.Tensor] = {}
        self._handles: list[int] = []

    def read(self, path: str, offset: int, nbytes: int) -> torch.Tensor:
        """See `RestoredFiles`. No copy."""
        found = self._files.get(path)
        if found is None:
            found = self._files[path] = self._opened(path)
        if offset + nbytes > found.numel():
            raise _short(path, offset, nbytes, found.numel())
        return found[offset : offset + nbytes]

    def close(self) -> None:
        """See `RestoredFiles`."""
        self._files.clear()
        while self._handles:
            handle = self._handles.pop()
            file_locks.unshare(handle)
            os.close(handle)

    def _opened(self, path: str) -> torch.Tensor:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise _given_up(path, "is gone") from None
        self._handles.append(handle)
        file_locks.share(handle)
        head = self._heads.get(path, b"")
        if os.pread(handle, len(head), 0) != head:
            raise _given_up(path, "holds another step")
        # A private map that may be written: torch warns of buffers that may not.
        return torch.frombuffer(mmap.mmap(handle, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _given_up(path: str, why: str) -> SessionLostError:
    return SessionLostError(
        f"{path}, which the agent named to restore from, {why}: the agent was restarted, or gave the restore up",
        key=path,
        phase="restore",
    )


class StreamedFiles:
    """Files that only the agent can reach; it reads none that it has given up.

    Args:
        request: Sends a request and yields the messages of its answer.
        session: Named in each request.
    """

    def __init__(self, request: Callable[[ReadRestoredRequest], Iterator[SlotBytes]], session: str) -> None:
        self._request = request
        self._session = session

    def read(self, path: str, offset: int, nbytes: int) -> torch.Tensor:
        """See `RestoredFiles`. Holds these bytes once more."""
        found = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if not nbytes:
            return found
        view = found.numpy().data
        got = 0
        message = ReadRestoredRequest(session=self._session, file=path, offset=offset, nbytes=nbytes)
        try:
            for part in self._request(message):
                at = part.offset - offset
                view[at : at + len(part.data)] = part.data
                got += len(part.data)
        except Aborted as aborted:
            if aborted.reason != error_pb2.REASON_ABORTED:
                raise
            raise _given_up(path, "is no part of the restore any more") from aborted
        if got != nbytes:
            raise _short(path, offset, nbytes, offset + got)
        return found

    def close(self) -> None:
        """See `RestoredFiles`. The agent ends what it streams by itself."""
