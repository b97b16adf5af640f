"""safetensors: one file, or several with an index as transformers reads it.

Owns: cutting into files, writing them piece by piece, and opening them again with the real library. Does not own: what is
written (`selection`). Invariant: a file's bytes are those the library itself would write for these tensors in this order:
widest dtypes first, so that each tensor is aligned.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ckptd.client.errors import InvalidRequest
from ckptd.client.loaded_step import StoredTensor
from ckptd.client.opened_step import OpenStep
from ckptd.client.staging import plain_bytes

from .mapped_file import MappedFile
from .selection import Digests, Selection, pieces, refuse_dtypes
from .sources import Source

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FORMAT = "format"
"""Key of the metadata that transformers asks for."""
_ALIGN = 8
CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtypes, and what the format calls them. Source: the format's README, and the table of safetensors.torch."""


def library() -> Any:
    """Return the library.

    Raises:
        InvalidRequest: it is not installed.
    """
    try:
        import safetensors  # noqa: PLC0415 - an extra
    except ImportError:
        raise InvalidRequest(
            "the library safetensors is not installed", hint="pip install 'ckptd[export]'", key="safetensors"
        ) from None
    return safetensors


def check(selection: Selection) -> None:
    """Refuse what the format cannot hold; see `refuse_dtypes`."""
    library()
    refuse_dtypes(selection, CODES, "safetensors")
    odd = next((name for name in (*selection.tensors, *selection.ties) if name in {_FORMAT, "__metadata__"}), None)
    if odd is not None:
        raise InvalidRequest(f"a tensor called {odd!r} cannot stand in a safetensors file", key=odd)


def write(
    opened: OpenStep, selection: Selection, folder: Path, *, most: int, progress: Callable[[int], None] | None
) -> Digests:
    """Write everything selected into a folder; on return it is on disk, but for the folder's own entry.

    Args:
        opened: The step.
        selection: What of it; checked.
        folder: Empty.
        most: Bytes of tensors a file holds at most, but for a single larger one.
        progress: Told of bytes written.
    """
    files = _files(selection, most)
    digests = Digests()
    place = {name: file for file in files for name in file.starts}
    with contextlib.ExitStack() as stack:
        # All of them before the first tensor: what does not fit on the disk fails here.
        maps = {file.name: stack.enter_context(file.made(folder)) for file in files}
        for name, piece in pieces(opened, selection):
            file, data = place[name], plain_bytes(piece.data)
            maps[file.name].write(piece.tensor, len(file.head) + file.starts[name], piece.offset, piece.data)
            digests.take(name, piece.offset, tuple(piece.data.shape), data)
            if progress is not None:
                progress(len(data))
    if len(files) > 1:
        _write_index(folder / INDEX, selection, place)
    return digests


class _File:
    """One file: its name, its header, and where each tensor begins in it."""

    def __init__(self, name: str, tensors: Mapping[str, StoredTensor], ties: Mapping[str, str]) -> None:
        self.name = name
        self.starts: dict[str, int] = {}
        metadata = {_FORMAT: "pt", **{tie: owner for tie, owner in ties.items() if owner in tensors}}
        header: dict[str, object] = {"__metadata__": metadata}
        at = 0
        # Stable: of one width, tensors stay in stored order.
        for key, one in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
            header[key] = {"dtype": CODES[one.dtype], "shape": one.shape, "data_offsets": [at, at + one.nbytes]}
            self.starts[key] = at
            at += one.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGN)
        self.head = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.head) + at

    def made(self, folder: Path) -> MappedFile:
        """Make the file with its header and its full length."""
        path = folder / self.name
        with path.open("xb") as file:
            file.write(self.head)
        return MappedFile(path, self.nbytes)


def _files(selection: Selection, most: int) -> list[_File]:
    groups: list[dict[str, StoredTensor]] = [{}]
    taken = 0
    for name, one in selection.tensors.items():
        if groups[-1] and taken + one.nbytes > most:
            groups.append({})
            taken = 0
        groups[-1][name] = one
        taken += one.nbytes
    if len(groups) == 1:
        return [_File(SINGLE, groups[0], selection.ties)]
    count = len(groups)
    return [
        _File(f"model-{number:05d}-of-{count:05d}.safetensors", group, selection.ties)
        for number, group in enumerate(groups, 1)
    ]


def _write_index(path: Path, selection: Selection, place: Mapping[str, _File]) -> None:
    index = {
        "metadata": {"total_size": selection.nbytes},
        "weight_map": {name: place[name].name for name in sorted(selection.tensors)},
    }
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(index, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_back(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor, as the library reads it."""
    for path in _paths(folder):
        with library().safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)


def _paths(source: Path) -> list[Path]:
    """Return the files of a folder: those its index names, else all.

    Raises:
        InvalidRequest: there is none, or the index names what is not there.
    """
    if source.is_file():
        return [source]
    if (source / INDEX).is_file():
        # Names only: an index must not lead out of its folder.
        found = [source / Path(name).name for name in dict.fromkeys(_index(source).values())]
    else:
        found = sorted(source.glob("*.safetensors"))
    missing = [path for path in found if not path.is_file()]
    if missing or not found:
        raise InvalidRequest(f"{missing[0] if missing else source / '*.safetensors'} is not there", key=str(source))
    return found


def _index(source: Path) -> dict[str, str]:
    """Return which file of a folder its index says each tensor is in; empty where there is none.

    Raises:
        InvalidRequest: it is no index.
    """
    index = source / INDEX
    if not index.is_file():
        return {}
    try:
        named = json.loads(index.read_text("utf-8"))["weight_map"]
        return {str(name): str(Path(file)) for name, file in named.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{index} is no index of safetensors files: {error}", key=str(index)) from None


def read(source: Path) -> Source:
    """Open files for an import; the bytes of tensors are read when they are used.

    Raises:
        InvalidRequest: they are no safetensors files, one name stands in two of them, or the index names one that is in none.
    """
    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    safetensors = library()
    for path in _paths(source):
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                names = list(file.keys())
                metadata: Mapping[str, str] = file.metadata() or {}
                held = {name: file.get_tensor(name) for name in names}
        except (safetensors.SafetensorError, OSError) as error:
            raise InvalidRequest(f"{path} cannot be read as safetensors: {error}", key=str(path)) from None
        twice = next((name for name in names if name in tensors), None)
        if twice is not None:
            raise InvalidRequest(f"{twice} stands in two files of {source}", key=twice)
        tensors |= held
        ties |= {tie: owner for tie, owner in metadata.items() if owner in held}
    lost = [name for name in _index(source) if name not in tensors and name not in ties]
    if lost:
        raise InvalidRequest(
            f"{source / INDEX} names {len(lost)} tensors that no file holds, the first is {lost[0]}",
            hint="copy the files again as they belong together; or take the names out of the index",
            key=lost[0],
        )
    return Source(tensors=tensors, ties={tie: owner for tie, owner in ties.items() if tie not in tensors}, others=())
