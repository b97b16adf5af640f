"""Saying what is wanted of a step, and reading where it was put.

Owns: the messages of Want and their answer. Does not own: copying. Invariant: an answer that leaves elements out is
refused: it would leave old values among restored ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ckptd.protos import shard_table
from ckptd.protos.agent_pb2 import FetchedPart, WantPart, WantTerms

from .errors import CkptdError
from .wanted import ObjectKey, Wanted


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class FetchedPiece:
    """A box of the global tensor that stands C-contiguous in a file, and may reach beyond what was wanted.

    Attributes:
        wanted: What it is for.
        path: File.
        at: In bytes.
        offset: Of the box, in elements.
        length: Of the box, in elements.
    """

    wanted: Wanted
    path: str
    at: int
    offset: tuple[int, ...]
    length: tuple[int, ...]

    def shared(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return offset and length, in elements of the global tensor, of what the piece and the wanted box share."""
        row = self.wanted.row
        if self.offset == row.offset and self.length == row.length:
            return row.offset, row.length
        low = tuple(map(max, self.offset, row.offset))
        ends = zip(self.offset, self.length, row.offset, row.length, strict=True)
        high = tuple(min(begin + size, start + wide) for begin, size, start, wide in ends)
        return low, tuple(max(0, end - begin) for begin, end in zip(low, high, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the box in the file."""
        return math.prod(self.length) * self.wanted.view.element_size()

    def target(self) -> torch.Tensor:
        """Return the part of the wanted view that the piece fills."""
        low, size = self.shared()
        row = self.wanted.row
        return self.wanted.view if size == row.length else _part(self.wanted.view, row.offset, low, size)

    def source(self, data: torch.Tensor) -> torch.Tensor:
        """Return the part of the file's bytes that fills `target`; no copy where the bytes are aligned."""
        view = self.wanted.view
        item = view.element_size()
        if item > 1 and (data.data_ptr() % item or data.storage_offset() % item):
            data = data.clone()
        typed = data.view(view.dtype)
        if len(self.length) != 1:
            typed = typed.view(self.length)
        low, size = self.shared()
        return typed if size == self.length else _part(typed, self.offset, low, size)


def _part(tensor: torch.Tensor, at: tuple[int, ...], low: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    if tuple(tensor.shape) == size:
        return tensor
    for dim, (origin, begin, length) in enumerate(zip(at, low, size, strict=True)):
        tensor = tensor.narrow(dim, begin - origin, length)
    return tensor


@dataclass(kw_only=True, slots=True)
class Fetched:
    """Where the verified bytes stand.

    Attributes:
        pieces: Of tensors.
        objects: File, offset and length of each object.
        bytes_by_tier: Where this node's bytes came from.
        unused: Bits of the names no rank asked for, see `WantTerms`; None: nobody compared.
        heads: By file: what it begins with for as long as it holds these bytes; empty where it never holds others.
    """

    pieces: list[FetchedPiece]
    objects: dict[ObjectKey, tuple[str, int, int]]
    bytes_by_tier: dict[str, int]
    unused: bytes | None = None
    heads: dict[str, bytes] = field(default_factory=dict)


def want_parts(
    session: str, attempt: int, wanted: list[Wanted], objects: list[ObjectKey], terms: WantTerms | None = None
) -> Iterator[WantPart]:
    """Yield the messages that ask for rows and objects, each small enough for gRPC's default limit.

    Without `terms`, nothing that one rank alone cannot tell is checked.
    """
    table = shard_table.build(one.row for one in wanted)
    ranks = [one.rank or 0 for one in wanted] if any(one.rank is not None for one in wanted) else []
    at = 0
    for number, rows in enumerate(shard_table.split(table)):
        end = at + shard_table.row_count(rows)
        part = WantPart(rows=rows, row_ranks=ranks[at:end])
        at = end
        if number == 0:
            part.session, part.attempt = session, attempt
            if terms is not None:
                part.terms.CopyFrom(terms)
            part.object_names.extend(name for name, _ in objects)
            if any(rank is not None for _, rank in objects):
                part.object_ranks.extend(rank or 0 for _, rank in objects)
        yield part


def take_part(part: FetchedPart, wanted: list[Wanted], objects: list[ObjectKey], fetched: Fetched) -> None:
    """Add what one part of the answer says to `fetched`."""
    begin = 0
    offsets, lengths, files = list(part.source_offset), list(part.source_length), list(part.files)
    columns = zip(part.want_row, part.file, part.file_offset, strict=True)
    for row, file, file_offset in columns:
        one = wanted[row]
        end = begin + len(one.row.length)
        box = {"offset": tuple(offsets[begin:end]), "length": tuple(lengths[begin:end])}
        fetched.pieces.append(FetchedPiece(wanted=one, path=files[file], at=file_offset, **box))
        begin = end
    for number, file, offset, nbytes in zip(
        part.object, part.object_file, part.object_offset, part.object_bytes, strict=True
    ):
        fetched.objects[objects[number]] = (files[file], offset, nbytes)
    fetched.bytes_by_tier.update(part.bytes_by_tier)
    fetched.heads.update(zip(files, part.file_heads, strict=False))
    if part.HasField("unused"):
        fetched.unused = part.unused


def check_complete(fetched: Fetched, wanted: list[Wanted], objects: list[ObjectKey]) -> None:
    """Refuse an answer that leaves elements out: it would leave old values among restored ones."""
    left = {id(one): math.prod(one.row.length) for one in wanted}
    for piece in fetched.pieces:
        left[id(piece.wanted)] -= math.prod(piece.shared()[1])
    short = [one.row.name for one in wanted if left[id(one)]]
    short += [key[0] for key in objects if key not in fetched.objects]
    if short:
        raise CkptdError(
            f"the agent's answer does not hold all of {len(short)} wanted entries, first {short[0]}",
            key=short[0],
            phase="restore",
        )
