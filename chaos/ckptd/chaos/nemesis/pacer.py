"""Makes processes slow: stops and wakes them in turns.

Owns: the rhythm. Does not own: which processes. Should the harness die in the midst of it, their leashes end them, stopped
or not.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress

from ckptd.chaos.cluster.leash import start_time

_PERIOD_S = 0.5
"""Long enough that a process gets something done in its share, short enough that nobody takes it for dead."""


class Pacer(threading.Thread):
    """Lets processes run for a share of the time, until `stop`.

    Args:
        pids: Living processes.
        percent: Their share.
    """

    def __init__(self, pids: Sequence[int], percent: int) -> None:
        super().__init__(name="ckptd-chaos-pacer", daemon=True)
        self._pids = {pid: start_time(pid) for pid in pids}
        self._runs_s = _PERIOD_S * percent / 100
        self._is_over = threading.Event()
        self.stops = 0
        """How often they were stopped."""

    def run(self) -> None:
        """Stop, wait, wake, wait."""
        while not self._is_over.is_set() and self._send(signal.SIGSTOP):
            self.stops += 1
            self._is_over.wait(_PERIOD_S - self._runs_s)
            self._send(signal.SIGCONT)
            self._is_over.wait(self._runs_s)

    def stop(self) -> None:
        """Wake them for good."""
        self._is_over.set()
        self.join()
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> bool:
        """Send a signal to those that live; False when nobody does."""
        living = [pid for pid, started in self._pids.items() if started is not None and start_time(pid) == started]
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(living)
