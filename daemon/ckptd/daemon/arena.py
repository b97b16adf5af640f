"""The arena: the memory that a node's restores are fetched into, shared with the ranks, and the window beside it.

Owns: the files that fetches write, a new one each, their removal, and how much may be taken beside what is wanted. Does not
own: where a chunk goes in a file (`arrangement`), and when all ranks have copied. Invariant: what stands in a file that a rank
was told of never changes, also when it is removed: ranks copy without a lock, and one that is slow, or was believed dead, copies
on while its agent has forgotten it. So no file is used twice, and none is emptied: its memory goes with the last who maps it.
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


class HangingWriterError(Exception):
    """The fetch failed with `cause`, and a thread still writes to its file."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Arena:
    """Restore memory of one job on this node. Thread-safe.

    Args:
        shm_dir: Folder in shared memory; made 0700.
        job_digest: Hex digest of root and job name, at least 16 digits.
        window_bytes: Most memory beside what the ranks want: slack in the files and window together. At least 4/3 of the
            longest chunk.

    Attributes:
        window: Where chunks stand of which only parts are wanted.
        slack_bytes: Most of a file that nobody wants.

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
        self._files: dict[Path, SharedFile] = {}
        self._is_closed = False
        for path in shm_dir.glob(f"{self._job}.*.arena"):
            orphan = SharedFile.open(path)
            if orphan is not None:
                orphan.remove(punch=False)

    @contextmanager
    def writing(self, nbytes: int) -> Iterator[SharedFile]:
        """Give a new file of at least so many bytes to one writer; it stays until `release` where the block ends well.

        Raises:
            NoSpaceError: Free and needed bytes.
            BaseException: `cause` of a HangingWriterError that the block raised: the file's name goes, and its mapping, to
                which somebody may write whenever he likes, goes with the process.
        """
        name = f"{self._job}.{secrets.token_hex(4)}.arena"
        file = SharedFile.create(self._folder / name, page_rounded(max(nbytes, 1)))
        try:
            yield file
        except HangingWriterError as hanging:
            file.path.unlink(missing_ok=True)
            raise hanging.cause from None
        except BaseException:
            file.remove(punch=False)
            raise
        with self._lock:
            self._files[file.path] = file
            is_late = self._is_closed
        if is_late:
            self.release(file.path)

    def release(self, path: Path) -> None:
        """Delete a fetch's file, and give back the window's memory but for what a fetch has of it; idempotent."""
        self.window.release()
        with self._lock:
            file = self._files.pop(path, None)
        if file is not None:
            file.remove(punch=False)

    def close(self) -> None:
        """Delete every file, also those of fetches that still run; idempotent."""
        with self._lock:
            self._is_closed = True
            left = list(self._files)
        for path in left:
            self.release(path)
        self.window.release()
