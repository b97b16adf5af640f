"""What a node holds of one step, and how its ranks' slots are laid out. Values; used on the event loop.

Owns: their shape. Does not own: when they change (`held`, `upload_queue`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum

from ckptd.daemon.chunks import StreamLayout
from ckptd.daemon.slots import SlotFile
from ckptd.protos.coordinator_pb2 import Held
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import HeldPlan, HeldSnapshot, IndexRef


class Stage(Enum):
    """Where the node's part of a snapshot stands."""

    WRITING = "writing"
    STAGED = "staged"
    SEALED = "sealed"
    COMMITTED = "committed"


@dataclass(kw_only=True, slots=True)
class RankPlan:
    """How one rank's slot is laid out under one plan.

    Attributes:
        held: The rank's rows, who writes which, ties and place.
        layout: What follows from it for the stream.
        digest: Of all of `held`, ties and place included; empty where an agent of an older version wrote it.
    """

    held: HeldPlan
    layout: StreamLayout
    digest: bytes


@dataclass(kw_only=True, slots=True)
class Snapshot:
    """The node's part of one step."""

    about: HeldSnapshot
    plans: dict[int, RankPlan]
    slots: dict[int, SlotFile] = field(default_factory=dict)
    staged: set[int] = field(default_factory=set)
    stage: Stage = Stage.WRITING
    index: IndexRef | None = None
    failed: Error | None = None
    cancel: threading.Event = field(default_factory=threading.Event)
    readers: int = 0
    resumed: bool = False
    dropped: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """Timeline and step."""
        return self.about.timeline, self.about.step

    def wire(self) -> Held:
        """Return what the coordinator is told."""
        held = Held(timeline=self.about.timeline, step=self.about.step, ranks=sorted(self.staged))
        if self.index is not None:
            held.index.CopyFrom(self.index)
        if self.failed is not None:
            held.failed.CopyFrom(self.failed)
        return held
