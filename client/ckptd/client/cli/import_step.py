"""`ckptd import`: make a step of safetensors, torch.distributed.checkpoint or torch.save files."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import torch
import typer

from ckptd.client.config import resolve
from ckptd.client.errors import InvalidRequest
from ckptd.client.formats import dcp_files, safetensors_files, torch_file
from ckptd.client.formats.sources import Source
from ckptd.client.importing import import_step
from ckptd.client.selecting import Choice

from .arguments import checked_format, root_url

_SHOWN = 5


def import_verb(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="File or folder to read.")],
    root: Annotated[str, typer.Argument(metavar="ROOT", help="Root URL of the job; made if it is not there.")],
    *,
    job: Annotated[str, typer.Option(help="The job's name; one root holds one job.")],
    step: Annotated[int, typer.Option(min=0, help="Number of the step.")],
    format_name: Annotated[str, typer.Option("--format", help="safetensors, dcp or torch.")],
    prefix: Annotated[str, typer.Option(help="Put before every name, e.g. model/.")] = "",
    only: Annotated[
        list[str] | None, typer.Option(help="Names in SRC, each with all below it, or patterns; repeat for several.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a report as JSON.")] = False,
) -> None:
    """Save tensors of another library's files as a step, which a job on any mesh restores. Nothing that would run code is read.

    The job must not be running: this claims the root like a start of the job, saves, and ends. The step is then the latest
    one. Exits with 2 when SRC cannot be read or holds what is no tensor, 6 while a run of the job is alive.
    """
    chosen = checked_format(format_name)
    config = resolve(None, {"root": root_url(root), "job": job, "read_only": False, "takeover": False})
    choice = Choice(only=tuple(only) if only else None)
    found = _read(source, chosen, choice)
    names = [name for name in (*found.tensors, *found.ties, *found.others) if choice.takes(name)]
    for pattern in only or ():
        if not any(Choice(only=(pattern,)).takes(name) for name in names):
            raise InvalidRequest(f"--only {pattern!r} chooses nothing of {source}", key=pattern)
    others = [name for name in found.others if choice.takes(name)]
    if others:
        shown = ", ".join(others[:_SHOWN]) + (", ..." if len(others) > _SHOWN else "")
        raise InvalidRequest(
            f"{len(others)} entries of {source} are no tensors: {shown}",
            hint="choose tensors with --only",
            key=others[0],
        )
    tensors, ties = _named(found, choice, prefix)
    if not tensors:
        raise InvalidRequest(f"{source} holds no tensors", key=str(source))
    done = import_step(config, step, tensors, ties, tags={"imported": chosen})
    if json:
        report = {
            "root": root,
            "job": job,
            "step": step,
            "timeline": done.timeline,
            "tensors": done.tensors,
            "bytes": done.nbytes,
            "ties": ties,
        }
        typer.echo(json_text.dumps(report, indent=2, ensure_ascii=False))
        return
    typer.echo(f"step {step} of {done.timeline}: {done.tensors} tensors, {done.nbytes} bytes from {source}")


def _read(source: Path, format_name: str, choice: Choice) -> Source:
    if not source.exists():
        raise InvalidRequest(f"{source} is not there", key=str(source))
    if format_name == "safetensors":
        return safetensors_files.read(source)
    if format_name == "dcp":
        return dcp_files.read(source, choice.takes)
    return torch_file.read(source, choice.takes)


def _named(found: Source, choice: Choice, prefix: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return what is chosen under the names it gets; where a tie alone is chosen, it stands for its tensor."""
    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[str, str] = {}
    for name, owner in [*((name, name) for name in found.tensors), *found.ties.items()]:
        if not choice.takes(name):
            continue
        if owner in first:
            ties[prefix + name] = first[owner]
        else:
            first[owner] = prefix + name
            tensors[prefix + name] = found.tensors[owner]
    return tensors, ties
