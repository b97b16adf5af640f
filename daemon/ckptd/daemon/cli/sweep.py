"""`ckptd sweep`: delete what no step needs any more."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptd.daemon.catalog import read_catalog
from ckptd.daemon.cli.offline_start import GiveUp, start_offline
from ckptd.daemon.cli.root import Driver, Json, Root, note, opened, print_json, size_text
from ckptd.daemon.sweep import sweep as run_sweep


def sweep(
    root: Root,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    claim: Annotated[
        bool, typer.Option("--claim", help="The job is dead, its last start was cut off: settle it first.")
    ] = False,
    give_up: GiveUp = False,
    json: Json = False,
    driver: Driver = "auto",
) -> None:
    """Delete what the newest record does not need: dropped and dead steps, chunks nothing refers to.

    Safe at any time, beside a running job and beside itself. Deletes nothing (exit 6) while a newer start of the job
    has claimed and written no record, and nothing (exit 4) when an index of a kept step cannot be read. With --claim, where
    that start is dead, a timeline is claimed and its start record written, as a start of the job would; then it sweeps.
    """
    if claim and dry_run:
        raise typer.BadParameter("say --claim or --dry-run, not both: a claim is written")
    with opened(root, driver) as store:
        catalog = read_catalog(store)
        if claim and catalog.newest is not None and catalog.is_provisional:
            done = start_offline(store, give_up=give_up)
            note(f"ckptd sweep: wrote the start record of timeline {done.timeline}; {len(done.kept)} steps are listed")
        plan = run_sweep(store, dry_run=dry_run)
    if json:
        print_json(
            {
                "root": root,
                "dry_run": dry_run,
                "deleted": [info.key for info in plan.delete],
                "bytes": plan.nbytes,
                "kept": plan.kept,
                "dead_steps": [{"step": step.step, "timeline": str(step.timeline)} for step in plan.dead_steps],
            }
        )
        return
    if dry_run:
        for info in plan.delete:
            typer.echo(info.key)
    what = "would be deleted" if dry_run else "deleted"
    steps = ", ".join(str(step.step) for step in plan.dead_steps) or "none"
    text = f"{len(plan.delete)} objects ({size_text(plan.nbytes)}) {what}, {plan.kept} kept; dead steps: {steps}"
    typer.echo(text, err=dry_run)
