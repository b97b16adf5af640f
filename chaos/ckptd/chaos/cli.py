"""`ckptd chaos`: run a training script under a scenario and judge what came back.

Exit codes of `run`: 0 pass, 1 fail, 3 unknown (nothing was proved: red as well), 2 usage.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from ckptd.chaos.cache import default_cache
from ckptd.chaos.cluster.launcher import MOST_NODES
from ckptd.chaos.cluster.store import STORES
from ckptd.chaos.conductor import Limits
from ckptd.chaos.evidence import EvidenceError
from ckptd.chaos.matrix_cli import failpoints, matrix
from ckptd.chaos.network.words import WAYS
from ckptd.chaos.progress import Progress
from ckptd.chaos.report import render
from ckptd.chaos.reports.rebuild import rebuild
from ckptd.chaos.reports.write import PAGE
from ckptd.chaos.scenario_reader import ScenarioError, load, scenario_names
from ckptd.chaos.schedule import ScheduleError
from ckptd.chaos.soak_cli import soak
from ckptd.chaos.trial import Stage, run_trial
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
    scenario: Annotated[str, typer.Argument(help="Name of a scenario (see --list), or a .toml file.")],
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- SCRIPT ARGS...", help="What torchrun runs; {root}, {digests}, {out} are filled in."),
    ],
    *,
    nnodes: Annotated[int, typer.Option(min=1, max=MOST_NODES, help="Nodes, an agent each.")] = 1,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks on each node.")] = 2,
    store: Annotated[str, typer.Option(help="local: files; s3: a SeaweedFS server of its own.")] = "local",
    seed: Annotated[int | None, typer.Option(help="Decides what the scenario leaves open. [default: random]")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for all evidence. [default: a temporary one, removed after a pass]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    cached: Annotated[bool, typer.Option("--cache/--no-cache", help="Use and keep the undisturbed run.")] = True,
    twice: Annotated[
        bool,
        typer.Option("--twice/--once", help="Do the undisturbed run twice, to see that the script is deterministic."),
    ] = True,
    network: Annotated[
        str, typer.Option(help="How the network is hurt: netns, proxy; auto: netns where allowed.")
    ] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Bound of each run, seconds.")] = 600.0,
) -> None:
    """Run SCRIPT under a scenario: 0 pass, 1 fail, 3 unknown, 2 wrong usage."""
    if store not in STORES:
        _refuse(f"--store is {store!r}; allowed: {', '.join(STORES)}")
    if network not in ("auto", *WAYS):
        _refuse(f"--network is {network!r}; allowed: auto, {', '.join(WAYS)}")
    try:
        read = load(scenario)
    except ScenarioError as error:
        _refuse(str(error))
    if not Path(command[0]).is_file():
        _refuse(f"there is no script {command[0]!r}")
    folder = (out or Path(tempfile.mkdtemp(prefix="ckptd-chaos-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        _refuse(f"--out {folder} is not empty; name a new folder")
    console = Console(stderr=as_json)
    progress = Progress(console)
    stage = Stage(
        nnodes=nnodes,
        nproc=nproc,
        command=tuple(command),
        out=folder,
        limits=Limits(run=timedelta(seconds=timeout), relaunches=len(read.faults) + 3),
        observe=progress.see,
        network=network,
    )
    try:
        with progress:
            report = run_trial(
                stage,
                read,
                store=store,
                seed=secrets.randbelow(1 << 31) if seed is None else seed,
                cache_folder=default_cache() if cached else None,
                twice=twice,
            )
    except ScheduleError as error:
        _refuse(str(error))
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=1) + "\n")
    else:
        render(report, console)
    if out is None and report.verdict is Verdict.PASS:
        shutil.rmtree(folder, ignore_errors=True)
        console.print("the evidence of a pass is removed; --out keeps it", style="dim")
    else:
        console.print(f"page: {folder / PAGE}", soft_wrap=True, markup=False, highlight=False)
    raise typer.Exit(report.verdict.exit_code)


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
        sys.stdout.write((folder / "report.json").read_text(encoding="utf-8"))
    else:
        console = Console()
        if len(written.reports) == 1:
            render(written.reports[0], console)
        console.print(f"{written.page}", soft_wrap=True, markup=False, highlight=False)
    raise typer.Exit(written.verdict.exit_code)


def _refuse(text: str) -> NoReturn:
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(_USAGE)
