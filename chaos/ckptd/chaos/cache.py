"""Keeps the evidence of undisturbed runs, for those who ask for it: what a script is made of cannot be seen from outside.

Owns: what is taken for the same run, and files in a folder outside of any repository. Does not own: evidence itself, nor
who may use what was kept: a key sees the command and the `.py` files beside the script, not modules elsewhere, data,
settings, other packages or the environment. Invariants: an entry is whole or not there, and one that cannot be read is as
good as none; two runs of one entry were done one after the other, so that a difference is the script's own.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import ckptd
from ckptd.chaos.evidence import Evidence, EvidenceError
from ckptd.chaos.leading import Undisturbed

_MOST_ENTRIES = 50


def default_cache() -> Path:
    """Return the folder for caches of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "ckptd" / "chaos"


def cache_key(command: Sequence[str], *, nnodes: int, nproc: int, store: str, code: str) -> str:
    """Return the name under which an undisturbed run is kept.

    Args:
        command: Script and arguments, placeholders not yet filled.
        nnodes: Number of nodes.
        nproc: Ranks on each.
        store: "local" or "s3".
        code: See `code_digest`.
    """
    described = json.dumps([list(command), nnodes, nproc, store, code])
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def code_digest(script: Path) -> str:
    """Return a digest of what is looked at: ckptd's code, the `.py` files of the script's folder, Python and torch."""
    digest = hashlib.sha256(platform.python_version().encode())
    with suppress(metadata.PackageNotFoundError):
        digest.update(metadata.version("torch").encode())
    folders = [Path(folder) for folder in ckptd.__path__]
    for root, path in sorted(_sources([*folders, script.parent] if script.is_file() else folders)):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _sources(folders: Iterable[Path]) -> set[tuple[Path, Path]]:
    return {(folder, path) for folder in folders for path in _modules(folder)}


def _modules(folder: Path) -> Iterator[Path]:
    """Yield the `.py` files of a folder, without hidden folders and virtual environments beside a script."""
    for path, folders, files in os.walk(folder):
        folders[:] = [
            name for name in folders if not name.startswith(".") and not (Path(path) / name / "pyvenv.cfg").exists()
        ]
        yield from (Path(path) / name for name in files if name.endswith(".py") and (Path(path) / name).is_file())


def load(folder: Path, key: str, *, twice: bool) -> Undisturbed | None:
    """Return what is kept under `key`, with the time at which it was run; None if there is nothing.

    Args:
        folder: Where.
        key: See `cache_key`.
        twice: Two runs are wanted: one that was done alone is as good as none, for another one now would be of other code.
    """
    with suppress(OSError, EvidenceError, ValueError, KeyError, TypeError):
        told = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        first = Evidence.from_json(told["first"])
        repeat = None if told["repeat"] is None else Evidence.from_json(told["repeat"])
        if repeat is not None or not twice:
            return Undisturbed(first=first, repeat=repeat, cached_at=float(told["begun"]))
    return None


def save(folder: Path, key: str, undisturbed: Undisturbed, *, begun: float) -> None:
    """Keep what was run at `begun` (seconds since the epoch) under `key`; the oldest entries beyond a bound go."""
    folder.mkdir(parents=True, exist_ok=True)
    repeat = None if undisturbed.repeat is None else undisturbed.repeat.to_json()
    told = {"begun": round(begun, 3), "first": undisturbed.first.to_json(), "repeat": repeat}
    draft = folder / f"{key}.{os.getpid()}.draft"
    draft.write_text(json.dumps(told), encoding="utf-8")
    draft.replace(folder / f"{key}.json")
    entries = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in entries[_MOST_ENTRIES:]:
        path.unlink(missing_ok=True)
