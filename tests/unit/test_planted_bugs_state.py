"""Bugs planted in the product itself: its own checks or the judge must turn red. What stays green proves nothing.

The judge is the demo's list of SHA-256s of live objects, in which nothing of ckptd takes part.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.at_rest import Shard, build_node, make_claim, timeline
from fixtures.client_agent import Make, fake_agent, make
from torch import nn

from ckptd.client import CkptdError, fetched, modules, nested, optimizers, restoring, staging, state, tree, values
from ckptd.client.copying import Copier
from ckptd.client.fetched import FetchedPiece
from ckptd.daemon.coverage import NotWhole, Whole, whole
from ckptd.daemon.index import load_index
from ckptd.protos import error_pb2

__all__ = ["fake_agent", "make"]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def judge() -> Iterator[Callable[..., dict[str, str]]]:
    """The demo's digests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("moe.digest").of_state


class Loader:
    """A position, a list and a tensor."""

    def __init__(self, seed: int) -> None:
        self.state = {
            "at": seed,
            "order": [seed, 2, 3],
            "kept": torch.full((3,), float(seed)),
            "rate": -0.0,
            "pair": (seed, 2.5),
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Job:
    """A net with a tie, counters without dimensions and a large layer; AdamW, a schedule, a loader."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = nn.ModuleDict({"a": nn.Linear(600, 600), "b": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)})
        self.net["tied"] = nn.Linear(4, 4)
        self.net["tied"].weight = self.net["b"].weight
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1 * seed)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.loader = Loader(seed)
        for _ in range(seed):
            self.optimizer.zero_grad()
            (
                self.net["a"](torch.randn(600)).sum()
                + self.net["norm"](self.net["b"](torch.randn(3, 4))).square().sum()
            ).backward()
            self.optimizer.step()
            self.schedule.step()
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002

    def tracked(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer, "schedule": self.schedule, "loader": self.loader}


Patch = pytest.MonkeyPatch


def _a_dropped_step_counter(patch: Patch) -> None:
    real = state.Collector.pieces

    def pieces(self: state.Collector, name: str, *rest: Any, **more: Any) -> None:
        if not name.endswith("/step"):
            real(self, name, *rest, **more)

    patch.setattr(state.Collector, "pieces", pieces)


def _a_counter_that_is_not_put_back(patch: Patch) -> None:
    real = optimizers.TrackedOptimizer.load

    def load(self: Any, value: Any, tensors: Any, *more: Any) -> None:
        real(self, value, {name: tensor for name, tensor in tensors.items() if not name.endswith("a.bias/step")}, *more)

    patch.setattr(optimizers.TrackedOptimizer, "load", load)


def _staged_is_an_older_cut(patch: Patch) -> None:
    real = staging.Capture.copy_into

    def copy_into(self: Any, *rest: Any, **more: Any) -> Any:
        self._views = [torch.zeros_like(view) if view.shape == (4,) else view for view in self._views]
        return real(self, *rest, **more)

    patch.setattr(staging.Capture, "copy_into", copy_into)


def _bit(which: Callable[[torch.Tensor], int], size: int) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        real = Copier.copy

        def copy(self: Copier, targets: Any, sources: Any) -> None:
            real(self, targets, sources)
            for target in targets if isinstance(targets, list) else []:
                if target.numel() == size and target.is_contiguous():
                    flat = target.detach().view(-1).view(torch.uint8)
                    flat[which(flat)] ^= 1

        patch.setattr(Copier, "copy", copy)

    return plant


def _two_tensors_exchanged(patch: Patch) -> None:
    real = FetchedPiece.source

    def source(self: FetchedPiece, data: torch.Tensor) -> torch.Tensor:
        found = real(self, data)
        return found.flip(0) if self.wanted.row.name == "model/a.weight" else found

    patch.setattr(FetchedPiece, "source", source)


def _a_piece_is_left_out(patch: Patch) -> None:
    patch.setattr(restoring, "check_complete", lambda *_: None)
    real = fetched.take_part

    def take_part(part: Any, wanted: Any, objects: Any, into: Any) -> None:
        real(part, wanted, objects, into)
        into.pieces[:] = [piece for piece in into.pieces if piece.wanted.row.name != "model/norm.running_var"]

    patch.setattr(restoring, "take_part", take_part)


def _floats_of_half_the_bits(patch: Patch) -> None:
    real = values._SIMPLE[float]
    patch.setitem(values._SIMPLE, float, lambda value, *rest: real(float(np.float32(value)), *rest))


def _the_sign_of_zero(patch: Patch) -> None:
    real = values._SIMPLE[float]
    patch.setitem(values._SIMPLE, float, lambda value, *rest: real(value + 0.0, *rest))


def _tuples_as_lists(patch: Patch) -> None:
    real = nested.TrackedStateful.load

    def load(self: Any, value: Any) -> None:
        real(self, {key: list(item) if isinstance(item, tuple) else item for key, item in value.items()})

    patch.setattr(nested.TrackedStateful, "load", load)


def _old_state_stays(patch: Patch) -> None:
    patch.setattr(nested.TrackedStateful, "load", lambda *_: None)


def _generators_stay(patch: Patch) -> None:
    patch.setattr(nested.TrackedRng, "load", lambda *_: None)


def _torch_generator_stays(patch: Patch) -> None:
    patch.setattr(torch, "set_rng_state", lambda _: None)


def _every_tensor_a_tie(patch: Patch) -> None:
    patch.setattr(modules, "memory_of", lambda tensor: (tensor.shape, tensor.dtype))


def _names_are_cut(patch: Patch) -> None:
    real = tree.component
    patch.setattr(modules, "component", lambda key: real(key).rpartition(".")[2])


BUGS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "the step counters of an optimizer are dropped": (_a_dropped_step_counter, r"optim/.*/step"),
    "one counter is not put back": (_a_counter_that_is_not_put_back, r"optim/a.bias/step"),
    "what is staged is not the cut": (_staged_is_an_older_cut, r"model/norm.bias"),
    "one bit of the first element": (_bit(lambda _: 0, 4), r"model/b.bias"),
    "one bit of the last element": (_bit(lambda flat: flat.numel() - 1, 4), r"model/b.bias"),
    "one bit of a large tensor's last element": (_bit(lambda flat: flat.numel() - 1, 360_000), r"model/a.weight"),
    "one bit of a counter": (_bit(lambda flat: flat.numel() - 1, 1), r"model/norm.num_batches_tracked"),
    "rows come back in another order": (_two_tensors_exchanged, r"model/a.weight"),
    "a piece is left out": (_a_piece_is_left_out, r"model/norm.running_var"),
    "floats lose bits": (_floats_of_half_the_bits, r"optim/groups"),
    "zero loses its sign": (_the_sign_of_zero, r"loader"),
    "tuples come back as lists": (_tuples_as_lists, r"loader"),
    "all tensors of a shape are taken for ties": (_every_tensor_a_tie, r"model/norm.running_var"),
    "stateful things keep what they have": (_old_state_stays, r"scheduler"),
    "generators stay where they are": (_generators_stay, r"rng/python"),
    "torch's generator stays where it is": (_torch_generator_stays, r"rng/torch"),
}
"""What is planted, and the first name that the judge must hold against it."""


def round_trip(make: Make, judge: Callable[..., dict[str, str]]) -> list[str]:
    """Save a job, restore it into another one, and return the names that the judge finds wrong or missing."""
    job, other = Job(1), Job(2)

    def digests(of: Job) -> dict[str, str]:
        return judge(of.net, of.optimizer, of.schedule, of.loader)

    random.seed(7)
    torch.manual_seed(7)
    want = digests(job)
    checkpointer = make(audit="off")
    checkpointer.track(**job.tracked())
    checkpointer.save(1).wait()
    checkpointer.close()
    torch.manual_seed(8)
    random.seed(8)
    again = make(audit="off")
    again.track(**other.tracked())
    assert again.restore(required=True)
    got = digests(other)
    return sorted(name for name in want.keys() | got.keys() if want.get(name) != got.get(name))


def test_without_a_bug_the_judge_is_content(make: Make, judge: Callable[..., dict[str, str]]) -> None:
    """Else red would mean nothing."""
    assert round_trip(make, judge) == []


@pytest.mark.parametrize("bug", BUGS)
def test_the_judge_turns_red(make: Make, judge: Callable[..., dict[str, str]], bug: str) -> None:
    """Nothing in the product sees these; SHA-256 of what the script holds does, and names it."""
    plant, name = BUGS[bug]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        wrong = round_trip(make, judge)
    assert any(re.fullmatch(name, each) for each in wrong), wrong


def test_names_cut_short_are_refused(make: Make, monkeypatch: Patch) -> None:
    """The product turns red by itself: two tensors never become one name."""
    _names_are_cut(monkeypatch)
    with pytest.raises(CkptdError, match="model/weight: two tensors have this name"):
        make(audit="off").save(1, {"model": Job(1).net})


# ---------------------------------------------------------------- tilings

NODES = {"a": [0, 1], "b": [2, 3]}
SHAPE = (4, 6)


def quarter(rank: int) -> Shard:
    """Return one of four boxes that tile a tensor."""
    whole_tensor = np.arange(24, dtype="<f4").reshape(SHAPE)
    low = (rank // 2 * 2, rank % 2 * 3)
    part = np.ascontiguousarray(whole_tensor[low[0] : low[0] + 2, low[1] : low[1] + 3])
    return Shard(name="weight", values=part, global_shape=SHAPE, offset=low, writer=rank)


def decided(shards: dict[int, list[Shard]]) -> Whole | NotWhole:
    """Return the coordinator's answer to the indexes of these four ranks."""
    claim = make_claim(timeline(1), NODES, mesh={"dp": 2, "tp": 2})
    indexes = {}
    for node, ranks in NODES.items():
        built = build_node(claim, 7, node, {rank: (shards[rank], {}) for rank in ranks})
        indexes[node] = [load_index(built.ref, built.index)]
    return whole(claim, 7, indexes)


def moved(shard: Shard, dim: int, by: int) -> Shard:
    offset = list(shard.offset)
    offset[dim] += by
    return replace(shard, offset=tuple(offset))


def grown(shard: Shard, dim: int, by: int) -> Shard:
    """Return the shard with `by` more or fewer elements along a dimension."""
    size = list(shard.values.shape)
    size[dim] += by
    values_ = np.zeros(size, dtype="<f4")
    keep = tuple(slice(0, min(a, b)) for a, b in zip(size, shard.values.shape, strict=True))
    values_[keep] = shard.values[keep]
    return replace(shard, values=values_)


FAULTS = [
    (change, dim, by, rank)
    for change in ("moved", "grown", "lost", "twice")
    for dim, by in ([(0, 1), (0, -1), (1, 1), (1, -1)] if change in ("moved", "grown") else [(0, 0)])
    for rank in range(4)
    if change != "moved" or quarter(rank).offset[dim] + by >= 0  # else it cannot even be said
]


@pytest.mark.parametrize(("change", "dim", "by", "rank"), FAULTS)
def test_a_hole_or_an_overlap_is_never_whole(change: str, dim: int, by: int, rank: int) -> None:
    """One box of four moved or grown by one element, in every direction; lost; or held by a second rank as its own."""
    shards = {each: [quarter(each)] for each in range(4)}
    assert isinstance(decided(shards), Whole)
    if change == "moved":
        shards[rank] = [moved(quarter(rank), dim, by)]
    elif change == "grown":
        shards[rank] = [grown(quarter(rank), dim, by)]
    elif change == "lost":
        shards[rank] = []
    else:
        other = (rank + 1) % 4
        shards[rank] = [replace(quarter(other), writer=rank)]
    answer = decided(shards)
    assert isinstance(answer, NotWhole)
    assert answer.error.reason in {error_pb2.REASON_COVERAGE, error_pb2.REASON_LAYOUT_MISMATCH}
    assert answer.error.object == "weight"
    assert "'weight'" in answer.error.message
