"""One step that the coordinator offers to a run: what a node reads of it, fetches and hands out.

Owns: an attempt's waiting ranks, the bytes it fetched and the slots it reads from. Does not own: which attempt counts and
what the coordinator is told (`restores`), which bytes these are (`restore_plan`). On the agent's event loop, heavy work in
threads. Invariant: slots that are read stay as they are until `release`; the arena's file for as long as a rank has it mapped.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptd.daemon import any_mesh, restore_plan
from ckptd.daemon.any_mesh import Wanted
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.held import HeldJob
from ckptd.daemon.restore_plan import NodePlan, Stored
from ckptd.daemon.snapshots import Snapshot
from ckptd.protos import error_pb2, shard_table
from ckptd.protos.agent_pb2 import AttachRequest, FetchedPart, RestoreRequest, StoredPart
from ckptd.protos.coordinator_pb2 import CoordinatorMessage
from ckptd.protos.error_pb2 import Error
from ckptd.storage_backends.base import ObjectStore


@dataclass(kw_only=True, slots=True)
class Ask:
    """A rank that waits for the answer to Restore."""

    request: RestoreRequest
    answer: asyncio.Future[list[StoredPart]]


@dataclass(kw_only=True, slots=True)
class Want:
    """A rank that said what it wants."""

    wanted: Wanted
    answer: asyncio.Future[list[FetchedPart]]


@dataclass(kw_only=True, slots=True)
class Attempt:
    """One step offered by the coordinator.

    Attributes:
        chosen: The offer.
        loaded: What is stored for the node's ranks, once the indexes are read.
        deadline: When this node gives up on the store, on `time.monotonic`.
        wants: By rank, what it asked for.
        told: Ranks that heard what is stored.
        done: Ranks that have copied.
        failed: By rank, why its bytes cannot be had, or why it cannot use the step.
        plan: Where the verified bytes stand, once they are fetched.
        ready: Whether all that is wanted is fetched and verified.
        fetching: Whether that has begun.
        leases: Give back the slots that are read.
    """

    chosen: CoordinatorMessage.RestoreChosen
    loaded: asyncio.Future[Stored]
    deadline: float
    wants: dict[int, Want] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    failed: dict[int, Error] = field(default_factory=dict)
    plan: NodePlan | None = None
    ready: bool = False
    fetching: bool = False
    leases: list[Callable[[], None]] = field(default_factory=list)

    @property
    def number(self) -> int:
        """The coordinator's number of the attempt."""
        return self.chosen.attempt

    async def read(self, store: ObjectStore, about: AttachRequest, places: Mapping[int, Sequence[int]]) -> Stored:
        """Read the step's indexes for ranks at these coordinates, until the deadline: a thread may hang in the store for longer.

        Raises:
            DaemonError: DEADLINE_EXCEEDED, naming the object; or as `restore_plan.load` says.
        """
        reading: set[str] = set()
        load = functools.partial(
            restore_plan.load, store, self.chosen, about.mesh, about.world, places, reading=reading
        )
        loading = asyncio.get_running_loop().run_in_executor(None, load)
        await asyncio.wait({loading}, timeout=max(0.0, self.deadline - time.monotonic()))
        if not loading.done():
            raise _not_read(self.chosen.step.step, sorted(reading))
        return loading.result()

    def stored_parts(
        self,
        held: HeldJob,
        stored: Stored,
        rank: int,
        ranks: Sequence[int],
        detail: RestoreRequest.Detail.ValueType,
    ) -> list[StoredPart]:
        """Return the answer to a rank's Restore: the step, and what is stored at the rank's coordinate.

        Args:
            held: The node's slots: where they hold the step, it comes from memory.
            stored: What the indexes say.
            rank: Whose answer.
            ranks: All of the run on this node.
            detail: How much of it the rank asked for.
        """
        snapshot = self._held_snapshot(held)
        in_memory = snapshot is not None and stored.needed_ranks(ranks) <= set(snapshot.slots)
        committed = self.chosen.committed
        found = StoredPart.Found(
            found=True,
            step=self.chosen.step.step,
            timeline=self.chosen.step.timeline,
            tier="memory" if in_memory else "store",
            metrics=dict(committed.metrics),
            tags=dict(committed.tags),
            fell_back_from=self.chosen.fell_back_from,
            mesh=committed.mesh,
            world=committed.world,
            attempt=self.number,
            other_mesh=stored.other_mesh,
        )
        if detail == RestoreRequest.NOTHING:
            return [StoredPart(found=found)]
        if stored.other_mesh:
            told = any_mesh.boxes(stored.sections) if detail == RestoreRequest.BOXES else stored.offered
            return [StoredPart(found=found), *told]
        section = stored.sections[rank]
        first = StoredPart(found=found, object_names=section.object_names, aliases=section.aliases)
        return [first, *(StoredPart(rows=part) for part in shard_table.split(section.shards))]

    async def fetch(self, held: HeldJob, stored: Stored) -> NodePlan:
        """Plan, fetch and verify what all ranks of the node want; slots of the step stay as they are until `release`.

        Raises:
            DaemonError: the bytes are not there in time, or not what was saved.
        """
        snapshot = self._held_snapshot(held)
        if snapshot is not None:
            self.leases.append(held.read_lease(snapshot))
        wants = {rank: want.wanted for rank, want in self.wants.items()}
        fetch = functools.partial(
            restore_plan.fetch,
            stored,
            wants,
            fetcher=held.fetcher,
            arena=held.arena,
            held=dict(snapshot.slots) if snapshot is not None else {},
            deadline=self.deadline,
        )
        return await asyncio.get_running_loop().run_in_executor(None, fetch)

    def hand_out(self, plan: NodePlan, go: CoordinatorMessage.RestoreGo) -> None:
        """Tell every rank that waits where its bytes stand."""
        for rank, want in self.wants.items():
            if not want.answer.done():
                parts = plan.parts(rank)
                if go.HasField("unused"):
                    parts[0].unused = go.unused
                want.answer.set_result(parts)

    def supersede(self) -> None:
        """Tell every rank that waits that another attempt has taken this one's place."""
        for want in self.wants.values():
            if not want.answer.done():
                want.answer.set_result([FetchedPart(superseded=True)])

    def release(self, held: HeldJob) -> None:
        """Let go of slots and of the arena's file, in any order with ranks that still copy from them; idempotent.

        The file stays what it is for whoever has it mapped, and a slot that a rank says it reads is not written to.
        """
        for lease in self.leases:
            lease()
        self.leases.clear()
        if self.plan is not None and self.plan.arena_file is not None:
            held.arena.release(self.plan.arena_file)

    def _held_snapshot(self, held: HeldJob) -> Snapshot | None:
        ref = self.chosen.step
        snapshot = held.snapshots.get((ref.timeline, ref.step))
        return snapshot if snapshot is not None and snapshot.staged and not snapshot.dropped else None


def _not_read(step: int, keys: list[str]) -> DaemonError:
    return DaemonError.of(
        f"restore of step {step}: {keys[0] if keys else 'its index'} was not read within the deadline",
        reason=error_pb2.REASON_DEADLINE_EXCEEDED,
        hint="raise restore_timeout_s, or check the store",
        step=step,
        object=keys[0] if keys else "",
        phase="restore",
    )
