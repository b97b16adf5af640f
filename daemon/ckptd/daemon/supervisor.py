"""Notices at once that a trainer process has ended.

Owns: one pidfd per watched process, on the agent's event loop. Does not own: what follows. A pidfd names one process
for ever, so that a pid used again cannot be mistaken for the rank.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class ProcessWatch:
    """Calls `on_exit` once when the process ends. Made on the event loop; where the process cannot be seen, `seen` is False."""

    def __init__(self, pid: int, on_exit: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        self._on_exit = on_exit
        if pid > 0:
            try:
                self._fd = os.pidfd_open(pid)
            except OSError:
                return
            self._loop.add_reader(self._fd, self._ended)

    @property
    def seen(self) -> bool:
        """Whether the process is watched."""
        return self._fd >= 0

    def _ended(self) -> None:
        self.close()
        self._on_exit()

    def close(self) -> None:
        """Stop watching; idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
