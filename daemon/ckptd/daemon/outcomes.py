"""What became of steps, for ranks that were away when it was told.

Owns: the last outcomes of one run on one node, and telling a rank that comes back what it waits for. Does not own: deciding
(`coordinator`), or what an outcome means for slots (`saves`). On the agent's event loop. Invariant: a step that a rank waits for
is told once it is over, also where neither this agent nor the one before it kept anything of it.
"""

from __future__ import annotations

from collections.abc import Collection

from ckptd.daemon.errors import make_error
from ckptd.daemon.held import HeldJob
from ckptd.daemon.keys import Timeline
from ckptd.daemon.session import Session
from ckptd.daemon.snapshots import Stage
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import Event
from ckptd.protos.coordinator_pb2 import CoordinatorMessage
from ckptd.protos.error_pb2 import Error

KEPT = 64
"""Outcomes that are remembered: a rank has no more steps in flight than it has slots."""


class Outcomes:
    """The outcomes of one run's steps on one node."""

    def __init__(self, held: HeldJob) -> None:
        self._held = held
        self._known: dict[tuple[str, int], Error | None] = {}
        self._now: Timeline | None = None
        self._listed: set[tuple[str, int]] = set()

    def note(self, timeline: str, step: int, error: Error | None) -> None:
        """Remember how a step ended; `error`: why it was aborted, None: it counts."""
        self._known[timeline, step] = error
        while len(self._known) > KEPT:
            del self._known[next(iter(self._known))]

    def started(self, started: CoordinatorMessage.Started) -> None:
        """A timeline runs: of older ones, what it lists counts, and nothing else."""
        self._now = Timeline.parse(started.timeline)
        self._listed = {(ref.timeline, ref.step) for ref in started.keeps}

    def tell(self, session: Session, going: Collection[tuple[str, int]]) -> None:
        """Tell a rank how the steps ended that it waited for when it attached; of the others it will be told in time.

        Args:
            session: Of the rank.
            going: Timeline and step of what is being begun here.
        """
        for ref in session.about.in_flight:
            key = ref.timeline, ref.step
            snapshot = self._held.snapshots.get(key)
            is_held = (snapshot is not None and not snapshot.dropped) or key in going
            if key in self._known:
                error = self._known[key]
            elif snapshot is not None and snapshot.stage is Stage.COMMITTED:
                error = None
            elif is_held or self._now is None or Timeline.parse(ref.timeline) >= self._now:
                continue
            else:
                error = None if key in self._listed else gone(ref.step)
            session.tell_step(*key, Event.COMMITTED if error is None else Event.ABORTED, error)


def gone(step: int) -> Error:
    """Return the error of a step of an older timeline that does not count."""
    text = f"step {step} was not whole when the coordinator restarted"
    return make_error(error_pb2.REASON_ABORTED, text, step=step, phase="commit")
