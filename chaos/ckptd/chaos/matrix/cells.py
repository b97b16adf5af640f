"""The cells of the matrix, and which of them cannot be. Pure.

Owns: the product of boundaries, victims, actions, stores and shapes, and the reasons why a cell does not apply. Does not own:
where a boundary is passed (`survey`). The product is taken over the registry, so that a new failpoint is in it by itself;
a cell is left out for one of few reasons only, each of which a survey can contradict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckptd.chaos.cluster.store import STORES
from ckptd.chaos.matrix.striking import Place
from ckptd.chaos.matrix.workload import Shape
from ckptd.protos.boundaries import BOUNDARIES, Boundary

VICTIMS: dict[str, tuple[str, ...]] = {
    "rank": ("kill", "pause"),
    "agent": ("kill", "pause"),
    "coordinator": ("kill", "pause"),
    "verb": ("kill", "pause"),
    "node": ("lose", "freeze"),
    "all": ("kill all",),
}
"""Who is hit, and what can be done to it."""
TWO_NODES = Shape(nnodes=2, nproc=1)
ONE_NODE = Shape(nnodes=1, nproc=2)
SHAPES = (TWO_NODES, ONE_NODE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One fault.

    Attributes:
        boundary: Where.
        victim: Who is hit, of VICTIMS.
        action: What is done.
        store: "local" or "s3".
        shape: Nodes and ranks.
    """

    boundary: str
    victim: str
    action: str
    store: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.boundary}/{self.action.replace(' ', '-')}/{self.victim}/{self.store}/{self.shape}"

    @property
    def role(self) -> str:
        """Who passes the boundary."""
        return BOUNDARIES[self.boundary].role

    def matches(self, pattern: str) -> bool:
        """Whether the cell, or its boundary, is meant by a pattern of shells."""
        return fnmatchcase(str(self), pattern) or fnmatchcase(self.boundary, pattern)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why cells do not apply.

    Attributes:
        name: One word.
        text: One sentence.
        holds: Whether it keeps a cell out, as far as the declarations tell.
    """

    name: str
    text: str
    holds: Callable[[Cell, Boundary], bool]


_PASSED_BY = {"rank": {"rank"}, "agent": {"agent"}, "coordinator": {"agent", "coordinator"}, "verb": {"verb"}}

REASONS: tuple[Reason, ...] = (
    Reason(
        name="never-passes",
        text="this process never passes the boundary: it is declared for another role",
        holds=lambda cell, boundary: cell.victim in _PASSED_BY and boundary.role not in _PASSED_BY[cell.victim],
    ),
    Reason(
        name="no-node",
        text="an operator's verb belongs to no node of the job",
        holds=lambda cell, boundary: cell.victim in {"node", "all"} and boundary.role == "verb",
    ),
    Reason(
        name="one-agent",
        text="the only agent plays the coordinator, and is hit as such",
        holds=lambda cell, _: cell.shape.nnodes == 1 and cell.victim == "agent",
    ),
    Reason(
        name="small-group",
        text="two ranks on one node are tried with deaths on local files only; all else is alike on two nodes",
        holds=lambda cell, _: cell.shape.nnodes == 1 and (cell.store != "local" or not cell.action.startswith("kill")),
    ),
)
ONLY_COORDINATOR = Reason(
    name="only-coordinator",
    text="no agent but the coordinator's passes the boundary, in any play: it is hit as such",
    holds=lambda cell, boundary: cell.victim == "agent" and boundary.role == "agent",
)
"""Told by the surveys, not by declarations."""


def cells(shapes: Iterable[Shape] = SHAPES) -> Iterator[Cell]:
    """Yield the whole product, in the order of the registry."""
    for boundary in BOUNDARIES:
        for victim, actions in VICTIMS.items():
            for action in actions:
                for store in STORES:
                    for shape in shapes:
                        yield Cell(boundary=boundary, victim=victim, action=action, store=store, shape=shape)


def cell_named(name: str) -> Cell:
    """Return the cell whose `str` this is.

    Raises:
        ValueError: There is none.
    """
    for shape in SHAPES:
        boundary, _, rest = name.removesuffix(f"/{shape}").partition("/")
        action, victim, store = (*rest.split("/"), "", "", "")[:3]
        cell = Cell(boundary=boundary, victim=victim, action=action.replace("-", " "), store=store, shape=shape)
        if str(cell) == name and boundary in BOUNDARIES and cell.action in VICTIMS.get(victim, ()) and store in STORES:
            return cell
    raise ValueError(f"no cell is named {name!r}")


def reason(cell: Cell) -> Reason | None:
    """Return why a cell does not apply by its declaration; None if it does."""
    boundary = BOUNDARIES[cell.boundary]
    return next((one for one in REASONS if one.holds(cell, boundary)), None)


def may_pass(place: Place, role: str) -> bool:
    """Whether a process may pass boundaries of a role; what a survey saw beyond that contradicts the declarations."""
    if place.kind == "agent":
        # Rank 0 lives on node 0, and has its own agent lead.
        return role == "agent" or (role == "coordinator" and place.number == 0)
    return role == place.kind


def is_victim(cell: Cell, place: Place) -> bool:
    """Whether a process that passes the cell's boundary is one that the cell hits."""
    if cell.victim == "agent":
        return place.kind == "agent" and place.number != 0
    if cell.victim == "coordinator":
        return place.kind == "agent" and place.number == 0
    return cell.victim in {"node", "all"} or place.kind == cell.victim
