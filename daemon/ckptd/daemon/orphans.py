"""Shared memory that dead agents left and that nothing will ever be made of: found and given back.

Owns: telling what is of no use in a folder of slots. Does not own: slots of jobs that this agent serves (`held`), what is
staged (it is adopted as soon as its store answers). Invariant: nothing is touched that a living agent holds, that is staged
with all that its upload needs, or that is of a job named to be left alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from . import slot_header
from .shared_files import SharedFile
from .slot_header import HEADER_BYTES, SlotState

_JOB_DIGITS = 16
_OWN = re.compile(r"[0-9a-f]{16}\..*\.(slot|arena|pb|new)")


def free_orphans(shm_dir: Path, *, leave: Collection[str] = ()) -> tuple[int, int]:
    """Delete empty and torn slots, arenas, and plans of jobs without anything staged; return files and bytes.

    Args:
        shm_dir: The folder.
        leave: Digests of jobs whose files are not looked at.
    """
    untouched = {digest[:_JOB_DIGITS] for digest in leave}
    files = [path for path in sorted(shm_dir.iterdir()) if _OWN.fullmatch(path.name)]
    mine = [path for path in files if path.name[:_JOB_DIGITS] not in untouched]
    needed: set[str] = set()
    count = nbytes = 0
    for path in mine:
        if path.suffix not in {".slot", ".arena"}:
            continue
        file = SharedFile.open(path)
        if file is None:
            needed.add(path.name[:_JOB_DIGITS])  # its agent lives
            continue
        if path.suffix == ".slot" and _is_staged(file, shm_dir):
            needed.add(path.name[:_JOB_DIGITS])
            file.close()
            continue
        count, nbytes = count + 1, nbytes + file.nbytes
        if path.suffix == ".slot" and file.nbytes >= HEADER_BYTES:
            # A rank may hold it open that has not said yet that it reads it. It compares the header after that: either it finds
            # another one, or it is found here.
            file.view[:HEADER_BYTES] = bytes(HEADER_BYTES)
        # A rank may still copy what its dead agent fetched: its memory goes with the last who has it mapped.
        file.remove(punch=path.suffix == ".slot")
    for path in mine:
        if path.suffix in {".pb", ".new"} and path.name[:_JOB_DIGITS] not in needed:
            count, nbytes = count + 1, nbytes + path.stat().st_size
            path.unlink(missing_ok=True)
    return count, nbytes


def _is_staged(file: SharedFile, shm_dir: Path) -> bool:
    """Whether the slot is staged and the file that says of what is there: an agent can finish it."""
    header = slot_header.decode(file.view[:HEADER_BYTES])
    if header is None or header.state is not SlotState.STAGED:
        return False
    return (shm_dir / f"{header.job[:_JOB_DIGITS]}.snapshot.{header.timeline}.{header.step:012d}.pb").exists()
