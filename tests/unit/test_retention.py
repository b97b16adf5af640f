"""Which steps stay."""

from __future__ import annotations

from fixtures.at_rest import timeline
from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon.keys import StepId
from ckptd.daemon.retention import kept
from ckptd.protos.snapshot_pb2 import Retention, StepRef

steps_of_history = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40)), min_size=1, max_size=20, unique=True)
rules = st.builds(Retention, keep_last=st.integers(0, 5), keep_every=st.integers(0, 10))


def refs(steps: list[tuple[int, int]]) -> list[StepRef]:
    """Return entries of (timeline number, step)."""
    return [StepRef(step=step, timeline=str(timeline(number))) for number, step in steps]


def test_s013_steps_are_compared_as_numbers() -> None:
    """Steps 900, 9900, 10000, 100000 with keep_last=2: 10000 and 100000 stay, as numbers and not as names."""
    listed = refs([(1, 900), (1, 9900), (1, 10000), (1, 100000)])
    newest = StepId(timeline(1), 100000)
    assert [ref.step for ref in kept(listed, newest, Retention(keep_last=2))] == [10000, 100000]


def test_newer_means_later_in_history() -> None:
    """After going back, a smaller step of the new timeline is the newer one."""
    listed = refs([(1, 10), (1, 20), (2, 15)])
    assert [ref.step for ref in kept(listed, StepId(timeline(2), 15), Retention(keep_last=2))] == [20, 15]


def test_any_rule_keeps_a_step() -> None:
    """keep_every, a pin and a base in flight each keep a step that keep_last would drop."""
    listed = refs([(1, step) for step in (10, 15, 20, 25, 31)])
    newest = StepId(timeline(1), 31)
    found = kept(
        listed,
        newest,
        Retention(keep_last=1, keep_every=20),
        pinned={StepId(timeline(1), 10)},
        also_keep={StepId(timeline(1), 25)},
    )
    assert [ref.step for ref in found] == [10, 20, 25, 31]


@given(steps_of_history, rules, st.randoms(use_true_random=False))
def test_what_is_kept_is_a_part_in_order_and_holds_the_newest(
    steps: list[tuple[int, int]], retention: Retention, rng: object
) -> None:
    """Nothing is invented, order is history's, the newest stays, keep_last counts, whatever the order of the input."""
    listed = refs(steps)
    rng.shuffle(listed)  # type: ignore[attr-defined]
    ids = sorted(StepId.of(ref) for ref in listed)
    found = [StepId.of(ref) for ref in kept(listed, ids[-1], retention)]
    assert found == sorted(found)
    assert set(found) <= set(ids)
    assert ids[-1] in found
    if retention.keep_last:
        assert set(ids[-retention.keep_last :]) <= set(found)
        rest = set(found) - set(ids[-retention.keep_last :])
        assert all(retention.keep_every and step.step % retention.keep_every == 0 for step in rest)
    else:
        assert found == ids


@given(steps_of_history, rules)
def test_retention_is_stable(steps: list[tuple[int, int]], retention: Retention) -> None:
    """What was kept once is kept again by the same rules: a record that changes nothing drops nothing."""
    once = kept(refs(steps), None, retention)
    assert kept(once, None, retention) == once
