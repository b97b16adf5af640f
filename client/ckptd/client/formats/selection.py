"""What is exported, and under which names.

Pure. Owns: renaming, and that no two tensors get one name. Does not own: writing. Invariant: entries are owners of bytes,
in stored order; every other name of theirs is a tie.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import xxhash

from ckptd.client.errors import CkptdError, InvalidRequest
from ckptd.client.loaded_step import Names, StoredTensor, TensorPiece, part_of
from ckptd.client.opened_step import OpenStep
from ckptd.client.staging import plain_bytes
from ckptd.protos import error_pb2

_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What is exported.

    Attributes:
        tensors: Name in the export to the stored tensor whose bytes it is, none of them an alias; in stored order.
        ties: Further names in the export, each to the name of the same tensor in `tensors`.
    """

    tensors: Mapping[str, StoredTensor]
    ties: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, tied ones once."""
        return sum(one.nbytes for one in self.tensors.values())

    def names_of(self) -> dict[str, list[str]]:
        """Return each name of `tensors` with its ties."""
        found = {name: [name] for name in self.tensors}
        for tie, name in self.ties.items():
            found[name].append(tie)
        return found


def select(opened: OpenStep, names: Names | None, renamed: Mapping[str, str]) -> Selection:
    """Choose what is exported.

    Args:
        opened: The step.
        names: See `loading.load`.
        renamed: Beginnings of names to what stands there instead; of several the longest counts, once.

    Raises:
        InvalidRequest: nothing is chosen, a beginning begins no name, or two names become one.
    """
    chosen = opened.names(names)
    if not chosen:
        raise InvalidRequest(f"step {opened.step} holds no global tensors to export", step=opened.step)
    for beginning in renamed:
        if not any(name.startswith(beginning) for name in chosen):
            raise InvalidRequest(f"no chosen name begins with {beginning!r}", hint=f"names are like {chosen[0]!r}")
    given: dict[str, str] = {}
    tensors: dict[str, StoredTensor] = {}
    ties: dict[str, str] = {}
    first: dict[str, str] = {}
    for stored in sorted(chosen, key=lambda name: opened.tensors[name].alias_of is not None):
        name = _renamed(stored, renamed)
        if name in given or not name:
            raise InvalidRequest(
                f"{given.get(name, '')!r} and {stored!r} would both be called {name!r}"
                if name
                else f"{stored!r} has no name left",
                hint="choose fewer names, or rename them apart",
                key=stored,
            )
        given[name] = stored
        one = opened.tensors[stored]
        owner = one.alias_of or stored
        if first.setdefault(owner, name) == name:
            tensors[name] = opened.tensors[owner]
        else:
            ties[name] = first[owner]
    order = {name: at for at, name in enumerate(opened.tensors)}
    return Selection(tensors=dict(sorted(tensors.items(), key=lambda item: order[item[1].name])), ties=ties)


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    fitting = [beginning for beginning in renamed if name.startswith(beginning)]
    if not fitting:
        return name
    longest = max(fitting, key=len)
    return renamed[longest] + name.removeprefix(longest)


def refuse_dtypes(selection: Selection, known: Collection[torch.dtype], format_name: str) -> None:
    """Refuse dtypes that the format cannot hold.

    Raises:
        InvalidRequest: names the first tensors, and counts all.
    """
    odd = [
        f"{name} ({str(one.dtype).removeprefix('torch.')})"
        for name, one in selection.tensors.items()
        if one.dtype not in known
    ]
    if odd:
        shown = ", ".join(odd[:_SHOWN]) + (", ..." if len(odd) > _SHOWN else "")
        raise InvalidRequest(
            f"{format_name} cannot hold {len(odd)} of {len(selection.tensors)} tensors: {shown}",
            hint="choose others with --only, or another --format",
            key=odd[0],
        )


class ReadBackError(CkptdError):
    """What was written cannot be read back: the disk, or a fault of the writer. Nothing of it is kept."""

    default_reason = error_pb2.REASON_STORE_FAILED


class Digests:
    """The xxh3-128 of boxes that are written, to compare them with what is read back."""

    def __init__(self) -> None:
        self._taken: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], bytes]]] = {}

    def take(self, name: str, offset: tuple[int, ...], length: tuple[int, ...], data: memoryview) -> None:
        """Note a box of a tensor; the boxes of a tensor hold each element once."""
        self._taken.setdefault(name, []).append((offset, length, xxhash.xxh3_128_digest(data)))

    def compare(self, tensors: Iterable[tuple[str, torch.Tensor]], where: str) -> None:
        """Compare what was read back; every tensor must be there once.

        Raises:
            ReadBackError: names the first tensor that differs or is not there.
        """
        left = dict(self._taken)
        for name, tensor in tensors:
            boxes = left.pop(name, None)
            if boxes is None or not all(_holds(tensor, *box) for box in boxes):
                raise ReadBackError(f"{name} read back from {where} is not what was written", key=name)
        if left:
            raise ReadBackError(f"{next(iter(left))} was written and is not in {where}", key=next(iter(left)))


def _holds(tensor: torch.Tensor, offset: tuple[int, ...], length: tuple[int, ...], digest: bytes) -> bool:
    if tensor.ndim != len(length) or any(a + b > c for a, b, c in zip(offset, length, tensor.shape, strict=True)):
        return False
    return xxhash.xxh3_128_digest(plain_bytes(part_of(tensor, offset, length))) == digest


def pieces(opened: OpenStep, selection: Selection) -> Iterator[tuple[str, TensorPiece]]:
    """Yield name and piece of everything selected; one window is held at a time."""
    names = {one.name: name for name, one in selection.tensors.items()}
    for piece in opened.pieces_of(names):
        yield names[piece.tensor.name], piece
