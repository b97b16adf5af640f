"""The job of the matrix: a few kilobytes of state, a step in milliseconds, and the real client.

Run by `launcher`, or by torchrun. Owns: a deterministic training loop that says what the harness listens to (`step N loss HEX`,
`restored step=N tier=T`, lists of SHA-256). Does not own: faults. Each rank has replicated parameters and optimizer
state, a loader of its own and generators, so that every part of a snapshot is there, only small.

At most one save is waited for at a time, so that two steps are in flight as in a real job, and what a process does is
nearly the same each time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ckptd.chaos.matrix.launcher import RENDEZVOUS
from ckptd.client import Checkpointer
from ckptd.client.errors import Aborted, CkptdError, Fenced, InvalidRequest, SnapshotNotFound
from ckptd.client.handles import SaveHandle

WIDTH = 16


class Loader:
    """Draws batches with a generator of its own; fails to say its state when told to."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(100 + rank)
        self.position = 0
        self.is_broken = False

    def next(self) -> torch.Tensor:
        """Return the next batch: float32 [4, WIDTH]."""
        self.position += 1
        return torch.randn(4, WIDTH, generator=self.generator)

    def state_dict(self) -> dict[str, object]:
        """Return position and generator."""
        if self.is_broken:
            raise RuntimeError("this loader was told to fail once")
        return {"position": self.position, "generator": self.generator.get_state().numpy()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on where `state` was made."""
        self.position = int(state["position"])  # type: ignore[call-overload]
        self.generator.set_state(torch.as_tensor(state["generator"]))


class Job:
    """One rank's training."""

    def __init__(self, rank: int, *, width: int = WIDTH) -> None:
        random.seed(rank)
        np.random.seed(rank)  # noqa: NPY002 - the global one is meant
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, width)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        torch.manual_seed(1000 + rank)
        self.loader = Loader(rank)

    def track(self, ckpt: Checkpointer) -> None:
        """Have everything saved."""
        ckpt.track(model=self.model, optimizer=self.optimizer, loader=self.loader)

    def train(self) -> float:
        """Train one step; return the loss, summed over ranks."""
        batch = self.loader.next()
        loss = torch.nn.functional.mse_loss(self.model(batch), batch)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        total = loss.detach().double()
        # One collective a step: a dead rank is noticed here, as in any job.
        flat = torch.cat(
            [total.reshape(1), *(p.grad.reshape(-1).double() for p in self.model.parameters() if p.grad is not None)]
        )
        dist.all_reduce(flat)
        at = 1
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(flat[at : at + parameter.numel()].view(parameter.shape))
            at += parameter.numel()
        self.optimizer.step()
        return float(flat[0].item())

    def flip_a_bit(self) -> None:
        """Change a parameter on this rank alone; a second call changes it back."""
        next(iter(self.model.state_dict().values())).reshape(-1).view(torch.uint8)[0] ^= 1

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of everything this rank holds."""
        found = {f"model/{name}": _sha256(value) for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            momentum = self.optimizer.state[parameter].get("momentum_buffer")
            found[f"optim/{name}"] = "none" if momentum is None else _sha256(momentum)
        found |= {"rng/torch": _sha256(torch.get_rng_state()), "rng/python": repr(random.getstate())}
        found["rng/python"] = hashlib.sha256(found["rng/python"].encode()).hexdigest()
        return found | {"loader": _sha256(self.loader.generator.get_state()), "position": str(self.loader.position)}


def _sha256(value: torch.Tensor) -> str:
    return hashlib.sha256(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _write_claim(root: str) -> None:
    """Claim the next timeline as another start of the job would that then dies: whoever runs now is fenced."""
    from ckptd.daemon.keys import Timeline, claim_key, new_nonce  # noqa: PLC0415 - one act of one play needs it
    from ckptd.daemon.log_reader import list_log, read_claim  # noqa: PLC0415
    from ckptd.daemon.log_writer import put_once  # noqa: PLC0415
    from ckptd.daemon.records import to_bytes  # noqa: PLC0415
    from ckptd.storage_backends.urls import open_store  # noqa: PLC0415

    with open_store(root) as store:
        view = list_log(store)
        highest = view.highest_claim()
        assert highest is not None
        claim = read_claim(store, highest)
        assert claim is not None
        timeline = Timeline(view.next_number(), new_nonce())
        claim.timeline, claim.run_id = str(timeline), "usurper"
        claim.ClearField("endpoint")
        claim.ClearField("certificate_sha256")
        put_once(store, claim_key(timeline), to_bytes(claim))


class Script:
    """The flags, and what is said to the harness."""

    def __init__(self, flags: argparse.Namespace, rank: int) -> None:
        self.flags, self.rank = flags, rank

    def say(self, line: str) -> None:
        """Print one line, rank 0 only."""
        if self.rank == 0:
            os.write(1, line.encode() + b"\n")

    def tell(self, job: Job, step: int, when: str) -> None:
        """Append what this rank holds to its list."""
        line = json.dumps({"step": step, "rank": self.rank, "when": when, "sha256": job.digests()})
        with self.flags.digests.with_name(f"{self.flags.digests.name}.{self.rank}").open("a") as file:
            file.write(line + "\n")

    def settle(self, handle: SaveHandle | None) -> None:
        """Wait until a save is decided; one that is lost is no reason to stop.

        Raises:
            Fenced: a newer run has taken over.
        """
        if handle is None:
            return
        try:
            handle.wait()
        except Fenced:
            raise
        except CkptdError as lost:
            sys.stderr.write(f"rank {self.rank}: step {handle.step} is not saved: {lost}\n")

    def checkpointer(self, **changes: str) -> Checkpointer:
        """Return a Checkpointer with deadlines that fit a job of seconds."""
        given: dict[str, str] = {"job": "matrix", **changes}
        return Checkpointer(
            self.flags.root,
            **given,  # type: ignore[arg-type]
            attach_timeout_s=30,
            begin_timeout_s=30,
            commit_timeout_s=40,
            restore_timeout_s=40,
            posthumous_timeout_s=20,
            wait_when_busy=True,
            keep_last=3,
            audit="off",
        )

    def train(self) -> None:
        """Restore and train up to `--until`."""
        job = Job(self.rank)
        ckpt = self.checkpointer()
        job.track(ckpt)
        restored = ckpt.restore()
        start = restored.step if restored else 0
        if restored:
            self.say(f"restored step={restored.step} tier={restored.tier}")
            self.tell(job, start, "restore")
        before: SaveHandle | None = None
        for step in range(start + 1, self.flags.until + 1):
            loss = job.train()
            self.say(f"step {step} loss {loss.hex()}")
            handle = self.save(ckpt, job, step, loss)
            self.tell(job, step, "step")
            self.settle(before)
            before = handle
            if step == self.flags.usurp_after:
                self.settle(handle)
                if self.rank == 0:
                    _write_claim(self.flags.root)
                dist.barrier()
        self.settle(before)
        ckpt.close()

    def save(self, ckpt: Checkpointer, job: Job, step: int, loss: float) -> SaveHandle | None:
        """Save a step; the last rank's state is broken at the steps that the flags name."""
        is_last = self.rank == dist.get_world_size() - 1
        job.loader.is_broken = (is_last and step == self.flags.fail_save) or (
            # Two steps later the first rank, so that every agent hears of such a failure.
            self.rank == 0 and self.flags.fail_save > 0 and step == self.flags.fail_save + 2
        )
        changed = is_last and step == self.flags.differ
        if changed:
            job.flip_a_bit()
        try:
            return ckpt.save(step, metrics={"loss": loss})
        except Aborted as failed:
            sys.stderr.write(f"rank {self.rank}: {failed}\n")
            return None
        finally:
            job.loader.is_broken = False
            if changed:
                job.flip_a_bit()

    def refused(self) -> None:
        """Ask for what cannot be had, and see that it is said: a step that is not there, and a state that does not fit."""
        # The state of one rank is enough to refuse a step to all; each node's agent is to say so once.
        for odd in (0, dist.get_world_size() - 1):
            ckpt = self.checkpointer()
            Job(self.rank, width=WIDTH // 2 if self.rank == odd else WIDTH).track(ckpt)
            with _expected(SnapshotNotFound):
                ckpt.restore(step=999_999)
            with _expected(InvalidRequest):
                ckpt.restore()
            ckpt.close()
        with _expected(InvalidRequest):
            ckpt = self.checkpointer(job="another")
            ckpt.restore()
        ckpt.close()


@contextmanager
def _expected(kind: type[CkptdError]) -> Iterator[None]:
    try:
        yield
    except kind as refusal:
        sys.stderr.write(f"refused as expected: {refusal}\n")
    else:
        raise AssertionError(f"{kind.__name__} was expected")


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--digests", type=Path, required=True)
    parser.add_argument("--until", type=int, default=4, help="last step")
    parser.add_argument(
        "--fail-save", type=int, default=0, help="step that the last rank cannot save, and the first one two later"
    )
    parser.add_argument("--differ", type=int, default=0, help="step at which a replica differs on the last rank")
    parser.add_argument("--usurp-after", type=int, default=0, help="step after which another start claims a timeline")
    parser.add_argument("--refused", action="store_true", help="only ask for what cannot be had")
    flags = parser.parse_args()
    rendezvous = os.environ.get(RENDEZVOUS)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    script = Script(flags, rank)
    try:
        if flags.refused:
            script.refused()
        else:
            script.train()
    except Fenced as fenced:
        if not flags.usurp_after:
            raise
        sys.stderr.write(f"rank {rank}: {fenced}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
