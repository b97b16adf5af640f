"""A job's store that is away for a while: time decides when it is given up, not how often it was asked."""

from __future__ import annotations

import random
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.daemon.config import AgentConfig
from ckptd.daemon.job_root import PROBE_S, job_retry, probe_retry
from ckptd.storage_backends.errors import Unavailable
from ckptd.storage_backends.memory import MemoryStore
from ckptd.storage_backends.retrying import RetryingStore, RetryPolicy

OUTAGE_S, ERRORS = 10.0, 12
DEADLINE_S: float = AgentConfig.model_fields["store_deadline_s"].default


class Away(MemoryStore):
    """A store that is away for so many seconds of its own clock, and fails a row of calls after that."""

    def __init__(self, *, seconds: float, errors: int = 0) -> None:
        super().__init__("memory://away")
        self.now, self.calls = 0.0, 0
        self._seconds, self._errors = seconds, errors

    def get(self, key: str) -> bytes:
        """Read an object, once the store is back."""
        self.calls += 1
        if self.now >= self._seconds:
            if not self._errors:
                return super().get(key)
            self._errors -= 1
        raise Unavailable("away", key=key, url=self.url)

    def passes(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def tried(store: Away, policy: RetryPolicy, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Read an object of a store by a policy, on the store's clock."""
    clock: Any = SimpleNamespace(monotonic=lambda: store.now)
    monkeypatch.setattr("tenacity.time", clock)
    store.put("key", b"value")
    return RetryingStore(store, policy, sleep=store.passes).get("key")


@pytest.mark.parametrize("policy", [job_retry(DEADLINE_S), probe_retry(DEADLINE_S)], ids=["job", "probe"])
@pytest.mark.parametrize("seed", range(20))
def test_a_start_gets_over_an_outage_and_a_row_of_errors(
    policy: RetryPolicy, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the pauses fall: both fit into the time that is configured."""
    random.seed(seed)  # tenacity draws from it
    store = Away(seconds=OUTAGE_S, errors=ERRORS)
    assert tried(store, policy, monkeypatch) == b"value"
    assert store.calls > ERRORS


@pytest.mark.parametrize("deadline_s", [5.0, 60.0, 600.0])
def test_a_store_that_stays_away_is_given_up_when_the_time_is_over(
    deadline_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget is used, but for less than a pause, and never passed; a longer one means more tries."""
    store = Away(seconds=float("inf"))
    with pytest.raises(Unavailable):
        tried(store, job_retry(deadline_s), monkeypatch)
    assert deadline_s - 5 <= store.now < deadline_s
    assert store.calls > deadline_s / 5


@pytest.mark.parametrize(("deadline_s", "expected_s"), [(60.0, PROBE_S), (4.0, 4.0)])
def test_the_probe_ends_before_a_rank_gives_up_on_its_agent(deadline_s: float, expected_s: float) -> None:
    """What is configured bounds it, too."""
    assert probe_retry(deadline_s).deadline == timedelta(seconds=expected_s)
