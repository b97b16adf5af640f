"""torch.distributed.checkpoint: written by the library in one process, piece by piece, and read without running code.

Owns: planning a save whose tensors are not there yet, and reading a checkpoint's metadata by a list of names. Does not
own: what is written (`selection`). Invariant: a tensor's memory is given back as soon as it is in the file, although the
library keeps the tensor; of what is pickled in a checkpoint only the library's own plain records are made.
"""

from __future__ import annotations

import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ckptd.client.errors import CkptdError, InvalidRequest
from ckptd.client.loaded_step import StoredTensor, TensorPiece
from ckptd.client.opened_step import OpenStep
from ckptd.client.staging import plain_bytes

from . import torch_file
from .mapped_file import settle
from .selection import Digests, Selection, pieces, refuse_dtypes
from .sources import Source

_METADATA = ".metadata"
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
"""What a checkpoint's metadata may name, by module: plain records of the library, and what they hold."""


def check(selection: Selection) -> None:
    """Refuse what the format cannot hold; see `refuse_dtypes`."""
    refuse_dtypes(selection, torch_file.DTYPES, "dcp")


def write(opened: OpenStep, selection: Selection, folder: Path, *, progress: Callable[[int], None] | None) -> Digests:
    """Write everything selected; on return it is on disk, but for the folder's own entry.

    Tied names are written each for itself: the format knows no ties, and who loads them expects all names. Tensors that do
    not fit into a window are written in several chunks.
    """
    planner = _Planner(opened, selection, progress)
    writer = FileSystemWriter(
        folder, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0, sync_files=True
    )
    state = {
        name: torch.empty(one.shape, dtype=one.dtype, device="meta")
        for owner, one in selection.tensors.items()
        for name in planner.names[owner]
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is meant
        save(state, storage_writer=writer, planner=planner, no_dist=True)
    for path in sorted(folder.iterdir()):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            settle(handle)
        finally:
            os.close(handle)
    return planner.digests


class _Planner(DefaultSavePlanner):
    """Plans the pieces in the order they are read, and gives each when the writer asks for it."""

    def __init__(self, opened: OpenStep, selection: Selection, progress: Callable[[int], None] | None) -> None:
        super().__init__(flatten_state_dict=False)
        self.names = selection.names_of()
        self.digests = Digests()
        self._opened, self._selection, self._progress = opened, selection, progress
        self._pieces = pieces(opened, selection)
        self._piece: tuple[str, TensorPiece] | None = None
        self._given: torch.Tensor | None = None

    def create_local_plan(self) -> SavePlan:
        """Plan each piece, and behind it the same piece under every tied name."""
        names = {one.name: owner for owner, one in self._selection.tensors.items()}
        self.plan = SavePlan(
            [
                _item(name, one, offset, length)
                for one, offset, length in self._opened.cuts_of(names)
                for name in self.names[names[one.name]]
            ]
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return the piece; it is valid until the next one is asked for."""
        if self._given is not None:
            # The writer keeps every tensor until its file is done; their bytes are on their way to the disk.
            self._given.untyped_storage().resize_(0)
        name, offset = write_item.index.fqn, tuple(write_item.index.offset or ())
        if self._piece is None or name not in self.names[self._piece[0]][1:]:
            self._piece = next(self._pieces, None)
        if self._piece is None or name not in self.names[self._piece[0]] or offset != self._piece[1].offset:
            raise CkptdError(f"this version of torch asks for {name} at {offset} out of turn", key=name)
        owner, piece = self._piece
        # A storage of its own: torch.save writes whole storages.
        self._given = piece.data.clone(memory_format=torch.contiguous_format)
        data = plain_bytes(piece.data)
        self.digests.take(name, offset, tuple(piece.data.shape), _plain(data, piece.data.dtype))
        if self._progress is not None and name == owner:
            self._progress(len(data))
        return self._given


def _plain(data: memoryview, dtype: torch.dtype) -> memoryview:
    """Return bytes as the library's copies leave them: it makes every bool that is not 0 a 1."""
    if dtype is not torch.bool or not data:
        return data
    return (torch.frombuffer(data, dtype=torch.uint8) != 0).view(torch.uint8).numpy().data


def _item(name: str, one: StoredTensor, offset: tuple[int, ...], length: tuple[int, ...]) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(length))
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk, properties=TensorProperties(dtype=one.dtype), size=torch.Size(one.shape)
        ),
    )


class _Unpickler(pickle.Unpickler):
    """Makes the library's records and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype | torch.layout | torch.memory_format
        ):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is none of the records of a checkpoint's metadata")


class _Reader(FileSystemReader):
    """Reads a checkpoint of whom it may come from, without running its code. Tensors are read with weights_only."""

    _known: Metadata | None = None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the metadata, read once."""
        if self._known is None:
            path = Path(self.path) / _METADATA
            try:
                with path.open("rb") as file:
                    self._known = _checked(_Unpickler(file).load(), Path(self.path))
            except FileNotFoundError:
                raise InvalidRequest(f"{path} is not there", key=str(path)) from None
            except Exception as error:  # whatever hostile bytes make an unpickler raise
                raise InvalidRequest(f"{path} cannot be read: {error}", key=str(path)) from None
        return self._known


def _checked(metadata: object, folder: Path) -> Metadata:
    """Return metadata if it is some, and names no file outside the checkpoint's folder."""
    if not isinstance(metadata, Metadata):
        raise TypeError("no metadata")
    inside = folder.resolve()
    for path in {str(info.relative_path) for info in (metadata.storage_data or {}).values()}:
        if not (folder / path).resolve().is_relative_to(inside):
            raise ValueError(f"it names {path}, which is not in the folder")
    return metadata


def _tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    return {name: one for name, one in metadata.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)}


def _not_whole(one: TensorStorageMetadata) -> str:
    """Return what is wrong with the chunks of a tensor, "" if each element is in one of them."""
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in one.chunks]
    rank = len(one.size)
    for offset, length in boxes:
        if not len(offset) == len(length) == rank:
            return "a chunk of other dimensions"
        if any(a < 0 or n < 0 or a + n > size for a, n, size in zip(offset, length, one.size, strict=True)):
            return f"a chunk outside of it, at {offset}"
    held = sorted((offset, length) for offset, length in boxes if math.prod(length))
    # Along the first dimension: only boxes that end behind the begin of the next can share elements with it.
    open_boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offset, length in held:
        open_boxes = [box for box in open_boxes if rank and box[0][0] + box[1][0] > offset[0]]
        for other, its in open_boxes if rank else held[:-1]:
            if all(a < b + m and b < a + n for a, n, b, m in zip(offset, length, other, its, strict=True)):
                return f"elements that two chunks hold, from {offset} on"
        open_boxes.append((offset, length))
    missing = math.prod(one.size) - sum(math.prod(length) for _, length in held)
    return f"{missing} elements that no chunk holds" if missing else ""


def _loaded(reader: FileSystemReader, wanted: dict[str, TensorStorageMetadata]) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state: dict[str, Any] = {
            name: torch.empty(one.size, dtype=one.properties.dtype, device="cpu") for name, one in wanted.items()
        }
        load(state, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
    return state


def read_back(folder: Path, window_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor, as the library loads it; about a window, or one tensor, is held at a time."""
    reader = _Reader(folder)
    batch: dict[str, TensorStorageMetadata] = {}
    taken = 0
    for name, one in _tensors(reader.read_metadata()).items():
        nbytes = one.size.numel() * one.properties.dtype.itemsize
        if batch and taken + nbytes > window_bytes:
            yield from _loaded(reader, batch).items()
            batch, taken = {}, 0
        batch[name] = one
        taken += nbytes
    yield from _loaded(reader, batch).items()


def read(source: Path, takes: Callable[[str], bool]) -> Source:
    """Read a checkpoint for an import: the chosen tensors, into memory.

    Raises:
        InvalidRequest: it is none, or its metadata would run code; a chosen tensor is not whole.
    """
    reader = _Reader(source)
    metadata = reader.read_metadata()
    found = _tensors(metadata)
    chosen = {name: one for name, one in found.items() if takes(name)}
    for name, one in chosen.items():
        wrong = _not_whole(one)
        if wrong:
            raise InvalidRequest(
                f"{source}: {name} of shape {tuple(one.size)} has {wrong}",
                hint="the library would leave what happens to be in memory there; export the checkpoint again, or choose others "
                "with --only",
                key=name,
            )
    others = tuple(name for name in metadata.state_dict_metadata if name not in found)
    try:
        tensors = _loaded(reader, chosen) if chosen else {}
    except Exception as error:  # whatever the library makes of damaged files
        first = str(error).strip().partition("\n")[0]
        raise InvalidRequest(
            f"{source} cannot be read by torch.distributed.checkpoint: {first}", key=str(source)
        ) from None
    return Source(tensors=tensors, ties={}, others=others)
