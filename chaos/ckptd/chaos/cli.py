"""`ckptd chaos`: run a training script under a scenario and judge what came back.

Exit codes of `run`: 0 pass, 1 fail, 3 unknown (nothing was proved: red as well), 4 unknown because of the script, 2 usage;
128 + n when signal n ended it before anything had failed.
"""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from ckptd.chaos.cache import default_cache
from ckptd.chaos.cluster.launcher import MOST_NODES
from ckptd.chaos.command import CommandError
from ckptd.chaos.ending import SignalledError, broken_off, ends_in_order
from ckptd.chaos.evidence import EvidenceError
from ckptd.chaos.matrix_cli import failpoints, matrix
from ckptd.chaos.preset import load_preset, preset_names
from ckptd.chaos.preset_run import run_series
from ckptd.chaos.progress import Progress
from ckptd.chaos.report import Report, exit_code, render, render_line
from ckptd.chaos.reports.rebuild import rebuild
from ckptd.chaos.reports.summary import overall_verdict
from ckptd.chaos.reports.write import JSON, PAGE
from ckptd.chaos.request import Request, read_request
from ckptd.chaos.scenario_reader import ScenarioError, load, scenario_names
from ckptd.chaos.schedule import ScheduleError
from ckptd.chaos.soak_cli import soak
from ckptd.chaos.trial import run_trial
from ckptd.chaos.verdict import Verdict

app = typer.Typer(
    name="chaos",
    help="Run a training script undisturbed and hurt, and compare what comes back bit by bit.",
    no_args_is_help=True,
    add_completion=False,
)

app.command()(failpoints)
app.command()(matrix)
app.command()(soak)

_USAGE = 2


def _list_scenarios(*, wanted: bool) -> None:
    if wanted:
        table = Table(box=None, show_header=False)
        for name in scenario_names():
            table.add_row(name, load(name).title)
        for name in preset_names():
            preset = load_preset(name)
            names = ", ".join(scenario.name for scenario in preset.scenarios)
            table.add_row(f"--preset {name}", f"{preset.title}: {names}")
        Console().print(table)
        raise typer.Exit


@app.callback()
def chaos(
    *,
    listed: Annotated[
        bool,
        typer.Option(
            "--list", help="List the scenarios.", callback=lambda wanted: _list_scenarios(wanted=wanted), is_eager=True
        ),
    ] = False,
) -> None:
    """Run a training script undisturbed and hurt, and compare what comes back bit by bit."""


@app.command()
def run(
    scenario: Annotated[
        str | None,
        typer.Argument(
            help="Name of a scenario (see --list), or a .toml file. Not there with --preset.", show_default=False
        ),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- SCRIPT ARGS...",
            help="What torchrun runs: a script, -m MODULE, or a torchrun line. {root}, {digests}, {out} are filled in.",
        ),
    ] = None,
    *,
    preset: Annotated[
        str | None,
        typer.Option(help="Instead of a scenario: several in a row, one verdict; see --list, or a .toml file."),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Of the preset, only this scenario; may be repeated.")] = None,
    nnodes: Annotated[
        int | None, typer.Option(min=1, max=MOST_NODES, help="Nodes, an agent each. [default: 1]", show_default=False)
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks on each node. [default: 2]", show_default=False)
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="local: files; s3: a SeaweedFS server of its own. [default: local]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Decides what the scenario leaves open. [default: random]")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for all evidence. [default: a temporary one, removed after a pass]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    cached: Annotated[
        bool,
        typer.Option(
            "--cache/--no-cache",
            help="Take the undisturbed run from an earlier command, and keep it for later ones. Of changes only those "
            "of .py files beside the script are seen.",
        ),
    ] = False,
    twice: Annotated[
        bool,
        typer.Option("--twice/--once", help="Do the undisturbed run twice, to see that the script is deterministic."),
    ] = True,
    network: Annotated[
        str, typer.Option(help="How the network is hurt: netns, proxy; auto: netns where allowed.")
    ] = "auto",
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Bound of each run, seconds; half of it, and 150 s always, may be silent. [default: 600]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run SCRIPT under a scenario or a preset: 0 pass, 1 fail, 3 unknown, 4 the script cannot be judged, 2 wrong usage."""
    try:
        request = read_request(
            scenario,
            command or [],
            preset=preset,
            only=only or [],
            nnodes=nnodes,
            nproc=nproc,
            store=store,
            timeout=timeout,
            network=network,
        )
    except (ScenarioError, CommandError, ScheduleError) as error:
        _refuse(str(error))
    is_new = out is None or not out.exists()
    folder = (out or Path(tempfile.mkdtemp(prefix="ckptd-chaos-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        _refuse(f"--out {folder} is not empty; name a new folder")
    console = Console(stderr=as_json)
    if request.left_out:
        console.print(f"the harness decides by itself: {' '.join(request.left_out)}", style="dim", markup=False)
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    done: list[Report] = []
    try:
        with ends_in_order():
            page = _run(
                request, folder, console, done, seed=seed, cache_folder=default_cache() if cached else None, twice=twice
            )
    except ScheduleError as error:
        # Nothing was started.
        if is_new:
            folder.rmdir()
        _refuse(str(error))
    except SignalledError as ended:
        _end_early(ended, done, folder, console, as_json=as_json)
    except Exception:
        console.print(f"evidence: {folder}", soft_wrap=True, markup=False, highlight=False)
        raise
    if request.preset is None and not as_json:
        render(done[0], console)
    verdict, code = overall_verdict(done), exit_code(done)
    _end(verdict, code, page, console, keep=out is not None, as_json=as_json)


def _run(
    request: Request,
    folder: Path,
    console: Console,
    done: list[Report],
    *,
    seed: int,
    cache_folder: Path | None,
    twice: bool,
) -> Path:
    """Run what was asked for, and return the page; each report is put into `done` as soon as it is there."""

    def tell(report: Report) -> None:
        done.append(report)
        render_line(report, console)

    with Progress(console) as progress:
        stage = request.stage(folder, progress.see)
        if request.preset is not None:
            return run_series(
                stage,
                request.scenarios,
                store=request.store,
                seed=seed,
                cache_folder=cache_folder,
                twice=twice,
                tell=tell,
            ).page
        done.append(
            run_trial(
                stage, request.scenarios[0], store=request.store, seed=seed, cache_folder=cache_folder, twice=twice
            )
        )
        return folder / PAGE


def _end_early(
    ended: SignalledError, done: Sequence[Report], folder: Path, console: Console, *, as_json: bool
) -> NoReturn:
    """Say where what there is lies, and exit: with 1 where something had failed by then, else with the signal's status."""
    if as_json and (folder / JSON).is_file():
        sys.stdout.write((folder / JSON).read_text(encoding="utf-8"))
    console.print(
        f"{broken_off(ended)}; nothing is left running. What was seen so far: {folder}",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    raise typer.Exit(1 if overall_verdict(done) is Verdict.FAIL else ended.exit_code)


def _end(verdict: Verdict, code: int, page: Path, console: Console, *, keep: bool, as_json: bool) -> NoReturn:
    """Print where the page is, or remove the evidence of a pass that nobody asked to keep; exit."""
    if as_json:
        sys.stdout.write((page.parent / JSON).read_text(encoding="utf-8"))
    if not keep and verdict is Verdict.PASS:
        shutil.rmtree(page.parent, ignore_errors=True)
        console.print("the evidence of a pass is removed; --out keeps it", style="dim")
    else:
        console.print(f"page: {page}", soft_wrap=True, markup=False, highlight=False)
    raise typer.Exit(code)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Evidence of a trial (--out of run), or a folder with several.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Judge saved evidence anew and rewrite its pages; exit codes as for run."""
    try:
        written = rebuild(folder)
    except EvidenceError as error:
        _refuse(str(error))
    if as_json:
        sys.stdout.write((folder / JSON).read_text(encoding="utf-8"))
    else:
        console = Console()
        if len(written.reports) == 1:
            render(written.reports[0], console)
        console.print(f"{written.page}", soft_wrap=True, markup=False, highlight=False)
    raise typer.Exit(exit_code(written.reports))


def _refuse(text: str) -> NoReturn:
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(_USAGE)
