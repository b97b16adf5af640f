"""Runs cells: surveys what is needed, strikes, judges, keeps the result.

Owns: the order of a matrix and its fork servers and stores. Does not own: what a cell does (`performing`, `striking`), nor what
is right (`checkers`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from ckptd.chaos.accounts import accounts
from ckptd.chaos.checkers import check
from ckptd.chaos.checkers.case import Case
from ckptd.chaos.cluster.forked import ForkServer
from ckptd.chaos.cluster.process import Leashed, Spawn
from ckptd.chaos.cluster.store import LocalStore, Store, open_store
from ckptd.chaos.judging import judge
from ckptd.chaos.leading import TrialError
from ckptd.chaos.matrix.cells import ONLY_COORDINATOR, Cell
from ckptd.chaos.matrix.performing import Performed, Scene, perform_play
from ckptd.chaos.matrix.plays import Play
from ckptd.chaos.matrix.results import NOT_APPLICABLE, CellResult, Results
from ckptd.chaos.matrix.striking import Strike
from ckptd.chaos.matrix.survey import Survey, choose, load_survey
from ckptd.chaos.matrix.workload import TINY, Shape, Workload
from ckptd.chaos.record import Record, save_record, versions
from ckptd.chaos.reports.write import write_report
from ckptd.chaos.scenario import Scenario
from ckptd.chaos.verdict import FailureClass, Verdict, failure_counts, overall
from ckptd.protos.boundaries import BOUNDARIES

AGENT_MODULES = ("ckptd.daemon.serve", "ckptd.daemon.cli.agent", "ckptd.daemon.cli.sweep", "ckptd.daemon.cli.retain")
_TRIES = 3
# torch.optim imports torch._dynamo when the first optimizer is made, which takes a second.
RANK_MODULES = ("torch._dynamo", "torch.distributed", "ckptd.client", "ckptd.chaos.matrix.trainer")


class Matrix:
    """Runs cells one after the other. A context manager; for one thread.

    Args:
        out: Folder for evidence; that of cells that pass is removed.
        results: Where results and surveys are kept.
        workload: The job.
        stores: Those that somebody else has opened, by kind; others are opened when they are needed.
        label: Goes before the names of its runs, so that several matrices may share a store.
    """

    def __init__(
        self,
        out: Path,
        results: Results,
        workload: Workload = TINY,
        *,
        stores: Mapping[str, Store] | None = None,
        label: str = "",
    ) -> None:
        self._out, self._results, self.workload, self._label = out, results, workload, label
        self._stack = ExitStack()
        self._stores: dict[str, Store] = dict(stores or {})
        self._surveys: dict[tuple[str, Shape, str], Survey] = {}
        self._servers: tuple[ForkServer, ForkServer] | None = None
        self._runs = 0
        self._last = ""

    def run(self, cells: Iterable[Cell], *, tell: Callable[[CellResult], None]) -> None:
        """Run cells and keep their results; `tell` hears of each."""
        for cell in cells:
            result = self.run_cell(cell)
            self._results.add(result)
            tell(result)

    def run_cell(self, cell: Cell) -> CellResult:
        """Run one cell and judge it. Never raises for what the job does."""
        begun, self._last = time.monotonic(), ""
        try:
            chosen = choose(cell, self.workload.plays, lambda play: self.survey(play, cell.shape, cell.store))
            if chosen is None:
                return self._without_play(cell)
            play, strike = chosen
            for attempt in range(1, _TRIES + 1):
                result = self._struck(cell, play, strike)
                # What a process passes varies a little from run to run; one that is not struck proves nothing.
                if result.fired or set(result.problems) != {"faults_fired"} or attempt == _TRIES:
                    break
            return result
        except (TrialError, RuntimeError, TimeoutError, OSError) as error:
            problems = {"trial": f"{type(error).__name__}: {error}"}
            seconds = round(time.monotonic() - begun, 3)
            evidence = str(self._out / self._last) if self._last else ""
            return CellResult(
                cell=str(cell), verdict=Verdict.UNKNOWN, problems=problems, seconds=seconds, evidence=evidence
            )

    def survey(self, play: Play, shape: Shape, store: str) -> Survey:
        """Return the survey of a play, performing it at first.

        Raises:
            TrialError: The play does not get through undisturbed, or contradicts the declarations.
        """
        key = (play.name, shape, store)
        if key not in self._surveys:
            path = self._results.folder / f"survey.{play.name}.{shape}.{store}.json"
            known = load_survey(path)
            if known is None:
                # Other workers may want the same one: one of them performs it.
                with _locked(path.with_suffix(".lock")):
                    known = load_survey(path) or self._surveyed(play, shape, store)
                    draft = path.with_suffix(".draft")
                    draft.write_text(known.to_json(), encoding="utf-8")
                    draft.replace(path)
            self._surveys[key] = known
        return self._surveys[key]

    def _surveyed(self, play: Play, shape: Shape, store: str) -> Survey:
        name, performed = self._perform(play, shape, store, strike=None)
        performance = performed.performance
        if not performance.finished:
            raise TrialError(f"the play {play.name} does not get through undisturbed: {performance.why}")
        survey = Survey(evidence=performed.evidence, passes=performed.passes)
        if wrong := survey.contradictions():
            raise TrialError(f"the play {play.name}: {wrong[0]}")
        self._forget(name)
        return survey

    def _without_play(self, cell: Cell) -> CellResult:
        if ONLY_COORDINATOR.holds(cell, BOUNDARIES[cell.boundary]):
            # Whether the coordinator's agent passes it is that agent's own cell.
            return CellResult(cell=str(cell), verdict=NOT_APPLICABLE, problems={ONLY_COORDINATOR.name: ""})
        text = f"no play passes it: {', '.join(play.name for play in self.workload.plays)}"
        return CellResult(
            cell=str(cell),
            verdict=Verdict.FAIL,
            problems={"passed": text},
            classes=(str(FailureClass.FAULT_MISSED),),
        )

    def _struck(self, cell: Cell, play: Play, strike: Strike) -> CellResult:
        began, begun = time.time(), time.monotonic()
        undisturbed = self.survey(play, cell.shape, cell.store).evidence
        name, performed = self._perform(play, cell.shape, cell.store, strike=strike)
        performance = performed.performance
        told = tuple(accounts(performance, nproc=cell.shape.nproc))
        case = Case(
            scenario=Scenario(name=str(cell), title=play.title),
            undisturbed=undisturbed,
            hurt=performed.evidence,
            performance=performance,
            accounts=told,
        )
        findings = check(case)
        verdict = overall(findings)
        seconds = round(time.monotonic() - begun, 3)
        result = CellResult(
            cell=str(cell),
            verdict=verdict,
            play=play.name,
            struck=f"{strike.action} at pass {strike.nth} of {strike.place}",
            fired=bool(told) and told[0].fired,
            launches=performance.launches,
            seconds=seconds,
            problems={finding.check: finding.text for finding in findings if finding.verdict is not Verdict.PASS},
            classes=tuple(map(str, failure_counts(findings))),
            evidence="" if verdict is Verdict.PASS else str(self._out / name),
        )
        if verdict is Verdict.PASS:
            self._forget(name)
        else:
            record = Record(
                scenario=case.scenario,
                nnodes=cell.shape.nnodes,
                nproc=cell.shape.nproc,
                store=cell.store,
                seed=0,
                command=self.workload.command,
                begun=began,
                seconds=seconds,
                versions=versions(),
                replay=result.replay,
                undisturbed=undisturbed,
                hurt=performed.evidence,
                performance=performance,
            )
            save_record(record, self._out / name)
            write_report(judge(record, self._out / name), record)
        return result

    def _perform(self, play: Play, shape: Shape, store: str, *, strike: Strike | None) -> tuple[str, Performed]:
        self._runs += 1
        name = f"{self._label}{self._runs:05d}-{play.name}"
        self._last = name
        opened = self._store(store)
        spawn_agent, spawn_ranks = self._spawners()
        scene = Scene(
            out=self._out,
            variables=opened.environment(),
            spawn_agent=spawn_agent,
            spawn_ranks=spawn_ranks,
            workload=self.workload,
        )
        return name, perform_play(scene, play, shape, name=name, root=opened.root(name), strike=strike)

    def _forget(self, name: str) -> None:
        """Remove what a run left that proved what it should."""
        shutil.rmtree(self._out / name, ignore_errors=True)
        local = self._stores.get("local")
        if isinstance(local, LocalStore):
            shutil.rmtree(local.folder / name, ignore_errors=True)

    def _store(self, kind: str) -> Store:
        if kind not in self._stores:
            self._stores[kind] = self._stack.enter_context(open_store(kind, self._out / f"store-{kind}"))
        return self._stores[kind]

    def _spawners(self) -> tuple[Spawn, Spawn]:
        if not self.workload.is_forked:
            return Leashed, Leashed
        if self._servers is None:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
            environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
            self._servers = (
                self._stack.enter_context(ForkServer(*AGENT_MODULES, environment=environment)),
                self._stack.enter_context(ForkServer(*RANK_MODULES, environment=environment)),
            )
        return self._servers[0].spawn, self._servers[1].spawn

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.stdout.flush()
        self._stack.close()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock for the time of the block; it goes with the process, whatever ends it."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
