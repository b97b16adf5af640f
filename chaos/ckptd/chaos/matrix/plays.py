"""The plays: what the job goes through undisturbed, so that every boundary is passed in one of them.

Pure. Owns: acts (a launch of the script each), what an operator or an accident does between them. Does not own: the
fault that a cell adds. A boundary that no play passes is a failure of the matrix: its play is written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LOSE_NODES = "lose nodes"
"""Between two acts: every node loses its memory and disk, and fresh ones take their places."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """One launch of the script, from its start to a good end.

    Attributes:
        flags: Of the script.
        before: What is done before it: LOSE_NODES, or arguments of `ckptd`, "{root}" filled in.
        settings: Variables of the ranks.
    """

    flags: tuple[str, ...]
    before: tuple[str | tuple[str, ...], ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Accident:
    """A death that belongs to the play: the first agent of node 0 dies at a failpoint.

    Attributes:
        failpoint: With action and count.
        takes_all: Whether every other process dies with it.
    """

    failpoint: str
    takes_all: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Play:
    """A course of the job.

    Attributes:
        name: One word.
        title: What happens.
        acts: In order.
        accident: What happens in the first act, in every run of the play.
    """

    name: str
    title: str
    acts: tuple[Act, ...]
    accident: Accident | None = None


_UNDECIDED = "coordinator.before_decision=kill@3"
_STREAM = {"CKPTD_TRANSPORT": "stream"}

PLAYS: tuple[Play, ...] = (
    Play(
        name="resumed",
        title="a job begins, ends, and goes on from shared memory",
        acts=(Act(flags=("--until", "3")), Act(flags=("--until", "6"))),
    ),
    Play(
        name="moved",
        title="steps are dropped and swept between two runs, and the job goes on from the store, on fresh nodes",
        acts=(
            Act(flags=("--until", "3")),
            Act(
                flags=("--until", "5"),
                before=(("retain", "{root}", "--keep-last", "1"), ("sweep", "{root}"), LOSE_NODES),
            ),
        ),
    ),
    Play(
        name="aborted",
        title="a rank cannot save one step, and another one is not whole: both are given up, and training goes on",
        acts=(Act(flags=("--until", "5", "--fail-save", "2", "--differ", "3")),),
    ),
    Play(
        name="fenced",
        title="another start claims the job while it runs, and dies; the job is fenced and started again",
        acts=(Act(flags=("--until", "5", "--usurp-after", "2")), Act(flags=("--until", "5"))),
    ),
    Play(
        name="refused",
        title="a run asks for steps and states that cannot be had, and with another job's name",
        acts=(Act(flags=("--until", "2")), Act(flags=("--refused",)), Act(flags=("--until", "4"))),
    ),
    Play(
        name="streamed",
        title="no shared memory between ranks and agents; the job goes on from the store",
        acts=(
            Act(flags=("--until", "3"), settings=_STREAM),
            Act(flags=("--until", "5"), before=(LOSE_NODES,), settings=_STREAM),
        ),
    ),
    Play(
        name="all-killed",
        title="every process dies with a step staged and undecided: the next run adopts it",
        acts=(Act(flags=("--until", "5")),),
        accident=Accident(failpoint=_UNDECIDED, takes_all=True),
    ),
    Play(
        name="coordinator-killed",
        title="the coordinator's agent dies before a decision, and comes back beside living trainers",
        acts=(Act(flags=("--until", "5")),),
        accident=Accident(failpoint=_UNDECIDED, takes_all=False),
    ),
)
"""In the order in which a boundary looks for its play: those with an accident last, since what they pass varies most."""


def play_named(name: str) -> Play:
    """Return a play by name; raises KeyError."""
    return {play.name: play for play in PLAYS}[name]
