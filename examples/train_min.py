"""A whole script: run it, kill it at any moment, run it again. Alone, or under torchrun with as many ranks as you like.

python examples/train_min.py file:///tmp/ckptd-min 200
ckptd chaos run --preset ci --nproc 2 -- examples/train_min.py    # proves that it resumes bit for bit
"""

import os
import sys

import torch
import torch.distributed as dist

from ckptd.client import Checkpointer


class Loader:
    """Batches of shuffled rows, other ones for each rank. Its position is part of the state."""

    def __init__(self, data: torch.Tensor, size: int, rank: int, world: int) -> None:
        self.data, self.size, self.rank, self.world, self.position = data, size, rank, world, 0

    def __next__(self) -> torch.Tensor:
        epoch, at = divmod(self.position, len(self.data) // (self.size * self.world))
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(epoch))
        self.position += 1
        return self.data[order[self.rank :: self.world][at * self.size :][: self.size]]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def main(root: str | None, total: int) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    loader = Loader(torch.randn(256, 64), 16, rank, world)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 64))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, total)
    torch.manual_seed(1 + rank)  # ranks must not drop the same activations

    ckpt = Checkpointer(root, job="train-min")  # None: CKPTD_ROOT
    ckpt.track(
        model=model, optimizer=opt, scheduler=sched, loader=loader
    )  # the RNGs of python, numpy and torch by itself
    restored = ckpt.restore()  # None: nothing there yet
    for step in range(restored.step if restored else 0, total):
        x = next(loader)
        loss = torch.nn.functional.mse_loss(model(x), x)
        opt.zero_grad()
        torch.autograd.backward(loss)
        if world > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        opt.step()
        sched.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.6f}", flush=True)
        ckpt.save(step + 1, metrics={"loss": loss.item()})  # returns once training may go on
    ckpt.close()  # waits for what is in flight
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None, int(sys.argv[2]) if len(sys.argv) > 2 else 20)
