"""`ckptd drop`: list steps of a job that is not running no longer."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from ckptd.daemon.catalog import Catalog, StepState, read_catalog
from ckptd.daemon.cli.offline_start import DryRun, GiveUp, print_start, print_would_drop, start_offline
from ckptd.daemon.cli.root import Driver, Json, Root, opened
from ckptd.daemon.errors import NotFoundError
from ckptd.daemon.keys import StepId

_STEP = re.compile(r"(?P<step>[0-9]{1,12})(?:@(?P<timeline>[0-9]{8}-[0-9a-f]{12}))?")


def drop(
    root: Root,
    steps: Annotated[list[str], typer.Argument(metavar="STEP…", help="Numbers; STEP@TIMELINE where several have one.")],
    *,
    dry_run: DryRun = False,
    give_up: GiveUp = False,
    json: Json = False,
    driver: Driver = "auto",
) -> None:
    """Drop steps of a job that is not running: writes a start record that no longer lists them; `ckptd sweep` deletes.

    Claims a timeline: a run that is alive and cannot be seen from here is fenced. Exits with 6 when the job is visibly
    alive, 5 when a step is not listed, 2 when it is the latest or pinned.
    """
    with opened(root, driver) as store:
        wanted = {_listed(read_catalog(store), text) for text in steps}
        if dry_run:
            print_would_drop(root, sorted(wanted), json=json)
            return
        done = start_offline(store, drop=wanted, give_up=give_up)
    print_start(root, done, json=json)


def _listed(catalog: Catalog, text: str) -> StepId:
    match = _STEP.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no step: a number, or STEP@TIMELINE as `ckptd ls` shows them")
    found = [
        step.id
        for step in catalog.steps
        if step.state is StepState.COMMITTED
        and step.id.step == int(match["step"])
        and match["timeline"] in {None, str(step.id.timeline)}
    ]
    if not found:
        raise NotFoundError.of(f"no record lists step {text}", hint="`ckptd ls` shows which are committed")
    if len(found) > 1:
        every = ", ".join(f"{step.step}@{step.timeline}" for step in found)
        raise typer.BadParameter(f"step {text} is of several timelines: say one of {every}")
    return found[0]
