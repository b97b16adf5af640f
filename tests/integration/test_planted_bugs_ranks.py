"""Bugs planted on one of four ranks, on real agents: the step is refused on all of them, with tensor and ranks."""

from __future__ import annotations

import functools
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
from torch import nn

from ckptd.client import Checkpointer, PerRank, Sharded, sharding, staging
from ckptd.client.copying import Copier
from ckptd.client.errors import CkptdError
from ckptd.client.placements import LocalBox
from ckptd.client.state import Collector

pytestmark = pytest.mark.integration

SIZES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64, 16: torch.complex128}
"""Bytes of an element, and a dtype of that size."""
ROWS, COLUMNS = 8, 6


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[AgentProcess]]:
    """Two agents for all tests of this module."""
    with running_agents() as agents:
        yield [agents.new(), agents.new()]


def failed(ckpt: Checkpointer, step: int, state: dict[str, Any]) -> CkptdError:
    """Return how a save failed."""
    with pytest.raises(CkptdError) as caught:
        ckpt.save(step, state).wait(timeout=30)
    return caught.value


def refused(job: ClientJob, step: int, state: Callable[[int], dict[str, Any]]) -> CkptdError:
    """Save on all ranks, which must all hear of one reason; return it."""
    errors = job.each(lambda ckpt: failed(ckpt, step, state(ckpt.rank)))
    assert len({error.reason for error in errors}) == 1, errors
    return errors[0]


def replicas() -> dict[str, torch.Tensor]:
    """Return tensors of every element size: one element, a few, and many."""
    made = {}
    for nbytes, dtype in SIZES.items():
        for count in (1, 7, 70_001):
            made[f"{nbytes}.{count}"] = torch.arange(count * nbytes, dtype=torch.int32).to(torch.uint8).view(dtype)
    return made


def shared(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the tensors declared as replicas."""
    return {"r": {name: Sharded(tensor, tensor.shape, (0,)) for name, tensor in tensors.items()}}


PLACES: dict[str, Callable[[torch.Tensor], tuple[int, int]]] = {
    "first bit of the first element": lambda _: (0, 1),
    "last bit of the last element": lambda flat: (flat.numel() - 1, 128),
    "a bit in the middle": lambda flat: (flat.numel() // 2, 16),
}


@pytest.mark.parametrize("transport", ["shm", "stream"])
def test_one_bit_of_one_replica_is_enough(nodes: list[AgentProcess], tmp_path: Path, transport: str) -> None:
    """In tensors of every element size, small and large, at both ends: each is seen, and named with the odd rank."""
    root = f"file://{tmp_path}/root"
    cases = list(itertools.product(replicas(), PLACES.values()))
    with ClientJob(root, nodes, 2, transport=transport) as job:
        for step, (name, place) in enumerate(cases, 1):
            rank = step % 4
            odd = replicas()
            flat = odd[name].view(torch.uint8)
            at, bit = place(flat)
            flat[at] ^= bit
            error = refused(job, step, functools.partial(_held, {rank: odd}))
            assert error.reason_name == "REPLICAS_DIFFER"
            assert f"'r/{name}'" in error.message
            assert f"ranks [{rank}]" in error.message
            job.each(lambda ckpt: ckpt.restore())
        assert latest(root) is None
        last = len(cases) + 1
        job.wait(job.each(lambda ckpt: ckpt.save(last, shared(replicas()))))
    assert latest(root) == last


def _held(odd: dict[int, dict[str, torch.Tensor]], rank: int) -> dict[str, Any]:
    return shared(odd.get(rank) or replicas())


def quarter(rank: int) -> Sharded:
    """Return a quarter of the rows."""
    whole = torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)
    return Sharded(whole[2 * rank : 2 * rank + 2], (ROWS, COLUMNS), (2 * rank, 0))


def declared(wrong: Callable[[], object], rank: int) -> dict[str, Any]:
    """Return quarters, of which rank 1 declares another one, or none."""
    held = wrong() if rank == 1 else quarter(rank)
    return {"part": {"w": held} if held is not None else {}, "fine": PerRank(torch.ones(rank + 1))}


DECLARED: dict[str, tuple[Callable[[], object], str]] = {
    "shifted down": (lambda: Sharded(quarter(1).tensor, (ROWS, COLUMNS), (3, 0)), "overlap"),
    "shifted up": (lambda: Sharded(quarter(1).tensor, (ROWS, COLUMNS), (1, 0)), "overlap"),
    "a row too many": (lambda: Sharded(torch.ones(3, COLUMNS), (ROWS, COLUMNS), (2, 0)), "overlap"),
    "a row too few": (
        lambda: Sharded(torch.ones(1, COLUMNS), (ROWS, COLUMNS), (2, 0)),
        "6 elements are held by no rank",
    ),
    "a column too few": (
        lambda: Sharded(torch.ones(2, COLUMNS - 1), (ROWS, COLUMNS), (2, 0)),
        "2 elements are held by no rank",
    ),
    "nothing": (lambda: None, "12 elements are held by no rank"),
    "the box of another": (lambda: quarter(2), "12 elements are held by no rank"),
    "another whole": (lambda: Sharded(quarter(1).tensor, (ROWS + 1, COLUMNS), (2, 0)), r"\(9, 6\) on rank 1"),
    "another dtype": (lambda: Sharded(quarter(1).tensor.double(), (ROWS, COLUMNS), (2, 0)), "float64 .* on rank 1"),
    "a rank's own": (
        lambda: PerRank(quarter(1)),
        "12 elements are held by no rank",
    ),
}


def test_a_declaration_with_a_hole_or_an_overlap_is_refused(nodes: list[AgentProcess], tmp_path: Path) -> None:
    """Before anything is copied: by tensor, elements and ranks, on all ranks; the next save with right ones works."""
    root = f"file://{tmp_path}/root"
    with ClientJob(root, nodes, 2) as job:
        for step, (wrong, text) in enumerate(DECLARED.values(), 1):
            error = refused(job, step, functools.partial(declared, wrong))
            assert error.reason_name in {"COVERAGE", "LAYOUT_MISMATCH"}, error
            assert "'part/w'" in error.message
            assert re.search(text, error.message), error.message
        assert not (tmp_path / "root" / "chunks").exists() or not list((tmp_path / "root" / "chunks").rglob("*.*"))
        last = len(DECLARED) + 1
        job.wait(job.each(lambda ckpt: ckpt.save(last, declared(lambda: quarter(1), ckpt.rank))))
    assert latest(root) == last
    assert unproved(root) == []


def on_rank(rank: int) -> bool:
    """Say whether this is the thread of a rank."""
    return threading.current_thread().name.startswith(f"rank{rank}_")


def _a_box_that_is_shifted(patch: pytest.MonkeyPatch) -> None:
    real = sharding._one

    def one(offset: tuple[int, ...], length: tuple[int, ...]) -> tuple[LocalBox, ...]:
        return real((offset[0] - 1, *offset[1:]), length) if on_rank(1) and offset[0] else real(offset, length)

    patch.setattr(sharding, "_one", one)


def _a_box_that_is_left_out(patch: pytest.MonkeyPatch) -> None:
    real = sharding._one
    patch.setattr(sharding, "_one", lambda *box: () if on_rank(1) and box[0][0] else real(*box))


def _fingerprints_that_are_constant(patch: pytest.MonkeyPatch) -> None:
    real = staging.Fingerprints.result
    patch.setattr(staging.Fingerprints, "result", lambda self: bytes(len(real(self))))


def _fingerprints_of_other_tensors(patch: pytest.MonkeyPatch) -> None:
    real = staging.Fingerprints
    patch.setattr(
        staging,
        "Fingerprints",
        lambda tensors, *more, **named: real([tensor * 0 for tensor in tensors], *more, **named),
    )


def _fingerprints_that_are_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(staging.Fingerprints, "result", lambda _: b"")


def _replicas_that_nobody_names(patch: pytest.MonkeyPatch) -> None:
    real = staging.Capture.copy_into

    def copy_into(self: Any, slot: Any, plan: staging.SlotPlan, copier: Copier, **more: Any) -> Any:
        made = staging.SlotPlan(digest=plan.digest, written=plan.written, offsets=plan.offsets, replicas=())
        return real(self, slot, made, copier, **more)

    patch.setattr(staging.Capture, "copy_into", copy_into)


def _a_declaration_that_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Collector, "scope_of", lambda _self, _name, _leaf, default: default)


def _a_declaration_that_one_rank_forgets(patch: pytest.MonkeyPatch) -> None:
    real = Collector.scope_of

    def scope_of(self: Collector, name: str, leaf: object, default: int) -> int:
        return default if on_rank(2) else real(self, name, leaf, default)

    patch.setattr(Collector, "scope_of", scope_of)


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a box that is shifted": (_a_box_that_is_shifted, "'part/w'.*overlap"),
    "a box that is left out": (_a_box_that_is_left_out, "'part/w'.*12 elements are held by no rank"),
    "constant fingerprints": (_fingerprints_that_are_constant, "'same'.*replicas differ"),
    "fingerprints of other tensors": (_fingerprints_of_other_tensors, "'same'.*replicas differ"),
    "no fingerprints": (
        _fingerprints_that_are_left_out,
        "trailer of the staged slot cannot be read: its columns do not fit",
    ),
    "experts declared by nobody": (_a_declaration_that_is_forgotten, "'experts/weight'.*replicas differ"),
    "experts not declared on one rank": (
        _a_declaration_that_one_rank_forgets,
        "'experts/weight'.*(one rank declares it PerRank|each rank's own)",
    ),
    "replicas that nobody names": (_replicas_that_nobody_names, "replica|fingerprint"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_bug_in_the_client_commits_nothing(nodes: list[AgentProcess], tmp_path: Path, bug: str) -> None:
    """Whatever a rank says wrongly of its boxes or its replicas: agents and coordinator find it, and the step is lost."""
    root, (plant, text) = f"file://{tmp_path}/root", PLANTED[bug]

    def state(rank: int) -> dict[str, Any]:
        same = torch.arange(1.0, 100.0)
        experts = nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            experts.weight.fill_(rank)
        return {"part": {"w": quarter(rank)}, "same": Sharded(same, same.shape, (0,)), "experts": experts}

    with ClientJob(root, nodes, 2, per_rank=["experts/*"]) as job:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            errors = job.each(lambda ckpt: failed(ckpt, 1, state(ckpt.rank)))
        assert any(re.search(text, error.message) for error in errors), errors
        assert latest(root) is None
        job.each(lambda ckpt: ckpt.restore())
        job.wait(job.each(lambda ckpt: ckpt.save(2, state(ckpt.rank))))
    assert latest(root) == 2
