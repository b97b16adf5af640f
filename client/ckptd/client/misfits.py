"""What of a step does not fit what is tracked: collected thing by thing, and told at once.

Owns: comparing a tensor here with the stored one, and the way out of what differs. Does not own: the texts of the errors
(`differences`), or what is asked for (`targets`). Reads no store and changes nothing live.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK

from .differences import misfit, other_beginning
from .sharding import Pieces, dtype_name
from .stored import Stored

_SCOPES: dict[int, str] = {SCOPE_GLOBAL: "a piece of a global tensor", SCOPE_PER_RANK: "each rank's own"}


def describe(dtype: str, shape: Iterable[int]) -> str:
    """Return a dtype and a shape as errors show them."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


class Misfits:
    """The differences of one rank.

    Args:
        stored: What is there.

    Attributes:
        missing: Names asked for here that are not stored.
        different: Names here, and how each differs.
    """

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self.missing: list[str] = []
        self.different: dict[str, str] = {}
        self._dtypes_differ = False
        self._tied_otherwise: tuple[str, str] | None = None

    def note_tied(self, name: str, owner: str) -> None:
        """Note that a difference is that `name` is tied to `owner` here, and was not where it was saved."""
        self._tied_otherwise = self._tied_otherwise or (name, owner)

    def difference(self, source: str, pieces: Pieces, scope: int) -> str | None:
        """Return how a tensor here differs from what is stored as `source`, or None where that can fill it."""
        rows = self._stored.rows[source]
        first = rows[0]
        here = describe(dtype_name(pieces.dtype), pieces.global_shape)
        there = describe(first.dtype, first.global_shape)
        if here != there:
            are_floating = first.dtype.startswith(("float", "bfloat")) and pieces.dtype.is_floating_point
            self._dtypes_differ |= are_floating and first.global_shape == pieces.global_shape
            return f"stored {there}, here {here}"
        if first.scope != scope:
            return f"stored as {_SCOPES[first.scope]}, here {_SCOPES[scope]}"
        if self._stored.other_mesh:
            return None  # whatever boxes are held here, the elements are there
        stored_boxes = {row.box for row in rows}
        held = {(box.offset, box.length) for box in pieces.boxes}
        if stored_boxes != held:
            return f"stored as the boxes {sorted(stored_boxes)[:2]}, here {sorted(held)[:2]} of {here}"
        return None

    def check(self, unexpected: tuple[str, ...], *, strict: bool, step: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the missing and the unexpected names.

        Raises:
            InvalidRequest: as `Targets.check` does.
        """
        missing = tuple(self.missing)
        if not self.different and not (strict and (missing or unexpected)):
            return missing, unexpected
        hint = other_beginning(missing, unexpected) or self._way_out()
        raise misfit(missing, unexpected, self.different, hint=hint, step=step)

    def _way_out(self) -> str:
        if not self.different:
            return "strict=False takes what fits"
        own = next((name for name in self.different if name in self._stored.own_rows), None)
        if own is not None:
            return (
                f'on_reshard("{own}", hook) makes it of all ranks\' values, a pattern stands for several; drop= leaves tracked '
                "things, or tensors of modules, as they are here"
            )
        if self._tied_otherwise is not None:
            name, owner = self._tied_otherwise
            return (
                f"tie tensors as the run that saved did, or untie {name} before the restore; drop=({name!r}, {owner!r}) "
                "leaves both as they are here"
            )
        return "cast=True converts between floating dtypes" if self._dtypes_differ else ""
