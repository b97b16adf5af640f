"""`ckptd show`: show what a step's record says."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from google.protobuf import json_format

from ckptd.daemon.catalog import Catalog, CatalogStep, StepState, ranges_text, read_catalog
from ckptd.daemon.cli.exit_codes import ExitCode
from ckptd.daemon.cli.root import Driver, Json, Root, Step, note, opened, print_json, print_table, size_text
from ckptd.daemon.log_reader import read_committed
from ckptd.daemon.stored_step import StoredStep, dropped_or_corrupt, read_stored_step
from ckptd.daemon.tensors import StoredTensor, TensorKey, stored_tensors
from ckptd.protos.snapshot_pb2 import SCOPE_PER_RANK, Committed

_CODES = {
    StepState.COMMITTED: ExitCode.GOOD,
    StepState.QUARANTINED: ExitCode.CORRUPT,
    StepState.UNCOMMITTED: ExitCode.INCOMPLETE,
    StepState.INCOMPLETE: ExitCode.INCOMPLETE,
    StepState.ABORTED: ExitCode.INCOMPLETE,
}


def show(
    root: Root,
    step: Step = None,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", "-t", help="List the step's tensors instead.")] = False,
    json: Json = False,
    driver: Driver = "auto",
) -> None:
    """Show a step: what was saved, by whom, what it refers to, or what it lacks. From the store alone.

    With --tensors: every tensor by its global name with dtype, shape, shards, bytes and ranks, from the indexes; no tensor
    bytes are read. Exits with 3 when the step is not committed, 4 when it is quarantined, 5 when there is none.
    """
    if tensors:
        with opened(root, driver) as store, dropped_or_corrupt(store, step):
            stored = read_stored_step(store, step)
        _show_tensors(root, stored, json=json)
        return
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


def _show_tensors(root: str, step: StoredStep, *, json: bool) -> None:
    found = stored_tensors(step.sections, tuple(step.commit.mesh.axes))
    if json:
        print_json(
            {
                "root": root,
                "job": step.job.job,
                "step": step.id.step,
                "timeline": str(step.id.timeline),
                "tensors": [_tensor_json(key, tensor) for key, tensor in found.items()],
            }
        )
        return
    rows = [_tensor_row(key, tensor) for key, tensor in found.items()]
    print_table(["tensor", "dtype", "shape", "shards", "bytes", "ranks", "note"], rows)


def _tensor_json(key: TensorKey, tensor: StoredTensor) -> dict[str, object]:
    shown: dict[str, object] = {
        "name": key.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "shards": len(tensor.boxes),
        "bytes": tensor.nbytes,
        "ranks": tensor.ranks,
    }
    if tensor.scope == SCOPE_PER_RANK:
        shown["coordinate"] = dict(key.coordinate)
    if tensor.alias_of:
        shown["alias_of"] = tensor.alias_of
    return shown


def _tensor_row(key: TensorKey, tensor: StoredTensor) -> list[str]:
    where = ", ".join(f"{axis} {at}" for axis, at in key.coordinate)
    notes = [f"tied to {tensor.alias_of}" if tensor.alias_of else "", f"own of {where}" if where else ""]
    shape = f"[{', '.join(map(str, tensor.shape))}]"
    ranks = ranges_text(tensor.ranks)
    note_text = "; ".join(filter(None, notes))
    return [key.name, tensor.dtype, shape, str(len(tensor.boxes)), str(tensor.nbytes), ranks, note_text]


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
    if commit.HasField("compared_in"):
        compared = f"not compared in this step; last in step {commit.compared_in.step} of {commit.compared_in.timeline}"
    else:
        compared = "compared in this step"
    lines.append(("replicas", compared))
    if commit.HasField("base"):
        lines.append(("base", f"step {commit.base.step} of {commit.base.timeline}"))
    if commit.posthumous:
        lines.append(("posthumous", "committed by the next start, after its run had ended"))
    for name, entries in (("metrics", commit.metrics), ("tags", commit.tags), ("versions", commit.versions)):
        if entries:
            lines.append((name, ", ".join(f"{key}={entries[key]}" for key in sorted(entries))))
    lines += [("index", ref.key) for ref in commit.indexes]
    return lines
