"""What the wishes of all ranks mean together: a choice that is not the same everywhere, names that nobody asks for.

Pure. Owns: joining the terms of one attempt, rank by rank, and the error that follows from all of them. Does not own: when
they are asked for (`restoring`), or names (only their places in the sorted list are known here; agents add them). Invariant: the
verdict depends on what was said, not on the order it came in.
"""

from __future__ import annotations

from ckptd.daemon.errors import make_error
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import WantTerms
from ckptd.protos.error_pb2 import Error

_SHOWN = 8
"""Ranks an error shows of each group."""


class Terms:
    """The terms of one attempt; small, whatever the number of ranks."""

    def __init__(self) -> None:
        self.said: set[int] = set()
        self._silent = False
        self._strict = False
        self._choices: dict[tuple[bytes, int], list[int]] = {}
        self._unused: int | None = None
        self._matched: set[str] = set()
        self._unmatched: dict[str, tuple[int, Error]] = {}

    def take(self, rank: int, terms: WantTerms | None) -> None:
        """Add what a rank said; once, however often it says it."""
        if rank in self.said:
            return
        self.said.add(rank)
        if terms is None:
            self._silent = True
            return
        self._choices.setdefault((terms.choice, len(terms.unused)), []).append(rank)
        self._strict |= terms.strict
        unused = int.from_bytes(terms.unused, "big")
        self._unused = unused if self._unused is None else self._unused & unused
        self._matched.update(terms.matched)
        for error in terms.unmatched:
            if error.object not in self._unmatched or rank < self._unmatched[error.object][0]:
                self._unmatched[error.object] = rank, error

    def unused(self) -> bytes | None:
        """Return the bits of the names that no rank asks for; None where a rank did not say, or ranks chose differently."""
        if self._silent or len(self._choices) != 1:
            return None
        [(_, nbytes)] = self._choices
        return (self._unused or 0).to_bytes(nbytes, "big")

    def refusal(self, step: int) -> tuple[Error, bytes] | None:
        """Return what is wrong with what all ranks want, if anything is. For when all have said it.

        Returns:
            The error, and the bits of the names it is about, where it is about names that no rank asks for.
        """
        if self._silent:
            return None
        if len(self._choices) > 1:
            return self._disagreement(step), b""
        for text, (_, error) in sorted(self._unmatched.items()):
            if text not in self._matched:
                return error, b""
        count = (self._unused or 0).bit_count()
        if not self._strict or not count:
            return None
        error = make_error(
            error_pb2.REASON_LAYOUT_MISMATCH,
            f"step {step} does not fit what is tracked: {count} only in the snapshot, asked for by no rank",
            hint="strict=False takes what fits",
            step=step,
            phase="restore",
        )
        return error, self.unused() or b""

    def _disagreement(self, step: int) -> Error:
        groups = sorted(sorted(ranks) for ranks in self._choices.values())
        shown = "; ".join(f"ranks {ranks[:_SHOWN]}{' and more' if len(ranks) > _SHOWN else ''}" for ranks in groups)
        # The smaller groups are the ones to look at, wherever most ranks agree.
        largest = max(groups, key=len)
        return make_error(
            error_pb2.REASON_RANKS_DISAGREE,
            f"restore of step {step}: ranks choose differently (strict, only, names, cast or drop): {shown}",
            hint="every rank must call restore() with the same arguments, and names= must map alike on all of them",
            step=step,
            ranks=[rank for ranks in groups if ranks is not largest for rank in ranks],
            phase="restore",
        )
