"""What a rank copies from stays what its agent verified, whatever becomes of the agent, the attempt and the run meanwhile."""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_agent import FakeAgent
from fixtures.node_restores import chosen, node_restore

from ckptd.client.errors import Aborted, from_wire
from ckptd.client.link import SessionLostError
from ckptd.client.restored_files import SharedFiles, StreamedFiles
from ckptd.daemon.arena import Arena
from ckptd.daemon.chunks import ChunkSpan, StreamLayout
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.orphans import free_orphans
from ckptd.daemon.restore_attempt import Attempt
from ckptd.daemon.restores import NodeRestore
from ckptd.daemon.shared_files import SharedFile
from ckptd.daemon.slots import DATA_OFFSET, SlotFile, SlotPool, SlotState
from ckptd.protos.agent_pb2 import ReadRestoredRequest, SlotBytes
from ckptd.protos.coordinator_pb2 import CoordinatorMessage
from ckptd.protos.error_pb2 import REASON_RANK_FAILED, Error
from ckptd.storage_backends import file_locks

__all__ = ["fake_agent", "make"]

JOB = "ab" * 32
NBYTES = 1 << 20
NONE = np.zeros(0, dtype=np.int64)
LAYOUT = StreamLayout(
    offsets=[0],
    data_bytes=NBYTES,
    chunks=[ChunkSpan(offset=0, length=NBYTES)],
    padding_starts=NONE,
    padding_lengths=NONE,
)


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ckptd-test-reading-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield folder
    shutil.rmtree(folder)


def filled(arena: Arena, byte: int) -> Path:
    """Return a file that a fetch has brought."""
    with arena.writing(NBYTES) as file:
        file.view[:] = bytes([byte]) * len(file.view)
    return file.path


class Rank:
    """A rank that has copied the first half of a file."""

    def __init__(self, path: Path, byte: int, *, at: int = 0, head: bytes = b"") -> None:
        self._byte = byte
        self.files = SharedFiles({str(path): head})
        self._bytes = self.files.read(str(path), at, NBYTES)
        assert self._is_right(self._bytes[: NBYTES // 2])

    def _is_right(self, part: torch.Tensor) -> bool:
        return bool((part == self._byte).all())

    def copies_the_rest(self) -> bool:
        """Say whether the second half is right, too."""
        return self._is_right(self._bytes[NBYTES // 2 :])


# ---------------------------------------------------------------- files of restores


def dead(arena: Arena) -> None:
    """Leave what a killed agent leaves: its files, and no lock."""
    for file in arena._files.values():
        file.close()


@pytest.mark.parametrize("ends", [lambda folder: Arena(folder, JOB), free_orphans], ids=["its job's", "any"])
def test_the_next_agent_takes_nothing_away_from_a_rank_that_copies(shm_dir: Path, ends: Callable[[Path], Any]) -> None:
    """The agent is killed while a rank copies, and another one cleans up: the name goes, the bytes stay."""
    arena = Arena(shm_dir, JOB)
    rank = Rank(filled(arena, 7), 7)
    dead(arena)
    ends(shm_dir)
    assert list(shm_dir.iterdir()) == []
    assert rank.copies_the_rest()


def test_two_runs_of_a_job_on_one_node_do_not_share_a_file(shm_dir: Path) -> None:
    """A trainer restores one step while an evaluator reads another one: neither changes, nor takes away, the other's bytes."""
    arena = Arena(shm_dir, JOB)
    trains = filled(arena, 1)
    trainer = Rank(trains, 1)
    evaluator = Rank(filled(arena, 2), 2)
    arena.release(trains)
    assert trainer.copies_the_rest()
    assert evaluator.copies_the_rest()
    arena.close()
    assert evaluator.copies_the_rest()
    assert list(shm_dir.iterdir()) == []


def offered(restores: NodeRestore) -> Attempt:
    """Let the coordinator offer a step, and return the attempt."""
    restores.on_message(chosen(1))
    assert restores._attempt is not None
    return restores._attempt


def ready(attempt: Attempt, path: Path) -> None:
    """Fetch the attempt's bytes: they stand there."""
    plan: Any = SimpleNamespace(arena_file=path, bytes_by_tier={}, arena_bytes=NBYTES, window_bytes=0)
    attempt.fetching = attempt.ready = True
    attempt.plan = plan


def believed_dead(restores: NodeRestore) -> None:
    restores._link.ranks[0].attached = False
    restores._link.live_ranks = []  # type: ignore[misc]
    restores.rank_gone(0)


ENDS: dict[str, Callable[[NodeRestore], None]] = {
    "the coordinator's agent is another process": lambda restores: restores.coordinator_restarted(),
    "the agent ends": lambda restores: restores.close(),
    "another step is offered": lambda restores: restores.on_message(chosen(2)),
    "the restore fails elsewhere": lambda restores: restores.on_message(
        CoordinatorMessage(restore_error=CoordinatorMessage.RestoreError(attempt=1, error=Error(message="x")))
    ),
    "the rank is believed dead": believed_dead,
    "all are done": lambda restores: restores.done(restores._link.ranks[0], 1, None),
}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
def test_the_end_of_an_attempt_takes_nothing_away_from_a_rank_that_copies(
    shm_dir: Path, ends: Callable[[NodeRestore], None]
) -> None:
    """Whyever the agent lets go of a restore: its file's name goes, and who has it mapped reads what was verified."""

    async def play() -> None:
        arena = Arena(shm_dir, JOB)
        restores, _ = node_restore(arena=arena)
        path = filled(arena, 7)
        ready(offered(restores), path)
        rank = Rank(path, 7)
        ends(restores)
        assert not path.exists()
        assert rank.copies_the_rest()

    asyncio.run(play())


def test_a_fetch_that_ends_late_gives_back_its_own_file_alone(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run was killed and started anew: the next run's rank copies what that run's fetch brought."""

    async def play() -> None:
        arena = Arena(shm_dir, JOB)
        gate, entered = asyncio.Event(), asyncio.Event()
        old, _ = node_restore(arena=arena)
        attempt = offered(old)
        attempt.loaded.set_result(SimpleNamespace())  # type: ignore[arg-type]
        attempt.fetching = True
        late: list[Path] = []

        async def fetch(*_: object) -> Any:
            entered.set()
            await gate.wait()
            late.append(filled(arena, 3))
            return SimpleNamespace(arena_file=late[0])

        monkeypatch.setattr(Attempt, "fetch", fetch)
        fetching = asyncio.create_task(old._fetch(attempt))
        await entered.wait()
        believed_dead(old)
        mine = filled(arena, 9)
        rank = Rank(mine, 9)
        gate.set()
        await fetching
        assert not late[0].exists()
        assert mine.exists()
        assert rank.copies_the_rest()
        arena.close()

    asyncio.run(play())


def test_a_file_that_is_gone_before_it_was_opened_is_asked_for_again(shm_dir: Path) -> None:
    """The agent gave the attempt up, or died, between naming the file and its opening: no restore, and none that failed."""
    arena = Arena(shm_dir, JOB)
    path = filled(arena, 7)
    arena.close()
    with pytest.raises(SessionLostError, match="is gone"):
        SharedFiles({}).read(str(path), 0, NBYTES)


# ---------------------------------------------------------------- streamed


class Streaming:
    """A rank that cannot map the node's files: asks the agent's part in restoring for bytes, with its errors as they arrive."""

    def __init__(self, restores: NodeRestore) -> None:
        self._restores = restores
        self.files = StreamedFiles(self._answer, "session")

    def _answer(self, request: ReadRestoredRequest) -> Iterator[SlotBytes]:
        try:
            data = self._restores.readable(request.file, request.offset, request.nbytes)
        except DaemonError as error:
            raise from_wire(error.error) from error
        yield SlotBytes(offset=request.offset, data=bytes(data))


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
def test_a_rank_that_streams_asks_again_when_the_agent_has_let_go_of_the_restore(
    shm_dir: Path, ends: Callable[[NodeRestore], None]
) -> None:
    """It cannot hold on to the file as one that maps it does: its first half is right, and no error ends its restore."""

    async def play() -> None:
        arena = Arena(shm_dir, JOB)
        restores, _ = node_restore(arena=arena)
        path = filled(arena, 7)
        attempt = offered(restores)
        ready(attempt, path)
        attempt.plan.files = frozenset([path])  # type: ignore[union-attr, misc]
        files = Streaming(restores).files
        assert bool((files.read(str(path), 0, NBYTES // 2) == 7).all())
        ends(restores)
        with pytest.raises(SessionLostError, match="no part of the restore any more"):
            files.read(str(path), NBYTES // 2, NBYTES // 2)

    asyncio.run(play())


def test_a_streamed_file_that_is_gone_is_asked_for_again(shm_dir: Path) -> None:
    """Somebody has removed it while the attempt goes on."""

    async def play() -> None:
        restores, _ = node_restore(arena=Arena(shm_dir, JOB))
        attempt = offered(restores)
        ready(attempt, shm_dir / "none")
        attempt.plan.files = frozenset([shm_dir / "none"])  # type: ignore[union-attr, misc]
        with pytest.raises(SessionLostError):
            Streaming(restores).files.read(str(shm_dir / "none"), 0, 1)

    asyncio.run(play())


def test_what_else_an_agent_says_of_a_streamed_file_is_an_error() -> None:
    """Only where it has let go of the restore does it help to ask again."""

    def refused(_: ReadRestoredRequest) -> Iterator[SlotBytes]:
        raise from_wire(Error(reason=REASON_RANK_FAILED, message="x"))

    with pytest.raises(Aborted, match="x"):
        StreamedFiles(refused, "session").read("file", 0, 1)


@pytest.mark.parametrize("times", [1, 2])
def test_a_restore_whose_stream_was_given_up_begins_again(make: Make, fake_agent: FakeAgent, times: int) -> None:
    """Training goes on from the step, as it does where shared memory is."""
    checkpointer = make(transport="stream")
    saved = torch.arange(1000)
    checkpointer.save(1, {"tensor": saved, "object": "text"}).wait()
    fake_agent.given_up = times
    live: dict[str, Any] = {"tensor": torch.zeros(1000, dtype=torch.int64), "object": ""}
    restored = checkpointer.restore_into(live)
    assert restored is not None
    assert torch.equal(live["tensor"], saved)
    assert live["object"] == "text"
    assert fake_agent.given_up == 0
    assert fake_agent.calls.count("Restore") == 1 + times
    assert [done.error.message for done in fake_agent.done] == [""]


# ---------------------------------------------------------------- slots


def staged(pool: SlotPool, byte: int, step: int) -> SlotFile:
    """Return a slot of rank 0 that holds a step."""
    slot = pool.acquire(0, 0, NBYTES, 100)
    slot.begin(
        replace(
            slot.header,
            state=SlotState.WRITING,
            run_id="run",
            timeline="00000001-0123456789ab",
            step=step,
            layout_digest=b"L" * 32,
            plan_digest=b"P" * 32,
        ),
        LAYOUT,
    )
    slot.data[:] = bytes([byte]) * NBYTES
    slot.stage(objects_bytes=0, trailer_bytes=0, staged_at=1.0)
    return slot


def reading(slot: SlotFile, byte: int) -> Rank:
    return Rank(slot.path, byte, at=DATA_OFFSET, head=slot.head)


def test_a_slot_that_is_read_is_given_to_nobody_until_the_reader_is_done(shm_dir: Path) -> None:
    """Its agent was restarted and knows of no reader: the next save gets another file. Later ones use one file again."""
    first = SlotPool(shm_dir, JOB, touch=False)
    rank = reading(staged(first, 7, 5), 7)
    first.close()
    pool = SlotPool(shm_dir, JOB, touch=False)
    (slot,) = pool.adopt()
    slot.free()
    other = staged(pool, 8, 6)
    assert other.path != slot.path
    assert rank.copies_the_rest()
    late = reading(other, 8)
    assert late.copies_the_rest()
    late.files.close()
    other.free()
    assert staged(pool, 9, 7).path == other.path
    for left in pool.slots:
        left.unlink()


def test_a_slot_that_is_deleted_keeps_its_bytes_for_its_reader(shm_dir: Path) -> None:
    """Memory is given back at once but for what somebody copies from."""
    pool = SlotPool(shm_dir, JOB, touch=False)
    rank = reading(staged(pool, 7, 5), 7)
    pool.release_dead(keep=())
    assert list(shm_dir.iterdir()) == []
    assert rank.copies_the_rest()


def orphan(pool: SlotPool) -> Callable[[], Any]:
    """The agent is dead, nothing says what its slot holds, and another agent cleans up."""
    folder = pool.slots[0].path.parent
    pool.close()
    return lambda: free_orphans(folder)


def of_a_dead_run(pool: SlotPool) -> Callable[[], Any]:
    """Nobody needs the step any more."""
    return lambda: pool.release_dead(keep=())


def of_an_older_file(pool: SlotPool) -> Callable[[], Any]:
    """The agent died between making a replacement and deleting the old one."""
    folder = pool.slots[0].path.parent
    pool.close()
    second = SlotPool(folder, JOB, touch=False)
    staged(second, 8, 6)
    second.close()
    third = SlotPool(folder, JOB, touch=False)
    return lambda: (third.adopt(), third.release_dead(keep=()))


@pytest.mark.skipif(not hasattr(fcntl, "F_OFD_GETLK"), reason="this system has no such locks")
@pytest.mark.parametrize("deleted", [orphan, of_a_dead_run, of_an_older_file])
def test_a_slot_is_free_before_its_readers_are_looked_for(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch, deleted: Callable[[SlotPool], Callable[[], Any]]
) -> None:
    """A rank has opened it, and says that it reads it when the agent has just looked: it must see that it comes too late."""
    pool = SlotPool(shm_dir, JOB, touch=False)
    slot = staged(pool, 7, 5)
    path, head = str(slot.path), slot.head
    delete = deleted(pool)
    opened, looked, compared = threading.Event(), threading.Event(), threading.Event()
    is_read, share = SharedFile.is_read, file_locks.share

    def looks(file: SharedFile) -> bool:
        found = is_read(file)
        if str(file.path) == path:
            looked.set()
            assert compared.wait(60)
        return found

    def says(handle: int) -> bool:
        opened.set()
        assert looked.wait(60)
        return share(handle)

    monkeypatch.setattr(SharedFile, "is_read", looks)
    monkeypatch.setattr(file_locks, "share", says)
    files = SharedFiles({path: head})
    with ThreadPoolExecutor(1) as threads:

        def reads() -> torch.Tensor | None:
            try:
                return files.read(path, DATA_OFFSET, NBYTES)
            except SessionLostError:
                return None
            finally:
                compared.set()

        reader = threads.submit(reads)
        assert opened.wait(60)
        delete()
        assert looked.is_set()
        found = reader.result(60)
    assert found is None or bool((found == 7).all())
    files.close()


@pytest.mark.parametrize("holds", ["free", "another step"])
def test_a_slot_that_holds_something_else_by_now_is_not_copied(shm_dir: Path, holds: str) -> None:
    """It was given away between the agent's answer and the rank's opening it: the rank asks again."""
    pool = SlotPool(shm_dir, JOB, touch=False)
    slot = staged(pool, 7, 5)
    head = slot.head
    slot.free()
    if holds == "another step":
        assert staged(pool, 8, 6).path == slot.path
    files = SharedFiles({str(slot.path): head})
    with pytest.raises(SessionLostError, match="holds another step"):
        files.read(str(slot.path), DATA_OFFSET, NBYTES)
    files.close()
    for left in pool.slots:
        left.unlink()


def test_a_reader_that_died_is_none(shm_dir: Path) -> None:
    """The kernel takes the word back with the open file: a closed one keeps no slot from being used."""
    pool = SlotPool(shm_dir, JOB, touch=False)
    slot = staged(pool, 7, 5)
    rank = reading(slot, 7)
    assert slot.is_read()
    rank.files.close()
    assert not slot.is_read()
    slot.unlink()
