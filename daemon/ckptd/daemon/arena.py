"""The arena: the memory that a node's restores are fetched into, shared with the ranks, and the window beside it.

Owns: one file at a time, its size and its removal, and how much may be taken beside what is wanted. Does not own: where a
chunk goes in it (`arrangement`), and when all ranks have copied. Invariant: two writers never have one file: a fetch that
overlaps another one, or comes after one that could not be stopped, gets a new file, and the old one is nobody's any more.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .shared_files import SharedFile, page_rounded, prepare_folder
from .window import Window

WINDOW_BYTES = 256 << 20
_NAME_JOB = 16
_SLACK = 4
"""One part in so many of the window's bytes may be taken by the file instead, beside what is wanted."""


class Arena:
    """Restore memory of one job on this node. Thread-safe.

    Args:
        shm_dir: Folder in shared memory; made 0700.
        job_digest: Hex digest of root and job name, at least 16 digits.
        window_bytes: Most memory beside what the ranks want: slack in the file and window together. At least 4/3 of the
            longest chunk.

    Attributes:
        window: Where chunks stand of which only parts are wanted.
        slack_bytes: Most of the file that nobody wants.

    Raises:
        DaemonError: NOT_ALLOWED, the folder belongs to somebody else.
    """

    def __init__(self, shm_dir: Path, job_digest: str, window_bytes: int = WINDOW_BYTES) -> None:
        prepare_folder(shm_dir)
        self.slack_bytes = window_bytes // _SLACK
        self.window = Window(window_bytes - self.slack_bytes)
        self._folder = shm_dir
        self._job = job_digest[:_NAME_JOB]
        self._lock = threading.Lock()
        self._file: SharedFile | None = None
        self._is_busy = False
        for path in shm_dir.glob(f"{self._job}.*.arena"):
            orphan = SharedFile.open(path)
            if orphan is not None:
                orphan.remove()

    @contextmanager
    def writing(self, nbytes: int) -> Iterator[SharedFile]:
        """Give a file of at least so many bytes and undefined content to one writer: the present one where that will do.

        Takes back whatever was handed out before. Inside, `release` is the way out when a thread cannot be stopped.

        Raises:
            NoSpaceError: Free and needed bytes.
        """
        with self._lock:
            if self._file is None or self._is_busy or self._file.nbytes < nbytes:
                self._drop()
                name = f"{self._job}.{secrets.token_hex(4)}.arena"
                self._file = SharedFile.create(self._folder / name, page_rounded(max(nbytes, 1)))
            file, self._is_busy = self._file, True
        try:
            yield file
        finally:
            with self._lock:
                if self._file is file:
                    self._is_busy = False
                else:
                    file.close()

    def release(self) -> None:
        """Delete the file, and give all memory back but what somebody still writes to; idempotent."""
        self.window.release()
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._file is not None and self._is_busy:
            # The mapping is its writer's to end. Memory that is punched out and then written to is memory that may
            # not be there any more: with /dev/shm full, the death of this process.
            self._file.path.unlink(missing_ok=True)
        elif self._file is not None:
            self._file.remove()
        self._file, self._is_busy = None, False
