"""What a chosen step holds, as the agent told it: at this rank's coordinate, or of a step of another mesh everywhere.

Owns: names, rows and holders. Does not own: comparing them with what is tracked (`targets`). Invariant: of another mesh
each global tensor is one whole row, and what was one rank's own is found under that rank only.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptd.protos import shard_table
from ckptd.protos.agent_pb2 import StoredPart
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SCOPE_PER_RANK


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """A step of another mesh, seen from this one.

    Attributes:
        coordinates: Stored rank: its coordinate, axis by axis.
        objects: Stored rank: its objects.
        own_rows: Name: stored rank: the row of its own tensor.
        step: The step.
        here: This rank's coordinate.
        world: Ranks here.
    """

    coordinates: Mapping[int, Mapping[str, int]]
    objects: Mapping[int, Sequence[str]]
    own_rows: Mapping[str, Mapping[int, ShardRow]]
    step: int
    here: Mapping[str, int]
    world: int

    def holders(self, name: str) -> list[int]:
        """Return the stored ranks that hold an object."""
        return sorted(rank for rank, names in self.objects.items() if name in names)


class Stored:
    """What the chosen step holds.

    Args:
        rows: At this rank's coordinate; of another mesh one whole row for each global tensor.
        objects: At this rank's coordinate.
        aliases: Names that share memory with another one.
        elsewhere: Set for a step of another mesh.
    """

    def __init__(
        self,
        rows: Iterable[ShardRow],
        objects: Iterable[str],
        aliases: Mapping[str, str],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        found: dict[str, list[ShardRow]] = {}
        for row in rows:
            found.setdefault(row.name, []).append(row)
        self.rows: dict[str, tuple[ShardRow, ...]] = {name: tuple(held) for name, held in found.items()}
        self.aliases = dict(aliases)
        self.elsewhere: Elsewhere | None = None
        self.own_rows: Mapping[str, Mapping[int, ShardRow]] = {}
        self.holders: dict[str, list[int]] = {}
        if elsewhere is not None:
            self._take_elsewhere(elsewhere)
        self.objects = frozenset(objects) | frozenset(self.holders)
        self._index()

    def _take_elsewhere(self, elsewhere: Elsewhere) -> None:
        self.elsewhere, self.own_rows = elsewhere, elsewhere.own_rows
        for rank, names in sorted(elsewhere.objects.items()):
            for name in names:
                self.holders.setdefault(name, []).append(rank)

    def _index(self) -> None:
        self._sorted, self._sorted_own = sorted(self.rows), sorted(self.own_rows)
        self._places = {name: at for at, name in enumerate([*self.rows, *self.own_rows])}

    @property
    def other_mesh(self) -> bool:
        """Whether the step was saved on another mesh."""
        return self.elsewhere is not None

    @property
    def names(self) -> list[str]:
        """All names, sorted: the same list on every rank where the step is of another mesh."""
        return sorted({*self.rows, *self.own_rows, *self.aliases, *self.objects})

    def source(self, name: str) -> str | None:
        """Return the name that the bytes of the tensor `name` are stored under; None where it is not stored."""
        return name if name in self.rows or name in self.own_rows else self.aliases.get(name)

    def names_below(self, prefix: str) -> list[str]:
        """Return the tensor names that are `prefix` or begin with it and "/"; not those of single ranks elsewhere."""
        return _below(self._sorted, prefix)

    def as_collected(self, names: Iterable[str]) -> list[str]:
        """Return names of tensors in the order in which they were collected when the step was saved."""
        return sorted(names, key=self._places.__getitem__)

    def own_below(self, prefix: str) -> Iterator[tuple[str, Mapping[int, ShardRow]]]:
        """Yield the stored ranks' own tensors that are `prefix` or begin with it and "/"."""
        for name in _below(self._sorted_own, prefix):
            yield name, self.own_rows[name]


def _below(names: list[str], prefix: str) -> list[str]:
    at = bisect.bisect_left(names, prefix)
    own = [prefix] if names[at : at + 1] == [prefix] else []
    start = bisect.bisect_left(names, f"{prefix}/")
    # "0" follows "/" in every encoding that names can have.
    return own + names[start : bisect.bisect_left(names, f"{prefix}0")]


@dataclass(slots=True)
class StoredParts:
    """Joins the parts of the answer to Restore."""

    found: StoredPart.Found = field(default_factory=StoredPart.Found)
    rows: list[ShardRow] = field(default_factory=list)
    own: dict[str, dict[int, ShardRow]] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    ranks: list[StoredPart.RankObjects] = field(default_factory=list)

    def take(self, part: StoredPart) -> None:
        """Add a part."""
        if part.HasField("found"):
            self.found = part.found
        owners = list(part.row_ranks)
        for at, row in enumerate(shard_table.iter_rows(part.rows)):
            if owners and row.scope == SCOPE_PER_RANK:
                self.own.setdefault(row.name, {})[owners[at]] = row
            else:
                self.rows.append(row)
        self.objects += part.object_names
        self.aliases.update(zip(part.aliases.alias, part.aliases.target, strict=True))
        self.ranks += part.rank_objects

    def stored(self, here: Mapping[str, int], world: int) -> Stored:
        """Return what is stored, for the rank at the coordinate `here` of `world` ranks."""
        elsewhere = None
        if self.found.other_mesh:
            axes = self.found.mesh.axes
            elsewhere = Elsewhere(
                coordinates={one.rank: dict(zip(axes, one.coordinate, strict=False)) for one in self.ranks},
                objects={one.rank: list(one.names) for one in self.ranks},
                own_rows=self.own,
                step=self.found.step,
                here=here,
                world=world,
            )
        return Stored(self.rows, self.objects, self.aliases, elsewhere)
