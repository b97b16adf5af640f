"""What a rank that comes back is told of the saves that it waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.raw_rank import run_credentials

from ckptd.daemon.errors import DaemonError
from ckptd.daemon.outcomes import KEPT, Outcomes
from ckptd.daemon.request_checks import check_attach
from ckptd.daemon.session import Session
from ckptd.daemon.snapshots import Snapshot, Stage
from ckptd.protos.agent_pb2 import AttachRequest, Event
from ckptd.protos.coordinator_pb2 import CoordinatorMessage
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import HeldSnapshot, StepRef

OLD, NOW = "00000001-aaaaaaaaaaaa", "00000002-bbbbbbbbbbbb"


def told(
    outcomes: Outcomes, *, timeline: str = OLD, step: int = 7, going: tuple[tuple[str, int], ...] = ()
) -> list[tuple[int, int, str]]:
    """Return step, state and error of all that a rank is told which waits for this step."""
    session = Session(token="t", about=AttachRequest(rank=1))
    session.about.in_flight.add(step=step, timeline=timeline)
    outcomes.tell(session, going)
    events = [session.events.get_nowait() for _ in range(session.events.qsize())]
    return [(one.step.step, one.step.state, one.step.error.message) for one in events if one is not None]


def holding(**held: Stage) -> Any:
    """Return slots of step 7, in these stages by the name of their timeline."""
    snapshots = [
        Snapshot(about=HeldSnapshot(timeline={"old": OLD, "now": NOW}[name], step=7), plans={}, stage=stage)
        for name, stage in held.items()
    ]
    return SimpleNamespace(snapshots={one.key: one for one in snapshots})


def started(*listed: tuple[str, int]) -> CoordinatorMessage.Started:
    """Return the word that the newer timeline runs."""
    keeps = [StepRef(timeline=timeline, step=step) for timeline, step in listed]
    return CoordinatorMessage.Started(timeline=NOW, keeps=keeps)


def test_a_step_of_an_older_timeline_that_nobody_holds_is_over() -> None:
    """It counts where it is listed, and is gone where it is not."""
    outcomes = Outcomes(holding())
    assert told(outcomes) == []
    outcomes.started(started((OLD, 6)))
    assert told(outcomes) == [(7, Event.ABORTED, "step 7 was not whole when the coordinator restarted")]
    assert told(outcomes, step=6) == [(6, Event.COMMITTED, "")]


def test_what_goes_on_is_not_told() -> None:
    """A step of the present timeline, one that is being uploaded, one that is being begun."""
    outcomes = Outcomes(holding(old=Stage.STAGED))
    outcomes.started(started())
    assert told(outcomes, timeline=NOW) == []
    assert told(outcomes) == []
    assert told(outcomes, step=8, going=((OLD, 8),)) == []


def test_what_was_told_while_the_rank_was_away_is_told_again() -> None:
    """Whether it counts or was aborted, and also where the slots were given to another step since."""
    outcomes = Outcomes(holding(now=Stage.COMMITTED))
    outcomes.note(OLD, 5, Error(message="boom"))
    outcomes.note(OLD, 6, None)
    assert told(outcomes, step=5) == [(5, Event.ABORTED, "boom")]
    assert told(outcomes, step=6) == [(6, Event.COMMITTED, "")]
    assert told(outcomes, timeline=NOW) == [(7, Event.COMMITTED, "")]


def test_old_outcomes_are_forgotten() -> None:
    """A run of months keeps as many as ranks can wait for."""
    outcomes = Outcomes(holding())
    for step in range(KEPT + 1):
        outcomes.note(OLD, step, None)
    assert told(outcomes, step=0) == []
    assert told(outcomes, step=1) == [(1, Event.COMMITTED, "")]


def test_a_timeline_that_is_none_is_refused() -> None:
    """Before anything is made of it."""
    request = AttachRequest(run_id="run", rank=1, world=2, endpoint="127.0.0.1:1", credentials=run_credentials())
    request.credentials.private_key = b""
    check_attach(request)
    request.in_flight.add(step=1, timeline="../..")
    with pytest.raises(DaemonError, match=r"in_flight: '\.\./\.\.' is not a timeline id"):
        check_attach(request)
