"""A stored step as plain tensors, in one process and without the job: for evaluation, export and a look inside.

Owns: what a caller names and gets, and reading it window by window. Does not own: the session (`step_session`) and the
cuts (`windows`). Invariant: nothing is claimed or written anywhere; beyond the result at most a window is held; every byte
handed out has been verified against its digest.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from ckptd.protos.shard_table import ShardRow

from .config import Config, resolve
from .errors import InvalidRequest
from .resharding import StoredPiece, decoded
from .selecting import Choice
from .sharding import dtype_of
from .step_session import PHASE, StepSession
from .targets import ObjectKey, Wanted
from .windows import Slab, windows

WINDOW_BYTES = 256 << 20
"""What is read at once by default."""
Names: TypeAlias = str | Iterable[str]
"""Names, each with all below it, or `fnmatch` patterns; as `only` of a restore."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """What is known of a stored tensor without reading it.

    Attributes:
        name: Global name.
        dtype: Its dtype.
        shape: Global shape.
        nbytes: Of the whole tensor.
        alias_of: The name whose memory it shares, or None.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    alias_of: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TensorPiece:
    """A range of a tensor's C-contiguous bytes, as a box of it.

    Attributes:
        tensor: Which one.
        offset: Where the box begins, in elements.
        start: Where the range begins, in bytes.
        data: The box. Its memory is used again by the next window: copy what is to be kept.
    """

    tensor: StoredTensor
    offset: tuple[int, ...]
    start: int
    data: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedStep(Mapping[str, torch.Tensor]):
    """Global tensors by name, on the CPU, whole; and what the step says of itself.

    Attributes:
        step: Its number.
        timeline: The one it was saved in.
        metrics: As given to save().
        tags: As given to save().
        mesh: Axes and sizes of the mesh that saved.
        ties: Names that share memory with another one here: name to name.
        objects: With `objects=True`: name to the values of all ranks that held one, by coordinate, in the order of ranks.
            Tensors in them that were not loaded stand there as `StoredTensor`.
        own: With `objects=True`: name to the tensors that were each rank's own, likewise.
    """

    step: int
    timeline: str
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    mesh: Mapping[str, int]
    ties: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    objects: Mapping[str, tuple[StoredPiece, ...]] = field(default_factory=dict, repr=False)
    own: Mapping[str, tuple[StoredPiece, ...]] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


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
        self._rows = {name: rows[0] for name, rows in stored.rows.items()}
        owners = {name: _described(row) for name, row in self._rows.items()}
        # A name that is tied on one stage and has bytes of its own on another is read under its own.
        ties = {
            name: replace(owners[target], name=name, alias_of=target)
            for name, target in stored.aliases.items()
            if target in owners and name not in owners
        }
        self.tensors: Mapping[str, StoredTensor] = {**owners, **ties}
        where = self._session.coordinates
        self.own: Mapping[str, tuple[StoredPiece, ...]] = {
            name: tuple(
                StoredPiece(coordinate=where[rank], value=_described(row)) for rank, row in sorted(rows.items())
            )
            for name, rows in stored.own_rows.items()
        }
        self.objects: Mapping[str, tuple[Mapping[str, int], ...]] = {
            name: tuple(where[rank] for rank in ranks) for name, ranks in sorted(stored.holders.items())
        }

    @property
    def read_bytes(self) -> int:
        """Bytes read from the store so far, those of whole chunks: a chunk is read for each window that needs a part of it."""
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
        tensors = self._read_global([name for name in self.tensors if name in wanted])
        own = self._read_own([name for name in self.own if objects and name in wanted])
        values = {name: self._object(name, tensors, own) for name in self.objects if objects and name in wanted}
        where = self._session.coordinates
        return LoadedStep(
            step=self.step,
            timeline=self.timeline,
            metrics=self.metrics,
            tags=self.tags,
            mesh=self.mesh,
            ties=_ties({name: self.tensors[name] for name in tensors}),
            tensors=tensors,
            objects=values,
            own={
                name: tuple(StoredPiece(coordinate=where[rank], value=held) for rank, held in sorted(ranks.items()))
                for name, ranks in own.items()
            },
        )

    def pieces(self, names: Names | None = None) -> Iterator[TensorPiece]:
        """Yield the bytes of global tensors, window by window, in stored order; tied names once, under their owner.

        All of a tensor comes before the next one begins, its pieces in C order. Never more than a window is held.
        """
        owners = dict.fromkeys(self.tensors[name].alias_of or name for name in self.names(names))
        return self.pieces_of([self.tensors[name] for name in self.tensors if name in owners])

    def pieces_of(self, order: Sequence[StoredTensor]) -> Iterator[TensorPiece]:
        """Yield the bytes of exactly these tensors, in this order; see `pieces`. Each must be one of `tensors`, no alias."""
        buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        for window in windows([(one.shape, one.dtype.itemsize) for one in order], self.window_bytes):
            need = sum(slab.room for slab in window)
            if buffer.numel() < need:
                buffer = torch.empty(need, dtype=torch.uint8, device="cpu")
            at, wanted = 0, []
            for slab in window:
                one = order[slab.position]
                view = buffer[at : at + slab.nbytes].view(one.dtype).view(slab.length)
                wanted.append(Wanted(row=_row(self._rows[one.name], slab), view=view))
                at += slab.room
            self._session.fetch(wanted)
            for slab, filled in zip(window, wanted, strict=True):
                yield TensorPiece(tensor=order[slab.position], offset=slab.offset, start=slab.start, data=filled.view)

    def _read_global(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        owners = dict.fromkeys(self.tensors[name].alias_of or name for name in names)
        order = [name for name in self.tensors if name in owners]
        made = self._filled([(self._rows[name], None) for name in order])
        of = dict(zip(order, made, strict=True))
        return {name: of[self.tensors[name].alias_of or name] for name in names}

    def _read_own(self, names: Sequence[str]) -> dict[str, dict[int, torch.Tensor]]:
        rows = self._session.stored.own_rows
        order = [(name, rank) for name in names for rank in sorted(rows[name])]
        made = self._filled([(rows[name][rank], rank) for name, rank in order])
        found: dict[str, dict[int, torch.Tensor]] = {name: {} for name in names}
        for (name, rank), tensor in zip(order, made, strict=True):
            found[name][rank] = tensor
        return found

    def _filled(self, rows: Sequence[tuple[ShardRow, int | None]]) -> list[torch.Tensor]:
        """Return fresh tensors with what is stored in the rows; of one rank's own, those of the rank beside it."""
        made = [torch.empty(row.length, dtype=dtype_of(row.dtype), device="cpu") for row, _ in rows]
        for window in windows([(tensor.shape, tensor.dtype.itemsize) for tensor in made], self.window_bytes):
            self._session.fetch(
                [
                    Wanted(row=_row(rows[slab.position][0], slab), view=_part(made[slab.position], slab), rank=rank)
                    for slab in window
                    for rank in (rows[slab.position][1],)
                ]
            )
        return made

    def _object(
        self, name: str, tensors: Mapping[str, torch.Tensor], own: Mapping[str, Mapping[int, torch.Tensor]]
    ) -> tuple[StoredPiece, ...]:
        ranks = self._session.stored.holders[name]
        keys: list[ObjectKey] = [(name, rank) for rank in ranks]
        data = self._session.fetch([], keys)
        where = self._session.coordinates
        return tuple(
            StoredPiece(
                coordinate=where[rank],
                value=decoded(name, data[name, rank], functools.partial(self._tensor, rank, tensors, own)),
            )
            for rank in ranks
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
        row = self._session.stored.own_rows.get(name, {}).get(rank)
        if row is None:
            raise ValueError(f"it refers to a tensor {name!r} that is not stored")
        return _described(row)

    def close(self) -> None:
        """End the session and its agent; idempotent."""
        self._session.close()


@contextlib.contextmanager
def open_step(
    root: str,
    step: int | None = None,
    *,
    job: str | None = None,
    window_bytes: int = WINDOW_BYTES,
    config: Config | None = None,
) -> Iterator[OpenStep]:
    """Open a stored step for reading, in this process alone: no launcher, no process group, no job.

    An agent is started for it, which claims and writes nothing and ends with the block. The job may be running. What
    the step holds is known at once; nothing of it is read before it is asked for.

    Args:
        root: Root URL of the job.
        step: A step; default: the newest.
        job: The job's name, to be sure; default: whatever job the root holds.
        window_bytes: What is read at once, at least 1 MiB.
        config: Settings, such as `store_driver`; default: the environment's.

    Raises:
        SnapshotNotFound: there is no such step (the message lists those there are), or none at all.
        SnapshotCorrupt: the step's records are not what was written. No other step is taken instead.
        InvalidRequest: the arguments are wrong, or the store refuses the credentials.
        Unavailable: the store or the agent cannot be reached.
    """
    if isinstance(step, bool) or not isinstance(step, int | None):
        raise InvalidRequest(f"step {step!r} is no whole number", key="step")
    if window_bytes < 1 << 20:
        raise InvalidRequest(f"window_bytes={window_bytes!r} is less than 1 MiB", key="window_bytes")
    settings = resolve(config, {"root": root, "job": job or ""}, any_job=not job)
    opened = OpenStep(settings, step=step, window_bytes=window_bytes)
    try:
        yield opened
    finally:
        opened.close()


def load(
    root: str,
    step: int | None = None,
    names: Names | None = None,
    *,
    objects: bool = False,
    job: str | None = None,
    window_bytes: int = WINDOW_BYTES,
    config: Config | None = None,
) -> LoadedStep:
    """Return a stored step as plain tensors on the CPU: whole ones, whatever mesh saved them.

    Runs in one process, beside a running job too, with credentials that may only read. Memory: the result, and at most a
    window. Tied names come back sharing memory.

    Args:
        root: Root URL of the job.
        step: A step; default: the newest.
        names: What to load, by global name: names, each with all below it ("model/layers.0"), or `fnmatch` patterns
            ("model/*.bias"). Each must choose something. Default: everything global.
        objects: Whether to load Python objects, and tensors that were each rank's own, as well: `LoadedStep.objects` and
            `LoadedStep.own`, by coordinate. `names` chooses among them too.
        job: The job's name, to be sure; default: whatever job the root holds.
        window_bytes: What is read at once.
        config: Settings; default: the environment's.

    Raises:
        CkptdError: see `open_step`; SnapshotCorrupt also where bytes of tensors are not what was saved.
        InvalidRequest: `names` chooses nothing.
    """
    with open_step(root, step, job=job, window_bytes=window_bytes, config=config) as opened:
        return opened.read(names, objects=objects)


def _described(row: ShardRow) -> StoredTensor:
    dtype = dtype_of(row.dtype)
    shape = row.length
    return StoredTensor(name=row.name, dtype=dtype, shape=shape, nbytes=math.prod(shape) * dtype.itemsize)


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


def _row(row: ShardRow, slab: Slab) -> ShardRow:
    offset = tuple(a + b for a, b in zip(row.offset, slab.offset, strict=True))
    return replace(row, offset=offset, length=slab.length, nbytes=slab.nbytes)


def _part(tensor: torch.Tensor, slab: Slab) -> torch.Tensor:
    if tuple(tensor.shape) == slab.length:
        return tensor
    part: Any = tensor
    for dim, (at, length) in enumerate(zip(slab.offset, slab.length, strict=True)):
        part = part.narrow(dim, at, length)
    held: torch.Tensor = part
    return held
