"""Runs schedules one after the other: stores, the undisturbed run, evidence, verdicts.

Owns: what all schedules of a soak share, and the folder of each. Does not own: schedules (`drawing`), how a run is led
(`trial.perform`), what is right (`judging`), shrinking.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ckptd.chaos.cluster import disks
from ckptd.chaos.cluster.store import LocalStore, Store, open_store
from ckptd.chaos.conductor import Limits
from ckptd.chaos.fitting import fitted
from ckptd.chaos.history import Event
from ckptd.chaos.leading import Lead, Undisturbed
from ckptd.chaos.record import Record, versions
from ckptd.chaos.report import Report
from ckptd.chaos.reports.write import write_text
from ckptd.chaos.scenario import Scenario
from ckptd.chaos.scenario_writer import to_toml
from ckptd.chaos.schedule import PlannedFault
from ckptd.chaos.soak.small_job import COMMAND, LIMITS, SmallLauncher, spawners
from ckptd.chaos.trial import Stage, conclude, hurt, undisturbed_runs
from ckptd.chaos.verdict import Verdict

SCENARIO_FILE = "schedule.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a soak hurts.

    Attributes:
        nnodes: Number of nodes.
        nproc: Ranks on each.
        command: Script and arguments, as for `trial.Stage`; run by torchrun unless `is_small`.
        is_small: The command is one that can be forked: the matrix's trainer, or one like it.
        limits: Deadlines of one run.
        cache_folder: Where undisturbed runs are kept; None: they are not.
    """

    nnodes: int
    nproc: int
    command: tuple[str, ...] = COMMAND
    is_small: bool = True
    limits: Limits = LIMITS
    cache_folder: Path | None = None

    @property
    def network(self) -> str:
        """How the network is hurt: processes that are forked stay in the namespace of the server they are forked from."""
        return "proxy" if self.is_small else "auto"

    def fitted(self, scenario: Scenario, *, store: str, seed: int = 0) -> tuple[PlannedFault, ...]:
        """Return a schedule's faults for this setting.

        Raises:
            ScheduleError: It does not fit the number of nodes and ranks, the store, or the network.
        """
        return fitted(scenario, nnodes=self.nnodes, nproc=self.nproc, store=store, network=self.network, seed=seed)


class Soak:
    """Runs schedules. A context manager: on exit all of its processes have ended. For one thread.

    Args:
        setting: What is hurt.
        out: Gets a folder for each run.
        observe: Is told (name of the run, event) as events are seen.
    """

    def __init__(
        self, setting: Setting, out: Path, *, observe: Callable[[str, Event], None] = lambda _run, _event: None
    ) -> None:
        self.setting, self._out, self._observe = setting, out, observe
        self._stack = ExitStack()
        self._stores: dict[str, Store] = {}
        self._undisturbed: dict[str, Undisturbed] = {}
        self._stage: Stage | None = None

    def run(self, scenario: Scenario, *, store: str, seed: int, name: str, replay: str) -> Report:
        """Run one schedule in the folder `name`, judge it, and write its evidence, its report and its file.

        Never raises for what the job does: what could not be led is unknown.

        Args:
            scenario: The schedule.
            store: "local" or "s3".
            seed: For what the scenario leaves open, and the report.
            name: Of the folder, which must not be there.
            replay: The line that runs it again; "{file}" is replaced by the path of the scenario's file.

        Raises:
            ScheduleError: The scenario does not fit, see `Setting.fitted`; nothing was started for it.
            OSError: Evidence or report cannot be written.
        """
        faults = self.setting.fitted(scenario, store=store, seed=seed)
        folder = self._out / name
        folder.mkdir(parents=True)
        write_text(folder / SCENARIO_FILE, to_toml(scenario))
        lead = Lead(
            Record(
                scenario=scenario,
                nnodes=self.setting.nnodes,
                nproc=self.setting.nproc,
                store=store,
                seed=seed,
                command=self.setting.command,
                begun=round(time.time(), 3),
                versions=versions(),
                network=self.setting.network,
                replay=replay.replace("{file}", shlex.quote(str(folder / SCENARIO_FILE))),
            )
        )
        with lead:
            if lead.can_be_judged(self._undisturbed_runs(store)):
                lead.begin_anew()
                stage = replace(self._make_stage(), out=folder)
                opened = self._store(store).of_run(folder, name)
                lead.record = hurt(stage, scenario, opened, lead.record, faults)
        return conclude(self._bare_stage(folder), lead.record)

    def remove(self, report: Report) -> None:
        """Remove the evidence of a run."""
        shutil.rmtree(report.out, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _undisturbed_runs(self, store: str) -> Undisturbed:
        if store not in self._undisturbed:
            folder = self._out / f"undisturbed-{store}"
            # A run that was tried and failed before: nothing of it may be taken for this one's.
            shutil.rmtree(folder, ignore_errors=True)
            stage = replace(self._make_stage(), out=folder)
            opened = self._store(store).of_run(folder, f"undisturbed-{time.time_ns()}")
            # That the small job is deterministic is a test of this house; of any other script it is to be seen.
            self._undisturbed[store] = undisturbed_runs(
                stage, opened, store, self.setting.cache_folder, twice=not self.setting.is_small
            )
        return self._undisturbed[store]

    def _store(self, kind: str) -> _Kept:
        if kind == "local":
            return _Kept(None)
        if kind not in self._stores:
            self._stores[kind] = self._stack.enter_context(open_store(kind, self._out / f"store-{kind}"))
        return _Kept(self._stores[kind])

    def _make_stage(self) -> Stage:
        if self._stage is None:
            stage = self._bare_stage(self._out)
            if self.setting.is_small:
                if not disks.missing():
                    # What is forked sees the disks that a run makes small.
                    self._stack.enter_context(disks.private_mounts())
                spawn_agent, spawn_ranks = spawners(self._stack)
                stage = replace(stage, launcher=SmallLauncher, spawn_agent=spawn_agent, spawn_ranks=spawn_ranks)
            self._stage = stage
        return self._stage

    def _bare_stage(self, out: Path) -> Stage:
        return Stage(
            nnodes=self.setting.nnodes,
            nproc=self.setting.nproc,
            command=self.setting.command,
            out=out,
            limits=self.setting.limits,
            observe=self._observe,
            network=self.setting.network,
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """A store that all runs share; None: each run has files of its own in its folder, which go with it."""

    shared: Store | None

    def of_run(self, folder: Path, name: str) -> Store:
        """Return the store as one run sees it: its roots are its own."""
        return LocalStore(folder=folder / "store") if self.shared is None else _Prefixed(self.shared, name)


@dataclass(frozen=True, slots=True)
class _Prefixed:
    store: Store
    prefix: str

    def root(self, name: str) -> str:
        return self.store.root(f"{self.prefix}-{name}")

    def environment(self) -> Mapping[str, str]:
        return self.store.environment()


def is_red(report: Report) -> bool:
    """Whether a report is anything but a pass."""
    return report.verdict is not Verdict.PASS


def failed_checks(report: Report) -> frozenset[str]:
    """Return the checks that failed; unknown ones are not among them."""
    return frozenset(finding.check for finding in report.findings if finding.verdict is Verdict.FAIL)


def fired(reports: Sequence[Report]) -> tuple[int, int]:
    """Return how many faults were done, and how many were planned."""
    told = [account for report in reports for account in report.accounts]
    return sum(account.fired for account in told), len(told)
