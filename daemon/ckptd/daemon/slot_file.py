"""One slot: a file in shared memory that a rank's bytes are staged in.

Owns: the regions of the file, its header page, and the changes of its state. Does not own: the bytes (the
trainer writes data and tail, this process the header page alone), nor when a state changes (the agent).
The file is: header page, data region (the tensor part of the stream), tail region (objects, SlotTrailer).

Invariants: a slot that says STAGED was filled to its end, and nobody writes to it until it was set free;
padding between shards is zero in every slot that was begun, so equal shards make equal chunks.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError

from ckptd.protos.snapshot_pb2 import SlotTrailer

from . import slot_header
from .chunks import ChunkSpan, StreamLayout, aligned
from .errors import FormatError
from .shared_files import SharedFile
from .slot_header import HEADER_BYTES, SlotHeader, SlotState

UNKNOWN_PROCESS = "?"
"""Stands in the header of a slot that somebody may still write to, nobody knows who."""
DATA_OFFSET = HEADER_BYTES
"""Where the data region begins in every slot."""


class SlotFile:
    """One slot. For one thread at a time; views may be read by many.

    Attributes:
        rank: Global rank it serves.
        number: Which of the rank's slots it is.
    """

    def __init__(self, file: SharedFile, rank: int, number: int, header: SlotHeader) -> None:
        self.rank = rank
        self.number = number
        self._file = file
        self._header = header
        self._stop_touching = threading.Event()
        self._touching = threading.Lock()

    @property
    def path(self) -> Path:
        """File that the trainer maps."""
        return self._file.path

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return self._file.nbytes

    @property
    def header(self) -> SlotHeader:
        """The header as last written; its geometry is also that of `data` and `tail`."""
        return self._header

    @property
    def tail_capacity(self) -> int:
        """Bytes that objects and trailer may take together."""
        return self.nbytes - self._header.tail_offset

    @property
    def data(self) -> memoryview:
        """The tensor part."""
        return self._file.view[DATA_OFFSET : DATA_OFFSET + self._header.data_bytes]

    @property
    def tail(self) -> memoryview:
        """Objects, padding and trailer, to the end of the file."""
        return self._file.view[self._header.tail_offset :]

    @property
    def objects(self) -> memoryview:
        """The object blob of a staged slot."""
        return self.tail[: self._header.objects_bytes]

    @property
    def head(self) -> bytes:
        """What the file begins with for as long as its bytes are these: the written part of the header page."""
        return slot_header.stem(self._header)

    def is_read(self) -> bool:
        """Say whether a rank copies from the file, also one that asked an agent before this one."""
        return self._file.is_read()

    def write_header(self, header: SlotHeader) -> None:
        """Write the header page. A crash inside leaves a torn page, which counts as WRITING.

        Raises:
            ValueError: The header does not fit the page, or its geometry the file.
        """
        if header.end > self.nbytes or DATA_OFFSET + header.data_bytes > header.tail_offset:
            raise ValueError(
                f"slot {self.path}: data {header.data_bytes}, objects {header.objects_bytes} and trailer "
                f"{header.trailer_bytes} bytes do not fit {self.nbytes}"
            )
        self._file.view[:HEADER_BYTES] = slot_header.encode(header)
        self._header = header

    def begin(self, header: SlotHeader, layout: StreamLayout) -> None:
        """Give a free slot to its trainer: zero the padding where the layout is new, and write the header.

        Trainers never write padding, so it stays zero for as long as layout and plan do. Ends the background
        touching first: from here on nobody but the trainer touches data and tail.

        Raises:
            ValueError: The slot is not free, or `header` does not say WRITING or does not fit.
        """
        held = self._header
        if held.state is not SlotState.FREE or header.state is not SlotState.WRITING:
            raise ValueError(f"slot {self.path} is {held.state} and cannot become {header.state}")
        if header.data_bytes != layout.data_bytes:
            raise ValueError(f"slot {self.path}: header says {header.data_bytes} bytes, layout {layout.data_bytes}")
        self._stop_touching.set()
        with self._touching:
            pass
        known = (held.layout_digest, held.plan_digest, held.data_bytes)
        if not held.layout_digest or known != (header.layout_digest, header.plan_digest, header.data_bytes):
            self._clear_padding(layout)
        self.write_header(header)

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes on behalf of a trainer that cannot map the file; `offset` from the start of the file.

        Raises:
            ValueError: The slot is not being written, or the bytes do not lie behind the header page.
        """
        if self._header.state is not SlotState.WRITING:
            raise ValueError(f"slot {self.path} is {self._header.state} and takes no bytes")
        if offset < DATA_OFFSET or offset + len(data) > self.nbytes:
            raise ValueError(f"slot {self.path}: bytes {offset}..{offset + len(data)} are not the trainer's")
        self._file.view[offset : offset + len(data)] = data

    def stage(self, *, objects_bytes: int, trailer_bytes: int, staged_at: float) -> None:
        """Take the slot over from its trainer: from here on nobody writes to it until `free`.

        Raises:
            ValueError: The slot is not being written, or objects and trailer do not fit its tail.
        """
        if self._header.state is not SlotState.WRITING:
            raise ValueError(f"slot {self.path} is {self._header.state} and cannot be staged")
        self.write_header(
            replace(
                self._header,
                state=SlotState.STAGED,
                process="",
                objects_bytes=objects_bytes,
                trailer_bytes=trailer_bytes,
                staged_at=staged_at,
            )
        )

    def free(self) -> None:
        """Give the slot's bytes up, whatever its state; idempotent.

        Where a trainer was writing, it may go on: one that is paused in the midst of its copy and wakes up after the
        job has moved on. So the header keeps its process, and the pool gives the file to no other one.
        """
        torn = self._header.state is SlotState.WRITING
        self.write_header(
            SlotHeader(
                state=SlotState.FREE,
                job=self._header.job,
                rank=self.rank,
                # A trainer that failed half-way may have written anywhere: then the padding counts as unknown.
                layout_digest=b"" if torn else self._header.layout_digest,
                plan_digest=b"" if torn else self._header.plan_digest,
                data_bytes=self._header.data_bytes,
                tail_offset=self._header.tail_offset,
                process=(self._header.process or UNKNOWN_PROCESS) if torn else self._header.process,
            )
        )

    def trailer(self) -> SlotTrailer:
        """Read the trailer of a staged slot.

        Raises:
            FormatError: The trainer wrote something else there, or objects that do not lie in the blob.
        """
        at = self._header.trailer_offset
        try:
            trailer = SlotTrailer.FromString(bytes(self._file.view[at : at + self._header.trailer_bytes]))
        except DecodeError as error:
            raise self._bad_trailer(str(error)) from error
        counts = {len(trailer.object_names), len(trailer.object_offset), len(trailer.object_length)}
        replicas = len(trailer.replica_fingerprints) + len(trailer.segmented_fingerprints)
        if len(counts) != 1 or replicas != 16 * len(trailer.replica_row):
            raise self._bad_trailer("its columns do not fit together")
        for offset, length in zip(trailer.object_offset, trailer.object_length, strict=True):
            if offset + length > self._header.objects_bytes:
                raise self._bad_trailer("an object lies beyond the objects")
        return trailer

    def stream(self, span: ChunkSpan) -> memoryview:
        """View a range of the stream, which must not span tensor part and objects; no copy.

        Raises:
            ValueError: The range does not lie in one of the two.
        """
        begin, end = self.file_range(span)
        return self._file.view[begin:end]

    def file_range(self, span: ChunkSpan) -> tuple[int, int]:
        """Say where in the file a range of the stream stands: first byte, and first behind it.

        Raises:
            ValueError: The range does not lie in the tensor part or in the objects.
        """
        if span.offset >= 0 and span.end <= self._header.data_bytes:
            return DATA_OFFSET + span.offset, DATA_OFFSET + span.end
        objects_at = aligned(self._header.data_bytes)
        if objects_at <= span.offset and span.end - objects_at <= self._header.objects_bytes:
            base = self._header.tail_offset - objects_at
            return base + span.offset, base + span.end
        raise ValueError(f"slot {self.path} has no bytes {span.offset}..{span.end} in its stream")

    def touch(self) -> None:
        """Bring all pages into memory, for as long as the slot was not begun; for the pool's thread."""
        with self._touching:
            self._file.touch(self._stop_touching)

    def close(self) -> None:
        """Unmap and unlock, and leave the file; idempotent."""
        self._stop_touching.set()
        with self._touching:
            self._file.close()

    def unlink(self) -> None:
        """Delete the file and close; idempotent.

        Gives its memory back at once unless somebody may still write to it, or copies from it.
        """
        self._stop_touching.set()
        with self._touching:
            self._file.remove(punch=not self._header.process)

    def _clear_padding(self, layout: StreamLayout) -> None:
        lengths = layout.padding_lengths
        if not len(lengths):
            return
        first = np.repeat(layout.padding_starts, lengths)
        within = np.arange(len(first)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        target = self._file.view[DATA_OFFSET : DATA_OFFSET + layout.data_bytes]
        np.frombuffer(target, dtype=np.uint8)[first + within] = 0

    def _bad_trailer(self, why: str) -> FormatError:
        return FormatError.of(
            f"rank {self.rank}: the trailer of the staged slot cannot be read: {why}",
            rank=self.rank,
            step=self._header.step,
            object=str(self.path),
            phase="upload",
        )
