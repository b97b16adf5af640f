"""A step that is open for reading: what it holds, and its tensors whole or piece by piece.

Owns: names, ties and order, and putting boxes into their places. Does not own: the session (`step_session`) and the cuts
(`windows`). Invariant: beyond the result at most a window is held; every element of a result was read, and every byte handed
out has been verified against its digest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ckptd.protos.shard_table import ShardRow

from .config import Config
from .errors import InvalidRequest, SnapshotCorrupt
from .loaded_step import LoadedStep, Names, StoredTensor, TensorPiece, part_of
from .reshard_hooks import StoredPiece
from .resharding import decoded
from .selecting import Choice
from .sharding import dtype_of
from .step_session import PHASE, StepSession
from .stored_boxes import StoredBox
from .wanted import ObjectKey, Wanted
from .windows import Slab, windows


class OpenStep:
    """One stored step that is open for reading; see `open_step`. Use it from one thread, and close it.

    Attributes:
        step: Its number.
        timeline: The one it was saved in.
        metrics: As given to save().
        tags: As given to save().
        mesh: Axes and sizes of the mesh that saved.
        window_bytes: What is read at once.
        tensors: Global tensors by name, in the order they are stored; tied names too.
        own: Tensors that were each rank's own: name to a `StoredTensor` for each rank that held one, by coordinate.
        objects: Names of objects, with the coordinates of the ranks that held one.
    """

    def __init__(self, config: Config, *, step: int | None, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self._session = StepSession(config, step=step, window_bytes=window_bytes)
        try:
            self._describe()
        except BaseException:
            self.close()
            raise

    def _describe(self) -> None:
        found, stored = self._session.found, self._session.stored
        self.step, self.timeline = found.step, found.timeline
        self.metrics: Mapping[str, float] = dict(found.metrics)
        self.tags: Mapping[str, str] = dict(found.tags)
        self.mesh: Mapping[str, int] = dict(zip(found.mesh.axes, found.mesh.sizes, strict=False))
        owners: dict[str, StoredTensor] = {}
        held: dict[str, int] = {}
        boxes: dict[tuple[str, int], list[ShardRow]] = {}
        for box in stored.boxes:
            name = box.row.name
            if box.owner is not None:
                boxes.setdefault((name, box.owner), []).append(box.row)
            else:
                if name not in owners:
                    owners[name] = _described(box.row, box.row.global_shape)
                held[name] = held.get(name, 0) + math.prod(box.row.length)
        _check_whole(owners, held)
        self._own: dict[str, dict[int, StoredTensor]] = {}
        self._origins: dict[tuple[str, int | None], tuple[int, ...]] = {}
        for (name, rank), rows in boxes.items():
            origin, shape = _extent(rows)
            self._own.setdefault(name, {})[rank] = _described(rows[0], shape)
            self._origins[name, rank] = origin
        # A name that is tied on one stage and has bytes of its own on another is read under its own.
        ties = {
            name: replace(owners[target], name=name, alias_of=target)
            for name, target in stored.aliases.items()
            if target in owners and name not in owners
        }
        self.tensors: Mapping[str, StoredTensor] = {**owners, **ties}
        self.own: Mapping[str, tuple[StoredPiece, ...]] = {
            name: self._by_coordinate(ranks) for name, ranks in self._own.items()
        }
        where = stored.coordinates
        self.objects: Mapping[str, tuple[Mapping[str, int], ...]] = {
            name: tuple(where[rank] for rank in ranks) for name, ranks in sorted(stored.holders.items())
        }

    def _by_coordinate(self, ranks: Mapping[int, object]) -> tuple[StoredPiece, ...]:
        where = self._session.stored.coordinates
        return tuple(StoredPiece(coordinate=where[rank], value=value) for rank, value in sorted(ranks.items()))

    @property
    def read_bytes(self) -> int:
        """Bytes read from the store so far, those of whole chunks: one that lies in two windows is read for each."""
        return self._session.read_bytes

    def names(self, names: Names | None = None) -> list[str]:
        """Return the names of the global tensors that `names` chooses, in stored order; None: all.

        Raises:
            InvalidRequest: a name or pattern chooses nothing.
        """
        return _chosen(names, self.tensors, [*self.own, *self.objects])

    def read(self, names: Names | None = None, *, objects: bool = False) -> LoadedStep:
        """Return whole tensors; see `load`."""
        others = [*self.own, *self.objects] if objects else []
        wanted = set(_chosen(names, [*self.tensors, *others], [] if objects else [*self.own, *self.objects]))
        order = dict.fromkeys(self.tensors[name].alias_of or name for name in self.tensors if name in wanted)
        made = {name: _empty(self.tensors[name]) for name in order}
        own = {
            name: {rank: _empty(one) for rank, one in ranks.items()}
            for name, ranks in self._own.items()
            if objects and name in wanted
        }
        for window in self._windows(made, own):
            wants = []
            for box, slab in window:
                target = made[box.row.name] if box.owner is None else own[box.row.name][box.owner]
                origin = self._origins.get((box.row.name, box.owner), (0,) * target.ndim)
                at = tuple(a - b for a, b in zip(_offset(box, slab), origin, strict=True))
                wants.append(_want(box, slab, part_of(target, at, slab.length)))
            self._session.fetch(wants)
        tensors = {name: made[one.alias_of or name] for name, one in self.tensors.items() if name in wanted}
        values = {name: self._object(name, tensors, own) for name in self.objects if objects and name in wanted}
        return LoadedStep(
            step=self.step,
            timeline=self.timeline,
            metrics=self.metrics,
            tags=self.tags,
            mesh=self.mesh,
            ties=_ties({name: self.tensors[name] for name in tensors}),
            tensors=tensors,
            objects=values,
            own={name: self._by_coordinate(ranks) for name, ranks in own.items()},
        )

    def pieces(self, names: Names | None = None) -> Iterator[TensorPiece]:
        """Yield global tensors box by box, in the order they are stored in; tied names once, under their owner.

        The boxes of a tensor hold each of its elements once; other tensors' may come between them. Never more than a window is
        held, and each chunk of the store is read about once: that is what this order is for.
        """
        return self.pieces_of(dict.fromkeys(self.tensors[name].alias_of or name for name in self.names(names)))

    def pieces_of(self, owners: Collection[str]) -> Iterator[TensorPiece]:
        """Yield the boxes of exactly these tensors, none of them an alias; see `pieces`."""
        buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        for window in self._windows(owners, {}):
            need = sum(slab.room for _, slab in window)
            if buffer.numel() < need:
                buffer = torch.empty(need, dtype=torch.uint8, device="cpu")
            at, wants = 0, []
            for box, slab in window:
                view = buffer[at : at + slab.nbytes].view(self.tensors[box.row.name].dtype).view(slab.length)
                wants.append(_want(box, slab, view))
                at += slab.room
            self._session.fetch(wants)
            for (box, slab), filled in zip(window, wants, strict=True):
                yield TensorPiece(tensor=self.tensors[box.row.name], offset=_offset(box, slab), data=filled.view)

    def cuts_of(self, owners: Collection[str]) -> Iterator[tuple[StoredTensor, tuple[int, ...], tuple[int, ...]]]:
        """Yield tensor, offset and length of every piece that `pieces_of` will yield, in its order; nothing is read."""
        for window in self._windows(owners, {}):
            for box, slab in window:
                yield self.tensors[box.row.name], _offset(box, slab), slab.length

    def _windows(
        self, owners: Collection[str], own: Mapping[str, Mapping[int, object]]
    ) -> Iterator[list[tuple[StoredBox, Slab]]]:
        """Yield what each round reads of the global tensors `owners`, and of the ranks' own tensors `own`."""
        boxes = [
            box
            for box in self._session.stored.boxes
            if (box.row.name in owners if box.owner is None else box.row.name in own)
        ]
        shapes = ((box.row.length, dtype_of(box.row.dtype).itemsize) for box in boxes)
        for window in windows(shapes, self.window_bytes):
            yield [(boxes[slab.position], slab) for slab in window]

    def _object(
        self, name: str, tensors: Mapping[str, torch.Tensor], own: Mapping[str, Mapping[int, torch.Tensor]]
    ) -> tuple[StoredPiece, ...]:
        keys: list[ObjectKey] = [(name, rank) for rank in self._session.stored.holders[name]]
        data = self._session.fetch([], keys)
        return self._by_coordinate(
            {
                rank: decoded(name, data[name, rank], functools.partial(self._tensor, rank, tensors, own))
                for _, rank in keys
                if rank is not None
            }
        )

    def _tensor(
        self,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        own: Mapping[str, Mapping[int, torch.Tensor]],
        name: str,
    ) -> object:
        held = own.get(name, {}).get(rank)
        if held is not None:
            return held
        if name in tensors:
            return tensors[name]
        if name in self.tensors:
            return self.tensors[name]
        if rank not in self._own.get(name, {}):
            raise ValueError(f"it refers to a tensor {name!r} that is not stored")
        return self._own[name][rank]

    def close(self) -> None:
        """End the session and its agent; idempotent."""
        self._session.close()


def _described(row: ShardRow, shape: tuple[int, ...]) -> StoredTensor:
    dtype = dtype_of(row.dtype)
    return StoredTensor(name=row.name, dtype=dtype, shape=shape, nbytes=math.prod(shape) * dtype.itemsize)


def _check_whole(owners: Mapping[str, StoredTensor], held: Mapping[str, int]) -> None:
    """Refuse a tensor of which elements are missing. A commit does; what is empty memory here would pass for a value."""
    for name, one in owners.items():
        if held[name] != math.prod(one.shape):
            raise SnapshotCorrupt(
                f"{name}: {held[name]} of {math.prod(one.shape)} elements are stored", key=name, phase=PHASE
            )


def _extent(rows: Sequence[ShardRow]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and shape of the box that one rank's own pieces of a tensor make up.

    Raises:
        InvalidRequest: they do not make up one.
    """
    low = tuple(min(at) for at in zip(*(row.offset for row in rows), strict=True))
    ends = ([a + b for a, b in zip(row.offset, row.length, strict=True)] for row in rows)
    shape = tuple(max(end) - at for at, end in zip(low, zip(*ends, strict=True), strict=True))
    if sum(math.prod(row.length) for row in rows) != math.prod(shape):
        raise InvalidRequest(f"{rows[0].name}: one rank's pieces of it are no box", key=rows[0].name, phase=PHASE)
    return low, shape


def _chosen(names: Names | None, present: Collection[str], others: Collection[str]) -> list[str]:
    """Return what `names` chooses of `present`, in its order.

    Args:
        names: As the caller gave them.
        present: What can be chosen.
        others: What could be with objects=True, for the hint.
    """
    if names is None:
        return list(present)
    patterns = (names,) if isinstance(names, str) else tuple(names)
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise InvalidRequest(
            f"names={names!r} names nothing", hint='write names=["model"], or leave it out', key="names"
        )
    chosen: set[str] = set()
    for pattern in patterns:
        one = Choice(only=(pattern,))
        found = {name for name in present if one.takes(name)}
        if not found:
            tops = ", ".join(sorted({name.split("/", 1)[0] for name in present})) or "no tensors"
            is_other = any(one.takes(name) for name in others)
            raise InvalidRequest(
                f"names: {pattern!r} chooses nothing of the step",
                hint="objects=True loads objects and what was each rank's own" if is_other else f"it holds {tops}",
                key=pattern,
                phase=PHASE,
            )
        chosen |= found
    return [name for name in present if name in chosen]


def _ties(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return the names among these that share memory with another of them: each with the first such."""
    first: dict[str, str] = {}
    ties = {}
    for name, one in sorted(tensors.items(), key=lambda item: item[1].alias_of is not None):
        owner = first.setdefault(one.alias_of or name, name)
        if owner != name:
            ties[name] = owner
    return ties


def _empty(one: StoredTensor) -> torch.Tensor:
    return torch.empty(one.shape, dtype=one.dtype, device="cpu")


def _offset(box: StoredBox, slab: Slab) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(box.row.offset, slab.offset, strict=True))


def _want(box: StoredBox, slab: Slab, view: torch.Tensor) -> Wanted:
    row = replace(box.row, offset=_offset(box, slab), length=slab.length, nbytes=slab.nbytes)
    return Wanted(row=row, view=view, rank=box.owner)
