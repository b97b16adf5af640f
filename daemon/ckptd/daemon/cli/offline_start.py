"""What the verbs share that write a start record for a job that is not running.

Owns: their options, the time, and printing what was written. Does not own: the record (`offline`).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection
from typing import Annotated, TypeAlias

import typer

from ckptd.daemon.cli.root import print_json
from ckptd.daemon.keys import StepId
from ckptd.daemon.offline import OfflineStart, write_start
from ckptd.protos.snapshot_pb2 import Retention
from ckptd.storage_backends.base import ObjectStore

DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Only say what would be dropped.")]
GiveUp: TypeAlias = Annotated[
    bool, typer.Option("--give-up", help="Give up steps that are there in part, though agents might finish them.")
]


def start_offline(
    store: ObjectStore, *, drop: Collection[StepId] = (), retention: Retention | None = None, give_up: bool
) -> OfflineStart:
    """Write the start record now; raises what `write_start` does."""
    now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    return write_start(store, created_at=now, drop=drop, retention=retention, give_up=give_up)


def print_start(root: str, done: OfflineStart, *, json: bool) -> None:
    """Print what was written."""
    if json:
        shown = {"adopted": done.adopted, "dropped": done.dropped, "kept": done.kept}
        print_json(
            {"root": root, "timeline": str(done.timeline), **{key: list(map(_shown, of)) for key, of in shown.items()}}
        )
        return
    adopted = f"; adopted: {_numbers(done.adopted)}" if done.adopted else ""
    typer.echo(f"dropped: {_numbers(done.dropped)}{adopted}; {len(done.kept)} kept; timeline {done.timeline}")


def print_would_drop(root: str, steps: list[StepId], *, json: bool) -> None:
    """Print what a run without --dry-run would drop."""
    if json:
        print_json({"root": root, "dry_run": True, "dropped": list(map(_shown, steps))})
    else:
        typer.echo(f"would be dropped: {_numbers(steps)}")


def print_nothing(root: str, *, json: bool) -> None:
    """Print that there is nothing to drop; nothing was claimed."""
    if json:
        print_json({"root": root, "dropped": []})
    else:
        typer.echo("dropped: none; nothing was written")


def _shown(step: StepId) -> dict[str, object]:
    return {"step": step.step, "timeline": str(step.timeline)}


def _numbers(steps: list[StepId]) -> str:
    return ", ".join(str(step.step) for step in steps) or "none"
