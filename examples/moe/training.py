"""One step: a GPipe schedule by hand, then gradients over all axes, then the optimizer.

Sends and receives block and come in one fixed order, so nothing depends on which message arrives first.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from moe.flags import Flags
from moe.model import Stage, role_of
from moe.parallel import Place, set_last_micro

WARMUP = 10  # steps
ROLES = ("matrix", "bias", "expert", "plain", "norm")
DECAYED = ("matrix", "expert")


def make_optimizer(stage: Stage, flags: Flags) -> AdamW:
    """AdamW with one group a role, in the order of `ROLES`.

    A group's parameters live on one part of the mesh, which is what AdamW's `foreach` and `fused` forms need.
    """
    by_role: dict[str, list[Any]] = {role: [] for role in ROLES}
    for name, parameter in stage.named_parameters():
        by_role[role_of(name, parameter)].append(parameter)
    groups = [
        {"params": by_role[role], "role": role, "weight_decay": 0.1 if role in DECAYED else 0.0} for role in ROLES
    ]
    return AdamW(groups, lr=flags.lr, foreach=flags.optim == "foreach", fused=flags.optim == "fused")


def make_scheduler(optimizer: AdamW, flags: Flags) -> LambdaLR:
    """Linear warm-up, then a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / WARMUP
        done = min(1.0, (step - WARMUP) / max(1, flags.schedule_steps - WARMUP))
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


class Trainer:
    """Runs steps of one stage on one rank."""

    def __init__(self, stage: Stage, optimizer: AdamW, scheduler: LambdaLR, place: Place, flags: Flags) -> None:
        self._stage, self._optimizer, self._scheduler = stage, optimizer, scheduler
        self._place, self._flags = place, flags
        self._experts = [p for n, p in stage.named_parameters() if ".experts." in n]

    def step(self, batch: torch.Tensor) -> float:
        """Train on this rank's part of a batch. Returns the mean loss over the whole batch, equal on all ranks."""
        loss = self._gradients(batch)
        self._finish_expert_gradients()
        self._clip()
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        return self._share(loss)

    def _gradients(self, batch: torch.Tensor) -> torch.Tensor:
        """Forward all micro-batches, then backward all; returns this rank's loss (0 before the last stage)."""
        pieces = batch.chunk(self._flags.micro)
        group = self._place.group("pp")
        here = self._place.coord["pp"]
        inputs, outputs = [], []
        total = torch.zeros(())
        for piece in pieces:
            x = piece[:, :-1]
            if not self._stage.first:
                x = torch.empty(*x.shape, self._flags.hidden)
                dist.recv(x, group=group, group_src=here - 1)
                x.requires_grad_()
            y = self._stage(x)
            if self._stage.last:
                y = F.cross_entropy(y, piece[:, 1:].flatten()) / len(pieces)
                total += y.detach()
            else:
                dist.send(y.detach().contiguous(), group=group, group_dst=here + 1)
            inputs.append(x)
            outputs.append(y)
        for number, (x, y) in enumerate(zip(inputs, outputs, strict=True), start=1):
            set_last_micro(self._stage, number == len(pieces))
            grad = None
            if not self._stage.last:
                grad = torch.empty_like(y)
                dist.recv(grad, group=group, group_src=here + 1)
            torch.autograd.backward(y, grad)
            if not self._stage.first:
                assert x.grad is not None
                dist.send(x.grad, group=group, group_dst=here - 1)
        return total

    def _finish_expert_gradients(self) -> None:
        """FSDP2 averages over dp; experts saw the rows of all dp_shard ranks, so theirs is a sum to divide."""
        for parameter in self._experts:
            assert parameter.grad is not None
            grad = _local(parameter.grad)
            self._place.sum(grad, "dp_replicate")
            grad /= self._place.data_part[1]

    @torch.no_grad()
    def _clip(self) -> None:
        """Scale all gradients so that the norm over the whole model is at most `--clip`.

        Each element counts once: a square sum is added over an axis only where that axis shards the tensor.
        """
        grads = [p.grad for p in self._stage.parameters() if p.grad is not None]
        squares = torch.zeros(2, 2, dtype=torch.float64)  # [sharded over dp?][over tp?]
        norms = torch._foreach_norm([_local(g) for g in grads])  # noqa: SLF001
        for grad, norm in zip(grads, norms, strict=True):
            axes = _sharded_axes(grad)
            squares[int("dp_shard" in axes), int("tp" in axes)] += norm.double().square()
        squares[1] = self._place.sum(squares[1].clone(), "dp_shard")
        squares[:, 1] = self._place.sum(squares[:, 1].clone(), "tp")
        total = self._place.sum(squares.sum(), "pp").sqrt().item()
        scale = min(1.0, self._flags.clip / (total + 1e-6))
        torch._foreach_mul_([_local(g) for g in grads], scale)

    def _share(self, loss: torch.Tensor) -> float:
        """Add up loss and expert loads over dp, move the routers' bias, and tell the loss to all stages."""
        mixtures = self._stage.mixtures()
        row = torch.cat([loss.double().view(1), *(m.load.double() for m in mixtures)])
        row = self._place.sum(row, "dp_replicate", "dp_shard")
        for mixture, load in zip(mixtures, torch.split(row[1:], [len(m.load) for m in mixtures]), strict=True):
            mixture.load.copy_(load)
            mixture.follow_load()
        return float(self._place.sum(row[:1].clone(), "pp").item() / self._place.data_part[1])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lies in this process; changes to it are changes to the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_axes(tensor: torch.Tensor) -> set[str]:
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    # `_StridedShard` says is_shard() too on some versions of torch only; what is not replicated is sharded.
    return {name for name, p in zip(names, tensor.placements, strict=True) if not p.is_replicate()}
