"""The arena: the shared memory that a node's restores are fetched into.

Owns: one file at a time, its size and its removal. Does not own: where a chunk goes in it (`fetcher`), and when
all ranks have copied. Invariant: a file is handed out again only by `reserve`, which the caller calls when nobody
reads the earlier content any more; bytes that a thread may still be writing are never handed out again.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from .shared_files import SharedFile, page_rounded, prepare_folder

_NAME_JOB = 16


class Arena:
    """Restore memory of one job on this node. For one thread at a time.

    Args:
        shm_dir: Folder in shared memory; made 0700.
        job_digest: Hex digest of root and job name, at least 16 digits.

    Raises:
        DaemonError: NOT_ALLOWED, the folder belongs to somebody else.
    """

    def __init__(self, shm_dir: Path, job_digest: str) -> None:
        prepare_folder(shm_dir)
        self._folder = shm_dir
        self._job = job_digest[:_NAME_JOB]
        self._file: SharedFile | None = None
        for path in shm_dir.glob(f"{self._job}.*.arena"):
            orphan = SharedFile.open(path)
            if orphan is not None:
                orphan.remove()

    def reserve(self, nbytes: int) -> SharedFile:
        """Return a file of at least so many bytes and undefined content: the present one where it is large enough.

        Takes back whatever an earlier call handed out.

        Raises:
            NoSpaceError: Free and needed bytes.
        """
        if self._file is None or self._file.nbytes < nbytes:
            self.release()
            name = f"{self._job}.{secrets.token_hex(4)}.arena"
            self._file = SharedFile.create(self._folder / name, page_rounded(max(nbytes, 1)))
        return self._file

    def release(self) -> None:
        """Delete the file and give its memory back, so that the next `reserve` gives another one; idempotent.

        A thread that still writes to the old one harms nobody.
        """
        if self._file is not None:
            self._file.remove()
            self._file = None
