"""What goes into the coordinator and what comes out of it.

Pure values. The coordinator is driven by `apply(event, now) -> effects`; its protocol steps are generators that
yield an operation and are resumed with the result. A runner executes the operations on a real store and
network; a test executes them on a store in memory, in any order it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeMessage
from ckptd.protos.snapshot_pb2 import Claim, ShardTable

# ---------------------------------------------------------------- operations: yielded by procedures


@dataclass(frozen=True, kw_only=True, slots=True)
class ListKeys:
    """LIST: result is the sorted list of keys under the prefix, strongly consistent. `label`: see `Put`, before only."""

    prefix: str
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Get:
    """GET of a small object: result is its bytes, or None where there is none. `label`: see `Put`, before only."""

    key: str
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GetMany:
    """GET of several small objects, in parallel: result is a list of bytes or None, in order. `label`: as in `Get`."""

    keys: tuple[str, ...]
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Put:
    """Write-once PUT. The result is None. `label` names the failpoints around it: coordinator.before_<label>, .after_<label>."""

    key: str
    data: bytes
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Run a pure function off the event loop: result is what it returns."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Ask the coordinator that wrote a claim how many of its ranks live: result is (run_id, count), or None without an answer."""

    claim: Claim


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Wait until `until()` holds: result True; or until the deadline (same clock as `now`): result False."""

    until: Callable[[], bool]
    deadline: float | None = None


Operation = ListKeys | Get | GetMany | Put | Compute | Probe | Wait
Procedure = Generator[Operation, Any, Any]


class ProcedureStopped(Exception):  # noqa: N818 - not an error: the coordinator has ended
    """Raised inside a procedure that has nothing left to do because its coordinator has ended."""


# ---------------------------------------------------------------- events


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSaid:
    """A message of a node's session. The first one of a session is its hello."""

    node: str
    message: NodeMessage


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLost:
    """The node's session broke; it may come back. `incarnation` tells a late loss of an old session from the present one."""

    node: str
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutReceived:
    """A rank's layout came in; `digest` was checked against the rows."""

    rank: int
    digest: bytes
    rows: ShardTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """An operation ended: with a result, or with an error that is thrown into the procedure."""

    lane: str
    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Superseded:
    """The same agent was asked to lead a newer run of the job: stop writing, a courtesy to the newer one."""


Event = NodeSaid | NodeLost | LayoutReceived | Done | Tick | Superseded

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send a message to a node's session; lost where there is none (the node says everything again)."""

    node: str
    message: CoordinatorMessage


@dataclass(frozen=True, kw_only=True, slots=True)
class Do:
    """Execute an operation and answer with `Done(lane=…)`."""

    lane: str
    operation: Operation


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """Write an event to the event log."""

    kind: str
    fields: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Close:
    """The coordinator has ended: close its sessions once what was sent before is delivered."""

    why: str


Effect = Send | Do | Log | Close
