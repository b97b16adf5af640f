"""What was asked for: scenarios, numbers and a script, from options, a preset and a torchrun line.

Owns: which of them counts where several say something. Does not own: running. Nothing is started: what cannot be run is
refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ckptd.chaos.cluster.store import STORES, missing_store
from ckptd.chaos.command import CommandError, agreed, parse_command
from ckptd.chaos.conductor import Limits
from ckptd.chaos.fitting import fitted
from ckptd.chaos.history import Event
from ckptd.chaos.network.words import WAYS
from ckptd.chaos.preset import Preset, load_preset
from ckptd.chaos.scenario import Scenario
from ckptd.chaos.scenario_reader import ScenarioError, load, scenario_names
from ckptd.chaos.trial import Stage

_RUN_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One run of the command.

    Attributes:
        scenarios: What is done, in order.
        preset: The preset they are of; None: one scenario by its name.
        script: Script or `-m MODULE`, and its arguments.
        nnodes: Nodes.
        nproc: Ranks on each.
        store: "local" or "s3".
        timeout: Bound of each run; half of it may be silent.
        network: How the network is hurt, see `Stage`.
        left_out: Options of a torchrun line that the harness decides by itself.
    """

    scenarios: tuple[Scenario, ...]
    preset: Preset | None
    script: tuple[str, ...]
    nnodes: int
    nproc: int
    store: str
    timeout: timedelta
    network: str = "auto"
    left_out: tuple[str, ...] = ()

    def stage(self, out: Path, observe: Callable[[str, Event], None]) -> Stage:
        """Return where it runs; `out` is the folder of all evidence."""
        return Stage(
            nnodes=self.nnodes,
            nproc=self.nproc,
            command=self.script,
            out=out,
            limits=Limits.of_timeout(self.timeout, relaunches=max(len(one.faults) for one in self.scenarios) + 3),
            observe=observe,
            network=self.network,
            environment={} if self.preset is None else self.preset.environment(),
            preset="" if self.preset is None else self.preset.name,
        )


def read_request(
    first: str | None,
    rest: Sequence[str],
    *,
    preset: str | None = None,
    only: Sequence[str] = (),
    nnodes: int | None = None,
    nproc: int | None = None,
    store: str | None = None,
    timeout: float | None = None,
    network: str = "auto",
) -> Request:
    """Return what is to be run.

    Args:
        first: Name of a scenario; the first word of the command, where there is a preset. None: nothing was said.
        rest: The command, or the rest of it.
        preset: Name or file of a preset.
        only: Names of its scenarios; empty: all of them.
        nnodes: As an option said; None: it did not.
        nproc: As above.
        store: As above.
        timeout: As above, seconds.
        network: How the network is hurt: one of WAYS, or auto.

    Raises:
        ScenarioError: No such scenario or preset, or a wrong one.
        CommandError: The command cannot be run, or says other numbers than the options; or there is no such store here.
        ScheduleError: A scenario does not fit the number of nodes and ranks, the store, or the network.
    """
    if store is not None and store not in STORES:
        raise CommandError(f"--store is {store!r}; allowed: {', '.join(STORES)}")
    if network not in ("auto", *WAYS):
        raise CommandError(f"--network is {network!r}; allowed: auto, {', '.join(WAYS)}")
    chosen = None if preset is None else load_preset(preset)
    if chosen is None:
        if only:
            raise CommandError("--only goes with --preset")
        scenarios: tuple[Scenario, ...] = (_scenario(first),)
        words = list(rest)
    else:
        if first in scenario_names():
            raise CommandError(f"a preset names its scenarios; for this one of them: --only {first}")
        scenarios, words = _only(chosen, only), [*([] if first is None else [first]), *rest]
    command = parse_command(words, is_file=lambda name: Path(name).is_file())
    request = Request(
        scenarios=scenarios,
        preset=chosen,
        script=command.script,
        nnodes=agreed("--nnodes", nnodes, command.nnodes, 1 if chosen is None else chosen.nodes),
        nproc=agreed("--nproc", nproc, command.nproc, 2 if chosen is None else chosen.ranks),
        store=store or ("local" if chosen is None else chosen.store),
        timeout=timedelta(seconds=timeout or (_RUN_S if chosen is None else chosen.timeout_s)),
        network=network,
        left_out=command.left_out,
    )
    for scenario in scenarios:
        fitted(scenario, nnodes=request.nnodes, nproc=request.nproc, store=request.store, network=network)
    if missing := missing_store(request.store):
        raise CommandError(missing)
    return request


def _scenario(name: str | None) -> Scenario:
    if name is None:
        raise CommandError("there is no scenario; say --preset ci, or a name of --list, and then -- and the script")
    if name.endswith(".py") or name == "torchrun":
        raise CommandError(
            f"{name!r} stands where a scenario should; say --preset ci, or a name of --list, before the --"
        )
    return load(name)


def _only(preset: Preset, only: Sequence[str]) -> tuple[Scenario, ...]:
    names = [scenario.name for scenario in preset.scenarios]
    if strange := [name for name in only if name not in names]:
        raise ScenarioError(f"preset {preset.name} has no scenario {strange[0]!r}; it has: {', '.join(names)}")
    return tuple(scenario for scenario in preset.scenarios if not only or scenario.name in only)
