"""What a row of the table of deeds is, and the targets that its makers draw. Pure.

Owns: the row. Does not own: the rows (`deeds`), nor their makers (`deeds`, `local_deeds`, `network_deeds`, `store_deeds`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptd.chaos.scenario import Fault, Target
from ckptd.chaos.soak.chance import Chance
from ckptd.chaos.soak.moments import Ground

Make = Callable[[Chance, Ground], tuple[Fault, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deed:
    """A row.

    Attributes:
        name: One or two words.
        weight: How often it is drawn, among all that can be.
        make: Draws the rest: one fault, or several that belong together.
        only_s3: It needs a store that can be made to fail.
        only_local: It needs a store that lies on a disk of this machine.
        once: At most once in a schedule: two of it would last longer than the job's deadlines.
        min_nodes: Fewest nodes it can be done to.
        pulse: "stops" or "paces" processes; of these two a schedule has one: who is woken twice a second does not stand still.
    """

    name: str
    weight: int
    make: Make
    only_s3: bool = False
    only_local: bool = False
    once: bool = False
    min_nodes: int = 1
    pulse: str = ""

    def fits(self, ground: Ground) -> bool:
        """Whether it can be done on this ground, as far as it is."""
        return (
            (ground.store == "s3" or not self.only_s3)
            and (ground.store == "local" or not self.only_local)
            and not (self.once and self.name in ground.drawn)
            and ground.nnodes >= self.min_nodes
            and (not self.pulse or ground.pulse in ("", self.pulse))
        )


def any_rank(chance: Chance, ground: Ground) -> Target:
    """Draw a rank."""
    return Target(kind="rank", which=chance.below(ground.nnodes * ground.nproc))


def any_node(chance: Chance, ground: Ground, kind: str = "node") -> Target:
    """Draw a node, or with another kind what is numbered as nodes are."""
    return Target(kind=kind, which=chance.below(ground.nnodes))
