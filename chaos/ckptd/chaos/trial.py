"""A trial: the script undisturbed, then hurt, and the verdict.

Owns: the order of things and the folders of a trial. Does not own: how a run is led (`conductor`), what becomes of a trial that
cannot be (`leading`), what is right (`judging`), nor whether the script can be judged at all (`fitness`). `perform` is also what
a program of its own uses to lead single runs (see examples/demo.py), and several trials share what is undisturbed (`presets`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptd.chaos import cache, fitness
from ckptd.chaos.cluster.cluster import Cluster
from ckptd.chaos.cluster.launcher import Launcher, Torchrun
from ckptd.chaos.cluster.means import local_means, require_means
from ckptd.chaos.cluster.node import AGENT_COMMAND
from ckptd.chaos.cluster.process import Leashed, ProcessError, Spawn
from ckptd.chaos.cluster.proxied import proxied_store
from ckptd.chaos.cluster.store import Store, open_store
from ckptd.chaos.conductor import Conductor, Limits, Performance
from ckptd.chaos.evidence import (
    Evidence,
    EvidenceError,
    losses_of,
    rates_of,
    read_audits,
    read_digests,
    saves_of,
    surroundings_of,
)
from ckptd.chaos.fitting import fitted
from ckptd.chaos.history import Event
from ckptd.chaos.judging import judge
from ckptd.chaos.leading import Lead, TrialError, Undisturbed
from ckptd.chaos.network.way import NotRunError, choose_way, open_network
from ckptd.chaos.record import Record, save_record, versions
from ckptd.chaos.report import Report, cached_words
from ckptd.chaos.reports.write import write_report
from ckptd.chaos.root import RootFacts, read_root_by_name
from ckptd.chaos.scenario import Scenario
from ckptd.chaos.schedule import PlannedFault
from ckptd.chaos.watch import last_lines
from ckptd.storage_backends.errors import StorageError

JOB = "chaos"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Where runs take place.

    Attributes:
        nnodes: Number of nodes.
        nproc: Ranks on each.
        command: Script and arguments; {root}, {digests} and {out} in them are filled for each run.
        out: Folder of all evidence.
        limits: Deadlines.
        agent: Command of an agent.
        launcher: Makes the launcher of a run from its folder.
        spawn_agent: Starts agents.
        spawn_ranks: Starts launchers.
        read_root: Reads a root's facts (URL, variables of the store); None: roots are not read.
        observe: Is told (name of the run, event) as events are seen.
        network: How the network is hurt: netns, proxy, or auto (namespaces where they are allowed).
        environment: Variables of the ranks besides CKPTD_ROOT and CKPTD_JOB.
        preset: Name of the preset that the trial is a part of; "" where it is none.
    """

    nnodes: int
    nproc: int
    command: tuple[str, ...]
    out: Path
    limits: Limits
    agent: tuple[str, ...] = AGENT_COMMAND
    launcher: Callable[[Path], Launcher] = Torchrun
    spawn_agent: Spawn = Leashed
    spawn_ranks: Spawn = Leashed
    read_root: Callable[..., RootFacts] | None = read_root_by_name
    observe: Callable[[str, Event], None] = lambda _run, _event: None
    network: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    preset: str = ""


def perform(
    stage: Stage,
    store: Store,
    name: str,
    *,
    faults: Sequence[PlannedFault] = (),
    agent_failpoints: str = "",
    root_name: str = "",
    saves_are_steps: bool = False,
) -> tuple[Performance, Evidence]:
    """Lead one run in the folder `name` of the stage; return how it went and what it left.

    Args:
        stage: Where.
        store: Has its root.
        name: Of the run.
        faults: What strikes, in order.
        agent_failpoints: Failpoints of every agent all the time.
        root_name: Of its root; the run's name where it is "".
        saves_are_steps: The script prints no steps: what it saves tells them.

    Raises:
        TrialError: An agent or a launcher could not be started, or the evidence cannot be read.
    """
    folder = stage.out / name
    digests = folder / "digests" / "list"
    digests.parent.mkdir(parents=True, exist_ok=False)
    root = store.root(root_name or name)
    filled = {"{root}": root, "{digests}": str(digests), "{out}": str(folder / "out.json")}
    script = [_filled(part, filled) for part in stage.command]
    proxied = proxied_store(store, folder, root, faults)
    variables = {**store.environment(), **(proxied.environment() if proxied is not None else {})}
    network = open_network(stage.network, folder, variables, faults)
    cluster = Cluster(
        nnodes=stage.nnodes,
        nproc=stage.nproc,
        folder=folder,
        launcher=Torchrun(folder, network) if stage.launcher is Torchrun else stage.launcher(folder),
        environment=variables,
        agent=stage.agent,
        failpoints=agent_failpoints,
        arm=lambda node, _start: conductor.restart_failpoints(node),
        spawn_agent=stage.spawn_agent,
        spawn_ranks=stage.spawn_ranks,
        network=network,
    )
    cluster.proxied = proxied
    conductor = Conductor(
        cluster,
        script,
        environment={"CKPTD_ROOT": root, "CKPTD_JOB": JOB, **stage.environment},
        faults=faults,
        limits=stage.limits,
        observe=lambda event: stage.observe(root_name or name, event),
        hears_clients=True,
        saves_are_steps=saves_are_steps,
    )
    try:
        with local_means(cluster, faults, root):
            performance = conductor.perform()
            facts = stage.read_root(root, store.environment()) if stage.read_root is not None else None
        for proof in (proxied, network, cluster.planted):
            if proof is not None:
                performance = replace(performance, struck=proof.proved(performance.struck))
        tracked, untracked = surroundings_of(performance.history)
        evidence = Evidence(
            losses=losses_of(performance.history),
            digests=read_digests(digests),
            root=facts,
            rates=rates_of(performance.history),
            audit=read_audits(folder),
            saves=saves_of(performance.history),
            tracked=tracked,
            untracked=untracked,
        )
    except (ProcessError, EvidenceError, StorageError) as error:
        raise TrialError(f"the {name} run cannot be judged: {error}") from error
    finally:
        if network is not None:
            network.close()
        if proxied is not None:
            proxied.close()
    return performance, evidence


def run_trial(
    stage: Stage, scenario: Scenario, *, store: str, seed: int, cache_folder: Path | None, twice: bool = False
) -> Report:
    """Run a scenario, judge it, and write evidence and report into the stage's folder.

    Args:
        stage: Where.
        scenario: What is done.
        store: "local" or "s3".
        seed: Decides what the scenario leaves open.
        cache_folder: Where undisturbed runs are kept; None: run it anew, and keep nothing.
        twice: Do the undisturbed run twice and compare, unless one that was done twice is kept: a script that is not
            deterministic gives unknown.

    Raises:
        ScheduleError: The scenario does not fit the number of nodes and ranks, the store, or the network; nothing was started.
        OSError: Evidence or report cannot be written.
        KeyboardInterrupt: As it came; nothing is left running, and the report says that it was broken off.
    """
    faults = planned(stage, scenario, store=store, seed=seed)
    lead = Lead(begin_record(stage, scenario, store=store, seed=seed))
    try:
        with lead:
            require_here(stage, faults, store=store)
            with open_store(store, stage.out / "store") as opened:
                if lead.can_be_judged(undisturbed_runs(stage, opened, store, cache_folder, twice=twice)):
                    lead.record = hurt(stage, scenario, opened, lead.record, faults)
    except KeyboardInterrupt:
        conclude(stage, lead.record)
        raise
    return conclude(stage, lead.record)


def planned(stage: Stage, scenario: Scenario, *, store: str, seed: int) -> tuple[PlannedFault, ...]:
    """Return a scenario's faults for this stage.

    Raises:
        ScheduleError: The scenario does not fit the number of nodes and ranks, the store, or the network.
    """
    return fitted(scenario, nnodes=stage.nnodes, nproc=stage.nproc, store=store, network=stage.network, seed=seed)


def require_here(stage: Stage, faults: Sequence[PlannedFault], *, store: str) -> None:
    """Check that what a scenario does can be done on this machine. Nothing is started.

    Raises:
        TrialError: It cannot, and why.
    """
    not_here = require_means(faults, store=store)
    if not_here:
        raise TrialError(not_here)
    try:
        choose_way(stage.network, faults, has_endpoint=store == "s3")
    except NotRunError as error:
        raise TrialError(str(error)) from error


def begin_record(stage: Stage, scenario: Scenario, *, store: str, seed: int) -> Record:
    """Return the record of a trial that begins now."""
    return Record(
        scenario=scenario,
        nnodes=stage.nnodes,
        nproc=stage.nproc,
        store=store,
        seed=seed,
        command=stage.command,
        begun=round(time.time(), 3),
        versions=versions(),
        network=stage.network,
        preset=stage.preset,
    )


def hurt(
    stage: Stage,
    scenario: Scenario,
    store: Store,
    record: Record,
    faults: Sequence[PlannedFault],
    *,
    root_name: str = "",
) -> Record:
    """Lead the run that is hurt, and return the record with it; the undisturbed evidence must stand in it.

    Raises:
        TrialError: It could not be led.
    """
    performance, evidence = perform(
        stage,
        store,
        "hurt",
        faults=faults,
        agent_failpoints=scenario.agent_failpoints,
        root_name=root_name,
        saves_are_steps=record.undisturbed is not None and not record.undisturbed.losses,
    )
    return replace(record, performance=performance, hurt=evidence)


def conclude(stage: Stage, record: Record) -> Report:
    """Save a record, judge it, and write the report.

    Raises:
        OSError: As the file system says.
    """
    save_record(record, stage.out)
    report = judge(record, stage.out)
    write_report(report, record)
    return report


def undisturbed_runs(stage: Stage, store: Store, kind: str, cache_folder: Path | None, *, twice: bool) -> Undisturbed:
    """Return what the script leaves undisturbed: run now, or kept from before; twice where that is wanted.

    Raises:
        TrialError: It does not get through, or cannot be judged.
    """
    script = script_file(stage.command)
    if cache_folder is None or script is None:
        return _undisturbed_now(stage, store, twice=twice)
    variables = [f"{name}={value}" for name, value in sorted(stage.environment.items())]
    code = cache.code_digest(script)
    key = cache.cache_key([*variables, *stage.command], nnodes=stage.nnodes, nproc=stage.nproc, store=kind, code=code)
    if (known := cache.load(cache_folder, key, twice=twice)) is not None:
        note = cached_words(known.cached_at)
        told = Event(t=time.time(), source="harness", kind="cached", fields={"note": note})
        stage.observe("undisturbed", told)
        return known
    begun = time.time()
    done = _undisturbed_now(stage, store, twice=twice)
    cache.save(cache_folder, key, done, begun=begun)
    return done


def _undisturbed_now(stage: Stage, store: Store, *, twice: bool) -> Undisturbed:
    first = _perform_undisturbed(stage, store, "undisturbed")
    return Undisturbed(first=first, repeat=_perform_undisturbed(stage, store, "repeat") if twice else None)


def script_file(command: Sequence[str]) -> Path | None:
    """Return the file that a command runs: the script, or the module behind `-m`; None where it cannot be found."""
    if command[0] != "-m":
        return Path(command[0])
    path = Path(*command[1].split("."))
    return next((one for one in (path.with_suffix(".py"), path / "__main__.py") if one.is_file()), None)


def _perform_undisturbed(stage: Stage, store: Store, name: str) -> Evidence:
    performance, evidence = perform(stage, store, name)
    outputs = (stage.out / name / "launches" / "1").glob("*.???")
    if (found := fitness.unfit(performance, evidence, output=last_lines(sorted(outputs)))) is not None:
        raise TrialError(found.text, found)
    if not performance.finished or performance.launches != 1:
        why = performance.why or _first_death(performance)
        raise TrialError(f"the script does not get through undisturbed: {why}")
    return evidence


def _first_death(performance: Performance) -> str:
    died = performance.history.of("exited", "agent_died", source="harness")
    return str(dict(died[0].fields)) if died else "it was started more than once"


def _filled(part: str, values: dict[str, str]) -> str:
    for placeholder, value in values.items():
        part = part.replace(placeholder, value)
    return part
