"""What each listed step of a root holds, by name: the evidence of a script that says nothing itself.

Owns: a short digest for every tensor (of its fingerprints, dtype and shape) and for every part of every object. Does not
own: whether two of them are to be equal (`checkers`). Tensors go by the names that `ckptd diff` compares; an object is
taken apart to a few levels, so that a learning rate has a name of its own: `optimizer/param_groups/0/lr`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptd.daemon.index import chunk_refs
from ckptd.daemon.tensors import TensorKey, coordinate_of, stored_tensors
from ckptd.protos.snapshot_pb2 import RankSection, Value

_DEPTH = 3
"""Levels of an object that have names; `optimizer/param_groups/0/lr` is the third."""
_WIDEST = 256
"""Entries of one level that have names; a longer one is one thing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """One listed step by what it holds.

    Attributes:
        step: Its number.
        timeline: Timeline it was saved in.
        names: Digest of each tensor and of each part of an object; a rank's own bear its coordinate ("loader at rank 1").
    """

    step: int
    timeline: str
    names: Mapping[str, str]


def saved_names(
    sections: Mapping[int, RankSection], axes: Sequence[str], get: Callable[[str], bytes]
) -> Mapping[str, str]:
    """Return the names of one step and their digests.

    Args:
        sections: Of all ranks.
        axes: Names of the mesh's axes.
        get: Reads a chunk by its key.

    Raises:
        StorageError: A chunk that holds objects cannot be read.
        ValueError: An object is none.
    """
    found: dict[str, str] = {}
    for key, tensor in stored_tensors(sections, tuple(axes)).items():
        boxes = [f"{box}{fingerprint.hex()}" for box, fingerprint in sorted(tensor.boxes.items())]
        found[str(key)] = _short(f"{tensor.dtype}{tensor.shape}{boxes}".encode())
    for section in sections.values():
        coordinate = coordinate_of(section, tuple(axes))
        for name, data in _objects(section, get):
            value = Value()
            value.ParseFromString(data)
            for part, digest in _parts(name, value, _DEPTH):
                found[str(TensorKey(part, coordinate))] = digest
    return found


def _objects(section: RankSection, get: Callable[[str], bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield a rank's objects; only the chunks in which one lies are read."""
    spans, at = [], 0
    for chunk in chunk_refs(section):
        spans.append((at, at + chunk.length, chunk.key))
        at += chunk.length
    for name, offset, length in zip(section.object_names, section.object_offset, section.object_length, strict=True):
        end = offset + length
        yield (
            name,
            b"".join(
                get(key)[max(offset - first, 0) : end - first]
                for first, last, key in spans
                if first < end and last > offset
            ),
        )


def _parts(name: str, value: Value, depth: int) -> Iterator[tuple[str, str]]:
    kind = value.WhichOneof("kind")
    children: list[tuple[str, Value]] = []
    if depth and kind in ("mapping", "ordered_mapping"):
        mapping = value.mapping if kind == "mapping" else value.ordered_mapping
        if all(key.WhichOneof("kind") in ("text", "integer") for key in mapping.keys):
            texts = [key.text or str(key.integer) for key in mapping.keys]
            children = list(zip(texts, mapping.values, strict=True))
    elif depth and kind == "list":
        children = [(str(at), one) for at, one in enumerate(value.list.items)]
    if not 0 < len(children) <= _WIDEST:
        yield name, _short(value.SerializeToString(deterministic=True))
        return
    for child, one in children:
        yield from _parts(f"{name}/{child}", one, depth - 1)


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:20]
