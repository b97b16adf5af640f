"""Slots: what a process leaves behind at any moment is either whole or thrown away."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon import slot_header
from ckptd.daemon.chunks import ChunkSpan, StreamLayout, stream_layout
from ckptd.daemon.errors import DaemonError, FormatError, NoSpaceError
from ckptd.daemon.orphans import free_orphans
from ckptd.daemon.shared_files import SharedFile
from ckptd.daemon.slots import DATA_OFFSET, SlotFile, SlotHeader, SlotPool, SlotState
from ckptd.protos import shard_table
from ckptd.protos.error_pb2 import REASON_NO_SPACE, REASON_NOT_ALLOWED
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SlotTrailer

JOB = "ab" * 32
OTHER_JOB = "cd" * 32
TIMELINE = "00000001-0123456789ab"
TRAILER = SlotTrailer(object_names=["x"], object_offset=[1], object_length=[2])
DEADLINE_S = 30

# An agent in a process of its own: takes a slot to the point named by its third argument, says so, and waits.
_AGENT = """
import signal, sys
from dataclasses import replace
from pathlib import Path
from ckptd.daemon import slot_header
from ckptd.daemon.chunks import ChunkSpan, StreamLayout
from ckptd.daemon.orphans import free_orphans
from ckptd.daemon.slots import SlotPool, SlotState
import numpy as np

none = np.zeros(0, dtype=np.int64)
layout = StreamLayout(
    offsets=[0], data_bytes=1 << 20, chunks=[ChunkSpan(offset=0, length=1 << 20)], padding_starts=none,
    padding_lengths=none,
)
pool = SlotPool(Path(sys.argv[1]), sys.argv[2])
slot = pool.acquire(2, 1, 1 << 20, 1000)
header = replace(
    slot.header, state=SlotState.WRITING, run_id="child", timeline=sys.argv[4], step=5, layout_digest=b"L" * 32,
    plan_digest=b"P" * 32,
)
slot.begin(header, layout)
slot.data[: 1 << 19] = b"\x5a" * (1 << 19)
until = sys.argv[3]
if until == "torn-page":
    page = slot_header.encode(replace(header, state=SlotState.STAGED))
    with open(slot.path, "r+b") as file:
        file.write(page[:2000])
if until == "staged":
    slot.data[1 << 19 :] = b"\x5a" * (1 << 19)
    slot.tail[:10] = b"0123456789"
    trailer = bytes.fromhex(sys.argv[5])
    slot.tail[16 : 16 + len(trailer)] = trailer
    slot.stage(objects_bytes=10, trailer_bytes=len(trailer), staged_at=1.0)
print(until, flush=True)
signal.pause()
"""


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """Give a folder in shared memory (or, where there is none, on disk)."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="ckptd-test-slots-", dir=parent))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def pool(shm_dir: Path) -> Iterator[SlotPool]:
    made = SlotPool(shm_dir, JOB, touch=False)
    yield made
    made.close()


def layout(*sizes: int) -> StreamLayout:
    rows = shard_table.build(
        ShardRow(name=f"t{at}", dtype="uint8", global_shape=(size,), offset=(0,), length=(size,), scope=0, nbytes=size)
        for at, size in enumerate(sizes)
    )
    return stream_layout(0, rows, [0] * len(sizes))


def writing(slot: SlotFile, *, step: int = 5, run_id: str = "run", layout_digest: bytes = b"L" * 32) -> SlotHeader:
    return replace(
        slot.header,
        state=SlotState.WRITING,
        run_id=run_id,
        timeline=TIMELINE,
        step=step,
        layout_digest=layout_digest,
        plan_digest=b"P" * 32,
    )


def filled(pool: SlotPool, *, rank: int = 0, number: int = 0, step: int = 5, run_id: str = "run") -> SlotFile:
    """Take a slot through to STAGED, with 100 bytes of tensor, 10 of objects and a trailer."""
    slot = pool.acquire(rank, number, 128, 1000)
    slot.begin(writing(slot, step=step, run_id=run_id), layout(100))
    slot.data[:100] = bytes(range(100))
    slot.tail[:10] = b"0123456789"
    trailer = TRAILER.SerializeToString()
    slot.tail[16 : 16 + len(trailer)] = trailer
    slot.stage(objects_bytes=10, trailer_bytes=len(trailer), staged_at=1.5)
    return slot


def killed_agent(shm_dir: Path, until: str) -> None:
    """Run an agent in a process of its own to the point `until`, then SIGKILL it."""
    trailer = TRAILER.SerializeToString().hex()
    command = [sys.executable, "-c", _AGENT, str(shm_dir), JOB, until, TIMELINE, trailer]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == until.encode()
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(DEADLINE_S)


class TestHeader:
    def test_page_gives_the_header_back(self) -> None:
        """A header survives its page, and the page is 4096 bytes."""
        header = SlotHeader(
            state=SlotState.STAGED,
            job=JOB,
            run_id="r",
            rank=3,
            timeline=TIMELINE,
            step=10**12 - 1,
            layout_digest=b"\0" * 32,
            plan_digest=b"\xff" * 32,
            data_bytes=64,
            tail_offset=8192,
            objects_bytes=9,
            trailer_bytes=7,
            staged_at=1.25,
        )
        page = slot_header.encode(header)
        assert len(page) == slot_header.HEADER_BYTES
        assert slot_header.decode(page) == header

    @given(old=st.integers(0, 2), cut=st.integers(0, 4096))
    def test_torn_page_is_the_old_one_the_new_one_or_none(self, old: int, cut: int) -> None:
        """However far a write of the page came, a reader never sees a third header."""
        before = SlotHeader(state=list(SlotState)[old], job=JOB, rank=0, step=1, data_bytes=0, tail_offset=4096)
        after = SlotHeader(state=SlotState.STAGED, job=JOB, rank=0, step=2, data_bytes=64, tail_offset=8192)
        page = slot_header.encode(after)[:cut] + slot_header.encode(before)[cut:]
        assert slot_header.decode(page) in {before, after, None}

    def test_unknown_version_and_foreign_pages_are_no_header(self) -> None:
        """Zeros, noise and short pages decode to None."""
        assert slot_header.decode(bytes(4096)) is None
        assert slot_header.decode(b"\xaa" * 4096) is None
        assert slot_header.decode(b"") is None

    def test_over_long_text_is_refused(self) -> None:
        """A run id that does not fit the page is an error, not a cut."""
        with pytest.raises(ValueError, match="do not fit"):
            slot_header.encode(
                SlotHeader(state=SlotState.FREE, job=JOB, run_id="r" * 5000, rank=0, data_bytes=0, tail_offset=4096)
            )


class TestStates:
    def test_staged_slot_gives_its_stream_and_trailer_back(self, pool: SlotPool) -> None:
        """Tensor part and objects are read by their place in the stream, the trailer as it was written."""
        slot = filled(pool)
        assert bytes(slot.stream(ChunkSpan(offset=3, length=4))) == bytes([3, 4, 5, 6])
        assert bytes(slot.stream(ChunkSpan(offset=128, length=10))) == b"0123456789"
        assert slot.trailer() == TRAILER
        begin, end = slot.file_range(ChunkSpan(offset=130, length=2))
        assert slot.path.read_bytes()[begin:end] == b"23"

    def test_stream_refuses_ranges_that_are_not_stored(self, pool: SlotPool) -> None:
        """A range across tensor part and objects, or beyond them, is an error."""
        slot = filled(pool)
        for offset, length in [(120, 20), (128, 11), (-1, 5), (4000, 1)]:
            with pytest.raises(ValueError, match="no bytes"):
                slot.stream(ChunkSpan(offset=offset, length=length))

    def test_staged_slot_takes_no_writes_until_it_is_free(self, pool: SlotPool) -> None:
        """Neither acquire, nor begin, nor write, nor a second stage gets at the bytes of a staged step."""
        slot = filled(pool)
        before = slot.path.read_bytes()
        with pytest.raises(ValueError, match="staged"):
            pool.acquire(0, 0, 128, 1000)
        with pytest.raises(ValueError, match="staged"):
            slot.begin(writing(slot), layout(100))
        with pytest.raises(ValueError, match="staged"):
            slot.write(DATA_OFFSET, b"x")
        with pytest.raises(ValueError, match="cannot be staged"):
            slot.stage(objects_bytes=0, trailer_bytes=0, staged_at=0)
        assert slot.path.read_bytes() == before
        slot.free()
        assert pool.acquire(0, 0, 128, 1000) is slot

    def test_streamed_bytes_never_reach_the_header_page(self, pool: SlotPool) -> None:
        """A trainer without shared memory writes behind the header page and inside the file only."""
        slot = pool.acquire(0, 0, 128, 1000)
        slot.begin(writing(slot), layout(100))
        slot.write(DATA_OFFSET, b"abc")
        assert bytes(slot.data[:3]) == b"abc"
        for offset in (0, DATA_OFFSET - 1, slot.nbytes - 1):
            with pytest.raises(ValueError, match="not the trainer's"):
                slot.write(offset, b"xy")

    def test_objects_that_do_not_fit_are_not_staged(self, pool: SlotPool) -> None:
        """A trainer that claims more tail than there is gets an error, and the slot stays WRITING."""
        slot = pool.acquire(0, 0, 128, 1000)
        slot.begin(writing(slot), layout(100))
        with pytest.raises(ValueError, match="do not fit"):
            slot.stage(objects_bytes=slot.tail_capacity, trailer_bytes=1, staged_at=0)
        assert slot.header.state is SlotState.WRITING

    def test_bad_trailer_names_rank_and_step(self, pool: SlotPool) -> None:
        """Bytes that are no trailer, and objects that lie outside the blob, are a format error."""
        slot = filled(pool)
        slot.tail[16:20] = b"\xff\xff\xff\xff"
        with pytest.raises(FormatError) as caught:
            slot.trailer()
        assert (caught.value.error.rank, caught.value.error.step) == (0, 5)
        bad = SlotTrailer(object_names=["x"], object_offset=[9], object_length=[2]).SerializeToString()
        slot.tail[16 : 16 + len(bad)] = bad
        slot.write_header(replace(slot.header, trailer_bytes=len(bad)))
        with pytest.raises(FormatError, match="beyond the objects"):
            slot.trailer()

    def test_padding_is_zero_after_every_change_of_layout(self, pool: SlotPool) -> None:
        """What an older layout wrote where the new one pads never gets into a chunk."""
        slot = pool.acquire(0, 0, 256, 1000)
        slot.begin(writing(slot), layout(256))
        slot.data[:] = b"\xee" * 256
        slot.stage(objects_bytes=0, trailer_bytes=0, staged_at=0)
        slot.free()
        slot = pool.acquire(0, 0, 256, 1000)
        slot.begin(writing(slot, layout_digest=b"M" * 32), layout(60, 1, 70))
        stored = bytes(slot.data)
        assert stored[60:64] + stored[65:128] + stored[198:] == bytes(4 + 63 + 58)

    def test_padding_is_cleared_again_after_a_failed_write(self, pool: SlotPool) -> None:
        """A slot freed while being written does not count as clean, even for the same layout."""
        slot = pool.acquire(0, 0, 64, 1000)
        slot.begin(writing(slot), layout(60))
        slot.data[:] = b"\xee" * 64
        slot.free()
        slot.begin(writing(slot), layout(60))
        assert bytes(slot.data[60:]) == bytes(4)


class TestZombies:
    def test_trainer_that_wakes_up_in_its_copy_writes_to_a_file_of_its_own(self, pool: SlotPool) -> None:
        """A slot taken from a process that was writing is never given to another one."""
        slot = pool.acquire(0, 0, 128, 1000, process="11:1")
        slot.begin(replace(writing(slot), process="11:1"), layout(100))
        path = slot.path
        slot.free()
        with path.open("r+b") as zombie:
            taken = pool.acquire(0, 0, 128, 1000, process="12:2")
            taken.begin(replace(writing(taken), process="12:2"), layout(100))
            taken.data[:] = bytes(128)
            zombie.seek(DATA_OFFSET)
            zombie.write(b"zombie")
        assert taken.path != path
        assert bytes(taken.data) == bytes(128)

    def test_trainer_that_asks_again_keeps_its_warm_slot(self, pool: SlotPool) -> None:
        """The process that was given up itself is not copying any more when it asks for the next step."""
        slot = pool.acquire(0, 0, 128, 1000, process="11:1")
        slot.begin(replace(writing(slot), process="11:1"), layout(100))
        slot.free()
        assert pool.acquire(0, 0, 64, 1000, process="11:1") is slot
        assert pool.acquire(0, 0, 64, 1000, process="12:2") is not slot

    def test_staged_slot_is_anybodys_once_it_is_free(self, pool: SlotPool) -> None:
        """Whoever said Staged has stopped writing."""
        slot = pool.acquire(0, 0, 128, 1000, process="11:1")
        slot.begin(replace(writing(slot), process="11:1"), layout(100))
        slot.stage(objects_bytes=0, trailer_bytes=0, staged_at=0)
        slot.free()
        assert pool.acquire(0, 0, 128, 1000, process="12:2") is slot

    def test_unknown_writer_counts_as_alive(self, pool: SlotPool) -> None:
        """Where nobody said which process writes, a slot given up in the midst is not used again."""
        slot = pool.acquire(0, 0, 128, 1000)
        slot.begin(writing(slot), layout(100))
        slot.free()
        assert pool.acquire(0, 0, 128, 1000) is not slot


class TestReuse:
    def test_slot_that_fits_is_the_same_file(self, pool: SlotPool) -> None:
        """Smaller, equal, and slightly larger tails reuse the file: its pages are warm."""
        slot = filled(pool)
        slot.free()
        again = pool.acquire(0, 0, 64, 1200)
        assert again is slot
        assert again.header.data_bytes == 64

    def test_slot_too_small_is_replaced_under_a_new_name(self, pool: SlotPool) -> None:
        """The old file is gone, and no path comes twice: a stale mapping cannot be written to by mistake."""
        slot = filled(pool)
        slot.free()
        old = slot.path
        new = pool.acquire(0, 0, 1 << 20, 1000)
        assert not old.exists()
        assert new.path != old
        assert len(pool.slots) == 1

    def test_files_are_private(self, pool: SlotPool, shm_dir: Path) -> None:
        """The folder is 0700 and a slot 0600; the name carries job and rank."""
        slot = pool.acquire(12, 1, 64, 64)
        assert shm_dir.stat().st_mode & 0o777 == 0o700
        assert slot.path.stat().st_mode & 0o777 == 0o600
        assert slot.path.name.startswith("abababababababab.r000012.s1.")

    def test_planted_folder_is_refused(self, tmp_path: Path) -> None:
        """A link in place of the folder is an error with a way out."""
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        with pytest.raises(DaemonError, match="CKPTD_SHM_DIR") as caught:
            SlotPool(tmp_path / "link", JOB)
        assert caught.value.error.reason == REASON_NOT_ALLOWED

    def test_full_shared_memory_is_an_error_with_both_numbers(self, pool: SlotPool, shm_dir: Path) -> None:
        """More than the file system holds raises NO_SPACE with free and needed bytes and leaves no file."""
        disk = os.statvfs(shm_dir)
        needed = disk.f_blocks * disk.f_frsize + (1 << 30)
        with pytest.raises(NoSpaceError, match=r"\d+ bytes needed, \d+ free") as caught:
            pool.acquire(0, 0, needed, 64)
        assert caught.value.error.reason == REASON_NO_SPACE
        assert list(shm_dir.iterdir()) == []
        assert pool.acquire(0, 0, 64, 64).nbytes > 64

    def test_memory_is_reserved_when_the_slot_is_made(self, pool: SlotPool) -> None:
        """No page is left to be found missing by the trainer's first write."""
        slot = pool.acquire(0, 0, 3 << 20, 64)
        assert slot.path.stat().st_blocks * 512 >= slot.nbytes

    def test_touching_changes_no_byte(self, pool: SlotPool) -> None:
        """Touching a free slot leaves what stands in it."""
        slot = pool.acquire(0, 0, 1 << 20, 64)
        slot.data[:3] = b"abc"
        slot.touch()
        assert bytes(slot.data[:4]) == b"abc\0"

    def test_begun_slot_is_not_touched_any_more(self, pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Once WRITING began, touching stops before its next slice."""
        slot = pool.acquire(0, 0, 1 << 20, 64)
        slot.begin(writing(slot), layout(1 << 20))
        touched: list[bool] = []
        monkeypatch.setattr(SharedFile, "touch", lambda _, stop: touched.append(stop.is_set()))
        slot.touch()
        assert touched == [True]


class TestAdoption:
    def test_killed_while_writing_is_torn(self, shm_dir: Path) -> None:
        """An agent killed between begin and Staged leaves a slot that the next one finds free, not staged."""
        killed_agent(shm_dir, "writing")
        pool = SlotPool(shm_dir, JOB, touch=False)
        assert pool.adopt() == []
        (slot,) = pool.slots
        assert slot.header.state is SlotState.FREE
        assert slot.header.layout_digest == b""
        assert pool.acquire(2, 1, 1 << 20, 1000).path != slot.path
        pool.close()

    def test_killed_inside_the_header_page_is_torn(self, shm_dir: Path) -> None:
        """A half-written page counts as WRITING: nothing of it is offered."""
        killed_agent(shm_dir, "torn-page")
        pool = SlotPool(shm_dir, JOB, touch=False)
        assert pool.adopt() == []
        assert [slot.header.state for slot in pool.slots] == [SlotState.FREE]
        pool.close()

    def test_killed_after_staging_is_adopted_whole(self, shm_dir: Path) -> None:
        """A staged slot of a killed agent is there with all its bytes, and still protected."""
        killed_agent(shm_dir, "staged")
        pool = SlotPool(shm_dir, JOB, touch=False)
        (slot,) = pool.adopt()
        header = slot.header
        assert (header.rank, header.step, header.timeline, header.run_id) == (2, 5, TIMELINE, "child")
        assert bytes(slot.data) == b"\x5a" * (1 << 20)
        assert bytes(slot.objects) == b"0123456789"
        assert slot.trailer() == TRAILER
        with pytest.raises(ValueError, match="staged"):
            pool.acquire(2, 1, 1 << 20, 1000)
        pool.close()

    def test_slots_of_a_living_agent_are_left_alone(self, pool: SlotPool, shm_dir: Path) -> None:
        """A second agent, started while the first lives, neither adopts nor deletes its slots."""
        slot = filled(pool)
        second = SlotPool(shm_dir, JOB, touch=False)
        assert second.adopt() == []
        assert free_orphans(shm_dir) == (0, 0)
        assert slot.path.exists()
        second.close()

    def test_other_jobs_and_other_files_are_left_alone(self, shm_dir: Path) -> None:
        """Adoption keeps to its own job's names."""
        other = SlotPool(shm_dir, OTHER_JOB, touch=False)
        filled(other)
        other.close()
        (shm_dir / "README").write_text("not a slot")
        (shm_dir / "abababababababab.rx.slot").write_text("not a slot either")
        mine = SlotPool(shm_dir, JOB, touch=False)
        assert mine.adopt() == []
        mine.close()
        assert len(list(shm_dir.iterdir())) == 3

    def test_what_nobody_can_finish_is_given_back(self, shm_dir: Path) -> None:
        """Torn slots, staged ones without the file that says of what, arenas and plans go; foreign files and spared jobs stay."""
        other = SlotPool(shm_dir, OTHER_JOB, touch=False)
        staged = filled(other)
        other.close()
        snapshot = shm_dir / f"{OTHER_JOB[:16]}.snapshot.{TIMELINE}.{staged.header.step:012d}.pb"
        plan = shm_dir / f"{OTHER_JOB[:16]}.plan.00.r0.pb"
        for path in (snapshot, plan, shm_dir / "README", shm_dir / f"probe-{'0' * 36}"):
            path.write_bytes(b"x")
        assert free_orphans(shm_dir) == (0, 0), "it can be finished"
        assert free_orphans(shm_dir, leave=[OTHER_JOB]) == (0, 0)
        snapshot.unlink()
        assert free_orphans(shm_dir, leave=[OTHER_JOB]) == (0, 0)
        count, nbytes = free_orphans(shm_dir)
        assert (count, nbytes > staged.header.data_bytes) == (2, True)
        assert sorted(path.name[:6] for path in shm_dir.iterdir()) == ["README", "probe-"]

    def test_unreadable_orphans_are_deleted_at_start(self, shm_dir: Path) -> None:
        """A file with no header page to read cannot be asked for by any job, and goes."""
        path = shm_dir / "0123456789abcdef.r000000.s0.00000000.slot"
        path.write_bytes(b"\1" * 8192)
        assert free_orphans(shm_dir) == (1, 8192)
        assert not path.exists()

    def test_two_files_for_one_slot_leave_the_newer(self, shm_dir: Path) -> None:
        """An agent killed while replacing a slot leaves two files: the staged one is kept."""
        first = SlotPool(shm_dir, JOB, touch=False)
        filled(first, step=5)
        first.close()
        second = SlotPool(shm_dir, JOB, touch=False)
        filled(second, step=6)
        second.close()
        third = SlotPool(shm_dir, JOB, touch=False)
        assert [slot.header.step for slot in third.adopt()] == [6]
        assert len(list(shm_dir.iterdir())) == 1
        third.close()

    def test_release_dead_keeps_what_counts(self, pool: SlotPool) -> None:
        """Slots of dead runs go unless their step still counts; those of living runs stay."""
        filled(pool, rank=0, step=5, run_id="dead")
        filled(pool, rank=1, step=6, run_id="dead")
        filled(pool, rank=2, step=7, run_id="alive")
        free = pool.acquire(3, 0, 64, 64)
        dropped = pool.release_dead({(TIMELINE, 6)}, {"alive"})
        assert [header.step for header in dropped] == [5]
        assert [slot.rank for slot in pool.slots] == [1, 2, 3]
        pool.release_dead({(TIMELINE, 6)})
        assert [slot.rank for slot in pool.slots] == [1]
        assert not free.path.exists()
