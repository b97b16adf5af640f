"""Runs a preset: several scenarios in a row over one undisturbed pair of runs, each judged, and a summary over all.

Owns: the order of trials, what they share, and the folders: `undisturbed/`, `repeat/`, `store/`, one per scenario, and the
index. Does not own: a trial (`trial`), or what is right (`judging`). What is shared is what no fault may change: the
undisturbed evidence, the store's server (each run has a root of its own), the rendezvous, and processes to fork from.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ckptd.chaos.cluster.forked import ForkServer
from ckptd.chaos.cluster.launcher import Rendezvous, Torchrun
from ckptd.chaos.cluster.store import Store, open_store
from ckptd.chaos.leading import Lead
from ckptd.chaos.matrix.running import AGENT_MODULES
from ckptd.chaos.record import Record
from ckptd.chaos.report import UNDISTURBED, Report, exit_code
from ckptd.chaos.reports.summary import overall_verdict, write_summary
from ckptd.chaos.scenario import Scenario
from ckptd.chaos.trial import (
    Stage,
    begin_record,
    conclude,
    hurt,
    planned,
    require_here,
    undisturbed_runs,
)
from ckptd.chaos.verdict import Verdict

TRIES = 2
"""How often a scenario is run at most whose fault missed its window: on a busy machine that happens, and proves nothing."""
_LAUNCHER_MODULES = ("torch.distributed.launcher.api", "torch.distributed.argparse_util")
"""All that `python -m torch.distributed.run` imports, but for that module itself."""
_UNDISTURBED = Scenario(
    name=UNDISTURBED,
    title="The script runs twice, and nobody hurts it",
    proves="Two runs are equal, and there is something to compare a hurt one with.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """What a preset gave.

    Attributes:
        reports: One per scenario; one alone, of the undisturbed runs, where those were in the way.
        page: The index.
        seconds: It took in all.
    """

    reports: tuple[Report, ...]
    page: Path
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """Over all."""
        return overall_verdict(self.reports)

    @property
    def exit_code(self) -> int:
        """The command's exit status."""
        return exit_code(self.reports)


def run_series(
    stage: Stage,
    scenarios: Sequence[Scenario],
    *,
    store: str,
    seed: int,
    cache_folder: Path | None,
    twice: bool = True,
    tell: Callable[[Report], None] = lambda _report: None,
) -> Series:
    """Run scenarios one after the other, and write all evidence and reports into the stage's folder.

    Args:
        stage: Where; its `preset` names the preset.
        scenarios: In order.
        store: "local" or "s3".
        seed: Decides what the scenarios leave open.
        cache_folder: Where undisturbed runs are kept; None: run them anew, and keep nothing.
        twice: Do the undisturbed run twice and compare.
        tell: Is told of each trial that is done; the summary in the stage's folder knows of it by then.

    Raises:
        ScheduleError: A scenario does not fit the number of nodes and ranks, the store, or the network; nothing was started.
        OSError: Evidence or reports cannot be written.
        KeyboardInterrupt: As it came; nothing is left running, and the summary names what is still open.
    """
    for scenario in scenarios:
        planned(stage, scenario, store=store, seed=seed)
    lead = Lead(begin_record(stage, _UNDISTURBED, store=store, seed=seed))
    reports: list[Report] = []
    alone, out = stage, stage.out
    names = [scenario.name for scenario in scenarios]

    def note(report: Report) -> None:
        reports.append(report)
        done = {one.scenario for one in reports}
        write_summary(reports, out, still_open=[name for name in names if name not in done])
        tell(report)

    # Who ends the harness from outside finds what there is.
    page = write_summary(reports, out, still_open=names)
    with ExitStack() as stack:
        is_sound = False
        try:
            with lead:
                stage = _sharing(stage, stack)
                opened = stack.enter_context(open_store(store, out / "store"))
                is_sound = lead.can_be_judged(undisturbed_runs(stage, opened, store, cache_folder, twice=twice))
        except KeyboardInterrupt:
            note(conclude(replace(stage, out=out / _UNDISTURBED.name), lead.record))
            raise
        if not is_sound:
            note(conclude(replace(stage, out=out / _UNDISTURBED.name), lead.record))
            # None of the scenarios will be run: they are not open any more.
            write_summary(reports, out)
        else:
            for scenario in scenarios:
                # Networks of their own, and what sits in processes, are given at the start of a process.
                is_shared = all(fault.network is None and fault.local is None for fault in scenario.faults)
                note(_trial(stage if is_shared else alone, scenario, opened, lead.record, note=note))
    return Series(reports=tuple(reports), page=page, seconds=lead.seconds)


def _sharing(stage: Stage, stack: ExitStack) -> Stage:
    """Return the stage with what all runs share; it ends with the stack."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    agents = stack.enter_context(ForkServer(*AGENT_MODULES, environment=environment))
    # The launcher alone: the ranks are processes that it starts, as it does without the harness.
    launchers = stack.enter_context(ForkServer(*_LAUNCHER_MODULES, environment=environment))
    rendezvous = Rendezvous(stage.out)
    stack.callback(rendezvous.close)
    return replace(
        stage,
        spawn_agent=agents.spawn,
        spawn_ranks=launchers.spawn,
        launcher=lambda folder: Torchrun(folder, shared=rendezvous),
    )


def _trial(stage: Stage, scenario: Scenario, store: Store, before: Record, *, note: Callable[[Report], None]) -> Report:
    """Run one scenario, again where its fault missed its window; the evidence of the last try stays.

    `note` is told of one that is broken off, before the interrupt goes on.
    """
    mine = replace(stage, out=stage.out / scenario.name)
    for attempt in range(1, TRIES + 1):
        record = begin_record(mine, scenario, store=before.store, seed=before.seed)
        lead = Lead(replace(record, undisturbed=before.undisturbed, repeat=before.repeat, cached_at=before.cached_at))
        faults = planned(mine, scenario, store=before.store, seed=before.seed)
        root = scenario.name if attempt == 1 else f"{scenario.name}-{attempt}"
        try:
            with lead:
                require_here(mine, faults, store=before.store)
                lead.record = hurt(mine, scenario, store, lead.record, faults, root_name=root)
        except KeyboardInterrupt:
            note(conclude(mine, lead.record))
            raise
        report = conclude(mine, lead.record)
        red = {finding.check for finding in report.findings if finding.verdict is not Verdict.PASS}
        if report.unfit or attempt == TRIES or red != {"faults_fired"}:
            break
        shutil.rmtree(mine.out)
    return report
