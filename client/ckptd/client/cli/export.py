"""`ckptd export`: write a stored step as safetensors, torch.distributed.checkpoint or torch.save files."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import typer

from ckptd.client.exporting import check_out, export
from ckptd.client.loaded_step import WINDOW_BYTES
from ckptd.client.loading import open_step

from .arguments import checked_format, root_url, size_of
from .progress import bytes_bar


def export_verb(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The job's root URL, e.g. s3://bucket/runs/llama.")],
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to make; not there yet, or empty.")],
    format_name: Annotated[str, typer.Option("--format", help="safetensors, dcp or torch.")],
    step: Annotated[int | None, typer.Option(help="The step; the latest otherwise.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Names, each with all below it, or patterns; repeat for several.")
    ] = None,
    strip: Annotated[list[str] | None, typer.Option(help="Beginning to take off names; repeat for several.")] = None,
    rename: Annotated[
        list[str] | None, typer.Option(metavar="OLD=NEW", help="Beginning of names to replace; repeat for several.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of safetensors: the largest file, e.g. 5GB or 2GiB.")] = "5GB",
    window_mib: Annotated[int, typer.Option(min=1, help="Memory for what is read at once, MiB.")] = WINDOW_BYTES >> 20,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Read back and compare.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print a report as JSON.")] = False,
) -> None:
    """Write a step's global tensors, whole, as another library reads them; DIR is there when all of it is good.

    The job may be running. Tied names share their bytes. Exits with 2 when DIR is not empty, nothing is chosen or the format
    cannot hold a dtype, 4 when bytes of the step are not what was saved, 5 when it is not there.
    """
    chosen = checked_format(format_name)
    most = size_of(max_shard_size)
    renamed = {**dict.fromkeys(strip or (), ""), **dict(_pair(text) for text in rename or ())}
    check_out(out)
    with open_step(root_url(root), step, window_bytes=window_mib << 20) as opened:
        done = export(
            opened,
            out,
            chosen,
            names=only or None,
            renamed=renamed,
            max_shard_bytes=most,
            verify=verify,
            progress=bytes_bar,
        )
        report = {
            "root": root,
            "step": opened.step,
            "timeline": opened.timeline,
            "format": chosen,
            "out": str(out),
            "tensors": done.tensors,
            "bytes": done.nbytes,
            "read_bytes": opened.read_bytes,
            "ties": dict(done.ties),
            "files": dict(done.files),
            "verified": verify,
        }
    if json:
        typer.echo(json_text.dumps(report, indent=2, ensure_ascii=False))
        return
    checked = "read back and equal" if verify else "not read back"
    typer.echo(
        f"step {opened.step} of {opened.timeline}: {done.tensors} tensors, {done.nbytes} bytes in {len(done.files)} files "
        f"in {out}, {checked}"
    )


def _pair(text: str) -> tuple[str, str]:
    old, sign, new = text.partition("=")
    if not sign or not old:
        raise typer.BadParameter(f"--rename {text!r}: write OLD=NEW")
    return old, new
