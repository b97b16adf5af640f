"""Every fault of the store, once, on a job of real Checkpointers and agents: it is got over, or said; never is anything wrong.

One row a kind. They strike while a step is saved, or while it is restored on another node. Behind each row the root
is read without faults: what is listed is proved byte by byte, and what was acknowledged is listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fixtures.agents import Agents
from fixtures.client_job import ClientJob
from fixtures.stored_root import catalog_of, unproved

from ckptd.chaos.seaweed import SeaweedServer
from ckptd.chaos.store_proxy.handle import StoreProxy
from ckptd.client import CkptdError
from ckptd.client.handles import SaveHandle
from ckptd.daemon.catalog import StepState
from ckptd.storage_backends.fault_script import Fault, FaultKind, Op

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.s3]

K = FaultKind
ENOUGH_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A kind of fault, and what must come of it.

    Attributes:
        kind: The fault.
        on: A method and a prefix in the root, as "put chunks/"; "" for all calls.
        more: Of the fault.
        at: Whether it strikes a save or a restore.
        ends: "well": got over. "aborted": the save fails on all ranks, and the next one commits. "named": the restore raises.
        reason: Of the error that is told.
    """

    kind: FaultKind
    on: str
    more: dict[str, Any] = field(default_factory=dict)
    at: str = "save"
    ends: str = "well"
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind}-{self.on}-{self.at}".replace(" ", "-").replace("/", "")


ROWS = [
    Row(kind=K.SLOW_DOWN, on="", more={"times": 6}),
    Row(kind=K.ERROR, on="", more={"times": 6}),
    Row(kind=K.HANG, on="put chunks/", more={"times": None}, ends="aborted", reason="DEADLINE_EXCEEDED"),
    Row(kind=K.RESET, on="", more={"times": 4}),
    Row(kind=K.ANSWER_LOST, on="put ", more={"times": 4}),
    Row(kind=K.DRIP, on="put chunks/", more={"times": None, "bytes_per_s": 200_000}),
    Row(kind=K.PUT_LOST, on="put chunks/", more={"times": 2}),
    Row(kind=K.PUT_LOST, on="put chunks/", more={"times": None}, ends="aborted", reason="STORE_FAILED"),
    Row(kind=K.PUT_LOST, on="put index/"),
    Row(kind=K.STALE_LIST, on="list log/", more={"times": 3}),
    Row(kind=K.EXPIRED, on="put ", more={"times": 3}),
    Row(kind=K.OUTAGE, on="", more={"for_s": 6.0, "times": None}),
    Row(kind=K.LIMIT, on="put ", more={"per_s": 2, "times": None}),
    Row(kind=K.SKEWED, on="put chunks/", more={"times": 2}),
    Row(kind=K.SKEWED, on="put chunks/", more={"times": None}, ends="aborted", reason="STORE_FAILED"),
    Row(kind=K.TRUNCATED, on="get ", more={"times": 3}, at="restore"),
    Row(kind=K.CORRUPTED, on="get chunks/", at="restore"),
    Row(kind=K.CORRUPTED, on="get chunks/", more={"times": None}, at="restore", ends="named", reason="CORRUPT"),
    Row(kind=K.SLOW_DOWN, on="get ", more={"times": 4}, at="restore"),
    Row(kind=K.RESET, on="get ", more={"times": 3}, at="restore"),
    Row(kind=K.DRIP, on="get chunks/", more={"times": None, "bytes_per_s": 300_000}, at="restore"),
    Row(kind=K.DELAY, on="", more={"times": 5, "delay_s": 0.3}, at="restore"),
]


@pytest.fixture(scope="module")
def proxy(seaweed: SeaweedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProxy]:
    with StoreProxy(seaweed.endpoint, tmp_path_factory.mktemp("proxy"), seed=11) as running:
        yield running


def test_every_kind_has_a_row() -> None:
    """A new kind of fault is tried here, or this fails."""
    assert {row.kind for row in ROWS} == set(FaultKind)


def ordered(row: Row, root: str) -> Fault:
    """Return the fault of a row, on this root alone."""
    method, _, folder = row.on.partition(" ")
    prefix = "" if row.kind is K.OUTAGE else root.split("/", 3)[3] + "/" + folder
    return Fault(kind=row.kind, op=Op(method) if method else None, prefix=prefix, **row.more)


def outcome(handle: SaveHandle) -> str:
    """Return how a save ended: "durable", or a reason."""
    try:
        handle.wait(timeout=ENOUGH_S)
    except CkptdError as error:
        return error.reason_name
    return "durable"


# What is slow rather than wrong takes its time.
SLOW = {K.DRIP, K.LIMIT, K.DELAY}


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=str(row), marks=[pytest.mark.long] if row.kind in SLOW else []) for row in ROWS]
)
def test_a_fault_of_the_store_is_got_over_or_said(
    agents: Agents, proxy: StoreProxy, fresh_root: Callable[[], str], tmp_path: Path, row: Row
) -> None:
    """See the table."""
    del tmp_path
    root = fresh_root()
    through = {"AWS_ENDPOINT_URL": proxy.endpoint, "CKPTD_STORE_DEADLINE_S": "30"}
    struck_before = len(proxy.done())
    acknowledged = [1]
    hasty: dict[str, Any] = {"commit_timeout_s": 12.0} if row.ends == "aborted" else {}
    with ClientJob(root, [agents.new(env=through)], 2, **hasty) as job:
        job.wait(job.save(1))
        if row.at == "save":
            proxy.add(ordered(row, root))
            ends = [outcome(handle) for handle in job.save(2)]
            proxy.clear()
            assert ends == [row.reason or "durable"] * 2
            acknowledged += [2] if row.ends == "well" else []
        job.wait(job.save(3))
        acknowledged.append(3)
    with ClientJob(root, [agents.new(env=through)], 2) as job:
        if row.at == "restore":
            proxy.add(ordered(row, root))
        if row.ends == "named":
            with pytest.raises(CkptdError) as caught:
                job.restore(step=3)
            assert caught.value.reason_name == row.reason
            assert caught.value.key.startswith("chunks/")
            proxy.clear()
        job.check(job.restore(step=3), 3)
        proxy.clear()
    done = [line["fault"] for line in proxy.done()[struck_before:]]
    assert set(done) == {row.kind}, "the fault must have fired, and no other"
    states = {step.id.step: step.state for step in catalog_of(root).steps}
    assert [states.get(step) for step in acknowledged] == [StepState.COMMITTED] * len(acknowledged)
    assert unproved(root) == []
