"""Train a small byte-level MoE model on a mesh of pp x dp_replicate x dp_shard x tp, kept safe by ckptd.

One process:   python examples/train_moe.py --steps 20 --root file:///tmp/moe
Eight ranks:   torchrun --nproc-per-node 8 examples/train_moe.py --pp 2 --dp-shard 2 --tp 2 --root file:///tmp/moe

Run it again after anything has died: it goes on from the newest saved step, and every loss and digest is equal
to those of a run that nobody disturbed. Run it on another mesh: it goes on from the same step there.
"""

import json
import os
import random
import sys
import threading
import time
from dataclasses import fields
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from moe import digest
from moe.data import Loader, read_corpus
from moe.flags import Flags, parse_flags
from moe.model import Shape, Stage
from moe.parallel import AXES, Place, cut
from moe.training import Trainer, make_optimizer, make_scheduler


def main(argv: list[str]) -> None:
    flags = parse_flags(argv)
    if flags.world != int(os.environ.get("WORLD_SIZE", "1")):
        raise SystemExit(
            f"the mesh has {flags.world} ranks, but WORLD_SIZE is {os.environ.get('WORLD_SIZE', 'not set')}: "
            f"start it with torchrun --nproc-per-node {flags.world}, or change --pp, --dp-shard, --tp"
        )
    run(flags)


def seed_everything(seed: int, place: Place) -> None:
    """Seed all global generators.

    All ranks that work on one part of a batch augment it alike. Dropout differs by stage as well, but not inside a
    tp group: its ranks hold the same activations and must drop the same of them.
    """
    part, _ = place.data_part
    random.seed(seed * 1009 + part)
    np.random.seed(seed * 1009 + part)  # noqa: NPY002 - the global generator is meant
    torch.manual_seed((seed * 1009 + part) * 101 + place.coord["pp"])


def run(flags: Flags) -> None:
    # One thread, and deterministic kernels: equal runs must give equal bits.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.use_deterministic_algorithms(True)
    place = Place.join({axis: getattr(flags, axis) for axis in AXES}, timedelta(seconds=flags.timeout_s))

    shape = Shape(**{field.name: getattr(flags, field.name) for field in fields(Shape)})
    stage = Stage(shape, index=place.coord["pp"], of=flags.pp, seed=flags.seed)
    cut(stage, place)
    optimizer = make_optimizer(stage, flags)
    scheduler = make_scheduler(optimizer, flags)
    loader = Loader(
        read_corpus(flags.corpus_bytes),
        seq=flags.seq,
        batch=flags.batch,
        part=place.data_part,
        seed=flags.seed,
        augment=flags.augment,
    )
    trainer = Trainer(stage, optimizer, scheduler, place, flags)
    seed_everything(flags.seed, place)

    def digests() -> dict[str, str]:
        return digest.of_state(stage, optimizer, scheduler, loader)

    def tell(step: int, loss: float | None, when: str) -> None:
        if flags.digests is not None:
            line = {"step": step, "rank": place.rank, "coord": place.coord, "when": when}
            line |= {"loss": None if loss is None else loss.hex(), "sha256": digests()}
            digest.append_line(flags.digests.with_name(f"{flags.digests.name}.{place.rank}"), line)

    ckpt: Any = None
    handles: list[Any] = []
    start = 0
    if flags.ckpt:
        from ckptd.client import Checkpointer  # noqa: PLC0415 - training without it needs none of it

        ckpt = Checkpointer(flags.root, job=flags.job, mesh=place.mesh)
        ckpt.track(model=stage, optimizer=optimizer, scheduler=scheduler, loader=loader)
        ckpt.on_reshard("loader", loader.on_another_mesh)  # asked only when another mesh saved
        if (restored := ckpt.restore()) is not None:
            start = restored.step
            if place.rank == 0:
                print(f"restored step={restored.step} tier={restored.tier}", flush=True)
            # On one rank only: with dp and tp at 0, and the stage that has the tensor.
            if flags.flip and place.is_first_of_stage and digest.flip_bit(stage, flags.flip):
                print(f"flipped model/{flags.flip} rank={place.rank}", flush=True)
            tell(start, (restored.metrics or {}).get("loss"), "restore")

    losses: dict[int, str] = {}
    for step in range(start + 1, flags.steps + 1):
        begun = time.monotonic()
        loss = trainer.step(loader.next())
        losses[step] = loss.hex()
        if place.rank == 0:
            print(f"step {step} loss {loss.hex()}", flush=True)
        if flags.saves_at(step):
            if not flags.saves_after(step):
                settle(handles, "durable")  # the last save must not be skipped because slots are busy
            handles = [h for h in handles if not h.done()] + [ckpt.save(step, metrics={"loss": loss})]
        if flags.digests_at(step):
            tell(step, loss, "step")
        if flags.saves_at(step) and flags.wait != "none":
            settle(handles[-1:], flags.wait)
        if (left := flags.step_s - (time.monotonic() - begun)) > 0:
            threading.Event().wait(left)

    if handles:
        handles[-1].wait("durable")  # raises when the last one is lost: a run must not end well without it
    if ckpt is not None:
        ckpt.close()
    finish(flags, place, digests(), {"start": start, "losses": losses})


def settle(handles: list[Any], level: str) -> None:
    """Wait for snapshots; training goes on without those that were lost, and says so. `Fenced` is for the caller."""
    from ckptd.client import Aborted, OutcomeUnknown, Unavailable  # noqa: PLC0415 - as in run()

    for handle in handles:
        try:
            handle.wait(level)
        except (Aborted, OutcomeUnknown, Unavailable) as lost:
            print(f"lost step={handle.step} {type(lost).__name__}: {lost}", flush=True)


def finish(flags: Flags, place: Place, digests: dict[str, str], story: dict[str, Any]) -> None:
    """Print what this rank holds (in short where `--digests` has the list), write `--out`, leave the group."""
    if flags.digests is None:
        text = "".join(f"sha256 rank={place.rank} {name} {value}\n" for name, value in digests.items())
    else:
        text = f"sha256 rank={place.rank} all {digest.of_object(digests)}\n"
    os.write(sys.stdout.fileno(), text.encode())  # in one write, so that the lines of ranks do not mix
    if place.rank == 0 and flags.out is not None:
        mesh = {axis: getattr(flags, axis) for axis in AXES}
        flags.out.write_text(json.dumps({"world": flags.world, "mesh": mesh, "steps": flags.steps} | story) + "\n")
    if place.mesh is not None:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
