"""What a save collects: shards with the views that hold them, ties, and encoded objects.

Owns: the collector that every tracked thing writes into, and its memory of rows from save to save. Does not own: how
a module or an optimizer is read (`modules`, `optimizers`, `nested`). Invariant: a name is collected once; a row is
the same object as in the last save exactly when nothing about it changed, so that an unchanged layout is known
without hashing it.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ckptd.protos import shard_table
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK, AliasTable, ShardTable, Value

from .errors import InvalidRequest
from .placements import LocalBox
from .sharding import PerRank, Pieces, dtype_name, pieces_of
from .values import encode

TRAINED, FROZEN = 0, 1
"""Groups of rows that change together, see ShardTable.group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The rows of a rank's state, in order. Equal digests mean equal rows.

    Attributes:
        table: The rows.
        rows: The same rows as objects.
        aliases: Names that share memory with another name.
        digest: BLAKE3 of the table, 32 bytes.
    """

    table: ShardTable
    rows: tuple[ShardRow, ...]
    aliases: AliasTable
    digest: bytes


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Collected:
    """One rank's state at a cut. Views alias the live tensors: valid only until training goes on.

    Attributes:
        layout: The rows.
        views: Row: the tensor that holds it, of the box's shape; any strides, any device, perhaps with a gradient.
        objects: Names and encoded bytes of the objects, in order. These are copies.
    """

    layout: Layout
    views: Sequence[torch.Tensor]
    objects: Sequence[tuple[str, bytes]]


@dataclass(slots=True)
class _Known:
    """How a name looked in the last save."""

    dtype: torch.dtype
    global_shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]
    scope: int
    group: int
    rows: tuple[ShardRow, ...]


def _rows(name: str, pieces: Pieces, scope: int, group: int) -> tuple[ShardRow, ...]:
    return tuple(
        ShardRow(
            name=name,
            dtype=dtype_name(pieces.dtype),
            global_shape=pieces.global_shape,
            offset=box.offset,
            length=box.length,
            scope=scope,
            nbytes=math.prod(box.length) * pieces.dtype.itemsize,
            group=group,
        )
        for box in pieces.boxes
    )


@dataclass(slots=True)
class _Cut:
    """What one save has collected so far."""

    rows: list[ShardRow] = field(default_factory=list)
    views: list[torch.Tensor] = field(default_factory=list)
    aliases: list[tuple[str, str]] = field(default_factory=list)
    objects: list[tuple[str, bytes]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    object_names: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Segment:
    """What one tracked thing added to a cut, without its tensors."""

    rows: tuple[ShardRow, ...]
    aliases: tuple[tuple[str, str], ...]
    names: frozenset[str]


def check_text(name: str) -> None:
    """Refuse a name, or a text beside the state, that cannot be stored.

    Raises:
        InvalidRequest: it holds lone surrogates.
    """
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{name!r}: text with lone surrogates cannot be stored", key=name) from None


class Collector:
    """Takes the state of one rank apart, save after save. Not thread-safe.

    Args:
        per_rank: Patterns (`fnmatch`) of tensor names that are the rank's own.
    """

    def __init__(self, per_rank: Iterable[str] = ()) -> None:
        patterns = [fnmatch.translate(pattern) for pattern in per_rank]
        self._per_rank = re.compile("|".join(patterns)) if patterns else None
        self._known: dict[str, _Known] = {}
        self._layout: Layout | None = None
        self._cut = _Cut()

    def begin(self) -> None:
        """Start a new cut."""
        self._cut = _Cut()

    def scope_of(self, name: str, leaf: object, default: int) -> int:
        """Return the scope of a tensor: its own word, then the patterns, then `default`."""
        if isinstance(leaf, PerRank) or (self._per_rank is not None and self._per_rank.match(name)):
            return SCOPE_PER_RANK
        return default

    def tensor(self, name: str, leaf: object, *, scope: int = SCOPE_GLOBAL, group: int = TRAINED) -> str:
        """Collect a tensor under `name` and return `name`.

        Raises:
            InvalidRequest: it cannot be stored, or the name was used; `key` says which.
        """
        self.pieces(name, pieces_of(leaf, name), scope=self.scope_of(name, leaf, scope), group=group)
        return name

    def pieces(self, name: str, pieces: Pieces, *, scope: int, group: int) -> None:
        """Collect a tensor whose boxes are known; see `tensor`."""
        if name in self._cut.names:
            raise InvalidRequest(
                f"{name}: two tensors have this name", hint="track them under different names", key=name
            )
        self._cut.names.add(name)
        known = self._known.get(name)
        if known is None:
            check_text(name)
        if (
            known is None
            or known.boxes is not pieces.boxes
            or known.global_shape != pieces.global_shape
            or (known.dtype, known.scope, known.group) != (pieces.dtype, scope, group)
        ):
            rows = _rows(name, pieces, scope, group)
            known = _Known(pieces.dtype, pieces.global_shape, pieces.boxes, scope, group, rows)
            self._known[name] = known
        self._cut.rows += known.rows
        self._cut.views += pieces.views()

    def mark(self) -> tuple[int, int]:
        """Return where the cut stands, for `segment`."""
        return len(self._cut.rows), len(self._cut.aliases)

    def segment(self, mark: tuple[int, int]) -> Segment:
        """Return what was added since `mark`."""
        rows, aliases = tuple(self._cut.rows[mark[0] :]), tuple(self._cut.aliases[mark[1] :])
        names = frozenset([*(row.name for row in rows), *(name for name, _ in aliases)])
        return Segment(rows=rows, aliases=aliases, names=names)

    def repeat(self, segment: Segment, views: Sequence[torch.Tensor]) -> bool:
        """Add a segment of an earlier cut with the tensors that hold its rows now.

        Returns:
            False, and nothing is added, where a name is used already: taking the thing apart says which.
        """
        if len(views) != len(segment.rows) or not self._cut.names.isdisjoint(segment.names):
            return False
        self._cut.names |= segment.names
        self._cut.rows += segment.rows
        self._cut.aliases += segment.aliases
        self._cut.views += views
        return True

    def alias(self, name: str, target: str) -> None:
        """Say that `name` shares the memory of `target`, which is collected.

        Where `target` has no elements on this rank it is not stored here, and nor is the tie.
        """
        check_text(name)
        self._cut.names.add(name)
        if self._known[target].rows:
            self._cut.aliases.append((name, target))

    def object(self, name: str, value: Value | object) -> None:
        """Collect an object: encoded at once.

        Raises:
            InvalidRequest: it holds what cannot be stored, or the name was used.
        """
        if name in self._cut.object_names:
            raise InvalidRequest(f"{name}: two objects have this name", key=name)
        encoded = value if isinstance(value, Value) else encode(value, name)
        self._cut.object_names.add(name)
        self._cut.objects.append((name, encoded.SerializeToString(deterministic=True)))

    def finish(self) -> Collected:
        """Return the cut."""
        cut, self._cut = self._cut, _Cut()
        rows, last = tuple(cut.rows), self._layout
        aliases = AliasTable(alias=[name for name, _ in cut.aliases], target=[target for _, target in cut.aliases])
        # Rows that did not change are the same objects, so this comparison is one of identities.
        if last is None or rows != last.rows or aliases != last.aliases:
            table = shard_table.build(rows)
            last = Layout(table=table, rows=rows, aliases=aliases, digest=shard_table.digest(table))
            self._layout = last
        return Collected(layout=last, views=cut.views, objects=cut.objects)
