"""`ckptd ls`: list the steps of a root and the state of each."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptd.daemon.catalog import Catalog, CatalogStep, StepState, read_catalog, read_commits
from ckptd.daemon.cli.root import Driver, Json, Root, note, opened, print_json, print_table, size_text
from ckptd.protos.snapshot_pb2 import Committed

WORKERS = 16
"""Records read at once for --long."""


def list_steps(
    root: Root,
    *,
    json: Json = False,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Also read each step's record: bytes, time, world.")
    ] = False,
    driver: Driver = "auto",
) -> None:
    """List the steps of a root, oldest first, from the store alone.

    committed: restorable. uncommitted, incomplete: newer than the newest record and not decided. aborted: given up.
    quarantined: found bad, left alone.
    """
    with opened(root, driver) as store:
        catalog = read_catalog(store)
        commits = {step.id: commit for step, commit in read_commits(store, catalog, workers=WORKERS)} if long else {}
    if catalog.is_provisional:
        note(f"ckptd ls: provisional: timeline {catalog.highest} was claimed and has written no record yet")
    if json:
        print_json(
            {
                "root": root,
                "job": catalog.job.job,
                "provisional": catalog.is_provisional,
                "latest": _name(catalog),
                "steps": [_as_json(step, commits.get(step.id)) for step in catalog.steps],
            }
        )
        return
    columns = ["step", "timeline", "state", *(["created", "bytes", "new", "world"] if long else []), "note"]
    print_table(columns, [_as_row(catalog, step, commits.get(step.id), long=long) for step in catalog.steps])


def _name(catalog: Catalog) -> dict[str, object] | None:
    latest = catalog.latest
    return None if latest is None else {"step": latest.step, "timeline": str(latest.timeline)}


def _as_json(step: CatalogStep, commit: Committed | None) -> dict[str, object]:
    shown: dict[str, object] = {"step": step.id.step, "timeline": str(step.id.timeline), "state": str(step.state)}
    if step.why is not None:
        shown |= {"why": step.why.message, "ranks": list(step.why.ranks)}
    if commit is not None:
        shown |= {
            "created_at": commit.created_at,
            "bytes": commit.totals.bytes,
            "new_bytes": commit.totals.new_bytes,
            "world": commit.world,
            "posthumous": commit.posthumous,
            "metrics": dict(commit.metrics),
        }
    return shown


def _as_row(catalog: Catalog, step: CatalogStep, commit: Committed | None, *, long: bool) -> list[str]:
    row = [str(step.id.step), str(step.id.timeline), str(step.state)]
    if long and commit is not None:
        row += [
            commit.created_at,
            size_text(commit.totals.bytes),
            size_text(commit.totals.new_bytes),
            str(commit.world),
        ]
    elif long:
        row += ["", "", "", ""]
    if step.state is StepState.COMMITTED:
        return [*row, "latest" if step.id == catalog.latest else ""]
    return [*row, step.why.message if step.why is not None else ""]
