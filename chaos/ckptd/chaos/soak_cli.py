"""`ckptd chaos soak`: random schedules of several faults, one after the other, until a number or a time is reached.

Exit codes: 0 pass, 1 fail, 3 unknown, 2 usage; 128 + n when signal n ended it before anything was red.
"""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from ckptd.chaos.cache import default_cache
from ckptd.chaos.cluster.launcher import MOST_NODES
from ckptd.chaos.cluster.store import STORES, missing_store
from ckptd.chaos.command import CommandError, agreed, parse_command
from ckptd.chaos.conductor import Limits
from ckptd.chaos.ending import SignalledError, ends_in_order
from ckptd.chaos.report import Report
from ckptd.chaos.reports.summary import overall_verdict, write_summary
from ckptd.chaos.scenario import Scenario
from ckptd.chaos.scenario_reader import ScenarioError, load
from ckptd.chaos.scenario_writer import to_toml
from ckptd.chaos.schedule import ScheduleError
from ckptd.chaos.soak.drawing import draw
from ckptd.chaos.soak.reproducing import Bounds, Reproduction, reproduce
from ckptd.chaos.soak.running import Setting, Soak, is_red
from ckptd.chaos.soak.small_job import COMMAND, LIMITS
from ckptd.chaos.soak.telling import Telling, as_plain
from ckptd.chaos.verdict import Verdict

_USAGE = 2
_SEEDS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What is asked for.

    Attributes:
        setting: What is hurt.
        stores: In the order in which each schedule is run on them.
        first: First seed.
        seeds: How many; None: until the time is up.
        until: Monotonic seconds after which no run begins; None: no such bound.
        given: A schedule to run instead of drawn ones.
        shrinks: Whether what fails is shrunk.
        bounds: Of shrinking.
        keeps: Whether the evidence of passes stays.
        script: What stands behind `--`.
    """

    setting: Setting
    stores: tuple[str, ...]
    first: int
    seeds: int | None
    until: float | None
    given: Scenario | None
    shrinks: bool
    bounds: Bounds
    keeps: bool
    script: tuple[str, ...]

    def runs(self) -> Iterator[tuple[int, str, Scenario]]:
        """Yield (seed, store, schedule) of each run."""
        seed = self.first
        while self.seeds is None or seed < self.first + self.seeds:
            for store in self.stores:
                if self.until is not None and time.monotonic() >= self.until and seed > self.first:
                    return
                yield (
                    seed,
                    store,
                    self.given or draw(seed, nnodes=self.setting.nnodes, nproc=self.setting.nproc, store=store),
                )
            seed += 1

    def again(self, seed: int, store: str) -> str:
        """Return the line that runs one seed again."""
        if self.given is not None:
            return self.of_file(store)
        return self._line("soak", ["--seed", str(seed), "--seeds", "1"], store, self.script)

    def of_file(self, store: str) -> str:
        """Return the line that runs a schedule's file, which stands there as {file}."""
        return self._line("soak", ["--schedule", "{file}"], store, self.script)

    def plain(self, store: str) -> str:
        """Return the line of `ckptd chaos run` for a file that stands there as {file}."""
        way = self.setting.network
        return self._line(
            "run", ["{file}", *(["--network", way] if way != "auto" else [])], store, self.setting.command
        )

    def _line(self, verb: str, first: list[str], store: str, script: Sequence[str]) -> str:
        size = ["--nnodes", str(self.setting.nnodes), "--nproc", str(self.setting.nproc), "--store", store]
        rest = ["--", *script] if script else []
        # The braces of {file} are to be filled in later; those of {root} belong to the script.
        return shlex.join(["ckptd", "chaos", verb, *first, *size, *rest]).replace("'{file}'", "{file}", 1)


@dataclass(slots=True)
class _Done:
    """What came of it so far."""

    reports: list[Report] = field(default_factory=list)
    shrunk: list[Reproduction] = field(default_factory=list)


def soak(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- SCRIPT ARGS...]",
            help="What torchrun runs: a script, -m MODULE, or a torchrun line. {root}, {digests}, {out} are filled in. "
            "[default: a small job of ckptd's own]",
        ),
    ] = None,
    *,
    seed: Annotated[int | None, typer.Option(min=0, help="First seed. [default: random]")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help=f"How many seeds, one after the other. [default: {_SEEDS}]")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Begin runs until so much time is up, with --seeds at most so many.")
    ] = None,
    store: Annotated[str, typer.Option(help="local: files; s3: a SeaweedFS server of its own; or both.")] = "local",
    nnodes: Annotated[int, typer.Option(min=1, max=MOST_NODES, help="Nodes, an agent each.")] = 2,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks on each node.")] = 1,
    given: Annotated[
        Path | None, typer.Option("--schedule", help="Run this scenario file instead of drawn schedules, once.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Only print the schedules, as scenario files.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="New folder for all evidence. [default: a temporary one, removed after a pass]")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the evidence of passes, too.")] = False,
    shrink: Annotated[
        bool, typer.Option("--shrink/--no-shrink", help="Reduce a schedule that fails to the shortest that does.")
    ] = True,
    shrink_tries: Annotated[int, typer.Option(min=1, help="Most schedules tried for each failure.")] = 40,
    shrink_minutes: Annotated[float, typer.Option(min=0.01, help="Most time for each failure.")] = 20.0,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1, help="Bound of each run, seconds; half of it may be silent. [default: 300; of a SCRIPT: 600]"
        ),
    ] = None,
    cached: Annotated[
        bool,
        typer.Option(
            "--cache/--no-cache",
            help="Take SCRIPT's undisturbed runs from an earlier command, and keep them for later ones. Of changes only "
            "those of .py files beside it are seen.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Hurt a job by random schedules of several faults each, and judge every run: 0 pass, 1 fail, 3 unknown, 2 usage.

    The same seed, size and store give the same schedule everywhere. A schedule that fails is shrunk to the shortest that
    still fails, and printed as a line that runs it again.
    """
    if store not in (*STORES, "both"):
        _refuse(f"--store is {store!r}; allowed: {', '.join(STORES)}, both")
    script = _script(command, nnodes, nproc)
    if given is not None and (seed, seeds, minutes) != (None, None, None):
        _refuse("--schedule runs one schedule; it goes without --seed, --seeds and --minutes")
    first = secrets.randbelow(1 << 31) if seed is None and given is None else seed or 0
    setting = _setting(script, nnodes, nproc, timeout, cached=cached)
    stores = STORES if store == "both" else (store,)
    plan = _Plan(
        setting=setting,
        stores=stores,
        first=first,
        seeds=1 if given is not None else seeds if seeds is not None or minutes is not None else _SEEDS,
        until=None if minutes is None else time.monotonic() + minutes * 60,
        given=None if given is None else _read(given, setting, stores),
        shrinks=shrink,
        bounds=Bounds(tries=shrink_tries, time=timedelta(minutes=shrink_minutes)),
        keeps=keep or out is not None,
        script=script,
    )
    if listed:
        _list(plan)
        return
    if missing := next(filter(None, map(missing_store, stores)), ""):
        _refuse(missing)
    folder = (out or Path(tempfile.mkdtemp(prefix="ckptd-soak-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        _refuse(f"--out {folder} is not empty; name a new folder")
    console = Console(stderr=as_json)
    if given is None:
        console.print(f"first seed {first}", style="dim", highlight=False)
    raise typer.Exit(_run(plan, folder, console, as_json=as_json))


def _script(command: list[str] | None, nnodes: int, nproc: int) -> tuple[str, ...]:
    """Return script or `-m MODULE` and its arguments; empty for the small job."""
    if not command:
        return ()
    try:
        parsed = parse_command(command, is_file=lambda name: Path(name).is_file())
        agreed("--nnodes", nnodes, parsed.nnodes, nnodes)
        agreed("--nproc", nproc, parsed.nproc, nproc)
    except CommandError as error:
        _refuse(str(error))
    return parsed.script


def _setting(command: Sequence[str], nnodes: int, nproc: int, timeout: float | None, *, cached: bool) -> Setting:
    if not command:
        limits = LIMITS if timeout is None else _bounds(timeout)
        return Setting(nnodes=nnodes, nproc=nproc, command=COMMAND, is_small=True, limits=limits)
    return Setting(
        nnodes=nnodes,
        nproc=nproc,
        command=tuple(command),
        is_small=False,
        limits=_bounds(timeout or 600.0),
        cache_folder=default_cache() if cached else None,
    )


def _read(given: Path, setting: Setting, stores: Sequence[str]) -> Scenario:
    try:
        scenario = load(str(given if given.suffix == ".toml" else given.with_suffix(".toml")))
        for store in stores:
            setting.fitted(scenario, store=store)
    except (ScenarioError, ScheduleError) as error:
        _refuse(str(error))
    return scenario


def _list(plan: _Plan) -> None:
    if plan.seeds is None:
        _refuse("--list prints a number of schedules; say --seeds")
    for _, _, scenario in plan.runs():
        typer.echo(f"# {scenario.name}\n{to_toml(scenario)}")


def _run(plan: _Plan, folder: Path, console: Console, *, as_json: bool) -> int:
    """Run everything and print the summary, also of what was broken off; return the exit code."""
    done, telling, number = _Done(), Telling(console), 0
    try:
        with ends_in_order(), Soak(plan.setting, folder, observe=telling.see) as running:
            for seed, store, scenario in plan.runs():
                name = scenario.name if plan.given is None else f"{scenario.name}-{store}"
                telling.begin(name)
                report = running.run(scenario, store=store, seed=seed, name=name, replay=plan.again(seed, store))
                done.reports.append(report)
                telling.end(report)
                _follow_up(plan, running, telling, done, report)
    except SignalledError as ended:
        number = ended.number
    finally:
        telling.close()
    verdict = overall_verdict(done.reports)
    told = as_plain(done.reports, done.shrunk, broken_off=number > 0)
    page = write_summary(done.reports, folder)
    if as_json:
        sys.stdout.write(json.dumps(told, indent=1) + "\n")
    else:
        telling.sum_up(done.reports, broken_off=number > 0)
    is_pass = bool(done.reports) and verdict is Verdict.PASS
    if (is_pass or not done.reports) and not plan.keeps:
        shutil.rmtree(folder, ignore_errors=True)
        console.print("the evidence of passes is removed; --out or --keep keeps it", style="dim")
    else:
        telling.say(f"page: {page}")
    return 128 + number if number and (is_pass or not done.reports) else verdict.exit_code


def _follow_up(plan: _Plan, running: Soak, telling: Telling, done: _Done, report: Report) -> None:
    """Remove the evidence of a pass; shrink what failed."""
    store = report.store
    if not is_red(report):
        if not plan.keeps:
            running.remove(report)
    elif plan.shrinks and report.verdict is Verdict.FAIL:
        shrunk = reproduce(
            running,
            report,
            replay=plan.of_file(store),
            bounds=plan.bounds,
            tell=lambda line: telling.say(f"    {line}"),
        )
        done.shrunk.append(shrunk)
        telling.reproduced(shrunk, plan.plain(store).replace("{file}", shlex.quote(shrunk.file), 1))


def _bounds(timeout: float) -> Limits:
    return Limits.of_timeout(timedelta(seconds=timeout), relaunches=LIMITS.relaunches)


def _refuse(text: str) -> NoReturn:
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(_USAGE)
