"""Bringing bytes to their experts and back: who sends how many rows to whom, and the exchange itself.

Every order here comes from a stable sort, so the same input gives the same bits on every run.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Where the rows of one layer's input go. A row is one (byte, chosen expert)."""

    order: torch.Tensor  # rows sorted by expert
    counts: torch.Tensor  # rows for each expert of the layer, from this rank
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    by_expert: torch.Tensor  # received rows, sorted by this rank's experts
    by_source: torch.Tensor  # the inverse of by_expert
    local_counts: list[int]  # rows for each of this rank's experts

    @staticmethod
    def plan(chosen: torch.Tensor, experts: int, group: ProcessGroup | None) -> "Route":
        """Plan from the chosen expert of each row; with a group, one small collective tells the counts."""
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=experts)
        ranks = 1 if group is None else group.size()
        to_rank = counts.view(ranks, -1)
        from_rank = to_rank
        if group is not None:
            from_rank = torch.empty_like(to_rank)
            dist.all_to_all_single(from_rank, to_rank, group=group)
        owner = torch.arange(from_rank.shape[1]).repeat(ranks).repeat_interleave(from_rank.flatten())
        by_expert = owner.argsort(stable=True)
        return Route(
            order=order,
            counts=counts,
            sent=to_rank.sum(1).tolist(),
            received=from_rank.sum(1).tolist(),
            by_expert=by_expert,
            by_source=by_expert.argsort(),
            local_counts=from_rank.sum(0).tolist(),
        )


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int], group: ProcessGroup
    ) -> torch.Tensor:
        ctx.route = received, sent, group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        received, sent, group = ctx.route
        out = grads[0].new_empty(sum(sent), *grads[0].shape[1:])
        dist.all_to_all_single(out, grads[0].contiguous(), sent, received, group=group)
        return out, None, None, None


def exchange(rows: torch.Tensor, received: list[int], sent: list[int], group: ProcessGroup | None) -> torch.Tensor:
    """Send `sent[i]` rows to rank i of the group and get `received[i]` from it; gradients go the way back."""
    if group is None:
        return rows
    out: torch.Tensor = _Exchange.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]
    return out
