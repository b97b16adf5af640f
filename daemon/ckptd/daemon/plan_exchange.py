"""Layouts on their way to the coordinator, plans on their way back.

Owns: when a plan that is known must be fetched all the same. Does not own: what makes a plan (the coordinator), who keeps it
(`held`). On the agent's event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ckptd.daemon import rpc
from ckptd.protos import shard_table
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeLayoutPart, NodePlanRequest
from ckptd.protos.failpoints import failpoint
from ckptd.protos.snapshot_pb2 import HeldPlan

if TYPE_CHECKING:
    from ckptd.daemon.run_link import RunLink


async def send_layout(link: RunLink, need: CoordinatorMessage.NeedLayout) -> None:
    """Send the coordinator a rank's layout; nothing where the rank has not put it.

    Raises:
        AioRpcError: the coordinator cannot be reached; it asks again.
    """
    session = link.ranks.get(need.rank)
    if session is None or bytes(need.digest) not in session.layouts:
        return
    rows, _ = session.layouts[bytes(need.digest)]

    async def parts() -> AsyncIterator[NodeLayoutPart]:
        for at, part in enumerate(shard_table.split(rows)):
            made = NodeLayoutPart(rows=part)
            if at == 0:
                made.run_id, made.rank, made.digest = link.about.run_id, need.rank, need.digest
            yield made

    failpoint("saves.before_SendLayout")
    await link.stub.SendLayout(parts(), metadata=rpc.token_metadata(link.about.credentials))
    failpoint("saves.after_SendLayout")


async def know_plan(link: RunLink, rank: int, layout_digest: bytes, plan_digest: bytes) -> None:
    """Fetch a rank's plan, unless the one that is known is as good.

    Raises:
        AioRpcError: the coordinator cannot be reached, or has another plan by now.
    """
    known = link.held.plan_of(rank, plan_digest)
    session = link.ranks[rank]
    put = session.layouts.get(layout_digest)
    # Ties are no rows, and neither is the rank's place: both may change without any other layout, hence without
    # another plan. A run on another mesh has another place for the rank that held this layout before.
    is_stale = known is not None and (
        (put is not None and put[1] != known.held.aliases)
        or list(known.held.coordinate) != list(session.about.coordinate)
    )
    if known is None or is_stale:
        await _fetch_plan(link, rank, layout_digest, plan_digest)


async def _fetch_plan(link: RunLink, rank: int, layout_digest: bytes, plan_digest: bytes) -> None:
    writers: list[int] = []
    request = NodePlanRequest(run_id=link.about.run_id, rank=rank, plan_digest=plan_digest)
    failpoint("saves.before_FetchPlan")
    async for part in link.stub.FetchPlan(request, metadata=rpc.token_metadata(link.about.credentials)):
        writers.extend(part.writer)
    failpoint("saves.after_FetchPlan")
    session = link.ranks[rank]
    rows, aliases = session.layouts[layout_digest]
    await link.held.learn_plan(
        HeldPlan(
            rank=rank,
            coordinate=session.about.coordinate,
            rows=rows,
            aliases=aliases,
            writer=writers,
            layout_digest=layout_digest,
            plan_digest=plan_digest,
        )
    )
