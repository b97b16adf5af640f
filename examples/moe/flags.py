"""The command line of `train_moe.py`: every knob, and the rules by which they fit together."""

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """Every knob of a run. Two runs with equal flags and equal world print equal losses and digests."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int
    steps: int
    schedule_steps: int
    seed: int
    layers: int
    hidden: int
    heads: int
    experts: int
    top_k: int
    batch: int  # sequences of one step, over the whole mesh
    seq: int  # bytes of one sequence
    micro: int  # micro-batches of one step
    dropout: float
    augment: float  # share of sequences that are augmented
    lr: float
    clip: float  # largest norm of the gradient of the whole model
    optim: str
    corpus_bytes: int
    step_s: float  # a step takes at least this many seconds
    root: str | None
    job: str
    ckpt: bool
    save_every: int
    wait: str
    digest_every: int
    digests: Path | None
    out: Path | None
    flip: str | None
    timeout_s: float

    @property
    def world(self) -> int:
        """Processes that this mesh needs."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        """Ranks that see different data."""
        return self.dp_replicate * self.dp_shard

    def saves_at(self, step: int) -> bool:
        """Whether the end of `step` is saved."""
        return self.ckpt and self.save_every > 0 and step % self.save_every == 0

    def saves_after(self, step: int) -> bool:
        """Whether a later step of this run will be saved."""
        return step + self.save_every <= self.steps

    def digests_at(self, step: int) -> bool:
        """Whether the state at the end of `step` is digested: each saved step, unless told otherwise."""
        every = self.digest_every or self.save_every
        return every > 0 and step % every == 0


def parse_flags(argv: list[str]) -> Flags:
    """Read `argv`. Exits with status 2 and one line on stderr when the flags do not fit together."""
    parser = _parser()
    given = parser.parse_args(argv)
    flags = Flags(**{f.name: getattr(given, f.name) for f in fields(Flags)})
    if broken := _first_broken_rule(flags):
        parser.error(broken)
    return flags


def _first_broken_rule(f: Flags) -> str | None:
    ones = ("pp", "dp_replicate", "dp_shard", "tp", "micro", "heads", "experts", "batch", "seq")
    low = [name for name in ones if getattr(f, name) < 1]
    if low:
        return f"must be at least 1: {', '.join('--' + name.replace('_', '-') for name in low)}"
    rules = (
        (f.layers >= 2 * f.pp, f"--layers {f.layers}: each of --pp {f.pp} stages needs two layers or more"),
        (f.heads % f.tp == 0, f"--heads {f.heads} must be a multiple of --tp {f.tp}"),
        (f.hidden % f.heads == 0, f"--hidden {f.hidden} must be a multiple of --heads {f.heads}"),
        (f.experts % f.dp_shard == 0, f"--experts {f.experts} must be a multiple of --dp-shard {f.dp_shard}"),
        (1 <= f.top_k <= f.experts, f"--top-k {f.top_k} must lie in 1..{f.experts}"),
        (f.root is not None or not f.ckpt, "give --root URL or CKPTD_ROOT, or train with --no-ckpt"),
        (
            f.batch % (f.dp * f.micro) == 0,
            f"--batch {f.batch} must be a multiple of dp_replicate x dp_shard x micro = {f.dp * f.micro}",
        ),
    )
    return next((text for holds, text in rules if not holds), None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a small byte-level MoE model on the sources of the running Python's library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    mesh = parser.add_argument_group("mesh (all 1: one process, without torchrun)")
    mesh.add_argument("--pp", type=int, default=1, help="pipeline stages")
    mesh.add_argument("--dp-replicate", type=int, default=1, help="replicas of the sharded model")
    mesh.add_argument("--dp-shard", type=int, default=1, help="FSDP2 shards; the experts live on this axis")
    mesh.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    mesh.add_argument("--micro", type=int, default=2, help="micro-batches of a step")
    mesh.add_argument("--timeout-s", type=float, default=120.0, help="longest wait of a collective, seconds")

    model = parser.add_argument_group("model and data")
    model.add_argument("--layers", type=int, default=4, help="odd ones have experts")
    model.add_argument("--hidden", type=int, default=128)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--experts", type=int, default=8, help="of each MoE layer")
    model.add_argument("--top-k", type=int, default=2, help="experts a byte goes to")
    model.add_argument("--batch", type=int, default=8, help="sequences of a step, all ranks together")
    model.add_argument("--seq", type=int, default=64, help="bytes of a sequence")
    model.add_argument("--corpus-bytes", type=int, default=2_000_000)
    model.add_argument("--dropout", type=float, default=0.1)
    model.add_argument("--augment", type=float, default=0.25, help="share of sequences augmented")

    train = parser.add_argument_group("training")
    train.add_argument("--steps", type=int, default=20)
    train.add_argument("--schedule-steps", type=int, default=400, help="length of the cosine schedule")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--lr", type=float, default=3e-3)
    train.add_argument("--clip", type=float, default=0.5)
    train.add_argument("--optim", choices=("foreach", "fused", "loop"), default="foreach", help="AdamW's kind")
    train.add_argument("--step-s", type=float, default=0.0, help="a step takes at least so many seconds")

    keep = parser.add_argument_group("checkpoints and evidence")
    keep.add_argument("--root", default=os.environ.get("CKPTD_ROOT"), help="store URL, e.g. file:///data/moe")
    keep.add_argument("--job", default=os.environ.get("CKPTD_JOB", "moe"))
    keep.add_argument("--no-ckpt", dest="ckpt", action="store_false", help="train without ckptd")
    keep.add_argument("--save-every", type=int, default=5, help="steps between saves")
    keep.add_argument("--wait", choices=("none", "staged", "durable"), default="none", help="wait at each save")
    keep.add_argument("--digest-every", type=int, default=0, help="steps between digests; 0: at each save")
    keep.add_argument("--digests", type=Path, default=None, help="rank R appends JSON lines to FILE.R")
    keep.add_argument("--out", type=Path, default=None, help="rank 0 writes losses and mesh here at the end")
    keep.add_argument("--flip", default=None, metavar="NAME", help="flip one bit of model/NAME after a restore")
    return parser
