"""A trial: the script once undisturbed, once hurt, and the verdict.

Owns: the order of things and the folders of a trial. Does not own: how a run is led (`conductor`) nor what is right
(`judging`). `perform` is also what a program of its own uses to lead single runs (see examples/demo.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptd.chaos import cache
from ckptd.chaos.cluster.cluster import Cluster
from ckptd.chaos.cluster.launcher import Launcher, Torchrun
from ckptd.chaos.cluster.means import local_means, require_means
from ckptd.chaos.cluster.node import AGENT_COMMAND
from ckptd.chaos.cluster.process import Leashed, ProcessError, Spawn
from ckptd.chaos.cluster.proxied import proxied_store
from ckptd.chaos.cluster.store import Store, open_store
from ckptd.chaos.conductor import Conductor, Limits, Performance
from ckptd.chaos.evidence import Evidence, EvidenceError, losses_of, rates_of, read_audits, read_digests
from ckptd.chaos.history import Event
from ckptd.chaos.judging import judge, nondeterminism
from ckptd.chaos.network.way import NotRunError, choose_way, open_network
from ckptd.chaos.record import Record, save_record, versions
from ckptd.chaos.report import Report
from ckptd.chaos.reports.write import write_report
from ckptd.chaos.root import RootFacts, read_root
from ckptd.chaos.scenario import Scenario
from ckptd.chaos.schedule import PlannedFault, ScheduleError, schedule
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
    read_root: Callable[..., RootFacts] | None = read_root
    observe: Callable[[str, Event], None] = lambda _run, _event: None
    network: str = "auto"


class TrialError(Exception):
    """A run could not be led at all, so that nothing can be said."""


def perform(
    stage: Stage, store: Store, name: str, *, faults: Sequence[PlannedFault] = (), agent_failpoints: str = ""
) -> tuple[Performance, Evidence]:
    """Lead one run in the folder `name` of the stage; return how it went and what it left.

    Raises:
        TrialError: An agent or a launcher could not be started, or the evidence cannot be read.
    """
    folder = stage.out / name
    digests = folder / "digests" / "list"
    digests.parent.mkdir(parents=True, exist_ok=False)
    root = store.root(name)
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
        environment={"CKPTD_ROOT": root, "CKPTD_JOB": JOB},
        faults=faults,
        limits=stage.limits,
        observe=lambda event: stage.observe(name, event),
    )
    try:
        with local_means(cluster, faults, root):
            performance = conductor.perform()
            facts = stage.read_root(root, store.environment()) if stage.read_root is not None else None
        for proof in (proxied, network, cluster.planted):
            if proof is not None:
                performance = replace(performance, struck=proof.proved(performance.struck))
        evidence = Evidence(
            losses=losses_of(performance.history),
            digests=read_digests(digests),
            root=facts,
            rates=rates_of(performance.history),
            audit=read_audits(folder),
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
        ScheduleError: The scenario does not fit the number of nodes and ranks.
        OSError: Evidence or report cannot be written.
    """
    faults = schedule(scenario, nnodes=stage.nnodes, nproc=stage.nproc, seed=seed)
    if store != "s3" and any(fault.store is not None for fault in faults):
        raise ScheduleError(f"scenario {scenario.name} makes an S3 store fail; say --store s3")
    not_here = require_means(faults, store=store)
    begun = time.monotonic()
    record = Record(
        scenario=scenario,
        nnodes=stage.nnodes,
        nproc=stage.nproc,
        store=store,
        seed=seed,
        command=stage.command,
        begun=round(time.time(), 3),
        versions=versions(),
        network=stage.network,
        problem=not_here,
    )
    if not_here:
        return _reported(record, stage.out)
    try:
        choose_way(stage.network, faults, has_endpoint=store == "s3")
        with open_store(store, stage.out / "store") as opened:
            undisturbed, repeat = undisturbed_runs(stage, opened, store, cache_folder, twice=twice)
            record = replace(record, undisturbed=undisturbed, repeat=repeat)
            if not nondeterminism(record):
                performance, hurt = perform(
                    stage, opened, "hurt", faults=faults, agent_failpoints=scenario.agent_failpoints
                )
                record = replace(record, performance=performance, hurt=hurt)
    except (TrialError, NotRunError, RuntimeError, TimeoutError, OSError) as error:
        record = replace(record, problem=str(error) or repr(error))
    return _reported(replace(record, seconds=round(time.monotonic() - begun, 3)), stage.out)


def _reported(record: Record, out: Path) -> Report:
    save_record(record, out)
    report = judge(record, out)
    write_report(report, record)
    return report


def undisturbed_runs(
    stage: Stage, store: Store, kind: str, cache_folder: Path | None, *, twice: bool
) -> tuple[Evidence, Evidence | None]:
    """Return the evidence of an undisturbed run, and of a second one where two are wanted.

    Args:
        stage: Where.
        store: Of the runs.
        kind: "local" or "s3".
        cache_folder: Where such runs are kept; None: run it anew, and keep nothing.
        twice: Two are wanted.

    Raises:
        TrialError: The script does not get through undisturbed.
    """
    if cache_folder is None:
        first = _perform_undisturbed(stage, store, "undisturbed")
        return first, _perform_undisturbed(stage, store, "repeat") if twice else None
    code = cache.code_digest(Path(stage.command[0]))
    key = cache.cache_key(stage.command, nnodes=stage.nnodes, nproc=stage.nproc, store=kind, code=code)
    known, again = cache.load(cache_folder, key), cache.load(cache_folder, f"{key}-repeat")
    if known is not None and again is not None:
        return known, again
    if known is None:
        known = _perform_undisturbed(stage, store, "undisturbed")
        cache.save(cache_folder, key, known)
    if twice:
        again = _perform_undisturbed(stage, store, "repeat")
        cache.save(cache_folder, f"{key}-repeat", again)
    return known, again


def _perform_undisturbed(stage: Stage, store: Store, name: str) -> Evidence:
    performance, evidence = perform(stage, store, name)
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
