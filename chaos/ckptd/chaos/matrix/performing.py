"""Performs a play on a cluster: act by act, with what is done between acts, and at most one fault.

Owns: acts, verbs between them, and who is armed. Does not own: the loop of one act (`conductor`), the fault (`striking`).
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ckptd.chaos.cluster.cluster import Cluster, Launch
from ckptd.chaos.cluster.process import Leashed, ProcessError, Spawn
from ckptd.chaos.conductor import Conductor, Performance
from ckptd.chaos.evidence import Evidence, EvidenceError, losses_of, read_digests
from ckptd.chaos.leading import TrialError
from ckptd.chaos.matrix.launcher import ARMED, LAUNCH_FOLDER
from ckptd.chaos.matrix.plays import LOSE_NODES, Act, Play
from ckptd.chaos.matrix.striking import BoundaryInjector, Place, Strike
from ckptd.chaos.matrix.workload import Shape, Workload
from ckptd.chaos.nemesis.injector import Injecting
from ckptd.chaos.root import read_root
from ckptd.chaos.schedule import PlannedFault
from ckptd.chaos.watch import TICK, read_tail
from ckptd.storage_backends.errors import StorageError

_VERB = (sys.executable, "-m", "ckptd.daemon.cli")
_VERB_DEADLINE = timedelta(seconds=60)
_LAST_CHANCE = timedelta(seconds=3)
"""How long a fault that is still to come is waited for when an act has ended: agents go on for a moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Where plays are performed.

    Attributes:
        out: Folder of all evidence.
        variables: Of the store.
        spawn_agent: Starts agents and verbs.
        spawn_ranks: Starts launchers of ranks.
        workload: The job.
    """

    out: Path
    variables: Mapping[str, str]
    workload: Workload
    spawn_agent: Spawn = Leashed
    spawn_ranks: Spawn = Leashed


@dataclass(frozen=True, kw_only=True, slots=True)
class Performed:
    """A run of a play.

    Attributes:
        performance: How it went.
        evidence: What it left.
        passes: How often each process passed each boundary; a survey's only.
    """

    performance: Performance
    evidence: Evidence
    passes: Mapping[Place, Mapping[str, int]]


def perform_play(scene: Scene, play: Play, shape: Shape, *, name: str, root: str, strike: Strike | None) -> Performed:
    """Perform a play in the folder `name` of the scene; without a strike every pass of every boundary is counted.

    Raises:
        TrialError: It could not be led, or left nothing that can be read.
    """
    folder = scene.out / name
    digests = folder / "digests" / "list"
    digests.parent.mkdir(parents=True, exist_ok=False)
    conductor = PlayConductor(scene, play, shape, folder=folder, root=root, digests=digests, strike=strike)
    try:
        performance = conductor.perform()
        evidence = Evidence(
            losses=losses_of(performance.history),
            digests=read_digests(digests),
            root=read_root(root, scene.variables),
        )
    except (ProcessError, EvidenceError, StorageError) as error:
        raise TrialError(f"{name} cannot be judged: {error}") from error
    passes = conductor.passes() if strike is None else {}
    return Performed(performance=performance, evidence=evidence, passes=passes)


class PlayConductor(Conductor):
    """One run of a play. Use once; for one thread."""

    def __init__(
        self, scene: Scene, play: Play, shape: Shape, *, folder: Path, root: str, digests: Path, strike: Strike | None
    ) -> None:
        self._scene, self._play_given, self._shape = scene, play, shape
        self._root, self._digests, self._strike = root, digests, strike
        self._stage = Cluster(
            nnodes=shape.nnodes,
            nproc=shape.nproc,
            folder=folder,
            launcher=scene.workload.launcher(folder),
            environment=scene.variables,
            arm=lambda node, start: self._strikes.failpoints(Place(kind="agent", number=node, start=start)),
            spawn_agent=scene.spawn_agent,
            spawn_ranks=scene.spawn_ranks,
        )
        self._launched = 0
        self._verbs = 0
        super().__init__(self._stage, [], environment={}, limits=scene.workload.limits)

    def _make_injector(self, faults: Sequence[PlannedFault]) -> Injecting:
        del faults
        self._strikes = BoundaryInjector(
            self._strike, self._play_given.accident, self._stage, self._history, nproc=self._shape.nproc
        )
        return self._strikes

    def _play(self) -> tuple[Launch, str]:
        launch, why = None, ""
        for act in self._play_given.acts:
            for deed in act.before:
                self._interlude(deed)
            self._script = [
                *self._scene.workload.command,
                *("--root", self._root, "--digests", str(self._digests)),
                *act.flags,
            ]
            launch, why = self._conduct(self._start(act))
            if why:
                break
            self._give_last_chance(launch)
        assert launch is not None
        return launch, why

    def _start(self, act: Act) -> Launch:
        self._environment = act.settings
        return self._launch()

    def _launch(self) -> Launch:
        self._launched += 1
        armed = {
            str(rank): self._strikes.failpoints(Place(kind="rank", number=rank, start=self._launched))
            for rank in range(self._shape.nnodes * self._shape.nproc)
        }
        folder = self._stage.folder / "launches" / str(self._launched)
        self._environment = {**self._environment, ARMED: json.dumps(armed), LAUNCH_FOLDER: str(folder)}
        return super()._launch()

    def _give_last_chance(self, launch: Launch) -> None:
        """The act has ended: let a fault strike that agents are yet to come to, and a paused process go on."""
        last = self._play_given.acts[-1].flags == tuple(self._script[-len(self._play_given.acts[-1].flags) :])
        place = self._strike.place if self._strike is not None else None
        is_due = last and place is not None and place.kind == "agent"
        end = time.monotonic() + (_LAST_CHANCE.total_seconds() if is_due else 0.0)
        while self._strikes.is_pausing or (self._strikes.pending is not None and time.monotonic() < end):
            self._suffer(self._injector.look(self._notice()))
            self._supervise(launch)
            time.sleep(TICK.total_seconds())

    # ------------------------------------------------------------ between acts

    def _interlude(self, deed: str | tuple[str, ...]) -> None:
        if deed == LOSE_NODES:
            for node in list(self._stage.nodes):
                node.lose()
            for node in list(self._stage.nodes):
                fresh = self._stage.replace(node)
                self._say("node_replaced", node=node.place.name, by=fresh.place.name)
            self._stage.await_agents()
            return
        self._run_verb(deed)

    def _run_verb(self, deed: str | tuple[str, ...]) -> None:
        """Run a verb as an operator does: again, when it was killed."""
        number, self._verbs = self._verbs, self._verbs + 1
        arguments = [part.replace("{root}", self._root) for part in deed]
        for attempt in (1, 2):
            place = Place(kind="verb", number=number, start=attempt)
            output = self._stage.folder / f"verb.{number}.{attempt}.out"
            verb = self._scene.spawn_agent(
                [*_VERB, *arguments],
                environment=self._stage.environment
                | {
                    "CKPTD_FAILPOINTS": self._strikes.failpoints(place),
                    "CKPTD_FAILPOINT_LOG": str(self._strikes.logs(place)[0]),
                },
                stdout=output,
            )
            end = time.monotonic() + _VERB_DEADLINE.total_seconds()
            while (code := verb.poll()) is None and time.monotonic() < end:
                if self._strike is not None and self._strike.place.kind == "verb":
                    self._strikes.look(())
                time.sleep(TICK.total_seconds() / 4)
            was_hit = self._strike is not None and self._strike.place == place and self._strikes.verb_was_hit(verb.pid)
            verb.kill()
            if code == 0:
                return
            if not (was_hit and code == 128 + signal.SIGKILL):
                raise ProcessError(f"`ckptd {' '.join(deed)}` ended with {code}: {read_tail(output)}")
        raise ProcessError(f"`ckptd {' '.join(deed)}` was killed twice")

    # ------------------------------------------------------------ counting

    def passes(self) -> dict[Place, dict[str, int]]:
        """Return how often each process passed each boundary."""
        found: dict[Place, dict[str, int]] = {}
        for (node, start), pid in self._stage.agent_pids.items():
            place = Place(kind="agent", number=node, start=start)
            found[place] = _count(self._strikes.logs(place), pid)
        for launch in range(1, self._launched + 1):
            for rank in range(self._shape.nnodes * self._shape.nproc):
                place = Place(kind="rank", number=rank, start=launch)
                found[place] = _count(self._strikes.logs(place), None)
        for number in range(self._verbs):
            place = Place(kind="verb", number=number, start=1)
            found[place] = _count(self._strikes.logs(place), None)
        return {place: counted for place, counted in found.items() if counted}


def _count(logs: Sequence[Path], pid: int | None) -> dict[str, int]:
    counted: dict[str, int] = {}
    for path in logs:
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            by, name, verb, _hit = line.split()
            if verb == "pass" and (pid is None or int(by) == pid):
                counted[name] = counted.get(name, 0) + 1
    return counted
