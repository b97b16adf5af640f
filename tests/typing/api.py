"""The public API as a user would write it; checked by mypy --strict, never run."""
# ruff: noqa: T201

import random
from collections.abc import MutableMapping
from pathlib import Path
from typing import assert_type

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckptd.client import (
    Audit,
    BadStep,
    Checkpointer,
    CkptdError,
    Config,
    Fenced,
    Finding,
    LoadedStep,
    PerRank,
    Restored,
    SaveHandle,
    Sharded,
    StoredTensor,
    load,
    open_step,
)


class Loader:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None: ...


def on_failure(handle: SaveHandle, error: CkptdError) -> None:
    print(handle.step, error.reason_name, error.hint, error.rank)


def five_lines(mesh: DeviceMesh, model: nn.Module, loss: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    ckpt = Checkpointer("s3://bucket/runs/llama", job="llama-7b", mesh=mesh)
    ckpt.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=Loader())
    restored = ckpt.restore()
    assert_type(restored, Restored | None)
    for step in range(restored.step if restored else 0, 100):
        handle = ckpt.save(step + 1, metrics={"loss": loss}, tags={"why": "x"}, timeout=3)
        assert_type(handle, SaveHandle)
    ckpt.close()


def everything(model: nn.Module, chunks: list[nn.Module], group: torch.distributed.ProcessGroup) -> None:
    config = Config(root="file:///data", job="x", slots=3)
    with Checkpointer(
        config=config,
        mesh={"dp": 2, "tp": 4},
        process_group=group,
        per_rank=["model/*.running_mean"],
        on_failure=on_failure,
        keep_last=3,
        keep_every=1000,
        takeover=True,
        transport="stream",
        socket=Path("/run/ckptd/agent.sock"),
        max_failed_saves=5,
    ) as ckpt:
        assert_type(ckpt, Checkpointer)
        ckpt.track(model=model, chunks=chunks, own=PerRank(model))
        ckpt.on_load("loader", lambda value: value)
        ckpt.on_reshard("loader", lambda pieces, here: pieces[here["dp"]].value)
        dropped = ckpt.restore(drop=("loader",))
        assert_type(dropped, Restored | None)
        state: MutableMapping[str, object] = {"x": 1, "part": Sharded(torch.ones(1), (2,), (0,))}
        handle = ckpt.save(1, state)
        handle.wait("staged", timeout=1.0)
        handle.wait()
        if handle.done() and not handle.skipped and handle.error is None:
            print(handle.state, handle.step)
        found = ckpt.restore_into(state, step=1, on_corrupt="raise", strict=False, rollback=True, timeout=9)
        assert_type(found, Restored | None)
        part = ckpt.restore(only=["model"], names={"old/": "model/"}, cast=True)
        renamed = ckpt.restore_into(state, only="x", names=lambda name: name.lower())
        if part is not None and renamed is not None:
            assert_type(part.left_out, tuple[str, ...])
        ckpt.track(torch_generator=torch.Generator(), python_generator=random.Random(1))
        report = ckpt.audit(state)
        assert_type(report, Audit)
        assert_type(report.of("unowned_parameter"), tuple[Finding, ...])
        required = ckpt.restore(required=True)
        if required is not None:
            assert_type(required.fell_back_from, tuple[BadStep, ...])
            print(required.tier, required.metrics, required.missing, required.unexpected, required.bytes_by_tier)
        print(ckpt.rank, ckpt.world, ckpt.timeline, Fenced.exit_code)


def without_the_job() -> None:
    found = load("file:///data/run", 1200, ["model"], objects=True)
    assert_type(found, LoadedStep)
    assert_type(found["model/w"], torch.Tensor)
    assert_type(found.step, int)
    print([piece.coordinate["dp"] for piece in found.objects["loader"]])
    with open_step("file:///data/run", job="llama", window_bytes=1 << 28) as step:
        assert_type(step.tensors["model/w"], StoredTensor)
        for piece in step.pieces("model/*.bias"):
            print(piece.tensor.name, piece.offset, piece.data.shape)
