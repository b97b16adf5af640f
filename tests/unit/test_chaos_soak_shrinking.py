"""Shrinking: what is left still fails, nothing more can be left out, and no more is tried than allowed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.chaos.local_faults import ClockFault, LocalFault, SlowFault
from ckptd.chaos.network.words import NetworkFault
from ckptd.chaos.scenario import Fault, Moment, Scenario, StoreFault, Target
from ckptd.chaos.scenario_reader import parse
from ckptd.chaos.scenario_writer import to_toml
from ckptd.chaos.soak.drawing import draw
from ckptd.chaos.soak.parts import Part, assembled, parts_of, simpler
from ckptd.chaos.soak.shrinking import Enough, shrink

ENOUGH = 10_000
ENDS = ("node 0", "nodes")
Numbers = tuple[int, ...]


@st.composite
def failing(draw_one: st.DrawFn) -> tuple[Numbers, frozenset[frozenset[int]]]:
    """Return parts and some sets of them, each of which is enough to fail."""
    parts = tuple(range(draw_one(st.integers(1, 12))))
    causes = draw_one(st.sets(st.frozensets(st.sampled_from(parts), min_size=1, max_size=4), min_size=1, max_size=3))
    return parts, frozenset(causes)


@settings(max_examples=50, deadline=None)
@given(failing())
def test_what_is_left_fails_and_no_single_part_can_go(told: tuple[Numbers, frozenset[frozenset[int]]]) -> None:
    """For every set of causes: the result fails, and without any one of its parts it does not."""
    parts, causes = told

    def fails(kept: Numbers) -> bool:
        return any(cause <= set(kept) for cause in causes)

    shrunk = shrink(parts, fails, most=ENOUGH)
    assert shrunk.is_minimal
    assert fails(shrunk.parts)
    assert all(not fails(shrunk.parts[:at] + shrunk.parts[at + 1 :]) for at in range(len(shrunk.parts)))
    assert frozenset(shrunk.parts) in causes


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8).map(tuple), st.integers(0, 60), st.integers(1, 3))
def test_what_is_left_cannot_be_simpler(parts: Numbers, least: int, count: int) -> None:
    """With parts that can be made smaller: none of them can, and still fail."""

    def fails(kept: Numbers) -> bool:
        return len(kept) >= min(count, len(parts)) and sum(kept) >= min(least, sum(parts))

    def smaller(number: int) -> Numbers:
        return tuple(one for one in (0, number // 2, number - 1) if 0 <= one < number)

    shrunk = shrink(parts, fails, simpler=smaller, most=ENOUGH)
    assert shrunk.is_minimal
    assert fails(shrunk.parts)
    for at, number in enumerate(shrunk.parts):
        assert len(shrunk.parts) == 1 or not fails(shrunk.parts[:at] + shrunk.parts[at + 1 :])
        for other in smaller(number):
            assert not fails((*shrunk.parts[:at], other, *shrunk.parts[at + 1 :]))


@settings(max_examples=50, deadline=None)
@given(failing(), st.integers(0, 8))
def test_the_bound_on_tries_is_kept(told: tuple[Numbers, frozenset[frozenset[int]]], most: int) -> None:
    """No more is asked than allowed, never the same twice, and what comes back failed."""
    parts, causes = told
    asked: list[Numbers] = []

    def fails(kept: Numbers) -> bool:
        asked.append(kept)
        return any(cause <= set(kept) for cause in causes)

    shrunk = shrink(parts, fails, most=most)
    assert len(asked) == len(set(asked)) == shrunk.tries <= most
    assert any(cause <= set(shrunk.parts) for cause in causes)


def test_a_predicate_may_say_that_it_is_enough() -> None:
    """Time is up in the midst of the search: the best so far comes back, and says that it may not be the shortest."""
    left = 2

    def fails(kept: Numbers) -> bool:
        nonlocal left
        if not left:
            raise Enough
        left -= 1
        return 3 in kept

    shrunk = shrink(tuple(range(8)), fails, most=ENOUGH)
    assert 3 in shrunk.parts
    assert len(shrunk.parts) < 8
    assert not shrunk.is_minimal


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from(["local", "s3"]))
def test_taking_apart_and_putting_together_changes_nothing(seed: int, store: str) -> None:
    """All parts of a schedule are the schedule."""
    scenario = draw(seed, nnodes=2, nproc=2, store=store)
    assert assembled(parts_of(scenario), scenario) == scenario


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from(["local", "s3"]), st.data())
def test_any_parts_make_a_scenario_that_can_be_run(seed: int, store: str, data: st.DataObject) -> None:
    """Whatever is left out or made simpler on the way: the file can be read, and nothing that was stopped stays so."""
    scenario = draw(seed, nnodes=2, nproc=2, store=store)
    kept: list[Part] = []
    for part in parts_of(scenario):
        others = [part, *simpler(part)]
        if data.draw(st.booleans()):
            kept.append(data.draw(st.sampled_from(others)))
    left = assembled(kept, scenario)
    if left.faults:
        assert parse(to_toml(left), name=left.name, source="x.toml") == left
        stops = [fault.target for fault in left.faults if fault.do == "stop"]
        assert stops == [fault.target for fault in left.faults if fault.do == "continue"]
        told = [fault.network for fault in left.faults if fault.network is not None]
        assert sum(one.replaced for one in told) == sum(one.kind == "heal" for one in told)


@pytest.mark.parametrize(
    ("kind", "op", "prefix"),
    [
        ("stale_list", "list", "log/"),
        ("corrupted", "get", "chunks/"),
        ("put_lost", "put", "log/"),
        ("skewed", "put", "chunks/"),
    ],
)
def test_a_lie_of_the_store_is_not_simplified_into_one_that_nothing_finds_out(kind: str, op: str, prefix: str) -> None:
    """Without its prefix it would strike what has no defence, and what is left of a schedule would fail for that."""
    store = StoreFault(kind=kind, op=op, prefix=prefix, times=3)
    part = Part(faults=((0, Fault(do="store", target=Target(kind="store"), at=Moment(step=1), store=store)),))
    others = [fault.store for other in simpler(part) for _, fault in other.faults]
    assert others
    assert {other.prefix for other in others if other is not None} == {prefix}


def test_simpler_comes_to_an_end() -> None:
    """Following simpler parts never turns in a circle, and ends at the plainest moment there is."""
    fault = Fault(
        do="store",
        target=Target(kind="store"),
        at=Moment(event="put", nth=9, restarting=True),
        store=StoreFault(kind="delay", op="put", prefix="chunks/", times=20, delay_s=4),
    )
    (part,) = parts_of(Scenario(name="x", title="x", faults=(fault,)))
    seen = [part]
    while following := next(iter(simpler(seen[-1])), None):
        assert following not in seen
        seen.append(following)
    ((_, plainest),) = seen[-1].faults
    assert plainest.at == Moment(event="step")
    assert plainest.store == StoreFault(kind="delay", op="put", times=1, delay_s=1)


@pytest.mark.parametrize(
    ("fault", "plainest"),
    [
        (ClockFault(shift_s=3600, for_s=8), ClockFault(shift_s=3600, for_s=1)),
        (ClockFault(shift_s=3600), ClockFault(shift_s=3600)),
        (SlowFault(percent=20, for_s=3), SlowFault(percent=20, for_s=1)),
        (
            NetworkFault(kind="delay", between=ENDS, for_s=5, delay_ms=50),
            NetworkFault(kind="delay", between=ENDS, for_s=1, delay_ms=50),
        ),
        (
            NetworkFault(kind="partition", between=ENDS, replaced=True),
            NetworkFault(kind="partition", between=ENDS, replaced=True),
        ),
    ],
)
def test_what_lasts_is_made_shorter_and_stays_what_it_is(
    fault: LocalFault | NetworkFault, plainest: LocalFault | NetworkFault
) -> None:
    """A fault that lasts is tried for a second; one that lasts to the end is not made one that is over."""
    is_network = isinstance(fault, NetworkFault)
    whole = Fault(
        do="x",
        target=Target(kind="network"),
        at=Moment(event="step"),
        network=fault if isinstance(fault, NetworkFault) else None,
        local=None if isinstance(fault, NetworkFault) else fault,
    )
    (part,) = parts_of(Scenario(name="x", title="x", faults=(whole,)))
    while (following := next(iter(simpler(part)), None)) is not None:
        part = following
    ((_, left),) = part.faults
    assert (left.network if is_network else left.local) == plainest
