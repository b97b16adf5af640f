"""The two ways bytes get into a slot: shared memory, and a stream where there is none.

Owns: mapping slot files, cutting a stream into messages. Does not own: the slot's header, which
only the agent writes. Invariant: bytes of the header page and between rows are never touched.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from ckptd.protos.agent_pb2 import BeginReply, SlotBytes

from .copying import Copier, Destinations
from .staging import SlotPlan, plain_bytes

MESSAGE_BYTES = 2 << 20
"""Bytes of data in one message; below gRPC's default limit of 4 MiB."""
_DEVICE_BYTES = 64 << 20
"""So many bytes of tensors on a device are brought to the host before they are sent, at least."""
_KEPT_PLANS = 4


class SlotMap:
    """One slot file in this process's memory. Kept from save to save, as the agent keeps the file."""

    def __init__(self, path: str) -> None:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(handle)
            self.identity = (found.st_dev, found.st_ino, found.st_size)
            self._map = mmap.mmap(handle, found.st_size)
        finally:
            os.close(handle)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._targets: dict[tuple[bytes, int], Destinations] = {}

    def targets(self, plan: SlotPlan, views: Sequence[torch.Tensor], data_offset: int) -> Destinations:
        """Return where each written row goes. Made once per plan: it takes longer than copying small tensors."""
        key = (plan.digest, data_offset)
        found = self._targets.get(key)
        if found is None:
            rows = []
            for row, offset in zip(plan.written, plan.offsets, strict=True):
                view = views[row]
                begin = data_offset + offset
                end = begin + view.numel() * view.element_size()
                rows.append(self._bytes[begin:end].view(view.dtype).view(view.shape))
            while len(self._targets) >= _KEPT_PLANS:
                del self._targets[next(iter(self._targets))]
            found = self._targets[key] = Destinations(rows)
        return found

    def is_there(self, path: str) -> bool:
        """Say whether the file still is the one at its path."""
        try:
            found = Path(path).stat()
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino, found.st_size) == self.identity

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes at an offset of the file."""
        self._map[offset : offset + len(data)] = data


class SlotMaps:
    """The slots of a rank."""

    def __init__(self) -> None:
        self._maps: dict[str, SlotMap] = {}

    def slot(self, path: str) -> SlotMap:
        """Return the slot file at `path`, mapped anew when the agent has made another one there."""
        found = Path(path).stat()
        identity = (found.st_dev, found.st_ino, found.st_size)
        known = self._maps.get(path)
        if known is None or known.identity != identity:
            # What is replaced gets another name, and its file is unlinked: mapped, its memory would stay in use.
            self._maps = {other: one for other, one in self._maps.items() if other != path and one.is_there(other)}
            known = self._maps[path] = SlotMap(path)
        return known

    def close(self) -> None:
        """Forget the maps."""
        self._maps.clear()


class SharedSlot:
    """A slot in shared memory: what is written is in the slot at once."""

    def __init__(self, maps: SlotMaps, copier: Copier, reply: BeginReply) -> None:
        self._copier = copier
        self._map = maps.slot(reply.path)
        self._reply = reply

    def write_tensors(self, plan: SlotPlan, views: Sequence[torch.Tensor]) -> None:
        """See `staging.SlotWriter`."""
        targets = self._map.targets(plan, views, self._reply.data_offset)
        self._copier.copy(targets, [views[row] for row in plan.written])

    def write_tail(self, tail: bytes) -> None:
        """See `staging.SlotWriter`."""
        self._map.write(self._reply.tail_offset, tail)


class StreamedSlot:
    """A slot that only the agent can reach: bytes go there in messages.

    Args:
        send: Sends the messages and returns when the agent has taken them.
        reply: The answer to Begin.
        session: Named in the first message.
        step: Named in the first message.
    """

    def __init__(
        self, send: Callable[[Iterator[SlotBytes]], None], reply: BeginReply, *, session: str, step: int
    ) -> None:
        self._send = send
        self._reply = reply
        self._session = session
        self._step = step
        self._is_over = False

    def write_tensors(self, plan: SlotPlan, views: Sequence[torch.Tensor]) -> None:
        """See `staging.SlotWriter`.

        Holds one tensor at a time where it is not contiguous on the host, and so many bytes of those on a device as fill a
        batch: the messages are made in a thread of gRPC's, where the caller's stream is not current.
        """
        rows = [(views[row], self._reply.data_offset + at) for row, at in zip(plan.written, plan.offsets, strict=True)]
        near = [(view, at) for view, at in rows if view.device.type == "cpu"]
        if near:
            self._put((at, plain_bytes(view)) for view, at in near)
        batch: list[tuple[int, memoryview]] = []
        size = 0
        for view, at in rows:
            if view.device.type != "cpu":
                batch.append((at, plain_bytes(view)))
                size += len(batch[-1][1])
                if size >= _DEVICE_BYTES:
                    self._put(iter(batch))
                    batch, size = [], 0
        if batch:
            self._put(iter(batch))

    def write_tail(self, tail: bytes) -> None:
        """See `staging.SlotWriter`."""
        self._put(iter([(self._reply.tail_offset, memoryview(tail))]))

    def _put(self, spans: Iterator[tuple[int, memoryview]]) -> None:
        try:
            self._send(self._messages(spans))
        except BaseException:
            # The call may go on when the wait for it was interrupted: it must not read a state that is no cut any more.
            self._is_over = True
            raise

    def _messages(self, spans: Iterator[tuple[int, memoryview]]) -> Iterator[SlotBytes]:
        first = True
        for offset, data in spans:
            for begin in range(0, len(data), MESSAGE_BYTES):
                if self._is_over:
                    return
                part = SlotBytes(offset=offset + begin, data=bytes(data[begin : begin + MESSAGE_BYTES]))
                if first:
                    part.session, part.step, part.slot = self._session, self._step, self._reply.slot
                    first = False
                yield part
