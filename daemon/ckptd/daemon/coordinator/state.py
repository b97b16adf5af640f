"""The coordinator's memory. All of it is soft: what counts is in the store.

Owns: the values the rooms of this package share, and sending. Does not own: any decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from ckptd.daemon.comparisons import Comparisons
from ckptd.daemon.coordinator.comparing import Schedule
from ckptd.daemon.coordinator.effects import Effect, Log, Send
from ckptd.daemon.coordinator.terms import Terms
from ckptd.daemon.keys import Timeline
from ckptd.daemon.plan import Plan
from ckptd.protos.agent_pb2 import LeadRequest
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, Held
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Claim, Committed, IndexRef, Quarantined, ShardTable, StepRef


class Phase(Enum):
    """Where the timeline stands."""

    GATHERING = "waiting for all ranks to attach"
    STARTING = "claiming and reading history"
    RESOLVED = "history is read; no start record yet"
    RUNNING = "the start record is written"
    ENDED = "fenced, refused or over"


@dataclass(kw_only=True, slots=True)
class Node:
    """A node of the run. `held` is what it said it holds, by (timeline, step)."""

    incarnation: str
    hostname: str
    connected: bool
    lost_at: float = 0.0
    held: dict[tuple[str, int], Held] = field(default_factory=dict)
    heard: int = 0
    """The newest attempt whose offer or error was told in the node's present session."""


@dataclass(kw_only=True, slots=True)
class Rank:
    """A rank of the run."""

    node: str
    coordinate: tuple[int, ...]
    attached: bool = True
    clean: bool = False
    restored: tuple[str, int] | None = None
    """Timeline ("": there was nothing) and step that it has restored, by the word of its agent, and not saved since."""


@dataclass(kw_only=True, slots=True)
class BeginCall:
    """A rank that asked to save and has no answer yet."""

    step: int
    layout_digest: bytes
    deadline: float
    segmented_algorithms: tuple[str, ...] = ()
    prefers_segmented: bool = False


@dataclass(kw_only=True, slots=True)
class RefusedBegin:
    """A step that one rank could not read its state for, before it asked: told to each rank that has not heard of it."""

    error: Error
    untold: set[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Over:
    """How a step ended that no rank may begin any more, and the ranks that this was said to, as they were then.

    One that has attached since and asks for the step may not have heard of it.
    """

    why: Error
    told: dict[int, Rank]


@dataclass(kw_only=True, slots=True)
class RestoreCall:
    """A rank that asked to restore and has no answer yet.

    `anew`: it has restored before, so all ranks ask anew, and nobody is answered alone.
    """

    step: int | None
    raise_on_corrupt: bool
    rollback: bool
    deadline: float
    anew: bool = False

    @property
    def question(self) -> tuple[int | None, bool, bool]:
        """What must be equal on all ranks."""
        return self.step, self.raise_on_corrupt, self.rollback


@dataclass(kw_only=True, slots=True)
class StepRun:
    """A step between go and its outcome."""

    step: int
    plan_digest: bytes
    base: StepRef | None
    begun_at: float
    deadline: float
    round: int
    compared_in: StepRef | None
    staged: set[int] = field(default_factory=set)
    sealed: dict[str, IndexRef] = field(default_factory=dict)
    failed: Error | None = None
    all_staged: bool = False
    go: CoordinatorMessage | None = None
    told: dict[int, Rank] = field(default_factory=dict)
    """The ranks that were told go, as they were then."""


@dataclass(kw_only=True, slots=True)
class Attempt:
    """One answer to Restore on all ranks: a step that is tried, or that there is none.

    `offer` says so to the nodes; it is said again to a node whose ranks ask again, because it was away or its agent is a new
    process. `go` is set when the ranks were told to copy, `done` holds those that need no answer any more.
    """

    number: int
    offer: CoordinatorMessage
    question: tuple[int | None, bool, bool]
    step: int | None = None
    go: CoordinatorMessage | None = None
    ready: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    failed: Error | None = None
    terms: Terms = field(default_factory=Terms)
    unused: bytes = b""
    """Bits of the names that `failed` is about, if it is about names that no rank asks for."""


@dataclass(kw_only=True, slots=True)
class Listed:
    """What the newest record lists, and what was found bad since."""

    keeps: list[StepRef] = field(default_factory=list)
    quarantined: list[Quarantined] = field(default_factory=list)
    decisions: dict[tuple[str, int], Committed] = field(default_factory=dict)
    doubted: list[Quarantined] = field(default_factory=list)
    """Those of `quarantined` that no successful restore of this process has told of yet."""

    def newest(self) -> StepRef | None:
        """Return the newest listed step."""
        return self.keeps[-1] if self.keeps else None


@dataclass(kw_only=True, slots=True)
class State:
    """Everything the coordinator knows."""

    lead: LeadRequest
    incarnation: str
    endpoint: str
    certificate_sha256: str
    nonce: Callable[[], str]
    stamp: Callable[[], str]
    started_at: float
    versions: dict[str, str]
    schedule: Schedule
    comparisons: Comparisons = field(default_factory=lambda: Comparisons(timeline=""))
    node_grace_s: float = 30.0
    phase: Phase = Phase.GATHERING
    now: float = 0.0
    effects: list[Effect] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    ranks: dict[int, Rank] = field(default_factory=dict)
    claim: Claim | None = None
    timeline: Timeline | None = None
    listed: Listed = field(default_factory=Listed)
    writing: list[StepRef] | None = None
    """What the commit decision lists that is being written and not yet acknowledged; None while there is none."""
    told: tuple[list[StepRef], CoordinatorMessage] | None = None
    """The listed steps that `Started` was made of last, and it. A list that is announced is replaced, never changed."""
    adopted: list[tuple[StepRef, Committed]] = field(default_factory=list)
    layouts: dict[bytes, ShardTable] = field(default_factory=dict)
    layouts_asked: set[bytes] = field(default_factory=set)
    """Digests of the layouts that a begin waits for."""
    plan: Plan | None = None
    begins: dict[int, BeginCall] = field(default_factory=dict)
    refused_begins: dict[int, RefusedBegin] = field(default_factory=dict)
    restores: dict[int, RestoreCall] = field(default_factory=dict)
    steps: dict[int, StepRun] = field(default_factory=dict)
    decided: dict[int, Error | None] = field(default_factory=dict)
    torn: dict[int, Error] = field(default_factory=dict)
    """Steps that an agent's or a coordinator's death ended before all had staged: a rank that asks again hears why."""
    over: dict[int, Over] = field(default_factory=dict)
    """Steps that were skipped or aborted since a step began last: a rank that never heard of it asks again, and alone."""
    last_begun: int = -1
    attempt: Attempt | None = None
    attempts: int = 0
    failed_restore: CoordinatorMessage | None = None
    """The error that the last restore ended with; None while one goes on or where it went well."""
    start_wanted: bool = False
    has_looked: bool = False
    """Whether a coordinator that comes back has looked for a newer run."""
    refusal: Error | None = None
    fenced: Error | None = None
    superseded: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether the coordinator is fenced, refused or superseded."""
        return self.phase is Phase.ENDED

    @property
    def world(self) -> int:
        """Number of ranks of the run."""
        return self.lead.world

    def send(self, node: str, message: CoordinatorMessage) -> None:
        """Send to one node."""
        self.effects.append(Send(node=node, message=message))

    def broadcast(self, message: CoordinatorMessage) -> None:
        """Send to every node that is connected."""
        for name, node in self.nodes.items():
            if node.connected:
                self.send(name, message)

    def log(self, kind: str, **fields: object) -> None:
        """Write an event."""
        self.effects.append(
            Log(kind=kind, fields={"job": self.lead.job, "timeline": str(self.timeline or ""), **fields})
        )

    def missing(self, present: Iterable[int]) -> list[int]:
        """Return the ranks of the world that are not in `present`."""
        there = set(present)
        return [rank for rank in range(self.world) if rank not in there]

    def asks(self, rank: int) -> None:
        """A rank asks to restore or to save: what it restored before is no answer any more."""
        if rank in self.ranks:
            self.ranks[rank].restored = None

    def live_ranks(self) -> int:
        """Return how many ranks are attached."""
        return sum(rank.attached for rank in self.ranks.values())

    def ranks_that_go_on(self) -> int:
        """Return how many ranks a second start must not disturb: those attached through an agent that is connected.

        None where a rank has died, or was lost with its node: every save needs all ranks, so nothing more can come of the
        others, however alive they look. One that has ended in order takes nobody with it.
        """
        if any(not rank.attached and not rank.clean for rank in self.ranks.values()):
            return 0
        return sum(rank.attached and self.nodes[rank.node].connected for rank in self.ranks.values())

    def held_by(self, timeline: str, step: int) -> dict[str, Held]:
        """Return what connected nodes hold of a step."""
        key = (timeline, step)
        return {name: node.held[key] for name, node in self.nodes.items() if node.connected and key in node.held}
