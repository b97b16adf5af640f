"""`ckptd chaos failpoints` and `ckptd chaos matrix`: every boundary of the protocol, and a fault at each.

Exit codes of `matrix`: 0 pass, 1 fail, 3 unknown, 2 usage, 128 + n ended by signal n where nothing had failed by then.
"""

from __future__ import annotations

import json
import random
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ckptd.chaos.cache import code_digest, default_cache
from ckptd.chaos.cluster.store import STORES, missing_store
from ckptd.chaos.ending import SignalledError, broken_off, ends_in_order
from ckptd.chaos.matrix.cells import ONLY_COORDINATOR, REASONS, SHAPES, VICTIMS, Cell, reason
from ckptd.chaos.matrix.cells import cells as all_cells
from ckptd.chaos.matrix.pace import Pace
from ckptd.chaos.matrix.pages import About, write_matrix
from ckptd.chaos.matrix.pool import Pool, default_workers
from ckptd.chaos.matrix.results import NOT_APPLICABLE, CellResult, Results, commit_of
from ckptd.chaos.matrix.running import Matrix
from ckptd.chaos.matrix.summary import Summary, summarize
from ckptd.chaos.matrix.survey import draw
from ckptd.chaos.matrix.workload import SCRIPT, Shape, real_job
from ckptd.chaos.verdict import Verdict
from ckptd.protos.boundaries import BOUNDARIES, ROLES

_REAL_SHAPE = Shape(nnodes=2, nproc=2)
_COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.UNKNOWN: "yellow"}


def failpoints(
    *,
    role: Annotated[str | None, typer.Option(help=f"Only those that one role passes: {', '.join(ROLES)}.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List every failpoint: its name, who passes it, and what lies before and after it."""
    if role is not None and role not in ROLES:
        raise typer.BadParameter(f"--role is {role!r}; allowed: {', '.join(ROLES)}")
    found = [one for one in BOUNDARIES.values() if role in (None, one.role)]
    if as_json:
        told = [{"name": one.name, "role": one.role, "before": one.before, "after": one.after} for one in found]
        sys.stdout.write(json.dumps(told, indent=1) + "\n")
        return
    table = Table("failpoint", "role", "after", "before", box=None)
    for one in found:
        table.add_row(one.name, one.role, escape(one.before), escape(one.after))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def matrix(
    *,
    store: Annotated[str, typer.Option(help="local: files; s3: a SeaweedFS server of its own; or both.")] = "both",
    only: Annotated[str, typer.Option(help="Pattern of shells for cells or their boundaries.")] = "*",
    role: Annotated[str | None, typer.Option(help=f"Only cells that hit one of: {', '.join(VICTIMS)}.")] = None,
    results: Annotated[Path | None, typer.Option(help="Folder of results. [default: in the user's cache]")] = None,
    sample: Annotated[int, typer.Option(min=0, help="Run so many cells only, chosen by the seed; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Chooses the sample. [default: random]")] = None,
    moe: Annotated[
        Path | None,
        typer.Option(help="examples/train_moe.py: hurt that job under torchrun, on 2 x 2 ranks, once in each way."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Run so many cells at once. [default: processors + 1]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of index.html, junit.xml and report.json. [default: with the results]")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Run cells again that have a result for this code.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Only list the cells that would be run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Hurt a small job at every boundary, in every role, on both stores, and judge each: 0 pass, 1 fail, 3 unknown.

    Results are kept per version of the code: a matrix that was broken off goes on where it stopped.
    """
    if store not in (*STORES, "both"):
        raise typer.BadParameter(f"--store is {store!r}; allowed: {', '.join(STORES)}, both")
    if role is not None and role not in VICTIMS:
        raise typer.BadParameter(f"--role is {role!r}; allowed: {', '.join(VICTIMS)}")
    chosen = [
        cell
        for cell in all_cells(SHAPES if moe is None else (_REAL_SHAPE,))
        if cell.matches(only) and role in (None, cell.victim) and store in (cell.store, "both")
    ]
    if moe is not None and not moe.is_file():
        raise typer.BadParameter(f"--moe: there is no script {str(moe)!r}")
    console = Console(stderr=as_json)
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    if sample:
        console.print(f"seed {seed}", style="dim")
        chosen = sampled(chosen, sample, seed)
    applicable = [cell for cell in chosen if reason(cell) is None]
    if not applicable:
        raise typer.BadParameter(
            "no cell of the matrix is meant, or none applies; `ckptd chaos failpoints` lists boundaries"
        )
    if listed:
        for cell in applicable:
            typer.echo(str(cell))
        return
    code = code_digest(SCRIPT if moe is None else moe)
    kept = Results((results or default_cache() / "matrix"), code)
    due = [cell for cell in applicable if moe is not None or again or not kept.is_settled(str(cell))]
    if missing := next(filter(None, (missing_store(kind) for kind in dict.fromkeys(cell.store for cell in due))), ""):
        raise typer.BadParameter(missing)
    kept.begin(commit=commit_of(Path(__file__).parent), code=code, begun=time.time())
    ended: SignalledError | None = None
    try:
        with ends_in_order():
            if moe is None:
                _run(due, kept, console, workers or default_workers())
            else:
                chosen = _hurt_real_job(moe.resolve(), applicable, seed if only == "*" else None, kept, console)
    except SignalledError as signalled:
        ended = signalled
        console.print(f"{broken_off(ended)}; the same command goes on where it stopped", highlight=False)
    summary = summarize(chosen, kept.known)
    options = [part for part in sys.argv[1:] if part not in ("--again", "--json")]
    about = About(commit=commit_of(Path(__file__).parent), code=code, command=shlex.join(["ckptd", *options]))
    index = write_matrix(chosen, kept.known, about, out or kept.folder)
    if as_json:
        sys.stdout.write(json.dumps(summary.to_dict(), indent=1) + "\n")
    else:
        _print(summary, console, index)
    is_red = summary.verdict is Verdict.FAIL
    raise typer.Exit(ended.exit_code if ended is not None and not is_red else summary.verdict.exit_code)


def sampled(chosen: list[Cell], count: int, seed: int) -> list[Cell]:
    """Return `count` cells that apply, no boundary twice where that can be; the same ones for the same seed."""
    cells = [cell for cell in chosen if reason(cell) is None]
    random.Random(f"matrix/{seed}").shuffle(cells)
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(cell.boundary, cell)
    others = [cell for cell in cells if first[cell.boundary] is not cell]
    return [*first.values(), *others][:count]


def _hurt_real_job(script: Path, cells: list[Cell], seed: int | None, kept: Results, console: Console) -> list[Cell]:
    """Run one cell for each victim and action, drawn by the seed among those the job passes; all of them without a seed.

    Return the cells that were run. One after the other: a launch of torchrun keeps two cores busy by itself.
    """
    workload = real_job(script)
    with _evidence() as out, Matrix(out, kept, workload) as running:
        if seed is not None:
            console.print(f"seed {seed}; an undisturbed run first", style="dim")
            cells = draw(cells, running.survey(workload.plays[0], _REAL_SHAPE, cells[0].store).passes, seed)
        console.print(f"{len(cells)} cells; results in {kept.folder}", style="dim", highlight=False)
        running.run(cells, tell=_Teller(cells, 1, console))
    return cells


def _run(due: list[Cell], kept: Results, console: Console, workers: int) -> None:
    """Run cells of the small job that have no result yet."""
    workers = min(workers, max(1, len(due)))
    teller = _Teller(due, workers, console)
    console.print(
        f"{len(due)} cells to run, {workers} at a time: about {_minutes(teller.pace.left_s(0.0))}; results in {kept.folder}",
        style="dim",
        highlight=False,
    )
    if due:
        with _evidence() as out, Pool(out, kept, workers) as pool:
            pool.run(due, tell=teller)


@contextmanager
def _evidence() -> Iterator[Path]:
    """Give a folder for evidence; what is left in it after the block, of cells that did not pass, stays.

    Of cells that a signal broke off nothing is left but what failed before.
    """
    out = Path(tempfile.mkdtemp(prefix="ckptd-matrix-"))
    is_ended = False
    try:
        yield out
    except SignalledError:
        is_ended = True
        raise
    finally:
        is_told = any(out.rglob("evidence/trial.json"))
        if not is_told and (is_ended or not any(out.rglob("nodes"))):
            shutil.rmtree(out, ignore_errors=True)


class _Teller:
    """Prints each result as it comes, with the time that is left."""

    def __init__(self, due: list[Cell], workers: int, console: Console) -> None:
        self.pace = Pace(due, workers)
        self._console, self._count, self._done, self._begun = console, len(due), 0, time.monotonic()

    def __call__(self, result: CellResult) -> None:
        self._done += 1
        self.pace.done(result.cell)
        took = time.monotonic() - self._begun
        colour = "dim" if result.verdict == NOT_APPLICABLE else _COLOURS[Verdict(result.verdict)]
        self._console.print(
            f"[{colour}]{result.verdict}[/{colour}] {escape(result.cell)} [dim]{result.seconds:.1f} s; {escape(result.struck)}; "
            f"{self._done}/{self._count}, {_minutes(took)}, {_minutes(self.pace.left_s(took))} left[/dim]",
            soft_wrap=True,
            highlight=False,
        )
        for check, text in result.problems.items():
            if result.verdict != NOT_APPLICABLE:
                self._console.print(f"    {check}: {escape(text)}", soft_wrap=True, highlight=False)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _print(summary: Summary, console: Console, path: Path) -> None:
    table = Table("boundary of", "hit", "store", "shape", "pass", "fail", "unknown", "open", box=None)
    for row, counted in sorted(summary.rows.items()):
        table.add_row(*row, *(str(counted[name] or "") for name in ("pass", "fail", "unknown", "open")))
    console.print(table)
    texts = {one.name: one.text for one in (*REASONS, ONLY_COORDINATOR)}
    for name, count in summary.not_applicable.items():
        console.print(f"not applicable: {count} ({escape(texts[name])})", highlight=False)
    for name in summary.silent:
        console.print(f"[red]fired in no cell: {name}[/red]")
    for result in summary.bad:
        colour = _COLOURS[Verdict(result.verdict)]
        console.print(
            f"[{colour}]{result.verdict}[/{colour}] {escape(result.replay)}  {result.evidence}", soft_wrap=True
        )
    if summary.totals[Verdict.PASS] or summary.bad:
        console.print(f"silent divergence: {summary.silent_divergences}", highlight=False)
    colour = _COLOURS[summary.verdict]
    totals = ", ".join(f"{count} {name}" for name, count in summary.totals.items())
    console.print(
        f"[bold {colour}]{summary.verdict}[/bold {colour}]: {totals}; {summary.seconds / 60:.1f} min of runs; {path}",
        soft_wrap=True,
        highlight=False,
    )
