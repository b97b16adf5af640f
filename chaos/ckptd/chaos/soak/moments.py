"""When the faults of a random schedule strike. Pure; data and the draw.

Owns: which moments there are for which target. Does not own: what is done (`deeds`). Moments are chosen so that they come: an
event that each save or each start has, counted from the fault before, or a time. A fault whose moment never comes proves
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptd.chaos.scenario import Moment
from ckptd.chaos.soak.chance import Chance

OF_A_STEP: Mapping[str, tuple[str, ...]] = {
    "rank": ("step", "begun", "staged", "sealed-local", "decided", "acknowledged"),
    "agent": ("step", "begun", "staged", "put", "sealed-local", "sealed", "decided", "acknowledged"),
    "node": ("step", "begun", "staged", "put", "sealed-local", "sealed", "decided", "acknowledged"),
    "coordinator": ("begun", "staged", "sealed", "decided", "acknowledged"),
    "all": ("step", "begun", "staged", "sealed", "decided", "acknowledged"),
    "store": ("step", "begun", "staged", "put", "decided", "acknowledged"),
}
"""By kind of the target: events that every save has, while a job runs."""
OF_A_START = ("attached", "claimed", "resolved", "restore_chosen", "started", "restored")
"""Events that every start of a job has that goes on from a snapshot."""

SAVING = (
    *("agent.received_Begin", "agent.before_reply_Begin", "agent.received_Staged", "agent.before_reply_Staged"),
    *("held.before_stage", "held.after_stage", "uploader.before_hash", "uploader.before_put", "uploader.before_head"),
    *("uploader.after_put", "uploader.before_index", "uploader.after_index", "uploader.before_told"),
    *("agent.before_say_begin", "agent.before_say_staged", "agent.before_say_sealed"),
    *("agent.heard_begin", "agent.heard_staged", "agent.heard_outcome"),
)
"""Failpoints that the agent of every node passes in each save."""
DECIDING = (
    *("coordinator.received_begin", "coordinator.before_send_begin", "coordinator.received_staged"),
    *("coordinator.received_sealed", "coordinator.before_read_indexes", "coordinator.before_decision"),
    *("coordinator.after_decision", "coordinator.before_second_look", "coordinator.before_send_outcome"),
)
"""Failpoints that the coordinator passes in each save."""
JOINING = (
    *("agent.received_Hello", "agent.received_Attach", "agent.before_say_hello", "agent.before_say_attached"),
    *("agent.heard_welcome", "agent.received_Restore", "agent.before_say_restore", "agent.heard_restore_chosen"),
)
"""Failpoints that the agent of every node passes when a job starts again."""
CLAIMING = (
    *("coordinator.before_list_claims", "coordinator.before_claim", "coordinator.after_claim"),
    *("coordinator.before_look_after_claim", "coordinator.before_list_log", "coordinator.before_read_newest"),
    *("coordinator.before_start_record", "coordinator.after_start_record", "coordinator.before_look_after_start"),
)
"""Failpoints that the coordinator passes when a job starts again."""
SLOW = (*SAVING, *DECIDING, *JOINING, *CLAIMING)
"""Failpoints at which every agent may be delayed, all the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What a schedule is drawn for, and how far it is.

    Attributes:
        nnodes: Number of nodes.
        nproc: Ranks on each.
        store: "local" or "s3".
        index: Of the fault that is drawn, from 0.
        is_starting: The fault before has the job started again.
        restarted: Numbers of the nodes whose agents that fault has started again.
        drawn: Names of the deeds so far.
        pulse: What was done to processes so far that live on, see `deed.Deed`; "" for nothing.
    """

    nnodes: int
    nproc: int
    store: str
    index: int = 0
    is_starting: bool = False
    restarted: tuple[int, ...] = ()
    drawn: tuple[str, ...] = ()
    pulse: str = ""


def moment(chance: Chance, ground: Ground, kind: str) -> Moment:
    """Draw when something is done to a target of a kind."""
    if ground.is_starting and chance.percent(45):
        # In the midst of a recovery: that is where two faults are more than one after the other.
        if chance.percent(40):
            return Moment(after_ms=chance.between(1, 1500))
        return Moment(event=chance.one_of(OF_A_START), restarting=True)
    if ground.index > 0 and chance.percent(15):
        return Moment(after_ms=chance.between(1, 800))
    return Moment(event=chance.one_of(OF_A_STEP[kind]), nth=chance.between(1, 4))


def failpoint(chance: Chance, ground: Ground, node: int) -> Moment | None:
    """Draw a failpoint that the agent of a node will pass; None where it cannot be given one now."""
    leads = node == 0
    # The coordinator's own are the fewer and the more telling ones.
    saving: Sequence[str] = (*SAVING, *DECIDING, *DECIDING) if leads else SAVING
    starting: Sequence[str] = (*JOINING, *CLAIMING, *CLAIMING) if leads else JOINING
    if ground.index == 0:
        return Moment(failpoint=chance.one_of(saving), nth=chance.between(1, 6))
    if node not in ground.restarted:
        return None
    if ground.is_starting and chance.percent(60):
        return Moment(failpoint=chance.one_of(starting), restarting=True)
    return Moment(failpoint=chance.one_of(saving), nth=chance.between(1, 4), restarting=True)
