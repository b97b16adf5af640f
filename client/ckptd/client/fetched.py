"""Saying what is wanted of a step, and reading where it was put.

Owns: the messages of Want and their answer. Does not own: copying. Invariant: an answer that leaves elements out is
refused: it would leave old values among restored ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ckptd.protos import shard_table
from ckptd.protos.agent_pb2 import FetchedPart, WantPart

from .errors import CkptdError
from .targets import Wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """Where the verified bytes stand."""

    pieces: list[tuple[Wanted, str, int, tuple[int, ...], tuple[int, ...]]]
    objects: dict[str, tuple[str, int, int]]
    bytes_by_tier: dict[str, int]


def want_parts(session: str, attempt: int, wanted: list[Wanted], objects: list[str]) -> Iterator[WantPart]:
    """Yield the messages that ask for rows and objects, each small enough for gRPC's default limit."""
    table = shard_table.build(one.row for one in wanted)
    for number, rows in enumerate(shard_table.split(table)):
        part = WantPart(rows=rows)
        if number == 0:
            part.session, part.attempt = session, attempt
            part.object_names.extend(objects)
        yield part


def take_part(part: FetchedPart, wanted: list[Wanted], objects: list[str], fetched: Fetched) -> None:
    """Add what one part of the answer says to `fetched`."""
    begin = 0
    offsets, lengths, files = list(part.source_offset), list(part.source_length), list(part.files)
    columns = zip(part.want_row, part.file, part.file_offset, strict=True)
    for row, file, file_offset in columns:
        one = wanted[row]
        end = begin + len(one.row.length)
        piece = (one, files[file], file_offset, tuple(offsets[begin:end]), tuple(lengths[begin:end]))
        fetched.pieces.append(piece)
        begin = end
    for number, file, offset, nbytes in zip(
        part.object, part.object_file, part.object_offset, part.object_bytes, strict=True
    ):
        fetched.objects[objects[number]] = (files[file], offset, nbytes)
    fetched.bytes_by_tier.update(part.bytes_by_tier)


def check_complete(fetched: Fetched, wanted: list[Wanted], objects: list[str]) -> None:
    """Refuse an answer that leaves elements out: it would leave old values among restored ones."""
    left = {id(one): math.prod(one.row.length) for one in wanted}
    for one, _, _, _, length in fetched.pieces:
        left[id(one)] -= math.prod(length)
    short = [one.row.name for one in wanted if left[id(one)]]
    short += [name for name in objects if name not in fetched.objects]
    if short:
        raise CkptdError(
            f"the agent's answer does not hold all of {len(short)} wanted entries, first {short[0]}",
            key=short[0],
            phase="restore",
        )
