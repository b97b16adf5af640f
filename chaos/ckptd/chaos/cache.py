"""Keeps the evidence of undisturbed runs, so that each is run once per command and version of the code.

Owns: what makes two runs the same, and files in a folder outside of any repository. Does not own: evidence itself.
Invariant: an entry is whole or not there, and one that cannot be read is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import ckptd
from ckptd.chaos.evidence import Evidence, EvidenceError

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
    """Return a digest of all that can change a run: ckptd's code, the script's folder, Python and torch."""
    digest = hashlib.sha256(platform.python_version().encode())
    with suppress(metadata.PackageNotFoundError):
        digest.update(metadata.version("torch").encode())
    folders = [Path(folder) for folder in ckptd.__path__]
    for root, path in sorted(_sources([*folders, script.parent] if script.is_file() else folders)):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _sources(folders: Iterable[Path]) -> set[tuple[Path, Path]]:
    return {(folder, path) for folder in folders for path in folder.rglob("*.py") if path.is_file()}


def load(folder: Path, key: str) -> Evidence | None:
    """Return the evidence kept under `key`; None if there is none."""
    with suppress(OSError, EvidenceError):
        return Evidence.from_json((folder / f"{key}.json").read_text(encoding="utf-8"))
    return None


def save(folder: Path, key: str, evidence: Evidence) -> None:
    """Keep evidence under `key`; the oldest entries beyond a bound go."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{key}.{os.getpid()}.draft"
    draft.write_text(evidence.to_json(), encoding="utf-8")
    draft.replace(folder / f"{key}.json")
    entries = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in entries[_MOST_ENTRIES:]:
        path.unlink(missing_ok=True)
