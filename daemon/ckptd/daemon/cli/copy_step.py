"""`ckptd copy`: copy one step into a root of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptd.daemon.cli.progress import bytes_bar
from ckptd.daemon.cli.root import Driver, Json, Root, opened, print_json, size_text
from ckptd.daemon.step_copy import READERS, copy_step, plan_copy
from ckptd.daemon.stored_step import dropped_or_corrupt, read_stored_step


def copy(
    root: Root,
    step: Annotated[int, typer.Argument(metavar="STEP", help="A committed step's number.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="URL of the root to make; empty.")],
    *,
    json: Json = False,
    readers: Annotated[
        int, typer.Option(min=1, max=64, help="Chunks under way at once; each takes up to 64 MiB of memory.")
    ] = READERS,
    driver: Driver = "auto",
) -> None:
    """Copy a step into a root of its own: self-contained, listed, proved and restored like any other.

    Each chunk is read with its digest and looked at once it is put. Cut off, the same call goes on where it stopped. Exits
    with 2 when the target holds anything but this copy, 3 or 4 when the step is not committed or is corrupt, 5 not found.
    """
    with opened(root, driver) as source, opened(target, driver) as copied_to, dropped_or_corrupt(source, step):
        stored = read_stored_step(source, step)
        plan = plan_copy(source, stored)
        with bytes_bar("copied", plan.nbytes) as progress:
            done = copy_step(source, copied_to, plan, readers=readers, progress=progress)
    if json:
        print_json(
            {
                "root": target,
                "job": stored.job.job,
                "step": stored.id.step,
                "timeline": str(stored.id.timeline),
                "objects": done.objects,
                "bytes": done.nbytes,
                "copied_bytes": done.put_bytes,
            }
        )
        return
    text = f"step {stored.id.step} of {stored.id.timeline}: {done.objects} objects, {size_text(done.nbytes)}"
    typer.echo(f"{text}, {size_text(done.put_bytes)} of them copied now")
