"""The slots of a job's ranks on this node.

Owns: making, reusing, adopting and dropping them. Does not own: what one slot is (`slot_file`), when a rank
may fill it, and what becomes of a staged step (the agent decides).

Invariants: what a dead agent left staged is staged for the next one, and anything else it left is free; file
names never come twice, so a trainer that keeps a mapping by path never writes to a file that was replaced; a
trainer that was given up in the midst of its copy has a file that nobody else will be given; and a file that a rank
copies from is not written to, whoever has forgotten that it does.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from . import slot_header
from .shared_files import SharedFile, page_rounded, prepare_folder
from .slot_file import DATA_OFFSET, SlotFile
from .slot_header import HEADER_BYTES, SlotHeader, SlotState

__all__ = ["DATA_OFFSET", "SlotFile", "SlotHeader", "SlotPool", "SlotState"]

_TAIL_SLACK_BYTES = 64 << 10
_NAME_JOB = 16
_NAME = re.compile(r"(?P<job>[0-9a-f]{16})\.r(?P<rank>[0-9]{6,})\.s(?P<number>[0-9]+)\.[0-9a-f]{8}\.slot")


class SlotPool:
    """The slots of one job on this node. Methods are for one thread; touching runs in one of its own.

    Args:
        shm_dir: Folder in shared memory; made 0700.
        job_digest: Hex digest of root and job name, at least 16 digits; in file names and headers.
        touch: Whether new slots are touched in the background.

    Raises:
        DaemonError: NOT_ALLOWED, the folder belongs to somebody else.
    """

    def __init__(self, shm_dir: Path, job_digest: str, *, touch: bool = True) -> None:
        prepare_folder(shm_dir)
        self._folder = shm_dir
        self._job = job_digest
        self._touch = touch
        self._slots: dict[tuple[int, int], SlotFile] = {}

    @property
    def slots(self) -> list[SlotFile]:
        """Every slot held, by rank and number."""
        return [self._slots[key] for key in sorted(self._slots)]

    def acquire(self, rank: int, number: int, data_bytes: int, tail_bytes: int, *, process: str = "") -> SlotFile:
        """Return a free slot with room for that much: the present one where it fits, else a new one in its place.

        Args:
            rank: Global rank.
            number: Which of its slots.
            data_bytes: Tensor part.
            tail_bytes: Objects and trailer.
            process: The trainer process that asks, where known. A slot that was taken from a process in the midst of
                writing is used again by that process only, and one that is read by nobody for as long as it is.

        Raises:
            NoSpaceError: /dev/shm is full; names free and needed bytes. The present slot, too small, is gone.
            ValueError: The slot is not free: `free` it when its step no longer counts.
        """
        tail_offset = DATA_OFFSET + page_rounded(data_bytes)
        header = SlotHeader(
            state=SlotState.FREE, job=self._job, rank=rank, data_bytes=data_bytes, tail_offset=tail_offset
        )
        held = self._slots.get((rank, number))
        if held is not None:
            if held.header.state is not SlotState.FREE:
                raise ValueError(f"slot {held.path} is {held.header.state}, with step {held.header.step}")
            is_fit = tail_offset + tail_bytes <= held.nbytes and held.header.process in {"", process}
            # The header says free since before this look: who comes to read later sees that.
            if is_fit and not held.is_read():
                if (held.header.data_bytes, held.header.tail_offset) != (data_bytes, tail_offset):
                    held.write_header(replace(header, process=held.header.process))
                return held
            del self._slots[rank, number]
            held.unlink()
        # Objects grow a little from save to save (a loader's position); room for that spares a new file.
        size = tail_offset + page_rounded(tail_bytes + tail_bytes // 4 + _TAIL_SLACK_BYTES)
        name = f"{self._job[:_NAME_JOB]}.r{rank:06d}.s{number}.{secrets.token_hex(4)}.slot"
        made = SlotFile(SharedFile.create(self._folder / name, size), rank, number, header)
        made.write_header(header)
        self._slots[rank, number] = made
        if self._touch:
            threading.Thread(target=made.touch, name=f"touch-{rank}-{number}", daemon=True).start()
        return made

    def adopt(self) -> list[SlotFile]:
        """Take over what dead agents left of this job, and return the staged slots; call it once, at start.

        What was being written is torn and becomes free; what cannot be read, or is there twice, is deleted.
        Slots of a living agent are left alone.
        """
        for path in sorted(self._folder.glob(f"{self._job[:_NAME_JOB]}.r*.slot")):
            named = _NAME.fullmatch(path.name)
            file = SharedFile.open(path) if named else None
            if named is None or file is None:
                continue
            rank, number = int(named["rank"]), int(named["number"])
            slot = self._read(file, rank, number)
            held = self._slots.get((rank, number))
            if slot is None:
                file.remove()
                continue
            if held is not None:
                # An agent died between making a replacement and deleting the old one.
                older, slot = sorted((held, slot), key=lambda each: (each.header.timeline, each.header.step))
                older.free()  # its readers are looked for when it says so
                older.unlink()
            self._slots[rank, number] = slot
        return [slot for slot in self.slots if slot.header.state is SlotState.STAGED]

    def release_dead(self, keep: Collection[tuple[str, int]], living: Collection[str] = ()) -> list[SlotHeader]:
        """Delete the slots of runs that are gone, but for the steps that still count; return what they held.

        Args:
            keep: (timeline, step) that may still be committed or restored from here.
            living: run ids whose ranks are attached; their slots stay, and so do free ones acquired for them.
        """
        dropped = []
        for key, slot in list(self._slots.items()):
            header = slot.header
            if header.run_id in living or (header.timeline, header.step) in keep:
                continue
            if header.state is SlotState.FREE and living:
                continue
            dropped.append(header)
            del self._slots[key]
            slot.free()
            slot.unlink()
        return dropped

    def close(self) -> None:
        """Unmap and unlock all slots, and leave the files for the next agent."""
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()

    def _read(self, file: SharedFile, rank: int, number: int) -> SlotFile | None:
        """Read an orphan: staged as it is, torn as free, None when it is none of ours or too small to be one."""
        if file.nbytes < DATA_OFFSET:
            return None
        header = slot_header.decode(file.view[:HEADER_BYTES])
        fits = (
            header is not None
            and header.rank == rank
            and DATA_OFFSET + header.data_bytes <= header.tail_offset
            and header.end <= file.nbytes
        )
        if header is not None and fits:
            if header.job != self._job:
                return None
            slot = SlotFile(file, rank, number, header)
            if header.state is SlotState.WRITING:
                slot.free()
            return slot
        torn = SlotHeader(state=SlotState.WRITING, job=self._job, rank=rank, data_bytes=0, tail_offset=DATA_OFFSET)
        slot = SlotFile(file, rank, number, torn)
        slot.free()
        return slot
