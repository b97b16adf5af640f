"""Replicas that are fingerprinted where they lie, on real agents: equal ones commit and verify, one odd bit ends the step.

Tensors lie on the host here and take the way of tensors on a GPU: the same torch operations, the same columns, the same word.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.agents import AgentProcess, running_agents
from fixtures.client_job import ClientJob
from fixtures.stored_root import latest, unproved

from ckptd.client import Checkpointer, Sharded, hash_in_place, saving, segment_kernel, staging
from ckptd.client.errors import CkptdError
from ckptd.daemon import index, log_reader
from ckptd.daemon.verify import Verdict, verify_step
from ckptd.protos import segmented
from ckptd.protos.snapshot_pb2 import IndexHeader, RankSection
from ckptd.storage_backends.local import LocalStore

pytestmark = pytest.mark.integration

COUNTS = {torch.uint8: 100_003, torch.bfloat16: 70_001, torch.float32: 40_000, torch.complex128: 9_000, torch.bool: 3}


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[AgentProcess]]:
    """Two agents for all tests of this module."""
    with running_agents() as agents:
        yield [agents.new(), agents.new()]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts, by the rank's thread, the tensors that are hashed in place."""
    seen: dict[str, int] = {}
    real = hash_in_place.fingerprints

    def fingerprints(tensors: Any) -> list[bytes]:
        rank = threading.current_thread().name.partition("_")[0]
        seen[rank] = seen.get(rank, 0) + len(tensors)
        return real(tensors)

    monkeypatch.setattr(hash_in_place, "fingerprints", fingerprints)
    return seen


def on_rank(rank: int) -> bool:
    """Say whether this is the thread of a rank."""
    return threading.current_thread().name.startswith(f"rank{rank}_")


def replicas(step: int) -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes, of several segments, in and out of order."""
    made = {}
    for dtype, count in COUNTS.items():
        data = (torch.arange(count * dtype.itemsize) * 31 + step).to(torch.uint8)
        made[str(dtype)] = (data & 1).view(dtype) if dtype is torch.bool else data.view(dtype)
    made["turned"] = made["torch.float32"].reshape(200, 200).t()
    made["spread"] = torch.tensor([float(step), 2.0]).expand(20_000, 2)
    made["last"] = made["torch.float32"].reshape(1, 4, 100, 100).contiguous(memory_format=torch.channels_last)
    made["scalar"], made["nothing"] = torch.tensor(step), torch.empty(0)
    return made


def shared(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the tensors declared as replicas."""
    return {"r": {name: Sharded(tensor, tensor.shape, (0,) * tensor.ndim) for name, tensor in tensors.items()}}


def with_another_bit(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, its elements in the same order in memory, with another last bit."""
    made = tensor.clone()
    data = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())
    data[-1] ^= 1
    return made


def bits(tensor: torch.Tensor) -> bytes:
    """Return the plain bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def restored(ckpt: Checkpointer) -> dict[str, torch.Tensor]:
    """Return the replicas as a rank gets the newest step back."""
    made = replicas(0)
    ckpt.restore_into(shared(made))
    return made


def failed(ckpt: Checkpointer, step: int, state: dict[str, Any]) -> CkptdError:
    """Return how a save failed."""
    with pytest.raises(CkptdError) as caught:
        ckpt.save(step, state).wait(timeout=120)
    return caught.value


def indexes_of(root: Path, step: int) -> list[tuple[IndexHeader, dict[int, RankSection]]]:
    """Return the indexes of a listed step, which must verify."""
    store = LocalStore(root)
    _, newest = log_reader.read_newest(store)
    assert newest is not None
    ref = next(ref for ref in newest.listed if ref.step == step)
    report = verify_step(store, newest, ref)
    assert report.verdict is Verdict.GOOD, report.bad
    return [
        index.load_index(one, store.get(one.key))[1:] for one in log_reader.read_committed(store, newest, ref).indexes
    ]


@pytest.mark.parametrize("transport", ["shm", "stream"])
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (1,)], ids=["on every rank", "on one of four"])
def test_replicas_are_compared_where_they_lie(
    nodes: list[AgentProcess], tmp_path: Path, hashed: dict[str, int], ranks: tuple[int, ...], transport: str
) -> None:
    """Whoever holds them on a device and whoever on the host: they commit, verify, restore, and one bit ends the step.

    What the odd rank is told of does not depend on where it, the others, or the writer hold theirs.
    """
    root = f"file://{tmp_path}/root"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "lies_in_place", lambda _: lambda _: any(on_rank(rank) for rank in ranks))
        job = ClientJob(root, nodes, 2, transport=transport)
    with job:
        job.wait(job.each(lambda ckpt: ckpt.save(1, shared(replicas(1)))))
        assert set(hashed) == {f"rank{rank}" for rank in ranks}
        names = ["torch.uint8", "turned", "last", "torch.bool"]
        for step, (name, odd) in enumerate(zip(names, itertools.cycle((1, 3, 0, 2)), strict=False), 2):

            def state(rank: int, step: int = step, name: str = name, odd: int = odd) -> dict[str, Any]:
                held = replicas(step)
                if rank == odd:
                    held[name] = with_another_bit(held[name])
                return shared(held)

            errors = job.each(lambda ckpt: failed(ckpt, step, state(ckpt.rank)))  # noqa: B023
            assert {error.reason_name for error in errors} == {"REPLICAS_DIFFER"}
            for error in errors:
                assert f"'r/{name}'" in error.message
                assert f"ranks [{odd}]" in error.message
            job.each(restored)
        last = len(names) + 2
        job.wait(job.each(lambda ckpt: ckpt.save(last, shared(replicas(last)))))
        for found in job.each(restored):
            assert [name for name, tensor in replicas(last).items() if bits(tensor) != bits(found[name])] == []
    assert latest(root) == last
    assert unproved(root) == []
    for step in (1, last):
        for header, sections in indexes_of(tmp_path / "root", step):
            assert header.segmented_algorithm == segmented.ALGORITHM
            assert len(sections) == 2


def test_nobody_asks_for_it_on_cpus(nodes: list[AgentProcess], tmp_path: Path, hashed: dict[str, int]) -> None:
    """With the default setting, and with `host`: the index needs nothing of its readers that it did not need before."""
    for number, where in enumerate(("auto", "host")):
        with ClientJob(f"file://{tmp_path}/{number}", nodes, 1, hash_replicas=where) as job:
            job.wait(job.each(lambda ckpt: ckpt.save(1, shared(replicas(1)))))
        for header, sections in indexes_of(tmp_path / str(number), 1):
            assert not header.required_features
            assert not header.segmented_algorithm
            assert not any(section.segmented_fingerprints for section in sections.values())
    assert not hashed


def test_steps_that_are_not_compared_hash_nothing(
    nodes: list[AgentProcess], tmp_path: Path, hashed: dict[str, int]
) -> None:
    """`every:2`: with the column, without any, with it again; all of them verify."""
    root = tmp_path / "root"
    with ClientJob(f"file://{root}", nodes, 1, hash_replicas="in-place", verify_replicas="every:2") as job:
        counts = []
        for step in (1, 2, 3):
            hashed.clear()
            job.wait(job.each(lambda ckpt: ckpt.save(step, shared(replicas(step)))))  # noqa: B023
            counts.append(sum(hashed.values()))
    assert [bool(count) for count in counts] == [True, False, True]
    names = [{header.segmented_algorithm for header, _ in indexes_of(root, step)} for step in (1, 2, 3)]
    assert names == [{segmented.ALGORITHM}, {""}, {segmented.ALGORITHM}]


def test_an_agent_that_restarts_keeps_the_word(tmp_path: Path, hashed: dict[str, int]) -> None:
    """It dies before its index; the next one finds trailer and word, seals the column, and the next run adopts the step."""
    root = tmp_path / "root"
    with running_agents() as agents:
        both = [agents.new(start=False), agents.new()]
        both[0].start(env={"CKPTD_FAILPOINTS": "uploader.before_index=kill@1"})
        job = ClientJob(f"file://{root}", both, 1, hash_replicas="in-place")
        job.each(lambda ckpt: ckpt.save(1, shared(replicas(1))))
        assert both[0].process is not None
        assert both[0].process.wait(timeout=120) == -9, "the failpoint must have fired"
        assert sum(hashed.values())
        job.die()
        both[0].start()
        both[0].wait_event("sealed-local", step=1)
        with ClientJob(f"file://{root}", both, 1) as again:
            for found in again.each(restored):
                assert bits(found["turned"]) == bits(replicas(1)["turned"])
    assert {header.segmented_algorithm for header, _ in indexes_of(root, 1)} == {segmented.ALGORITHM}


def _nothing_is_hashed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(segment_kernel, "block_sums", lambda _, into: into.zero_())


def _one_block_is_left_out(patch: pytest.MonkeyPatch) -> None:
    real = segment_kernel.block_sums

    def block_sums(words: torch.Tensor, into: torch.Tensor) -> None:
        real(words, into)
        into[:, 7] = 0

    patch.setattr(segment_kernel, "block_sums", block_sums)


def _the_tail_is_left_out(patch: pytest.MonkeyPatch) -> None:
    real = hash_in_place._Batches._add_tail
    patch.setattr(
        hash_in_place._Batches, "_add_tail", lambda self, number, tail: real(self, number, torch.zeros_like(tail))
    )


def _another_tensor_is_hashed(patch: pytest.MonkeyPatch) -> None:
    real = hash_in_place.fingerprints
    patch.setattr(hash_in_place, "fingerprints", lambda tensors: real([tensor * 0 for tensor in tensors]))


def _the_column_is_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(staging.Fingerprints, "result", lambda _: b"")


def _the_column_is_zeros(patch: pytest.MonkeyPatch) -> None:
    real = staging.Fingerprints.result
    patch.setattr(staging.Fingerprints, "result", lambda self: bytes(len(real(self))))


def _the_word_is_not_heard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(saving, "_known", lambda _: "")


BUGS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "nothing is hashed": (_nothing_is_hashed, "'r/.*replicas differ"),
    "one block is left out": (_one_block_is_left_out, "'r/.*replicas differ"),
    "the tail is left out": (_the_tail_is_left_out, "'r/.*replicas differ"),
    "another tensor is hashed": (_another_tensor_is_hashed, "'r/.*replicas differ"),
    "the column is left out": (_the_column_is_left_out, "trailer .* its columns do not fit"),
    "the column is zeros": (_the_column_is_zeros, "second column of fingerprints has zeros"),
    "the word is not heard": (_the_word_is_not_heard, "gave fingerprints by xxh3-128, not those by xxh3-128/32k"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_on_the_way_commits_nothing(
    nodes: list[AgentProcess], tmp_path: Path, hashed: dict[str, int], bug: str
) -> None:
    """Though it is the same on all ranks: what a replica hashed is held against what the writer's agent has in its slot."""
    root, (plant, text) = f"file://{tmp_path}/root", BUGS[bug]
    with ClientJob(root, nodes, 1, hash_replicas="in-place") as job:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            errors = job.each(lambda ckpt: failed(ckpt, 1, shared(replicas(1))))
        assert any(re.search(text, error.message) for error in errors), errors
        assert latest(root) is None
        job.each(lambda ckpt: ckpt.restore())
        job.wait(job.each(lambda ckpt: ckpt.save(2, shared(replicas(2)))))
    assert latest(root) == 2
