"""The model, written for one process; `moe.parallel` cuts it up afterwards.

A stage holds its own layers only, under names that are unique in the whole model (`layers.3.…` keeps its global
number), and a parameter's first value depends on the seed and its name alone, not on the mesh.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from moe.dispatch import Route, exchange

VOCABULARY = 256  # bytes
BIAS_RATE = 1e-3  # how fast the routers' bias follows the load


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of the model."""

    layers: int
    hidden: int
    heads: int
    experts: int
    top_k: int
    seq: int
    dropout: float


class Attention(nn.Module):
    """Causal self-attention. `qkv` is laid out head by head, so that a cut of its rows is a cut by heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.hidden // shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        qkv = self.qkv(x).view(rows, length, -1, 3, self.head_width)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        return y


class Dense(nn.Module):
    """The feed-forward part of even layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.up(x)))
        return y


class Experts(nn.Module):
    """All experts of a layer as two tensors whose dim 0 is the expert's number in the whole model's layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(shape.experts, shape.hidden, 4 * shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, 4 * shape.hidden, shape.hidden))

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Rows of `x` are sorted by expert; `counts` says how many each of this rank's experts gets."""
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        parts = torch.split(x, counts)
        return torch.cat([F.gelu(part @ up[i]) @ down[i] for i, part in enumerate(parts)])


class Mixture(nn.Module):
    """The feed-forward part of odd layers: each byte goes to `top_k` experts, wherever they live.

    `bias` steers the choice of experts towards an even load and is no parameter: it is a buffer that every step
    moves, equal on all ranks that hold the layer.
    """

    bias: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = Experts(shape)
        self.register_buffer("bias", torch.zeros(shape.experts))
        self.load = torch.zeros(shape.experts)  # bytes each expert got from this rank since the last step
        self.group: ProcessGroup | None = None  # ranks among which the experts are spread

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        share = self.router(tokens).softmax(-1)
        chosen = (share.detach() + self.bias).topk(self.top_k).indices
        weight = share.gather(1, chosen)
        route = Route.plan(chosen.flatten(), len(self.bias), self.group)
        self.load += route.counts
        sent = tokens.index_select(0, route.order // self.top_k)
        got = exchange(sent, route.received, route.sent, self.group)
        done = self.experts(got.index_select(0, route.by_expert), route.local_counts)
        back = exchange(done.index_select(0, route.by_source), route.sent, route.received, self.group)
        mixed = back.index_select(0, route.order.argsort()).view(-1, self.top_k, tokens.shape[1])
        y: torch.Tensor = (mixed * weight.unsqueeze(-1)).sum(1)
        return y.view_as(x)

    @torch.no_grad()
    def follow_load(self) -> None:
        """Move the bias by one small step against `load`, which is then begun anew."""
        self.bias += BIAS_RATE * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(shape.hidden)
        self.attn = Attention(shape)
        self.ff_norm = nn.LayerNorm(shape.hidden)
        self.ff: nn.Module = Mixture(shape) if index % 2 else Dense(shape)
        self.dropout = shape.dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attn(self.attn_norm(x)), self.dropout)
        return x + F.dropout(self.ff(self.ff_norm(x)), self.dropout)


class Stage(nn.Module):
    """The layers of one pipeline stage: the embeddings are on the first, the last norm and head on the last."""

    def __init__(self, shape: Shape, *, index: int, of: int, seed: int) -> None:
        super().__init__()
        self.first, self.last = index == 0, index == of - 1
        if self.first:
            self.embed = nn.Embedding(VOCABULARY, shape.hidden)
            self.place = nn.Embedding(shape.seq, shape.hidden)
        numbers = range(shape.layers * index // of, shape.layers * (index + 1) // of)
        self.layers = nn.ModuleDict({str(n): Layer(shape, n) for n in numbers})
        if self.last:
            self.norm = nn.LayerNorm(shape.hidden)
            self.head = nn.Linear(shape.hidden, VOCABULARY)
        self._begin(seed)

    @torch.no_grad()
    def _begin(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            if "norm" in name:
                continue
            word = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            parameter.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(int.from_bytes(word[:7])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Bytes in on the first stage, activations (rows, seq, hidden) between, (rows * seq, 256) out of the last."""
        if self.first:
            x = self.embed(x) + self.place.weight[: x.shape[1]]
        for layer in self.layers.values():
            x = layer(x)
        if self.last:
            # A copy: what leaves tp is a view, and FSDP2 hangs its hooks on outputs that are not.
            x = self.head(self.norm(x).flatten(0, 1)).clone()
        return x

    def mixtures(self) -> list[Mixture]:
        """The MoE parts of this stage, in order."""
        return [m for m in self.modules() if isinstance(m, Mixture)]


def role_of(name: str, parameter: Any) -> str:
    """The optimizer group of a parameter: by what it is, so that groups are the same on every mesh."""
    if ".experts." in name:
        return "expert"
    if ".attn." in name or ".ff.up." in name or ".ff.down." in name or name.startswith("head."):
        return "matrix" if parameter.dim() > 1 else "bias"
    return "plain" if parameter.dim() > 1 else "norm"
