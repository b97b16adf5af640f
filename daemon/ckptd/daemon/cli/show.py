"""`ckptd show`: show what a step's record says."""

from __future__ import annotations

import sys

import typer
from google.protobuf import json_format

from ckptd.daemon.catalog import Catalog, CatalogStep, StepState, read_catalog
from ckptd.daemon.cli.exit_codes import ExitCode
from ckptd.daemon.cli.root import Driver, Json, Root, Step, note, opened, print_json, size_text
from ckptd.daemon.log_reader import read_committed
from ckptd.protos.snapshot_pb2 import Committed

_CODES = {
    StepState.COMMITTED: ExitCode.GOOD,
    StepState.QUARANTINED: ExitCode.CORRUPT,
    StepState.UNCOMMITTED: ExitCode.INCOMPLETE,
    StepState.INCOMPLETE: ExitCode.INCOMPLETE,
    StepState.ABORTED: ExitCode.INCOMPLETE,
}


def show(root: Root, step: Step = None, *, json: Json = False, driver: Driver = "auto") -> None:
    """Show a step: what was saved, by whom, what it refers to, or what it lacks. From the store alone.

    Exits with 3 when the step is not committed, 4 when it is quarantined, 5 when there is none.
    """
    with opened(root, driver) as store:
        catalog = read_catalog(store)
        found = catalog.step(step)
        commit = None
        if found.ref is not None and catalog.newest is not None:
            commit = read_committed(store, catalog.newest, found.ref)
    if catalog.is_provisional:
        note(f"ckptd show: provisional: timeline {catalog.highest} was claimed and has written no record yet")
    if json:
        print_json(_as_json(root, catalog, found, commit))
    else:
        for name, value in _as_lines(catalog, found, commit):
            typer.echo(f"{typer.style(f'{name:<13}', bold=True) if sys.stdout.isatty() else f'{name:<13}'} {value}")
    raise typer.Exit(_CODES[found.state])


def _as_json(root: str, catalog: Catalog, step: CatalogStep, commit: Committed | None) -> dict[str, object]:
    shown: dict[str, object] = {
        "root": root,
        "job": catalog.job.job,
        "step": step.id.step,
        "timeline": str(step.id.timeline),
        "state": str(step.state),
        "latest": step.id == catalog.latest,
        "provisional": catalog.is_provisional,
    }
    if step.ref is not None:
        shown["record"] = step.ref.record_key
    if step.why is not None:
        shown |= {"why": step.why.message, "ranks": list(step.why.ranks)}
    if commit is not None:
        shown["committed"] = json_format.MessageToDict(commit, preserving_proto_field_name=True)
    return shown


def _as_lines(catalog: Catalog, step: CatalogStep, commit: Committed | None) -> list[tuple[str, str]]:
    lines = [
        ("job", catalog.job.job),
        ("step", f"{step.id.step}{' (latest)' if step.id == catalog.latest else ''}"),
        ("timeline", str(step.id.timeline)),
        ("state", str(step.state)),
    ]
    if step.why is not None:
        lines.append(("why", step.why.message))
    if step.ref is not None:
        lines.append(("record", step.ref.record_key))
    if commit is None:
        return lines
    mesh = " x ".join(f"{axis} {size}" for axis, size in zip(commit.mesh.axes, commit.mesh.sizes, strict=True))
    totals = commit.totals
    lines += [
        ("created", commit.created_at),
        ("world", f"{commit.world} ({mesh})"),
        ("bytes", f"{totals.bytes} ({size_text(totals.bytes)}), {size_text(totals.new_bytes)} of them new"),
        ("content", f"{totals.tensors} tensors, {totals.objects} objects, {totals.chunks} chunks"),
        ("state digest", commit.state_digest),
    ]
    if commit.HasField("base"):
        lines.append(("base", f"step {commit.base.step} of {commit.base.timeline}"))
    if commit.posthumous:
        lines.append(("posthumous", "committed by the next start, after its run had ended"))
    for name, entries in (("metrics", commit.metrics), ("tags", commit.tags), ("versions", commit.versions)):
        if entries:
            lines.append((name, ", ".join(f"{key}={entries[key]}" for key in sorted(entries))))
    lines += [("index", ref.key) for ref in commit.indexes]
    return lines
