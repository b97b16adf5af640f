"""Random interleavings of coordinators, agents and sweeps on the least a store may offer."""

from __future__ import annotations

from collections import Counter

import pytest
from fixtures.random_walks import random_walk

WALKS = 12


@pytest.mark.parametrize(
    ("incarnations", "sweeps", "aborts"),
    [(2, 1, False), (3, 2, True), (1, 3, False), (2, 2, True)],
)
def test_properties_hold_in_every_state_of_random_walks(incarnations: int, sweeps: int, aborts: bool) -> None:
    """P1 to P5, P7 and P9 hold after every write and delete, however the processes interleave or stop."""
    seen: Counter[str] = Counter()
    for seed in range(WALKS):
        bad, trace = random_walk(seed, incarnations=incarnations, sweeps=sweeps, aborts=aborts, seen=seen)
        assert not bad, f"seed {seed}: {bad}\n" + "\n".join(trace)
    # Walks that never commit, restart or sweep would prove nothing.
    assert seen["acked"] > WALKS / 2, seen
    assert seen["swept something"] > 0, seen
    assert incarnations == 1 or (seen["fenced"] > 0 and seen["adopted"] > 0), seen
    print(f"seeds 0..{WALKS - 1}: {dict(seen)}")  # noqa: T201 - shown with -s, to judge the walks by
