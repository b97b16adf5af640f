"""The whole use of ckptd in five lines: run it, kill it at any moment, run it again.

python examples/train_min.py file:///tmp/ckptd-min 200
"""

import sys

import torch

from ckptd.client import Checkpointer


def main(root: str, total: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 64))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, total)

    ckpt = Checkpointer(root, job="train-min")
    ckpt.track(model=model, optimizer=opt, scheduler=sched)  # the RNGs of python, numpy and torch by itself
    restored = ckpt.restore()  # None: nothing there yet
    for step in range(restored.step if restored else 0, total):
        x = torch.randn(32, 64)
        loss = torch.nn.functional.mse_loss(model(x), x)
        opt.zero_grad()
        torch.autograd.backward(loss)
        opt.step()
        sched.step()
        print(f"step {step + 1} loss {float(loss.item()).hex()}", flush=True)
        ckpt.save(step + 1, metrics={"loss": loss.item()})  # returns once training may go on
    ckpt.close()  # waits for what is in flight


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
