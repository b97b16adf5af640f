"""Live tensors whose elements share memory: which they are, and what they hold after a restore."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckptd.client import InvalidRequest
from ckptd.client.overlapping import overlaps, settle, sharing
from ckptd.client.reshard_hooks import ReshardHooks
from ckptd.client.resharding import Gathered
from ckptd.client.selecting import ChosenTargets, choice
from ckptd.client.stored import Elsewhere, Stored
from ckptd.client.targets import Targets
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK

__all__ = ["fake_agent", "make"]


class Masked(nn.Module):
    """Has an expanded buffer."""

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.full((3, 1), value, dtype=dtype).expand(3, 4))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=4))
def test_only_tensors_with_two_elements_at_one_place_overlap(dims: list[tuple[int, int]]) -> None:
    """Whatever sizes and strides: the answer is that of counting all places."""
    shape, strides = [size for size, _ in dims], [stride for _, stride in dims]
    tensor = torch.zeros(200).as_strided(shape, strides)
    places = torch.arange(200).as_strided(shape, strides)
    assert overlaps(tensor) == (len(set(places.reshape(-1).tolist())) < tensor.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_an_expanded_tensor_takes_any_value(dtype: torch.dtype) -> None:
    """Memory stays shared where all elements that share a place are equal, bit for bit; else it is separated."""
    base = torch.zeros(3, 1).to(dtype)
    live = base.expand(3, 4)
    value = torch.tensor([[1.0], [0.0], [1.0]]).to(dtype).expand(3, 4).contiguous()
    settle(live, value, [])
    assert torch.equal(live, value)
    assert torch.equal(base, value[:, :1])
    value[0, 3] = 0
    settle(live, value, [])
    assert torch.equal(live, value)
    assert base.data_ptr() != live.data_ptr()


def test_equal_is_said_of_bits() -> None:
    """-0.0 equals 0.0, and yet they are two values."""
    base = torch.ones(1)
    live = base.expand(2)
    settle(live, torch.tensor([0.0, -0.0]), [])
    assert torch.equal(torch.signbit(live), torch.tensor([False, True]))
    assert base.item() == 1


@pytest.fixture
def no_luck() -> Iterator[None]:
    """Fresh memory holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=before)


@pytest.mark.usefixtures("no_luck")
def test_an_expanded_tensor_is_cast(make: Make) -> None:
    """Chosen and stored in another dtype: it gets what was stored, not what stood in memory on the way."""
    saving = make()
    saving.track(model=Masked(1.5, torch.float32))
    saving.save(5).wait()
    saving.close()
    here = Masked(2.5, torch.bfloat16)
    again = make()
    again.track(model=here)
    assert again.restore(only="model", cast=True) is not None
    assert torch.equal(here.mask, torch.full((3, 4), 1.5, dtype=torch.bfloat16))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4), st.integers(0, 4), st.integers(1, 9)), max_size=6))
def test_all_that_share_a_place_are_found(windows: list[tuple[int, int, int, int]]) -> None:
    """Whatever the windows: two names that have an element at one place are in one group, and no name is alone in its."""
    memory, places = torch.zeros(200), torch.arange(200)
    spans = [((rows, columns), (stride, 1), at) for at, rows, columns, stride in windows]
    tensors = {str(number): memory.as_strided(*span) for number, span in enumerate(spans)}
    seen = {str(number): set(places.as_strided(*span).reshape(-1).tolist()) for number, span in enumerate(spans)}
    found = sharing(tensors.items())
    for one, other in ((a, b) for a in seen for b in seen if a < b and seen[a] & seen[b]):
        assert found[one] == found[other]
    assert all(list(found.values()).count(group) > 1 for group in found.values())


def named(**buffers: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in buffers.items():
        module.register_buffer(name, tensor)
    return module


SHARED: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {
    "part": lambda base: {"base": base, "view": base[1:3]},
    "part first": lambda base: {"a": base[1:3], "base": base},
    "three": lambda base: {"base": base, "one": base[:3], "two": base[2:]},
    "columns": lambda base: {"left": base.view(3, 2)[:, 0], "right": base.view(3, 2)[:, 1]},
    "transposed": lambda base: {"base": base.view(2, 3), "view": base.view(2, 3).t()},
    "integers": lambda base: {"base": base, "view": base.view(torch.int32)},
    "conjugate": lambda base: {
        "base": torch.view_as_complex(base.view(3, 2)),
        "view": torch.view_as_complex(base.view(3, 2)).conj(),
    },
    "negated": lambda base: {"base": base, "view": torch._neg_view(base)},
    "expanded": lambda base: {"base": base, "view": base[:1].expand(4)},
}


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("alike", [True, False], ids=["values agree", "values differ"])
@pytest.mark.parametrize("kind", SHARED)
def test_live_tensors_that_share_memory_each_get_their_own_value(
    make: Make, kind: str, alike: bool, cast: bool
) -> None:
    """Never what was copied last. Memory stays shared where the values agree; else each has its own, as the same object."""
    source = SHARED[kind](torch.arange(1.0, 7.0))
    saved = {name: tensor.resolve_conj().resolve_neg().clone() for name, tensor in source.items()}
    if not alike:
        for number, tensor in enumerate(saved.values()):
            tensor.add_(10 * number)
    base = torch.zeros(6)
    live = SHARED[kind](base)
    checkpointer = make(audit="off")
    checkpointer.save(1, {"model": named(**saved)}).wait()
    model = named(**live)
    checkpointer.restore_into({"model": model}, cast=cast)
    for name, tensor in live.items():
        assert model.get_buffer(name) is tensor
        assert torch.equal(tensor, saved[name]), name
    assert alike <= torch.equal(base, torch.arange(1.0, 7.0))


def test_what_is_cast_for_tensors_that_share_memory_is_right_too(make: Make) -> None:
    """Stored in another dtype than all of them."""
    base = torch.zeros(4, dtype=torch.bfloat16)
    checkpointer = make(audit="off")
    checkpointer.save(1, {"model": named(a=torch.arange(4.0), b=torch.tensor([7.0, 8.0]))}).wait()
    live = named(a=base, b=base[:2])
    checkpointer.restore_into({"model": live}, cast=True)
    assert live.get_buffer("a").tolist() == [0, 1, 2, 3]
    assert live.get_buffer("b").tolist() == [7, 8]


@pytest.mark.parametrize("cast", [False, True])
def test_one_tensor_that_is_to_hold_two_values_is_refused(make: Make, cast: bool) -> None:
    """It is one here and was two where it was saved: the error names both, and nothing at all is touched."""
    checkpointer = make(audit="off")
    stored = torch.float64 if cast else torch.float32
    one, two = torch.ones(4, dtype=stored), torch.full((4,), 2.0, dtype=stored)
    checkpointer.save(1, {"a": named(x=one, y=one), "b": named(x=two), "n": 5}).wait()
    both = torch.zeros(4)
    state = {"a": named(x=both, y=both), "b": named(x=both), "n": 0}
    with pytest.raises(InvalidRequest, match="b/x: stored apart from a/x and with other values") as caught:
        checkpointer.restore_into(state, cast=cast)
    assert caught.value.key == "b/x"
    assert (both.tolist(), state["n"]) == ([0, 0, 0, 0], 0)
    two.fill_(1)
    checkpointer.save(2, {"a": named(x=one, y=one), "b": named(x=two), "n": 5}).wait()
    checkpointer.restore_into(state, cast=cast)
    assert (both.tolist(), state["n"]) == ([1, 1, 1, 1], 5)


@pytest.mark.parametrize("kind", SHARED)
def test_what_is_dropped_stays_though_what_is_restored_shares_its_memory(make: Make, kind: str) -> None:
    """One of them is dropped, each in turn: it keeps its value, and all others get theirs."""
    base = torch.arange(1.0, 7.0)
    source = {name: tensor.resolve_conj().resolve_neg().clone() for name, tensor in SHARED[kind](base).items()}
    checkpointer = make(audit="off")
    checkpointer.save(1, {"model": named(**{name: tensor + 20 for name, tensor in source.items()})}).wait()
    for dropped in source:
        live = SHARED[kind](base.clone())
        model = named(**live)
        checkpointer.restore_into({"model": model}, drop=(f"model/{dropped}",))
        for name, tensor in live.items():
            assert model.get_buffer(name) is tensor
            assert torch.equal(tensor, source[name] if name == dropped else source[name] + 20), (dropped, name)


def test_columns_of_one_matrix_keep_their_memory_where_one_is_dropped(make: Make) -> None:
    """No element stands at one place, so nothing needs memory of its own."""
    base = torch.zeros(3, 2)
    checkpointer = make(audit="off")
    checkpointer.save(1, {"model": named(left=torch.ones(3), right=torch.ones(3))}).wait()
    checkpointer.restore_into({"model": named(left=base[:, 0], right=base[:, 1])}, drop=("model/right",))
    assert base.tolist() == [[1, 0]] * 3


def test_memory_cannot_be_dropped_and_filled_in_two_modules(make: Make) -> None:
    """As within one; and a tensor that cannot be restored at all can be dropped."""
    checkpointer = make(audit="off")
    checkpointer.save(1, {"a": named(x=torch.ones(4), y=torch.ones(2)), "b": named(x=torch.ones(4))}).wait()
    both = torch.zeros(4)
    state = {"a": named(x=both, y=torch.zeros(2).to_sparse()), "b": named(x=both)}
    with pytest.raises(InvalidRequest, match="drop: b/x shares memory with a/x, and one of them is chosen"):
        checkpointer.restore_into(state, drop=("b/x", "a/y"))
    assert both.tolist() == [0, 0, 0, 0]
    checkpointer.restore_into(state, drop=("a/y",))
    assert both.tolist() == [1, 1, 1, 1]


def own_targets(apart: dict[str, int], live: dict[str, torch.Tensor], *, cast: bool) -> Targets:
    """Of a step of another mesh where "m/own" was each of two ranks' own, and "m/whole" was global."""

    def rows(name: str, size: int, scope: int) -> ShardRow:
        return ShardRow(
            name=name, dtype="float32", global_shape=(size,), offset=(0,), length=(size,), scope=scope, nbytes=4 * size
        )

    own = dict.fromkeys(range(2), rows("m/own", 4, SCOPE_PER_RANK))
    elsewhere = Elsewhere(
        coordinates={0: {"dp": 0}, 1: {"dp": 1}}, objects={}, own_rows={"m/own": own}, step=7, here={"dp": 0}, world=1
    )
    stored = Stored([rows("m/whole", 2, SCOPE_GLOBAL)], [], {}, elsewhere)
    hooks = ReshardHooks()
    hooks.add("m/own", lambda pieces, _: pieces[0].value + pieces[1].value)
    targets: Targets = ChosenTargets(
        stored,
        lambda _n, _l, scope: scope,
        chosen=choice(None, None, cast=cast),
        modules=["m"],
        others=[],
        optimizers={},
        apart=apart,
        hooks=hooks,
    )
    for name, tensor in live.items():
        targets.fill(f"m/{name}", tensor)
    return targets


def restored_own(live: dict[str, torch.Tensor], *, cast: bool = False, tied: torch.Tensor | None = None) -> Targets:
    """Restore as `restoring` does: [1, 1, 1, 1] and [2, 2, 2, 2] for the ranks' own, [5, 6] for the global one."""
    targets = own_targets(own_targets({}, live, cast=cast).sharing(), live, cast=cast)
    assert targets.misfits.different == {}
    if tied is not None:
        targets.tie("m/tied", "m/own", tied)
    values = {"m/own": torch.ones(4), "m/whole": torch.tensor([5.0, 6.0])}

    def fill(*, fresh: bool) -> None:
        for wanted in targets.wanted:
            if wanted.is_fresh == fresh:
                wanted.view.copy_(values[wanted.row.name] * ((wanted.rank or 0) + 1))

    fill(fresh=True)
    targets.complete()
    elsewhere = targets.stored.elsewhere
    assert elsewhere is not None
    Gathered(elsewhere, targets, {}).reshard_tensors()
    targets.check_shared()
    before = {name: tensor.clone() for name, tensor in live.items()}
    fill(fresh=False)
    assert all(torch.equal(live[name], tensor) for name, tensor in before.items()), "live before all was checked"
    targets.finish()
    targets.settle()
    return targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [("own", "whole"), ("whole", "own")])
def test_what_a_hook_made_and_what_shares_its_memory_each_get_their_value(
    dtype: torch.dtype, order: tuple[str, ...]
) -> None:
    """Of another mesh, cast or not, whichever comes first."""
    base = torch.zeros(4, dtype=dtype)
    views = {"own": base, "whole": base[1:3]}
    live = {name: views[name] for name in order}
    restored_own(live, cast=dtype != torch.float32)
    assert live["own"].tolist() == [3, 3, 3, 3]
    assert live["whole"].tolist() == [5, 6]


def test_what_a_hook_made_goes_into_a_tensor_that_overlaps_itself_and_its_ties() -> None:
    """With memory of its own where the values differ, the same for both names."""
    base = torch.zeros(1)
    live, tied = base.expand(4), base.expand(4)
    restored_own({"own": live}, tied=tied)
    assert (live.tolist(), tied.tolist(), base.tolist()) == ([3, 3, 3, 3], [3, 3, 3, 3], [3])


def test_one_tensor_is_not_what_a_hook_made_and_something_else() -> None:
    """Refused before anything live is touched."""
    both = torch.zeros(2)
    live = {"whole": both, "own": both}
    targets = own_targets({"m/whole": 0, "m/own": 0}, live, cast=False)
    targets.own_tensors[0, "m/own"], targets.own_tensors[1, "m/own"] = torch.ones(2), torch.ones(2)
    for wanted in targets.wanted:
        wanted.view.fill_(5)
    elsewhere = targets.stored.elsewhere
    assert elsewhere is not None
    Gathered(elsewhere, targets, {}).reshard_tensors()
    with pytest.raises(InvalidRequest, match="m/own: stored apart from m/whole and with other values"):
        targets.check_shared()
    assert both.tolist() == [0, 0]
