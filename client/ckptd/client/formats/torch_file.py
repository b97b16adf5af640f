"""One file of torch.save, which torch.load(weights_only=True) reads.

Owns: letting torch write the file with room for the bytes, and filling them in piece by piece. Does not own: what is
written (`selection`). Invariant: names and shapes are pickled by torch, and nothing else is; tied names share a storage.
"""

from __future__ import annotations

import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ckptd.client.errors import InvalidRequest
from ckptd.client.opened_step import OpenStep
from ckptd.client.sharding import memory_of
from ckptd.client.staging import plain_bytes

from .mapped_file import MappedFile, put, settle
from .selection import Digests, ReadBackError, Selection, pieces, refuse_dtypes
from .sources import Source

FILE = "model.pt"
_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
DTYPES = frozenset(getattr(torch, name) for name in _NAMES if hasattr(torch, name))
"""What torch.save writes and torch.load(weights_only=True) reads. Integers below eight bits have no name there."""
_READ_BYTES = 8 << 20
_DESCRIPTOR = struct.pack("<I", 0x08074B50)
_CENTRAL = struct.pack("<I", 0x02014B50)


def check(selection: Selection) -> None:
    """Refuse what the format cannot hold; see `refuse_dtypes`."""
    refuse_dtypes(selection, DTYPES, "torch")


def write(opened: OpenStep, selection: Selection, folder: Path, *, progress: Callable[[int], None] | None) -> Digests:
    """Write everything selected as one file; on return it is on disk, but for the folder's own entry."""
    path = folder / FILE
    _write_empty(path, selection)
    records = _records(path)
    place = {name: records[str(number)] for number, name in enumerate(selection.tensors)}
    for name, one in selection.tensors.items():
        if place[name].nbytes != one.nbytes:
            raise ReadBackError(
                f"torch.save kept {place[name].nbytes} bytes for {name}, which has {one.nbytes}", key=name
            )
    digests = Digests()
    with MappedFile(path, path.stat().st_size) as mapped:
        for name, piece in pieces(opened, selection):
            data = plain_bytes(piece.data)
            mapped.write(piece.tensor, place[name].at, piece.offset, piece.data)
            digests.take(name, piece.offset, tuple(piece.data.shape), data)
            if progress is not None:
                progress(len(data))
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for record in place.values():
            record.set_crc(handle)
        settle(handle)
    finally:
        os.close(handle)
    return digests


def _write_empty(path: Path, selection: Selection) -> None:
    """Let torch write the file without the bytes of the storages, which come in the order of their first use."""
    names = selection.names_of()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dtypes that are experimental elsewhere
        with FakeTensorMode():
            state: dict[str, torch.Tensor] = {}
            for name, one in selection.tensors.items():
                made = torch.empty(one.shape, dtype=one.dtype, device="cpu")
                state |= dict.fromkeys(names[name], made)
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state, path)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """A storage in the file.

    Attributes:
        at: Where its bytes begin.
        nbytes: How many.
        central: Where its entry in the central directory begins.
    """

    at: int
    nbytes: int
    central: int

    def set_crc(self, handle: int) -> None:
        """Put the CRC of the bytes where readers of zip files look for it."""
        value, end = 0, self.at + self.nbytes
        for at in range(self.at, end, _READ_BYTES):
            value = zlib.crc32(os.pread(handle, min(_READ_BYTES, end - at), at), value)
        crc = struct.pack("<I", value)
        put(handle, crc, self.central + 16)
        if os.pread(handle, 4, end) == _DESCRIPTOR:
            put(handle, crc, end + 4)


def _records(path: Path) -> dict[str, _Record]:
    """Return the storages of a file of torch.save, by key. Source: the zip specification, APPNOTE.TXT 4.3."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        infos = archive.infolist()
        central = archive.start_dir
        found = {}
        for info in infos:
            file.seek(central)
            entry = file.read(46)
            if entry[:4] != _CENTRAL:
                raise ReadBackError(f"{path}: no entry of a zip file's directory at {central}", key=str(path))
            file.seek(info.header_offset)
            name_bytes, extra_bytes = struct.unpack_from("<HH", file.read(30), 26)
            _, folder, key = ("", *info.filename.rsplit("/", 2))[-3:]
            if folder == "data":
                at = info.header_offset + 30 + name_bytes + extra_bytes
                found[key] = _Record(at=at, nbytes=info.file_size, central=central)
            central += 46 + sum(struct.unpack_from("<HHH", entry, 28))
    return found


def _loaded(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
        first = str(error).strip().partition("\n")[0]
        raise InvalidRequest(
            f"{path} cannot be read by torch.load(weights_only=True): {first}",
            hint="only tensors and plain containers are read; nothing that would run code",
            key=str(path),
        ) from None


def read_back(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor, as torch.load reads it; tied ones once."""
    state: Mapping[str, torch.Tensor] = _loaded(folder / FILE)
    seen: set[int] = set()
    for name, tensor in state.items():
        where = tensor.data_ptr()
        if not tensor.numel() or where not in seen:
            seen.add(where)
            yield name, tensor


def read(source: Path, takes: Callable[[str], bool] = lambda _: True) -> Source:
    """Open a file for an import; the bytes of tensors are mapped. Nested dicts give names joined by "/".

    Args:
        source: The file, or the folder of one that was exported.
        takes: Which names are imported.

    Raises:
        InvalidRequest: it is no such file, or gives two entries that are imported one name.
    """
    path = source / FILE if source.is_dir() else source
    if not path.is_file():
        raise InvalidRequest(f"{path} is not there", key=str(path))
    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    others: list[str] = []
    owners: dict[tuple[object, ...], str] = {}
    seen: set[str] = set()
    for name, value in _leaves(_loaded(path), ""):
        if name in seen and takes(name):
            raise InvalidRequest(
                f"{path}: two entries would be called {name}",
                hint='keys are joined by "/", and numbers are text: {"a/b": x, "a": {"b": y}} gives one name twice. Write it '
                "with other keys, or choose other names with --only",
                key=name,
            )
        seen.add(name)
        if not isinstance(value, torch.Tensor):
            others.append(name)
            continue
        tensor = value.detach()
        # A conjugate or negated view has its base's address, and other values.
        owner = owners.setdefault(memory_of(tensor), name)
        if owner == name:
            tensors[name] = tensor
        else:
            ties[name] = owner
    return Source(tensors=tensors, ties=ties, others=others)


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and (value or not name):
        for key, item in value.items():
            yield from _leaves(item, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple) and value:
        for number, item in enumerate(value):
            yield from _leaves(item, f"{name}/{number}" if name else str(number))
    else:
        yield name, value
