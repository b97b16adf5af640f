"""`ckptd verify`: read every byte of a step and prove it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated

import typer

from ckptd.daemon.catalog import Catalog, CatalogStep, StepState, read_catalog
from ckptd.daemon.cli.exit_codes import ExitCode
from ckptd.daemon.cli.progress import bytes_bar
from ckptd.daemon.cli.root import Driver, Json, Root, Step, note, opened, print_json, size_text
from ckptd.daemon.errors import NotFoundError
from ckptd.daemon.verify import READERS, Proved, StepReport, Verdict, verify_step
from ckptd.storage_backends.base import ObjectStore

_CODES = {Verdict.GOOD: ExitCode.GOOD, Verdict.INCOMPLETE: ExitCode.INCOMPLETE, Verdict.CORRUPT: ExitCode.CORRUPT}


def verify(
    root: Root,
    step: Step = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Every committed step.")] = False,
    json: Json = False,
    readers: Annotated[
        int, typer.Option(min=1, max=64, help="Chunks read at once; each takes 8 MiB of memory.")
    ] = READERS,
    driver: Driver = "auto",
) -> None:
    """Read every byte of a step and prove it against its record: digests, coverage, fingerprints, state digest.

    Names every object that is bad. Exits with 0 good, 3 incomplete (no record lists it), 4 corrupt (an object is
    missing, cut or altered), 5 not found. Reads only; needs no agent.
    """
    if every and step is not None:
        raise typer.BadParameter("say a STEP or --all, not both")
    with opened(root, driver) as store, bytes_bar("proved") as progress:
        catalog = read_catalog(store)
        wanted = [s for s in catalog.steps if s.state is StepState.COMMITTED] if every else [catalog.step(step)]
        if not wanted:
            catalog.step(None)  # raises: there is none
        prove = functools.partial(verify_step, readers=readers, proved=Proved(), progress=progress)
        reports = [(one, _verify(store, catalog, one, prove)) for one in wanted]
    if catalog.is_provisional:
        note(f"ckptd verify: provisional: timeline {catalog.highest} was claimed and has written no record yet")
    if json:
        print_json({"root": root, "job": catalog.job.job, "steps": [_as_json(*pair) for pair in reports]})
    else:
        for one, report in reports:
            _print(one, report)
    raise typer.Exit(max((_CODES[report.verdict] for _, report in reports), default=ExitCode.GOOD))


def _verify(store: ObjectStore, catalog: Catalog, step: CatalogStep, prove: Callable[..., StepReport]) -> StepReport:
    if step.ref is None or catalog.newest is None:
        return StepReport(id=step.id, verdict=Verdict.INCOMPLETE, bad=[], objects=0, nbytes=0)
    report = prove(store, catalog.newest, step.ref)
    if report.bad and step.state is StepState.COMMITTED:
        # A running job may have dropped it, and a sweep deleted it, while it was read.
        now = {one.id: one.state for one in read_catalog(store).steps}
        if now.get(step.id) is not StepState.COMMITTED:
            raise NotFoundError.of(f"step {step.id.step} was dropped while it was read", step=step.id.step)
    return report


def _as_json(step: CatalogStep, report: StepReport) -> dict[str, object]:
    shown: dict[str, object] = {
        "step": step.id.step,
        "timeline": str(step.id.timeline),
        "state": str(step.state),
        "verdict": str(report.verdict),
        "objects": report.objects,
        "bytes": report.nbytes,
        "bad": [{"key": bad.key, "what": bad.what} for bad in report.bad],
    }
    if step.why is not None:
        shown |= {"why": step.why.message, "ranks": list(step.why.ranks)}
    return shown


def _print(step: CatalogStep, report: StepReport) -> None:
    head = f"step {step.id.step} of {step.id.timeline}: {report.verdict}"
    if report.verdict is Verdict.INCOMPLETE:
        typer.echo(f"{head} ({step.state}): {step.why.message if step.why is not None else ''}")
        return
    quarantined = ", quarantined" if step.state is StepState.QUARANTINED else ""
    typer.echo(f"{head}{quarantined}: {report.objects} objects, {size_text(report.nbytes)} proved")
    for bad in report.bad:
        typer.echo(f"  {bad.key}: {bad.what}")
