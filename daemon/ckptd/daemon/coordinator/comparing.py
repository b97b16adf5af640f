"""When replicas are compared: the setting `verify_replicas`, applied once for all ranks when a step begins.

Pure. Does not own: whether a step that was not compared may be committed (`comparisons`). Invariant: a step is begun
uncompared only on a step that was compared and is committed, with the same plan, since the last restore; what was to be
compared and was aborted is made up for by the next step that begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.daemon.comparisons import ALWAYS


@dataclass(kw_only=True, slots=True)
class Schedule:
    """The coordinator's memory of what it has compared.

    Attributes:
        every: See `parse_policy`.
        plan: Of the step begun last; another one begins a new round.
        round: Counts restores and changes of layout: what was begun before proves nothing of what is saved after.
        proof: The newest step of this round that was compared and committed, or None.
        since: Steps begun since one was compared.
        owed: A step that was to be compared was aborted.
    """

    every: int
    plan: bytes = b""
    round: int = 0
    proof: int | None = None
    since: int = 0
    owed: bool = False

    def begin(self, plan: bytes) -> int | None:
        """Begin a step: return the step it may rely on, or None where it must be compared."""
        if plan != self.plan:
            self.reset()
            self.plan = plan
        due = self.every == ALWAYS or self.owed or (self.every > 0 and self.since >= self.every - 1)
        if due or self.proof is None:
            self.since, self.owed = 0, False
            return None
        self.since += 1
        return self.proof

    def committed(self, step: int, *, begun_in: int, was_compared: bool) -> None:
        """A step is committed that was begun in this round or an earlier one."""
        if begun_in == self.round and was_compared:
            self.proof = step

    def aborted(self, *, begun_in: int, was_compared: bool, differs: bool) -> None:
        """A step was aborted; `differs` where its replicas were found to differ."""
        if begun_in != self.round:
            return
        self.owed = self.owed or was_compared
        if differs:
            self.proof = None

    def reset(self) -> None:
        """State was restored, or layouts changed: the next step is compared."""
        self.round += 1
        self.proof, self.since, self.owed = None, 0, False
