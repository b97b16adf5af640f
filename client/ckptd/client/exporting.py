"""A stored step as files of another library: whole in a new folder, or nothing.

Owns: the folder while it is made, reading back, and that nothing half done is left under its name. Does not own: the
formats (`formats`). Invariant: the folder gets its name when everything in it is on disk and was read back equal.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from .errors import InvalidRequest
from .formats import dcp_files, safetensors_files, torch_file
from .formats.selection import Digests, Selection, select
from .loaded_step import Names
from .opened_step import OpenStep

Format: TypeAlias = Literal["safetensors", "dcp", "torch"]
DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was exported.

    Attributes:
        tensors: How many, tied names not counted.
        nbytes: Their bytes.
        ties: Further names, each to the one whose bytes it shares.
        files: Names of the files, with their bytes.
    """

    tensors: int
    nbytes: int
    ties: Mapping[str, str]
    files: Mapping[str, int]


def check_out(out: Path) -> None:
    """Refuse a target that holds something.

    Raises:
        InvalidRequest: it is a file, or a folder that is not empty, or its parent is no folder.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise InvalidRequest(f"{out} is there and not an empty folder", hint="name a new folder", key=str(out))
    if not out.absolute().parent.is_dir():
        raise InvalidRequest(f"{out.absolute().parent} is no folder", hint="make it first", key=str(out))


def export(
    opened: OpenStep,
    out: Path,
    format_name: Format,
    *,
    names: Names | None = None,
    renamed: Mapping[str, str] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    verify: bool = True,
    progress: Callable[[str, int], contextlib.AbstractContextManager[Callable[[int], None] | None]] | None = None,
) -> Exported:
    """Write a step's global tensors into a new folder; on return they are on disk.

    Args:
        opened: The step.
        out: The folder; not there, or empty.
        format_name: What to write.
        names: What of it, see `loading.load`.
        renamed: Beginnings of names to what stands there instead.
        max_shard_bytes: Of safetensors: bytes of tensors a file holds at most, but for a single larger one.
        verify: Read everything back with the real library and compare.
        progress: Makes a bar of a word and bytes in all.

    Raises:
        InvalidRequest: the folder, the choice, or a dtype that the format cannot hold; nothing was written.
        SnapshotCorrupt, Unavailable: see `loading.load`; nothing is left.
        ReadBackError: what was read back is not what was written; nothing is left.
    """
    check_out(out)
    selection = select(opened, names, renamed or {})
    _CHECKS[format_name](selection)
    with _made(out) as folder:
        with _bar(progress, "written", selection.nbytes) as tell:
            digests = _write(opened, selection, folder, format_name, most=max_shard_bytes, tell=tell)
        if verify:
            digests.compare(_read_back(folder, format_name, opened.window_bytes), str(out))
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    return Exported(tensors=len(selection.tensors), nbytes=selection.nbytes, ties=dict(selection.ties), files=files)


_CHECKS: Mapping[str, Callable[[Selection], None]] = {
    "safetensors": safetensors_files.check,
    "dcp": dcp_files.check,
    "torch": torch_file.check,
}


def _write(
    opened: OpenStep,
    selection: Selection,
    folder: Path,
    format_name: Format,
    *,
    most: int,
    tell: Callable[[int], None] | None,
) -> Digests:
    if format_name == "safetensors":
        return safetensors_files.write(opened, selection, folder, most=most, progress=tell)
    if format_name == "dcp":
        return dcp_files.write(opened, selection, folder, progress=tell)
    return torch_file.write(opened, selection, folder, progress=tell)


def _read_back(folder: Path, format_name: Format, window_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    if format_name == "safetensors":
        return safetensors_files.read_back(folder)
    if format_name == "dcp":
        return dcp_files.read_back(folder, window_bytes)
    return torch_file.read_back(folder)


@contextlib.contextmanager
def _bar(
    progress: Callable[[str, int], contextlib.AbstractContextManager[Callable[[int], None] | None]] | None,
    word: str,
    total: int,
) -> Iterator[Callable[[int], None] | None]:
    if progress is None:
        yield None
        return
    with progress(word, total) as tell:
        yield tell


@contextlib.contextmanager
def _made(out: Path) -> Iterator[Path]:
    """Give a folder beside `out` that gets its name at the end, or is removed."""
    out = out.absolute()
    folder = out.with_name(f".{out.name}.{secrets.token_hex(4)}.ckptd-export")
    folder.mkdir()
    try:
        yield folder
        sync_folder(folder)
        # Takes the place of an empty folder; anything that came into it meanwhile makes it fail.
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    sync_folder(out.parent)


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
