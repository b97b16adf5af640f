"""What a restore fills: live tensors in place, fresh ones where none stands yet, and objects.

Owns: comparing what is stored at this rank's coordinate with what the tracked things hold, and the one error that
lists all differences. Does not own: fetching or copying. Invariant: nothing live is changed here; a wanted row has
the box, dtype and shape of the view it will be copied into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, empty

from ckptd.protos import error_pb2
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK

from .differences import tied
from .errors import InvalidRequest
from .misfits import Misfits, describe
from .overlapping import held
from .patterns import matches
from .placements import beside
from .reshard_hooks import ReshardHook, ReshardHooks
from .sharding import Pieces, dtype_name, dtype_of, held_in, is_out_of_reach, pieces_of, refusal
from .shown import How, Shown
from .stand_ins import StandIns, put
from .stored import Stored
from .wanted import ObjectKey, Wanted, row_of


class Targets:
    """Collects what to fetch, thing by thing, and every difference on the way.

    Args:
        stored: What is there.
        scope_of: The collector's rule, so that a name has the same scope in a restore as in a save.
        apart: Names whose live tensors share memory with those of other names, and the number of their group, see
            `StandIns`.
        hooks: Asked for tensors that were each rank's own on another mesh.
        dropped: Texts that choose tensors of modules, see `patterns`: these stay as they are here.
    """

    def __init__(
        self,
        stored: Stored,
        scope_of: Callable[[str, object, int], int],
        apart: Mapping[str, int] | None = None,
        *,
        hooks: ReshardHooks | None = None,
        dropped: Sequence[str] = (),
    ) -> None:
        self.stored = stored
        self.scope_of = scope_of
        self._hooks = hooks or ReshardHooks()
        self._dropped = tuple(dropped)
        self._live: set[str] = set()
        self.resharding: dict[str, tuple[ReshardHook, object | None]] = {}
        """Name: the hook that makes the tensor, and the live leaf that gets its value, if one stands already."""
        self._resharded: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.wanted: list[Wanted] = []
        self.objects: list[ObjectKey] = []
        self.tensors: dict[str, object] = {}
        self.own_tensors: dict[tuple[int, str], torch.Tensor] = {}
        self.misfits = Misfits(stored)
        self._stand_ins = StandIns(apart or {})
        self.shown = Shown()
        self._claimed: set[str] = set()
        self._claimed_objects: set[str] = set()
        if dropped:
            self._claimed.update(name for name in stored.names if self._is_dropped(name))

    def _is_dropped(self, name: str) -> bool:
        return any(matches(name, text) for text in self._dropped)

    def fill(self, name: str, leaf: object, *, scope: int = SCOPE_GLOBAL, how: How = How.IN_PLACE) -> None:
        """Ask for a tensor to be filled: a live one in place, when all was checked."""
        self._live.add(name)
        if self._is_dropped(name):
            self.keep(name, leaf, goes_along=False)
            return
        pieces = pieces_of(leaf, name)
        source = self.stored.source(name)
        if source is None or source not in self.stored.rows:
            if name in self.stored.own_rows:
                self.reshard(name, leaf)
            elif pieces.boxes:
                self.misfits.missing.append(name)
            else:
                self.tensors[name] = leaf  # no elements here, so no row, and nothing to fill
            return
        if source != name:
            self._claimed.add(name)
        if self._fits(name, source, pieces, self.scope_of(name, leaf, scope)):
            apart = None
            if how is not How.MADE:
                apart = self._stand_ins.filled(name, leaf, pieces.local, is_shown=how is How.SHOWN)
            self._want(
                source,
                pieces if apart is None else replace(pieces, local=apart),
                is_apart=apart is not None or how is How.MADE,
            )
            if how is How.SHOWN and apart is not None and apart.numel():
                live, leaf = leaf, held_in(leaf, apart)
                self.shown.add(name, live, leaf)
        self._claimed.add(source)
        self.tensors[name] = leaf

    def returned(self, name: str, value: object) -> object:
        """Return what hooks made of the value of `name` as it is loaded: live tensors get what the hooks left in their stead.

        Those that a hook did not return are not touched.
        """
        value, left = self.shown.returned(name, value)
        for each in left:
            self._stand_ins.forget(each)
        return value

    def keep(self, name: str, leaf: object, *, goes_along: bool = True) -> None:
        """Note a live tensor that stays as it is, though what is filled may share its memory.

        Args:
            name: Its name.
            leaf: The live leaf.
            goes_along: Whether it goes along where exactly its memory is filled under another name; False: that is an error.
        """
        local = held(leaf)
        if not is_out_of_reach(local) and refusal(local) is None:
            self._stand_ins.kept(name, leaf, local.detach(), goes_along=goes_along)

    def fits(self, name: str, leaf: object, *, scope: int) -> bool:
        """Say whether `leaf` could be filled from what is stored as `name`; asks for nothing."""
        pieces = pieces_of(leaf, name)
        return self._difference(name, pieces, self.scope_of(name, leaf, scope)) is None

    def _difference(self, source: str, pieces: Pieces, scope: int) -> str | None:
        return self.misfits.difference(source, pieces, scope)

    def _fits(self, name: str, source: str, pieces: Pieces, scope: int) -> bool:
        difference = self._difference(source, pieces, scope)
        if difference is not None:
            self.misfits.different[name] = difference
        return difference is None

    def _want(self, source: str, pieces: Pieces, *, is_apart: bool = False) -> None:
        rows = {row.box: row for row in self.stored.rows[source]}
        first = self.stored.rows[source][0]
        for box, view in zip(pieces.boxes, pieces.views(), strict=True):
            row = rows.get((box.offset, box.length)) or row_of(first, box, pieces.dtype)
            self.wanted.append(Wanted(row=row, view=view, is_apart=is_apart))

    def drop(self, name: str) -> None:
        """Take what is stored as `name`, and below it, for asked: it is left alone."""
        self._claimed.update(each for each in self.stored.names if each == name or each.startswith(f"{name}/"))
        self._claimed_objects.add(name)

    def takes_extra(self, name: str) -> bool:
        """Say whether the extra state called `name` is restored."""
        self._live.add(name)
        return not self._is_dropped(name)

    def is_part(self, _name: str) -> bool:
        """Say whether a part of the module tracked as `_name` was chosen."""
        return False

    def fresh_own(self, prefix: str) -> None:
        """Ask for every stored rank's own tensors below `prefix`, of a step of another mesh; see `own_tensors`."""
        for name, _ in self.stored.own_below(prefix):
            self._claimed.add(name)
            self._fetch_own(name)

    def _fetch_own(self, name: str) -> None:
        for rank, row in self.stored.own_rows[name].items():
            made = torch.empty(row.length, dtype=dtype_of(row.dtype), device=torch.device("cpu"))
            self.own_tensors[rank, name] = made
            self.wanted.append(Wanted(row=row, view=made, rank=rank))

    def reshard(self, name: str, leaf: object | None) -> None:
        """Ask for every stored rank's own tensor `name` of a step of another mesh, for a hook to make this rank's of them.

        Args:
            name: Of a tensor of a module or an optimizer.
            leaf: The live tensor that gets the value; None: the hook's tensor becomes the state itself.
        """
        self._claimed.add(name)
        hook = self._hooks.of_tensor(name)
        if hook is None:
            self.misfits.different[name] = (
                f"stored as each rank's own by {len(self.stored.own_rows[name])} ranks of another mesh, and no hook says what "
                "belongs here"
            )
            return
        self._fetch_own(name)
        self.resharding[name] = hook, leaf
        if leaf is not None:
            self._stand_ins.filled(name, leaf, pieces_of(leaf, name).local)

    def resharded(self, name: str, value: object) -> None:
        """Take what a hook made of all ranks' own tensors `name`. Nothing live is changed yet.

        Raises:
            InvalidRequest: it is no tensor, or not like the one that stands here.
        """
        leaf = self.resharding[name][1]
        made = pieces_of(value, name).local if isinstance(value, torch.Tensor) else None
        here = None if leaf is None else pieces_of(leaf, name).local
        fits = made is not None and (
            here is None or (made.shape == here.shape and self._converts(made.dtype, here.dtype))
        )
        if made is None or not fits:
            gave = type(value).__qualname__ if made is None else describe(dtype_name(made.dtype), made.shape)
            wanted = "a tensor" if here is None else describe(dtype_name(here.dtype), here.shape)
            raise InvalidRequest(
                f"{name}: the hook of on_reshard gave {gave}, here is {wanted}",
                reason=error_pb2.REASON_LAYOUT_MISMATCH,
                hint="return the part of the tensor that this rank holds, in its shape and dtype",
                key=name,
                phase="restore",
            )
        if leaf is None:
            self.tensors[name] = made.clone()
            return
        self.tensors[name] = leaf
        apart = self._stand_ins.value(name)
        if apart is not None:
            put(apart, made)
        else:
            self._resharded.append((held(leaf), made))

    def _converts(self, stored: torch.dtype, here: torch.dtype) -> bool:
        """Say whether values of one dtype are put into tensors of the other."""
        return stored == here

    def sharing(self) -> dict[str, int]:
        """Return the names whose live tensors share memory with those of other names, and the number of their group.

        Raises:
            InvalidRequest: one is dropped, and the same memory is filled under another name.
        """
        return self._stand_ins.sharing()

    def standing(self) -> list[torch.Tensor]:
        """Return the local tensors that were filled in place, and those that stay as they are: all have their value."""
        return self._stand_ins.standing()

    def complete(self) -> None:
        """Finish what was fetched into fresh memory, which objects and hooks see from now on."""

    def check_shared(self) -> None:
        """Check that one tensor is to hold one value. What is apart must be filled; nothing live is touched.

        Raises:
            InvalidRequest: stored are two values for it.
        """
        self._stand_ins.check()

    def settle(self) -> None:
        """Give tensors whose elements share memory their value. For when everything was copied."""
        self._stand_ins.settle()

    def tie(self, name: str, owner: str, leaf: object) -> None:
        """Say that `leaf`, called `name`, shares the memory of `owner`, which is filled.

        Raises:
            InvalidRequest: one of them is dropped.
        """
        self._live.add(name)
        if self._is_dropped(name) != self._is_dropped(owner):
            raise tied("drop", name, owner)
        if self._is_dropped(name):
            return
        self._claimed.add(name)
        if not pieces_of(leaf, name).boxes:
            return  # no elements here, and a tie without any is not stored
        self._stand_ins.tie(owner, leaf)
        source, its = self.stored.source(name), self.stored.source(owner)
        if source is None:
            self.misfits.missing.append(name)
        elif source != its:
            how = "apart" if source == name else f"tied to {source}"
            self.misfits.different[name] = f"stored {how}, here tied to {owner}{'' if its else ', which is not stored'}"
            self.misfits.note_tied(name, owner)

    def fresh(
        self,
        name: str,
        *,
        like: torch.Tensor | None = None,
        device: torch.device | None = None,
        is_beside: bool = False,
    ) -> torch.Tensor | None:
        """Ask for a stored tensor for which nothing stands yet; `tensors[name]` is it.

        Args:
            name: Stored name.
            like: A tensor to be sharded like, where the stored one has its global shape.
            device: Where to make it otherwise; default: host memory.
            is_beside: Whether a global one of another shape than a DTensor `like` was a DTensor too, scalars aside.

        Returns:
            The tensor, to be filled later; None where it cannot be made (a difference is noted).
        """
        rows = self.stored.rows[name]
        first, dtype = rows[0], dtype_of(rows[0].dtype)
        self._claimed.add(name)
        with torch.no_grad():
            if like is not None and first.scope == SCOPE_GLOBAL and first.global_shape == tuple(like.shape):
                made = torch.empty_like(like, dtype=dtype, requires_grad=False)
                if self._fits(name, name, pieces_of(made, name), first.scope):
                    self._want(name, pieces_of(made, name), is_apart=True)
                self.tensors[name] = made
                return made
            # Of another mesh every row is whole: beside a sharded tensor only what has no dimensions is sure to be so.
            is_whole = not self.stored.other_mesh or not isinstance(like, DTensor) or not first.global_shape
            if is_whole and is_beside and isinstance(like, DTensor) and _is_whole_piece(rows):
                placements = beside(like.placements, like.device_mesh.shape, like.shape, first.global_shape)
                made = empty(first.global_shape, dtype=dtype, device_mesh=like.device_mesh, placements=placements)
                if self._fits(name, name, pieces_of(made, name), first.scope):
                    self._want(name, pieces_of(made, name), is_apart=True)
                self.tensors[name] = made
                return made
            if is_whole and len(rows) == 1 and (first.scope == SCOPE_PER_RANK or first.length == first.global_shape):
                made = torch.empty(first.length, dtype=dtype, device=device or torch.device("cpu"))
                self.wanted.append(Wanted(row=first, view=made, is_apart=True))
                self.tensors[name] = made
                return made
        self.misfits.different[name] = (
            f"stored as a piece of {describe(first.dtype, first.global_shape)}; nothing here says how to hold it"
        )
        return None

    def object(self, name: str) -> None:
        """Ask for an object."""
        if name in self._claimed_objects:
            return
        self._claimed_objects.add(name)
        if self.stored.other_mesh and name in self.stored.holders:
            self.objects += [(name, rank) for rank in self.stored.holders[name]]
        elif name in self.stored.objects:
            self.objects.append((name, None))
        else:
            self.misfits.missing.append(name)

    def unexpected(self) -> list[str]:
        """Return what is stored and was not asked for, sorted."""
        left = (set(self.stored.rows) | set(self.stored.own_rows) | set(self.stored.aliases)) - self._claimed
        return sorted(left | (self.stored.objects - self._claimed_objects))

    def takes(self, _name: str) -> bool:
        """Say whether the thing tracked as `_name`, which is no module, is restored."""
        return True

    def unused(self, names: Sequence[str]) -> list[bool]:
        """Say of each stored name whether it was chosen and is not asked for by this rank."""
        left = set(self.unexpected())
        return [not left.isdisjoint(self.names_here(name)) for name in names]

    def here(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names here of stored ones, sorted."""
        return tuple(sorted({here for name in names for here in self.names_here(name)}))

    def names_here(self, name: str) -> tuple[str, ...]:
        """Return what a stored name is called here: a tensor and an object of one name may be renamed apart."""
        return (name,)

    @property
    def objects_asked(self) -> frozenset[str]:
        """Names here of the objects that are fetched."""
        return frozenset(self.object_here(name) for name, _ in self.objects)

    @property
    def names_known(self) -> set[str]:
        """Names that are stored, or asked for here."""
        return self._live | self._claimed_objects | set(self.stored.names)

    def object_here(self, name: str) -> str:
        """Return the name here of a stored object."""
        return name

    def tensor_here(self, name: str) -> str:
        """Return the name here of a stored tensor."""
        return name

    def value(self, _name: str, value: Any) -> Any:
        """Return a decoded object as the thing tracked as `_name` takes it."""
        return value

    def left_out(self) -> tuple[str, ...]:
        """Return what is stored and was not chosen, sorted."""
        return ()

    def finish(self) -> None:
        """Put in place what was fetched or made elsewhere. Everything has been verified."""
        for live, made in self._resharded:
            put(live, made)
        self._resharded.clear()

    def check(self, *, strict: bool, step: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the missing and the unexpected names.

        Raises:
            InvalidRequest: shapes, dtypes or boxes differ, or (strict) names are missing or unexpected. One error
            with all counts.
        """
        # Of another mesh a rank may hold other names than before; see `unused`.
        unexpected = () if self.stored.other_mesh else tuple(self.unexpected())
        return self.misfits.check(unexpected, strict=strict, step=step)


def _is_whole_piece(rows: Sequence[ShardRow]) -> bool:
    """Say whether a global tensor that is no scalar is held whole here."""
    first = rows[0]
    return len(rows) == 1 and first.scope == SCOPE_GLOBAL and () != first.length == first.global_shape
