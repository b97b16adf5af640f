"""Leading a trial: its record so far, and what becomes of it when a run cannot be led.

Owns: what is alike in a trial, a schedule of a soak and a scenario of a preset: from the undisturbed runs to the seconds it took.
Does not own: how a run is led (`trial.perform`), nor what is right (`judging`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from ckptd.chaos import fitness
from ckptd.chaos.cluster.process import ProcessError
from ckptd.chaos.ending import broken_off
from ckptd.chaos.evidence import Evidence
from ckptd.chaos.judging import nondeterminism
from ckptd.chaos.record import Record


class TrialError(Exception):
    """A run could not be led at all, so that nothing can be said.

    Attributes:
        unfit: Why the script cannot be judged, where it is the script that is in the way; else None.
    """

    def __init__(self, text: str, unfit: fitness.Unfit | None = None) -> None:
        super().__init__(text)
        self.unfit = unfit


@dataclass(frozen=True, kw_only=True, slots=True)
class Undisturbed:
    """What the script leaves when nobody hurts it.

    Attributes:
        first: Of one run.
        repeat: Of a second one; None where it was run once.
        cached_at: When they were run, seconds since the epoch, where that was before this trial; else 0.
    """

    first: Evidence
    repeat: Evidence | None = None
    cached_at: float = 0.0


class Lead:
    """A trial under way. A context manager: what ends it early is written into the record, and goes no further.

    But for an interrupt: that is written too, and goes on, for it ends more than the trial.

    Attributes:
        record: What there is of it; whoever leads a run puts it in.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long it has taken."""
        return round(time.monotonic() - self._begun, 3)

    def can_be_judged(self, undisturbed: Undisturbed) -> bool:
        """Take what the script leaves undisturbed; say whether its runs are alike, so that hurting it tells anything."""
        self.record = replace(
            self.record, undisturbed=undisturbed.first, repeat=undisturbed.repeat, cached_at=undisturbed.cached_at
        )
        return not nondeterminism(self.record)

    def begin_anew(self) -> None:
        """Count seconds from now: what was done before serves other trials, too."""
        self._begun = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        del kind, traceback
        if isinstance(error, KeyboardInterrupt):
            self.record = replace(self.record, problem=broken_off(error))
        is_told = isinstance(error, (TrialError, ProcessError, RuntimeError, TimeoutError, OSError))
        if is_told:
            unfit = error.unfit if isinstance(error, TrialError) else None
            reason = "" if unfit is None else str(unfit.reason)
            self.record = replace(self.record, problem=str(error) or repr(error), unfit=reason)
        self.record = replace(self.record, seconds=self.seconds)
        return is_told
