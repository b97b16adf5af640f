"""A rank's session with its agent.

Owns: what the agent knows of one living rank: its layouts, its events still to be sent, its process. Does not own: the
run's link to the coordinator, nor slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ckptd.daemon.supervisor import ProcessWatch
from ckptd.protos.agent_pb2 import AttachRequest, Event
from ckptd.protos.coordinator_pb2 import NodeMessage
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import AliasTable, ShardTable

ANSWER_SLACK_S = 10.0
"""An agent's own deadline lies this much behind the coordinator's, so that the coordinator's better error arrives first."""
T = TypeVar("T")


async def answered(answer: asyncio.Future[T], timeout_s: float, *, is_cut_off: Callable[[], bool]) -> T:
    """Wait for what the coordinator says, a little longer than `timeout_s` unless there is nobody to say it.

    Raises:
        TimeoutError: there is no answer; `answer` is cancelled.
    """
    # Not wait_for: where the answer comes as the call is cancelled, Python 3.11 forgets that it was.
    await asyncio.wait({answer}, timeout=timeout_s)
    if not answer.done():
        await asyncio.wait({answer}, timeout=0 if is_cut_off() else ANSWER_SLACK_S)
    if not answer.done():
        answer.cancel()
        raise TimeoutError
    return answer.result()


@dataclass(kw_only=True, slots=True)
class Session:
    """One rank's session. Used on the event loop only."""

    token: str
    about: AttachRequest
    events: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)
    layouts: dict[bytes, tuple[ShardTable, AliasTable]] = field(default_factory=dict)
    watch: ProcessWatch | None = None
    loss: asyncio.TimerHandle | None = None
    attached: bool = True
    gone: NodeMessage.RankGone | None = None

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.about.rank

    def tell(self, event: Event) -> None:
        """Queue an event for the rank."""
        self.events.put_nowait(event)

    def tell_step(self, timeline: str, step: int, state: Event.State.ValueType, error: Error | None = None) -> None:
        """Queue a step's change of state."""
        made = Event.StepState(step=step, timeline=timeline, state=state)
        if error is not None:
            made.error.CopyFrom(error)
        self.tell(Event(step=made))

    def end(self) -> None:
        """End the stream and the watch; idempotent."""
        self.attached = False
        self.events.put_nowait(None)
        if self.watch is not None:
            self.watch.close()
        if self.loss is not None:
            self.loss.cancel()
            self.loss = None
