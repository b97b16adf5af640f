"""Random interleavings of the real coordinator, with restarts, uploads, aborts, bad steps and sweeps."""

from __future__ import annotations

from collections import Counter

import pytest
from fixtures.coordinator_walks import coordinator_walk

from ckptd.daemon.coordinator import saving, starting

WALKS = 6


@pytest.mark.parametrize(
    ("runs", "sweeps", "quarantines"),
    [
        (2, 2, False),
        (3, 2, False),
        (1, 3, False),
        (3, 2, True),
    ],
)
def test_properties_hold_in_every_state_of_random_walks(runs: int, sweeps: int, quarantines: bool) -> None:
    """P1 to P5 and P7 hold after every write and delete, whatever runs, nodes and sweeps do in between."""
    seen: Counter[str] = Counter()
    for seed in range(WALKS):
        bad, trace = coordinator_walk(seed, runs=runs, sweeps=sweeps, quarantines=quarantines, seen=seen)
        assert not bad, f"seed {seed}: {bad}\n" + "\n".join(trace)
    # Walks that never commit, restart or sweep would prove nothing.
    assert seen["acked"] > WALKS / 2, seen
    assert seen["deleted"] > WALKS / 5, seen
    assert runs == 1 or (seen["fenced"] and seen["adopted"]), seen
    assert not quarantines or seen["found bad"], seen
    print(f"seeds 0..{WALKS - 1}: {dict(seen)}")  # noqa: T201 - shown with -s, to judge the walks by


def test_walks_find_a_coordinator_that_does_not_look_at_the_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the look after each record switched off, the same walks find the violation: they do bite."""
    monkeypatch.setattr(saving, "fenced_by", lambda *_: False)
    monkeypatch.setattr(starting, "fenced_by", lambda *_: False)
    found: set[str] = set()
    for seed in range(200):
        bad, _ = coordinator_walk(seed, runs=3, sweeps=1, quarantines=False, seen=Counter())
        found |= {text[:2] for text in bad}
        if found & {"P2", "P3"}:
            return
    pytest.fail(f"200 walks found {found}")
